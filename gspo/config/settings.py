"""The settings tree: plain dataclasses that are both Hydra's schema and the library's arguments.

Hydra composes conf/, and `to_settings` converts the result once. All other packages see
dataclasses. An unknown key, a wrong type, a number out of range or a clash of options fails before
a model loads. The error is one line that names the key and the value. Order of precedence: defaults
< experiment < preset < arm < cut < command line. gspo.config.checks refuses combinations that
cannot work.

A run is named by a hash of the settings that its numbers depend on. All other fields say so in
their metadata (gspo.io.ranges): OUTSIDE_RESULT, `cost_only`, or CHANGEABLE if a resumed run may
change the field too.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from gspo.algorithm.advantages import (
    GAE,
    GroupMean,
    GroupNormalized,
    LeaveOneOut,
    ReinforcePP,
    Returns,
)
from gspo.algorithm.gdpo import GDPO
from gspo.algorithm.kl import KL, KLInLoss, KLInReward
from gspo.algorithm.masks import CORRECTIONS
from gspo.algorithm.maxrl import MaxRL
from gspo.algorithm.nsr import NSR
from gspo.algorithm.objectives import OBJECTIVES
from gspo.algorithm.otb import OTB
from gspo.algorithm.reward_shaping import RewardShaping
from gspo.algorithm.turn_advantage import TurnNormalized
from gspo.evaluation.settings import EvaluationSettings
from gspo.io import untrusted
from gspo.io.errors import SettingError
from gspo.io.nested import dotted
from gspo.io.ranges import (
    CHANGEABLE,
    LARGEST_SEED,
    OUTSIDE_RESULT,
    Ranged,
    as_hashed,
    choice,
    fields_with,
    ranged,
)
from gspo.model.chat.prompts import PromptFormat
from gspo.model.settings import HFModel, StandIn, TinyDense, TinyMoE
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.problem_sampler import Grouped, Uniform
from gspo.rollout.vllm_settings import VLLMRollout, VLLMServerRollout
from gspo.tasks.adapters.open_env import OpenEnv
from gspo.tasks.adapters.text_games import TextGames
from gspo.tasks.adapters.vf_environments import VfEnvironments
from gspo.tasks.base import Task
from gspo.tasks.benchmarks.code_sets import HumanEval, Mbpp, RatedPrograms
from gspo.tasks.benchmarks.gym_problems import GymProblems
from gspo.tasks.benchmarks.livecodebench import LiveCodeBench
from gspo.tasks.benchmarks.math_sets import AIME24, AIME25, AMC23, GSM8K, Math500
from gspo.tasks.mixture import Mixture
from gspo.tasks.own_rows import OwnRows
from gspo.tasks.testbed.chain_arithmetic import ChainArithmetic
from gspo.tasks.testbed.function_writing import FunctionWriting
from gspo.tasks.testbed.guessing import Guessing
from gspo.tasks.testbed.python_tool import PythonTool
from gspo.tracking.monitor import MonitorSettings
from gspo.tracking.settings import ProfileSettings, TrackingSettings
from gspo.train.settings import (
    Algorithm,
    CheckpointSettings,
    ColdStartSettings,
    OptimSettings,
    ParallelSettings,
    PolicySettings,
    TrainerSettings,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BENCHMARKS = (
    GSM8K,
    Math500,
    AIME24,
    AIME25,
    AMC23,
    HumanEval,
    Mbpp,
    LiveCodeBench,
    RatedPrograms,
    GymProblems,
)
ENVIRONMENTS = (PythonTool, Guessing, VfEnvironments, TextGames, OpenEnv)
# The option groups whose options are different dataclasses. The option file of each starts with
# `defaults: [_<name>]`.
CHOICES: dict[str, dict[str, type[DataclassInstance]]] = {
    "objective": {kind.name: kind for kind in OBJECTIVES},
    "advantage": {
        kind.name: kind
        for kind in (
            GroupNormalized,
            GroupMean,
            LeaveOneOut,
            TurnNormalized,
            Returns,
            ReinforcePP,
            GAE,
            MaxRL,
            GDPO,
            NSR,
            OTB,
        )
    },
    "kl": {kind.name: kind for kind in (KL, KLInLoss, KLInReward)},
    "correction": {kind.name: kind for kind in CORRECTIONS},
    "sampler": {kind.name: kind for kind in (Uniform, Grouped)},
    "rollout": {kind.name: kind for kind in (RolloutSettings, VLLMRollout, VLLMServerRollout)},
    "model": {"tiny_moe": TinyMoE, "tiny_dense": TinyDense, "hf": HFModel, "stand_in": StandIn},
    "task": {
        kind.name: kind
        for kind in (ChainArithmetic, FunctionWriting, Mixture, OwnRows, *ENVIRONMENTS, *BENCHMARKS)
    },
}
# This setting of tasks is given on the command line alone. It is never read from a run directory.
CONSENT = "allow_weak_sandbox"
# Overrides of these settings do not enter `varied`: a run's name has the seed and the objective
# anyway, and the others do not tell runs apart.
NOT_VARIED = ("seed", "objective", "steps", "study", "runs", "threads", "on_existing")
UNSAFE_IN_NAMES = re.compile(r"[^\w.+-]+")
MAX_VARIED_NAME_CHARS = 60


@dataclass
class Settings(Ranged):
    """All settings of a run."""

    # the study that the run belongs to: its directory is in runs/<study>/, and W&B groups runs by
    # it
    study: str = field(default="default", metadata=OUTSIDE_RESULT)
    seed: int = ranged(1, least=0, most=LARGEST_SEED)
    steps: int = ranged(100, least=1, metadata=CHANGEABLE)  # the number of rollout batches
    # the option that was chosen in each group, for example {"objective": "gspo_tiny"}. The program
    # writes it
    options: dict[str, str] = field(default_factory=dict, metadata=OUTSIDE_RESULT)
    objective: Any = MISSING
    advantage: Any = MISSING
    kl: Any = MISSING
    correction: Any = MISSING
    sampler: Any = MISSING
    model: Any = MISSING
    task: Any = MISSING
    prompt: PromptFormat = field(default_factory=PromptFormat)
    # chat or plain: the value of prompt.format that this model led to. The program writes it
    prompt_used: str = field(default="", metadata=OUTSIDE_RESULT)
    # digests of the run's problems and of the weights it started from, and how many problems were
    # left out. The program writes them, and compares them when the run is resumed
    inputs: dict[str, Any] = field(default_factory=dict, metadata=OUTSIDE_RESULT)
    reward: RewardShaping = field(default_factory=RewardShaping)
    policy: PolicySettings = field(default_factory=PolicySettings)
    rollout: Any = MISSING
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    cold_start: ColdStartSettings = field(default_factory=ColdStartSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings, metadata=CHANGEABLE)
    tracking: TrackingSettings = field(default_factory=TrackingSettings, metadata=CHANGEABLE)
    profile: ProfileSettings = field(default_factory=ProfileSettings, metadata=CHANGEABLE)
    # the user's own metrics, custom/<name>: metrics.gap=my_pkg.extras:Gap, or metrics.gap.path=...
    # with its settings
    metrics: dict[str, Any] = field(default_factory=dict, metadata=CHANGEABLE)
    # the user's own code around the steps: callbacks.stop=my_pkg.extras:StopEarly, or
    # callbacks.stop.path=...
    callbacks: dict[str, Any] = field(default_factory=dict)
    # the code from outside this package: its path and the SHA-256 of its source files. The program
    # writes it
    outside: dict[str, Any] = field(default_factory=dict)
    # with action=rollback the monitor changes what is trained, and is part of the hash
    monitor: MonitorSettings = field(default_factory=MonitorSettings, metadata=CHANGEABLE)
    # how several processes, as torchrun starts them, train the policy together
    parallel: ParallelSettings = field(default_factory=ParallelSettings, metadata=CHANGEABLE)
    # permit one update per rollout batch with step_start log-probs, although then nothing can be
    # clipped
    allow_on_policy: bool = False
    # permit a sequence ratio under an aggregation that weighs by length
    allow_length_weighting: bool = False
    # CPU threads of torch; 0: torch's choice, in a sweep the cores divided by its jobs
    threads: int = ranged(0, least=0, most=1024, metadata=OUTSIDE_RESULT)
    # the folder of the studies and their run directories
    runs: str = field(default="runs", metadata=OUTSIDE_RESULT)
    # what to do with a run directory that exists already: refuse | resume | auto (resume it if it
    # is unfinished)
    on_existing: str = choice("auto", ("auto", "refuse", "resume"), metadata=OUTSIDE_RESULT)
    # print the run, or with -m every job of the sweep, and how far each is; write nothing
    dry_run: bool = field(default=False, metadata=OUTSIDE_RESULT)
    # consent to import the code named by a run directory that this user did not make. It is never
    # read from a file
    allow_outside_code: bool = field(default=False, metadata=OUTSIDE_RESULT)
    # continue this run directory with its own settings. Only settings that `changeable_on_resume`
    # lists may be given beside it
    resume: str = field(default="", metadata=OUTSIDE_RESULT)

    # the overrides that tell a job of a sweep from its other jobs, in messages and in the name of
    # its directory. `vary` sets them. They have no annotation, so they are no fields
    varied = ""
    varied_name = ""
    # for a job of a sweep: the name of its directory in the sweep's plan
    planned_name = ""

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.task, Task):
            self.task.truncated_reward = self.reward.truncated
            self.task.reward_weights = dict(self.reward.weights)
        if not self.study or "/" in self.study or self.study.startswith("."):
            raise SettingError("study", self.study, "must be a plain folder name")

    def algorithm(self) -> Algorithm:
        """Return the settings that the trainer's mathematics depends on."""
        return Algorithm(self.objective, self.advantage, self.reward, self.kl, self.correction)

    def label(self) -> str:
        """Describe the run by objective, replay, seed and the settings that a sweep varies.

        For example "gspo_tiny+r2 seed 3 lr=2e-4"."""
        replay = f"+{self.policy.routing_replay}" if self.policy.routing_replay != "none" else ""
        return f"{self.objective_option()}{replay} seed {self.seed} {self.varied}".rstrip()

    def tags(self) -> list[str]:
        """Return the tags of the run in W&B, by which its saved views choose runs."""
        objective = dict.fromkeys([self.objective_option(), self.objective.name])
        return [*objective, f"replay-{self.policy.routing_replay}", self.model.name]

    def objective_option(self) -> str:
        """Return the option that chose the objective, for example "gspo_tiny".

        If no option is recorded, return the objective's name."""
        return self.options.get("objective", self.objective.name)


# the groups of settings that the loss of a step depends on
LOSS_GROUPS = ("objective", "advantage", "kl", "correction", "reward", "trainer", "policy")
CLASS_PATH = "class_path"  # the key of the path of the user's own class, beside its settings


def loss_settings(settings: Settings) -> dict[str, Any]:
    """Return the groups of settings that the loss of a step depends on, ready for JSON."""
    groups = {group: asdict(getattr(settings, group)) for group in LOSS_GROUPS}
    for group, code in settings.outside.items():
        if group in groups:
            groups[group][CLASS_PATH] = code["path"]
    return groups


def has_recorded_kl_coefficient(settings: Settings, recorded: Settings) -> bool:
    """Return whether a replay's KL coefficient has the settings that the run recorded.

    Then the replay uses the value that the adaptive coefficient had reached at the step."""
    names = ("name", "coef", "target", "horizon")
    return all(getattr(settings.kl, name) == getattr(recorded.kl, name) for name in names)


def has_recorded_entropy_bonus(settings: Settings, recorded: Settings) -> bool:
    """Return whether a replay's entropy bonus has the settings that the run recorded.

    Then the replay uses the value that the coefficient had reached at the step."""
    return settings.trainer.entropy_coefficient() == recorded.trainer.entropy_coefficient()


# ------------------------------------------------------------------------------------ hash of a run
def settings_hash(settings: Settings) -> str:
    """Hash all settings that the run's numbers depend on, to ten hexadecimal digits."""
    return hashlib.sha256(json.dumps(of_result(settings), sort_keys=True).encode()).hexdigest()[:10]


def of_result(settings: Settings) -> dict[str, Any]:
    """Return the settings that the run's numbers depend on, as nested dictionaries."""
    left_out = fields_with(Settings, "outside_result")
    content = {key: value for key, value in as_hashed(settings).items() if key not in left_out}
    content["task"] = with_consent(content["task"], False)
    for group in content:
        group_settings = getattr(settings, group)
        if is_dataclass(group_settings):
            for name in fields_with(type(group_settings), "outside_result"):
                content[group].pop(name)
    content["outside"] = {
        key: code for key, code in settings.outside.items() if not key.startswith("metrics.")
    }
    for name in ("callbacks", "outside"):
        if not content[name]:
            del content[name]
    if settings.monitor.action == "rollback":
        content["monitor"] = {
            key: getattr(settings.monitor, key) for key in ("action", "rollbacks", "rollback_lr")
        }
    return content


def same_result(a: Settings, b: Settings) -> str | None:
    """Return the first setting that makes two runs differ, as "key: a against b", or None."""
    return first_difference(of_result(a), of_result(b))


def first_difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """Return the first entry in which two nested dictionaries differ, or None.

    For example "optim.lr: 0.1 against 0.2"."""
    flat_a = dotted(json.loads(json.dumps(a)))
    flat_b = dotted(json.loads(json.dumps(b)))
    for key in flat_a | flat_b:
        if flat_a.get(key) != flat_b.get(key):
            return f"{key}: {flat_a.get(key)} against {flat_b.get(key)}"
    return None


def with_consent(task: Any, consent: bool) -> Any:
    """Copy a task's settings and set every `allow_weak_sandbox` in them to `consent`."""
    if not isinstance(task, dict):
        return task
    return {
        key: consent if key == CONSENT else with_consent(value, consent)
        for key, value in task.items()
    }


def changeable_on_resume() -> list[str]:
    """Return the dotted keys of all settings that a resumed run may change."""
    fact = "changeable_on_resume"
    keys = fields_with(Settings, fact)
    for group in fields(Settings):
        kinds = CHOICES.get(group.name, {}).values() or [group.default_factory]
        for kind in kinds:
            if isinstance(kind, type) and is_dataclass(kind):
                keys += [f"{group.name}.{name}" for name in fields_with(kind, fact)]
    return list(dict.fromkeys(keys))


# ------------------------------------------------------------------------------ directory of a run
def folder_of(settings: Settings) -> Path:
    """Return the directory of a run: the resumed one, or the one that its settings name."""
    return Path(settings.resume) if settings.resume else run_directory(settings)


def run_directory(settings: Settings) -> Path:
    """Return the directory that a run's settings name.

    It is runs/<study>/<objective option>-<settings that a sweep varies>-seed<k>-<hash>. The hash
    alone identifies the run, so an existing directory with this hash keeps its name.
    """
    study = Path(settings.runs) / settings.study
    digest = settings_hash(settings)
    if settings.planned_name.endswith(f"-{digest}"):
        return study / settings.planned_name
    ending = f"-seed{settings.seed}-{digest}"
    existing = [file.parent for file in sorted(study.glob(f"*{ending}/settings.yaml"))]
    varied = f"-{settings.varied_name}" if settings.varied_name else ""
    option = UNSAFE_IN_NAMES.sub("_", settings.objective_option())
    usual = study / f"{option}{varied}{ending}"
    if usual in existing:
        return usual
    if len(existing) > 1:
        copies = ", ".join(map(str, existing))
        raise ValueError(f"{copies} hold the same run: leave one of them, and move the others away")
    if existing:
        return existing[0]
    return study / (name_in_plan(study, ending) or usual.name)


def name_in_plan(study: Path, ending: str) -> str:
    """Return the name that a sweep has planned for the run with this ending, or "".

    Such a run may be about to begin."""
    manifest = study / "manifest.jsonl"
    try:
        plans = untrusted.read_bytes(manifest, untrusted.MAX_ROWS_FILE_BYTES).decode(
            errors="replace"
        )
    except (OSError, untrusted.Unreadable):
        return ""
    planned = re.search(rf'"run": "([\w.+-]+{re.escape(ending)})"', plans)
    return planned[1] if planned else ""


def vary(settings: Settings, overrides: list[str]) -> None:
    """Note the overrides that tell a job of a sweep from the others, for its names and messages.

    The seed and the objective are left out, because a run's name has them anyway. For example
    ["optim.lr=2e-4", "policy.routing_replay=r2", "seed=1"] becomes lr2e-4-routing_replay_r2 in the
    name of the directory, and lr=2e-4 routing_replay=r2 in a warning.
    """
    words = []
    names = []
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in NOT_VARIED:
            continue
        name = key.rpartition(".")[2]
        words.append(f"{name}={value}")
        names.append(f"{name}{value}" if value[:1].isdigit() else f"{name}_{value}")
    settings.varied = " ".join(words)
    safe_name = UNSAFE_IN_NAMES.sub("_", "-".join(names))
    settings.varied_name = safe_name[:MAX_VARIED_NAME_CHARS].rstrip("-._")

"""The settings tree: plain dataclasses that are Hydra's schema and the library's arguments at once.

Hydra composes conf/, `to_settings` converts once, and everything below sees dataclasses. An unknown key, a wrong type,
a bad range or a clash of options fails here, before a model loads, in one line that names the key and the value.
Order of precedence: defaults < experiment < preset < arm < command line. Combinations that cannot work are refused by
gspo.checks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gspo.advantages import GAE, GroupMean, GroupNormalized, LeaveOneOut, ReinforcePP, Returns
from gspo.aggregation import Aggregation
from gspo.bounded import read_yaml
from gspo.checkpoint import CheckpointSettings
from gspo.checks import check
from gspo.cold_start import ColdStartSettings
from gspo.commands import BenchmarkCommand, EvaluateCommand, SampleCommand
from gspo.corrections import MIS, TIS, Correction, IcePop, Rejection
from gspo.credit import Algorithm
from gspo.evaluation import EvaluationSettings
from gspo.kl import KL, KLInLoss, KLInReward
from gspo.monitor import MonitorSettings
from gspo.objectives import OBJECTIVES
from gspo.ownership import own, write_signed
from gspo.policy.models import HFModel, TinyDense, TinyMoE
from gspo.policy.prompts import PromptFormat
from gspo.ranges import LARGEST_SEED, Ranged, ranged
from gspo.reward_shaping import RewardShaping
from gspo.rollout.sampler import Grouped, Uniform
from gspo.rollout.settings import RolloutSettings, VLLMRollout
from gspo.schema import GROUPS_BESIDE_SETTINGS, literal, schema, settings_of, to_dataclass, unknown
from gspo.tasks.chain_arithmetic import ChainArithmetic
from gspo.tasks.code_benchmarks import HumanEval, Mbpp, RatedPrograms
from gspo.tasks.function_writing import FunctionWriting
from gspo.tasks.gym_problems import GymProblems
from gspo.tasks.livecodebench import LiveCodeBench
from gspo.tasks.math_benchmarks import AIME24, AIME25, AMC23, GSM8K, Math500
from gspo.tasks.mixture import Mixture
from gspo.tracking import TrackingSettings
from gspo.trainer_settings import OptimSettings, PolicySettings, TrainerSettings

BENCHMARKS = (GSM8K, Math500, AIME24, AIME25, AMC23, HumanEval, Mbpp, LiveCodeBench, RatedPrograms, GymProblems)
# the option groups whose options are different dataclasses; an option file starts with `defaults: [_<name>]`
CHOICES: dict[str, dict[str, type]] = {
    "objective": {kind.name: kind for kind in OBJECTIVES},
    "advantage": {kind.name: kind for kind in (GroupNormalized, GroupMean, LeaveOneOut, Returns, ReinforcePP, GAE)},
    "kl": {kind.name: kind for kind in (KL, KLInLoss, KLInReward)},
    "correction": {kind.name: kind for kind in (Correction, TIS, MIS, IcePop, Rejection)},
    "sampler": {kind.name: kind for kind in (Uniform, Grouped)},
    "rollout": {kind.name: kind for kind in (RolloutSettings, VLLMRollout)},
    "model": {"tiny_moe": TinyMoE, "tiny_dense": TinyDense, "hf": HFModel},
    "task": {kind.name: kind for kind in (ChainArithmetic, FunctionWriting, Mixture, *BENCHMARKS)},
}
# left out of the hash
NOT_PART_OF_THE_RESULT = (
    "steps",
    "tracking",
    "checkpoint",
    "monitor",
    "study",
    "options",
    "runs",
    "on_existing",
    "resume",
    "dry_run",
    "threads",
    "prompt_used",
)
# left out as well: memory, speed and place; they move results by rounding at most
ONLY_COST = (
    "trainer.micro_batch_size",
    "policy.device",
    "policy.old_pass",
    "policy.checkpointing",
    *(f"rollout.{name}" for name in ("batch_rows", "overlap", "sync_tolerance", "routes_floor", "own_process")),
    *(f"rollout.{name}" for name in ("tensor_parallel_size", "kv_cache_gib", "gpu_memory", "eager", "sleep")),
)
CONSENT = "allow_weak_sandbox"  # of a task: only a command line gives it, it is never taken from a run directory
CHANGEABLE_ON_RESUME = ("steps", "tracking", "checkpoint", "monitor", *ONLY_COST)


@dataclass
class Settings(Ranged):
    """Everything a run depends on."""

    study: str = "default"  # what the run belongs to: runs/<study>/..., and the group in W&B
    seed: int = ranged(1, least=0, most=LARGEST_SEED)
    steps: int = ranged(100, least=1)  # rollout batches
    options: dict[str, str] = field(default_factory=dict)  # of each group, by name; the program writes it
    objective: Any = MISSING
    advantage: Any = MISSING
    kl: Any = MISSING
    correction: Any = MISSING
    sampler: Any = MISSING
    model: Any = MISSING
    task: Any = MISSING
    prompt: PromptFormat = field(default_factory=PromptFormat)
    prompt_used: str = ""  # chat or plain: what prompt.format became with this model; the run writes it down
    reward: RewardShaping = field(default_factory=RewardShaping)
    policy: PolicySettings = field(default_factory=PolicySettings)
    rollout: Any = MISSING
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    cold_start: ColdStartSettings = field(default_factory=ColdStartSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    allow_on_policy: bool = (
        False  # permit one update per rollout batch with step_start log-probs: nothing can be clipped
    )
    allow_length_weighting: bool = False  # permit a sequence ratio under an aggregation that weighs by length
    # CPU threads of torch; 0: torch's choice, in a sweep the cores divided by its jobs
    threads: int = ranged(0, least=0)
    runs: str = "runs"  # where run directories go
    on_existing: str = "auto"  # a run directory that is there: refuse | resume | auto (resume an unfinished run)
    dry_run: bool = False  # print the run, or with -m every job of the sweep, and how far each is; write nothing
    resume: str = ""  # continue this run directory with its own settings; CHANGEABLE_ON_RESUME may be given

    def __post_init__(self):
        super().__post_init__()
        if self.on_existing not in ("auto", "refuse", "resume"):
            raise ValueError(f"on_existing={self.on_existing!r}: choose auto, refuse or resume")
        if not self.study or "/" in self.study or self.study.startswith("."):
            raise ValueError(f"study={self.study!r} must be a plain folder name")

    def algorithm(self) -> Algorithm:
        return Algorithm(self.objective, self.advantage, self.reward, self.kl, self.correction)

    def label(self) -> str:
        """The arm in a few words: objective, replay, seed."""
        replay = f"+{self.policy.routing_replay}" if self.policy.routing_replay != "none" else ""
        return f"{self.objective_option()}{replay} seed {self.seed}"

    def tags(self) -> list[str]:
        """Of the run in W&B; views choose by them."""
        objective = dict.fromkeys([self.objective_option(), self.objective.name])
        return [*objective, f"replay-{self.policy.routing_replay}", self.model.name]

    def objective_option(self) -> str:
        """gspo_tiny, where objective.name is gspo; the latter where no option was recorded."""
        return self.options.get("objective", self.objective.name)


def register_schemas() -> None:
    """Make the dataclasses known to Hydra, under the names that conf/ refers to."""
    store = ConfigStore.instance()
    commands = {"_evaluate": EvaluateCommand, "_sample": SampleCommand, "_benchmark": BenchmarkCommand}
    for name, kind in ({"_settings": Settings} | commands).items():
        store.store(name=name, node=schema(kind))
    for group, options in CHOICES.items():
        for name, kind in options.items():
            store.store(group=group, name=f"_{name}", node=schema(kind))


def to_settings(config: DictConfig, choices: Mapping[str, str | None] | None = None) -> Settings:
    """The composed config as dataclasses, settled and checked; of `choices` (hydra.runtime.choices) it records the
    options that were chosen. Raises ValueError or an OmegaConf error naming key and value."""
    settings = to_dataclass(config)
    if choices is not None:
        if settings.options:
            raise ValueError(f"options={settings.options} is written by the program; say objective=...")
        if choices.get("sizes") != choices.get("model"):
            raise ValueError(f"sizes={choices['sizes']}: conf/sizes follows model={choices['model']}, it is not chosen")
        own = {group: name for group, name in choices.items() if not group.startswith(("hydra/", "sizes"))}
        settings.options = {group: name for group, name in own.items() if name}
    for group, options in CHOICES.items():
        chosen = getattr(settings, group)
        if type(chosen) is not options.get(chosen.name):
            raise ValueError(f"{group}.name={chosen.name!r} cannot be changed; choose another option with {group}=...")
    settle(settings)
    check(settings)
    return settings


def chosen_settings(config: DictConfig, overrides: list[str], choices: Mapping[str, str | None]) -> Settings:
    """What train.py was asked for: the composed config with Hydra's choices, or with resume= a recorded run's settings
    as overridden."""
    return resumed_settings(Path(config.resume), overrides) if config.resume else to_settings(config, choices)


def settle(s: Settings) -> None:
    """Replace what stands for another setting by its value, so that settings.yaml says what was done."""
    s.rollout.routes |= s.policy.routing_replay == "r3"
    s.trainer.aggregation = settled(s.trainer.aggregation, s.objective.aggregation, s.rollout.longest_limit)
    if isinstance(s.kl, KLInLoss):
        own = s.kl.aggregation
        if own.mode == "auto" and own != Aggregation():
            raise ValueError(
                f"kl.aggregation.rows={own.rows}, kl.aggregation.length={own.length} are not read with "
                "kl.aggregation.mode=auto, which takes over trainer.aggregation; say kl.aggregation.mode=..."
            )
        s.kl.aggregation = settled(own, "", s.rollout.longest_limit) if own.mode != "auto" else s.trainer.aggregation


def settled(aggregation: Aggregation, paper: str, longest: int) -> Aggregation:
    """With the objective's mode for auto, and the constant of the -norm mode. Raises ValueError if they do not fit."""
    mode = paper if aggregation.mode == "auto" else aggregation.mode
    length = aggregation.length
    if mode == "seq-mean-token-sum-norm" and length is None:
        length = longest
    return Aggregation(mode, aggregation.rows, length)


def settings_hash(settings: Settings) -> str:
    """Ten hexadecimal digits of everything that the run's numbers depend on."""
    return hashlib.sha256(json.dumps(of_result(settings), sort_keys=True).encode()).hexdigest()[:10]


def of_result(settings: Settings) -> dict[str, Any]:
    """The settings that the run's numbers depend on."""
    content = {key: value for key, value in asdict(settings).items() if key not in NOT_PART_OF_THE_RESULT}
    content["task"] = with_consent(content["task"], False)
    for group, name in (key.split(".") for key in ONLY_COST):
        content[group].pop(name, None)
    if settings.monitor.action == "rollback":
        content["monitor"] = {key: getattr(settings.monitor, key) for key in ("action", "rollbacks", "rollback_lr")}
    return content


def run_directory(settings: Settings) -> Path:
    """runs/<study>/<objective option>-seed<k>-<hash>/"""
    name = f"{settings.objective_option()}-seed{settings.seed}-{settings_hash(settings)}"
    return Path(settings.runs) / settings.study / name


def folder_of(settings: Settings) -> Path:
    """The directory of a run: the one that is resumed, or the one that its settings name."""
    return Path(settings.resume) if settings.resume else run_directory(settings)


def write_settings(settings: Settings, folder: Path) -> None:
    write_signed(folder / "settings.yaml", yaml.safe_dump(asdict(settings), sort_keys=False))


def with_consent(task: Any, consent: bool) -> Any:
    """A task's settings with its CONSENT, wherever it stands in them, replaced by the command line's."""
    if not isinstance(task, dict):
        return task
    return {key: consent if key == CONSENT else with_consent(value, consent) for key, value in task.items()}


def read_settings(folder: Path, consent: bool = False) -> Settings:
    """The settings of a run directory, with the command line's consent to a weak sandbox. Raises ValueError if it is
    none, or was written by another version."""
    return to_settings(recorded_config(folder, consent))


def recorded_config(folder: Path, consent: bool = False) -> DictConfig:
    """What a run directory's settings.yaml says, with the settings' types. It is data: nothing in it is resolved.

    Raises ValueError if the folder is no run directory, or was written by another version.
    """
    path = folder / "settings.yaml"
    if not path.exists():
        raise ValueError(f"{folder} is not a run directory: it has no settings.yaml")
    config, content = OmegaConf.structured(Settings), literal(read_yaml(path))
    for group, options in CHOICES.items():
        chosen = content.get(group)
        name = chosen.get("name") if isinstance(chosen, dict) else chosen
        if not isinstance(name, str) or name not in options:
            raise ValueError(f"{path}: {group}.name={name!r} is unknown here; it knows {', '.join(options)}")
        config[group] = OmegaConf.structured(options[name])
    try:
        config = OmegaConf.merge(config, content | {"task": with_consent(content["task"], consent)})
        to_settings(config)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path} was written by another version:") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config


def resumed_settings(folder: Path, overrides: list[str]) -> Settings:
    """A run directory's settings with those changed by the command line that may be, all else refused. Of a run that
    this user did not make (ownership.py), where it is tracked and where cold starts go is not taken over."""
    recorded = recorded_config(folder)
    if not own(folder / "settings.yaml"):
        recorded.runs = Settings.runs
        recorded.tracking.entity = recorded.tracking.project = ""
        recorded.tracking.wandb = "disabled" if recorded.tracking.wandb == "disabled" else "offline"
    known, changes = {*settings_of(recorded), *GROUPS_BESIDE_SETTINGS}, []
    for override in overrides:
        key = override.split("=")[0].lstrip("+")
        if key.startswith("~"):
            raise ValueError(f"{override}: a setting cannot be taken away; give it a value, {key[1:]}=...")
        if key not in known:
            raise ValueError(f"{override}: {unknown(key, sorted(known))}")
        free = key in ("resume", "dry_run") or key.endswith(f".{CONSENT}")
        if not free and not {key, key.split(".")[0]} & set(CHANGEABLE_ON_RESUME):
            raise ValueError(f"{override} with resume={folder}: only {', '.join(CHANGEABLE_ON_RESUME)} may be changed")
        if any(name.startswith(f"{key}.") for name in known):
            raise ValueError(f"{override} with resume={folder}: say which of its settings, {key}.NAME=...")
        changes.append(override.lstrip("+"))
    return to_settings(OmegaConf.merge(recorded, OmegaConf.from_dotlist(changes), {"resume": str(folder)}))


def same_result(a: Settings, b: Settings) -> str | None:
    """The first setting that makes two runs different, as "key: a against b"; None if their results are the same."""
    flat_a, flat_b = (json.loads(json.dumps(of_result(s))) for s in (a, b))
    for key in flat_a | flat_b:
        if flat_a.get(key) != flat_b.get(key):
            return f"{key}: {flat_a.get(key)} against {flat_b.get(key)}"
    return None

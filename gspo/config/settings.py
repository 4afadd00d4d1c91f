"""The settings tree: plain dataclasses that are Hydra's schema and the library's arguments at once.

Hydra composes conf/, `to_settings` converts once, and everything below sees dataclasses. An unknown key, a wrong type,
a bad range or a clash of options fails here, before a model loads, in one line that names the key and the value.
Order of precedence: defaults < experiment < preset < arm < command line. Combinations that cannot work are refused by
gspo.config.checks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from gspo.algorithm.advantages import GAE, GroupMean, GroupNormalized, LeaveOneOut, ReinforcePP, Returns
from gspo.algorithm.corrections import MIS, TIS, Correction, IcePop, Rejection
from gspo.algorithm.kl import KL, KLInLoss, KLInReward
from gspo.algorithm.objectives import OBJECTIVES
from gspo.algorithm.reward_shaping import RewardShaping
from gspo.core.ranges import LARGEST_SEED, Ranged, ranged
from gspo.evaluation.evaluate import EvaluationSettings
from gspo.model.loading import HFModel, TinyDense, TinyMoE
from gspo.model.prompts import PromptFormat
from gspo.rollout.problem_sampler import Grouped, Uniform
from gspo.rollout.settings import RolloutSettings, VLLMRollout
from gspo.tasks.chain_arithmetic import ChainArithmetic
from gspo.tasks.code_benchmarks import HumanEval, Mbpp, RatedPrograms
from gspo.tasks.function_writing import FunctionWriting
from gspo.tasks.gym_problems import GymProblems
from gspo.tasks.livecodebench import LiveCodeBench
from gspo.tasks.math_benchmarks import AIME24, AIME25, AMC23, GSM8K, Math500
from gspo.tasks.mixture import Mixture
from gspo.tracking.monitor import MonitorSettings
from gspo.tracking.settings import TrackingSettings
from gspo.train.checkpoint import CheckpointSettings
from gspo.train.cold_start import ColdStartSettings
from gspo.train.credit import Algorithm
from gspo.train.settings import OptimSettings, PolicySettings, TrainerSettings

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


def with_consent(task: Any, consent: bool) -> Any:
    """A task's settings with its CONSENT, wherever it stands in them, replaced by the command line's."""
    if not isinstance(task, dict):
        return task
    return {key: consent if key == CONSENT else with_consent(value, consent) for key, value in task.items()}


def same_result(a: Settings, b: Settings) -> str | None:
    """The first setting that makes two runs different, as "key: a against b"; None if their results are the same."""
    flat_a, flat_b = (json.loads(json.dumps(of_result(s))) for s in (a, b))
    for key in flat_a | flat_b:
        if flat_a.get(key) != flat_b.get(key):
            return f"{key}: {flat_a.get(key)} against {flat_b.get(key)}"
    return None

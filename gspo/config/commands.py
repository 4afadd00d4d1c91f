"""The settings of `gspo evaluate`, `gspo sample` and experiments/benchmark.py, as dataclasses."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from gspo.io.errors import SettingError
from gspo.io.nested import dotted
from gspo.io.ranges import LARGEST_SEED, Ranged, choice, ranged
from gspo.model.chat.prompts import PromptFormat
from gspo.rollout.engines.stop_strings import check_stop
from gspo.rollout.engines.truncation import Truncation
from gspo.rollout.settings import check_engine_alone
from gspo.rollout.vllm_settings import check_temperature
from gspo.tracking.settings import MODES

NAME_A_RUN = "name a run directory, such as runs/STUDY/RUN"


@dataclass
class PromptChanges:
    """Settings of prompts, as in PromptFormat. null is as in the run, or a model's default."""

    format: str | None = None  # auto | plain | chat
    system: str | None = None
    thinking: bool | None = None
    date: str | None = None
    control_tokens: bool | None = None
    special_tokens: bool | None = None

    def applied_to(self, prompt: PromptFormat) -> PromptFormat:
        """Return a copy of the settings with these changes."""
        changes = {name: value for name, value in vars(self).items() if value is not None}
        return replace(prompt, **changes)


@dataclass
class EvaluateCommand(Truncation):
    """The settings of `gspo evaluate`, which evaluates either a `run` or a `model`."""

    run: str = ""  # the run directory to evaluate
    step: int = ranged(-1, least=-1)  # the step of the run's checkpoint; -1: the newest one
    # the model to evaluate, model=hf model.path=...: a folder or a name on the hub
    model: Any = None
    # options of the group task; empty: the run's own task
    benchmark: list[str] = field(default_factory=list)
    # the settings of these benchmarks: tasks.gsm8k.path=...
    tasks: dict[str, Any] = field(default_factory=dict)
    data: str = ""  # a folder with the benchmarks' files, in one sub-folder each
    sets: list[str] = field(default_factory=list)  # the held-out sets to use; empty: all
    # problems per set; 0: all of a finite set, 256 of one without end
    problems: int = ranged(0, least=0)
    k: int = ranged(4, least=1)  # samples per problem
    temperature: float = ranged(1.0, least=0)  # 0 is greedy, which needs k=1
    # the maximum of tokens per response; 0: each benchmark's own limit, else the run's longest,
    # 2048 for a model
    max_new_tokens: int = ranged(0, least=0)
    # strings that end a response; empty: the run's own
    stop: list[str] = field(default_factory=list)
    # the engine that samples, with its own settings: rollout=vllm rollout.max_model_len=4096; null:
    # in-process
    rollout: Any = None
    # responses that are sampled at once; 0: as in the run, 256 for a model. With rollout=...:
    # rollout.batch_rows
    batch_rows: int = ranged(0, least=0)
    # null: as in the run; for a model, a chat if its tokenizer has a chat template
    prompt: PromptChanges = field(default_factory=PromptChanges)
    # the seed of the samples and of generated problems; evaluations during training use 0
    seed: int = ranged(0, least=0, most=LARGEST_SEED)
    device: str = "auto"  # auto | cpu | cuda
    # consent to a weak sandbox for the programs of the run's own task and of the benchmarks
    allow_weak_sandbox: bool = False
    # consent to import the code that the run directory names if this user did not make the run
    allow_outside_code: bool = False
    # addresses that the run's task names and may reach although this user did not make the run:
    # [http://host:8000]
    addresses: list[str] = field(default_factory=list)
    # the folder of a finished evaluation of the same problems, such as the base model's, to compare
    # with
    against: str = ""
    # the folder of the result; empty: in the run directory, or runs/evaluations/<model>-<hash>
    out: str = ""
    # whether W&B gets the numbers too, as tracking.wandb of a run
    wandb: str = choice("disabled", MODES)

    def __post_init__(self):
        super().__post_init__()
        for name, task in self.tasks.items():
            # a name that was added with +: without it Hydra accepts the names in `benchmark` alone
            if not hasattr(task, "evaluation_sets"):
                raise SettingError(
                    f"tasks.{name}", problem=f"it is not in benchmark={self.benchmark}"
                )
        if self.rollout:
            instead = {"prompts_per_step": "problems", "group_size": "k"}
            for key in ("temperature", "max_new_tokens", "top_p", "top_k", "min_p", "stop"):
                instead[key] = key
            check_engine_alone(self.rollout, instead)
            check_temperature("temperature", self.temperature)
        if self.rollout and self.batch_rows:
            raise SettingError(
                "batch_rows",
                self.batch_rows,
                f"is not read with rollout={self.rollout.name}",
                remedy="set rollout.batch_rows=",
            )
        if self.temperature == 0 and self.k > 1:
            raise SettingError(
                "k", self.k, "with temperature=0, greedy samples are all alike", remedy="use k=1"
            )
        self.refuse_greedy(self.temperature)
        check_stop(self.stop, "stop")
        if not self.run and self.model is None:
            raise SettingError(
                "run", problem="is not given", remedy=f"{NAME_A_RUN}, or model=hf model.path=..."
            )
        if self.run and self.model is not None:
            raise SettingError(
                "run",
                self.run,
                "a model is given too",
                remedy="set either run=RUN or model=hf model.path=...",
            )
        if not self.run and not self.tasks:
            raise SettingError(
                "benchmark",
                self.benchmark,
                "a model has no task of its own",
                remedy="set benchmark=[...]",
            )
        if not self.run:
            of_runs = {"step": -1, "allow_outside_code": False, "addresses": []}
            for name, default in of_runs.items():
                value = getattr(self, name)
                if value != default:
                    raise SettingError(
                        name, value, "is read of a run, and this is a model", "leave it out"
                    )


ARMS = ("trl", "like for like", "best")


@dataclass
class BenchmarkCommand(Ranged):
    """The settings of experiments/benchmark.py."""

    # tiny | long | small | small_dense | gpu | gpu_moe | qwen3_0p6b | moe_100m
    workload: str = "tiny"
    # none | trl: TRL is timed too, in alternation with gspo (make setup-peer) | transformers: its
    # `generate` is timed too
    peer: str = choice("none", ("none", "trl", "transformers"))
    # with peer=trl: TRL and one or both arms of gspo. "like for like" computes old log-probs as TRL
    # does, "best" skips that pass if the result is exact without it
    arms: list[str] = field(default_factory=lambda: list(ARMS))
    # rollout batches that are timed, after one to warm up; their medians are shown
    batches: int = ranged(5, least=1)
    # with peer or scaling: how often each is measured, in alternation
    rounds: int = ranged(5, least=1)
    threads: int = ranged(1, least=1)
    # measure scaling curves on 1 and 2 threads in place of a workload, as a table and a figure
    curves: bool = False
    # measure the workload on the CPU in one process and in this many, in alternation; 0: do not
    scaling: int = ranged(0, least=0)
    # other sizes: size.new_tokens=256, size.hidden=128
    size: dict[str, int] = ranged(default_factory=dict, least=0)
    # settings of a run: set.trainer.micro_batch_size=32
    set: dict[str, Any] = field(default_factory=dict)
    runs: str = "runs"  # models and results go to RUNS/cold_starts and RUNS/benchmarks
    out: str = ""  # the file of the result; empty: RUNS/benchmarks/<workload>.json

    def overrides(self) -> list[str]:
        """Write `set` as a command line of `gspo train`."""
        return [f"{key}={value}" for key, value in dotted(self.set).items()]

    def __post_init__(self):
        super().__post_init__()
        if "trl" not in self.arms or len(set(self.arms)) < 2 or set(self.arms) - set(ARMS):
            raise SettingError(
                "arms", self.arms, f"choose trl and at least one other of {', '.join(ARMS[1:])}"
            )
        if self.scaling == 1:
            raise SettingError(
                "scaling",
                1,
                "one process is what the others are compared with",
                remedy="set scaling=2 or more",
            )
        if self.scaling and (
            self.peer != "none" or self.curves or self.threads > 1 or "parallel" in self.set
        ):
            raise SettingError(
                "scaling",
                self.scaling,
                "chooses threads and set.parallel itself, and goes with neither peer nor curves",
                remedy="leave them out",
            )
        if self.curves:
            # the curves have workloads, sizes and threads of their own
            used = ("curves", "runs", "out")
            default = BenchmarkCommand()
            for setting in fields(self):
                value = getattr(self, setting.name)
                if setting.name not in used and value != getattr(default, setting.name):
                    raise SettingError(
                        setting.name, value, "is not read with curves=true", remedy="leave it out"
                    )


@dataclass
class SampleCommand(Truncation):
    """The settings of `gspo sample`."""

    run: str = ""
    step: int = ranged(-1, least=-1)  # the step of the checkpoint; -1: the newest one
    set: str = "train"  # train | one of the task's evaluation sets
    first: int = ranged(0, least=0)  # the index of the first problem
    problems: int = ranged(4, least=1)
    samples: int = ranged(2, least=1)
    temperature: float = ranged(1.0, least=0)  # 0 is greedy
    # the engine that samples, with its own settings, as of `gspo evaluate`; null: in-process
    rollout: Any = None
    allow_weak_sandbox: bool = False
    # import the code that the run names, although this user did not make the run
    allow_outside_code: bool = False
    # addresses that the run's task names and may reach although this user did not make the run:
    # [http://host:8000]
    addresses: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__post_init__()
        if not self.run:
            raise SettingError("run", problem="is not given", remedy=NAME_A_RUN)
        self.refuse_greedy(self.temperature)
        if self.rollout:
            instead = {
                "prompts_per_step": "problems",
                "group_size": "samples",
                "temperature": "temperature",
            }
            check_engine_alone(self.rollout, instead)
            check_temperature("temperature", self.temperature)

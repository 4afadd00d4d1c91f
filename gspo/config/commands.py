"""What the entry points beside train.py take: plain dataclasses that are Hydra's schema too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from gspo.core.ranges import LARGEST_SEED, Ranged, ranged
from gspo.model.prompts import PromptFormat


@dataclass
class EvaluateCommand(Ranged):
    """What experiments/evaluate.py takes. Either `run` or `model`; 0 and empty values are explained beside them."""

    run: str = ""  # a run directory
    step: int = ranged(-1, least=-1)  # which of the run's checkpoints; -1 is the newest
    model: Any = None  # model=hf model.path=...: a folder or a name on the hub
    benchmark: list[str] = field(default_factory=list)  # options of task; empty: the run's own task
    tasks: dict[str, Any] = field(default_factory=dict)  # their settings: tasks.gsm8k.path=...
    data: str = ""  # folder with the benchmarks' files, one sub-folder each
    sets: list[str] = field(default_factory=list)  # some of the held-out sets; empty: all
    problems: int = ranged(0, least=0)  # per set; 0: all of a finite set, 256 of one that is made without end
    k: int = ranged(4, least=1)  # samples per problem
    temperature: float = ranged(1.0, least=0)  # 0 is greedy, with k=1
    # 0: each benchmark's own; for others the run's longest limit, 2048 for a model
    max_new_tokens: int = ranged(0, least=0)
    batch_rows: int = ranged(0, least=0)  # responses sampled at once; 0: the run's, 256 for a model
    prompt: PromptFormat = field(default_factory=PromptFormat)  # auto: as in the run, or a chat if there is a template
    # of the samples and of made problems; 0 is what training evaluates with
    seed: int = ranged(0, least=0, most=LARGEST_SEED)
    device: str = "auto"  # auto | cpu | cuda
    allow_weak_sandbox: bool = False  # for the programs of the run's own task; a benchmark has its own
    out: str = ""  # folder of the result; empty: in the run, or runs/evaluations/<model>-<hash>

    def __post_init__(self):
        super().__post_init__()
        for name, task in self.tasks.items():
            if not hasattr(task, "evaluation_sets"):  # given with +, for Hydra knows those of benchmark alone
                raise ValueError(f"there is no setting tasks.{name}: it is not in benchmark={self.benchmark}")
        if self.temperature == 0 and self.k > 1:
            raise ValueError(f"k={self.k} with temperature=0: greedy samples are all alike; use k=1")
        if bool(self.run) == (self.model is not None):
            raise ValueError("say either run=RUN or model=hf model.path=..." + ", not both" * bool(self.run))
        if not self.run and not self.tasks:
            raise ValueError("a model needs benchmark=[...]: it has no task of its own")


@dataclass
class BenchmarkCommand(Ranged):
    """What experiments/benchmark.py takes."""

    workload: str = "tiny"  # tiny | long | small | small_dense | gpu | gpu_moe
    peer: str = "none"  # trl: TRL beside us, in alternation (make setup-peer); transformers: its `generate` alone
    batches: int = ranged(5, least=1)  # rollout batches that are timed, after one to warm up; medians of them are shown
    rounds: int = ranged(5, least=1)  # of TRL, ours like for like, ours at its best
    threads: int = ranged(1, least=1)
    curves: bool = False  # scaling curves on 1 and 2 threads in place of a workload: table and figure
    size: dict[str, int] = ranged(default_factory=dict, least=0)  # other sizes: size.new_tokens=256, size.hidden=128
    set: dict[str, Any] = field(default_factory=dict)  # settings of a run: set.trainer.micro_batch_size=32
    runs: str = "runs"  # where models and results go: RUNS/benchmarks, RUNS/cold_starts
    out: str = ""  # file of the result; empty: RUNS/benchmarks/<workload>.json

    def overrides(self) -> list[str]:
        """`set` as a command line of experiments/train.py."""
        return flat(self.set)

    def __post_init__(self):
        super().__post_init__()
        if self.peer not in ("none", "trl", "transformers"):
            raise ValueError(f"peer={self.peer!r}: choose none, trl or transformers")


@dataclass
class SampleCommand(Ranged):
    """What experiments/sample.py takes."""

    run: str = MISSING
    step: int = ranged(-1, least=-1)  # which checkpoint; -1 is the newest
    set: str = "train"  # train or one of the task's evaluation sets
    first: int = ranged(0, least=0)  # index of the first problem
    problems: int = ranged(4, least=1)
    samples: int = ranged(2, least=1)
    temperature: float = ranged(1.0, least=0)  # 0 is greedy
    allow_weak_sandbox: bool = False


def flat(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested settings as key=value.

    >>> flat({"trainer": {"epochs": 2}, "objective": "grpo"})
    ['trainer.epochs=2', 'objective=grpo']
    """
    found = []
    for key, value in settings.items():
        found += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}={value}"]
    return found

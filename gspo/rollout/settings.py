"""The settings under `rollout`: how much a training step samples, of which problems, by which
engine, how far ahead.

`rollout=local` samples in the trainer's process (gspo.rollout.engines.local), `rollout=vllm` by a
vLLM beside it (gspo.rollout.engines.vllm), `rollout=vllm_server` by a vLLM server elsewhere
(gspo.rollout.engines.vllm_server).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import ClassVar
from urllib.parse import urlsplit

from gspo.io.ranges import HASHED_IF_CHANGED, choice, cost_only, ranged
from gspo.rollout.engines.requests import Sampling
from gspo.rollout.engines.stop_strings import check_stop
from gspo.rollout.engines.truncation import Truncation
from gspo.rollout.sources.problem_sampler import MAX_REFILLS, Sampler

DTYPES = ("float32", "bfloat16")
# The formats of gspo.rollout.engines.quantization, which imports PyTorch.
QUANTIZATIONS = ("none", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int4", "int3", "int2")
# The largest mean |log-prob difference| in nats that engine and trainer may have on the same tokens
# after a sync, by the engine's precision.
SYNC_TOLERANCE = {
    "float32": 1e-4, "bfloat16": 0.15, "fp8_e4m3": 0.5, "fp8_e5m2": 1.0, "fp4_e2m1": 3.0, "int4": 3.0, "int3": 6.0,
    "int2": 9.0,
}  # fmt: skip


@dataclass
class RolloutSettings(Truncation, key="rollout"):
    """The settings of every engine. This class by itself is those of the in-process engine.

    name            the engine's name
    top_p, top_k, min_p  which tokens may be drawn: gspo.rollout.engines.truncation. Log-probs, and so
                         ratios, are of the whole
                    distribution
    stop            strings that end a response, with the token that completes one:
                    gspo.rollout.engines.stop_strings
    dtype           the precision that the engine computes in; the trainer's is float32
    quantization    none, or the format that the in-process engine's weights are rounded to:
                    gspo.rollout.engines.quantization
    routes          whether the engine returns the experts of every token (MoE models); Routing
                    Replay R3 turns it on
    routes_floor    the least share of the engine's experts that the trainer's router must choose
                    too; less is an error
    sync_tolerance  the largest mean |log-prob difference| of engine and trainer after a sync; null:
                    by precision
    staleness       step s trains on responses of the policy after step s - 1 - staleness
    overlap         whether those are sampled while the trainer works (staleness >= 1); changes no
                    number
    token_budget    the most tokens of a response sampled per step, the rest under later policies;
                    0: all at once
    in_flight       how many problems are under way at the start of a step with token_budget; over
                    prompts_per_step
    """

    # bounds the length of responses; 0: it does not. See `bound_by`
    half_of_positions: ClassVar[int] = 0

    name: str = "local"
    prompts_per_step: int = ranged(32, least=1)
    group_size: int = ranged(8, least=1)
    temperature: float = ranged(1.0, above=0, why="greedy groups are all alike")
    max_new_tokens: int = ranged(80, least=1)
    # {step: max_new_tokens from that step on}
    extend: dict[int, int] = ranged(default_factory=dict, least=1)
    # problems with longer prompts are replaced, and counted
    max_prompt_tokens: int | None = ranged(None, least=1)
    # number of different training problems; 0: an unbounded stream
    query_set: int = ranged(0, least=0)
    # steps (with token_budget: batches begun) until the next `query_set` problems; 0: never
    refresh_every: int = ranged(0, least=0)
    # dynamic sampling: further rounds of prompts_per_step problems; 0: none
    refill_rounds: int = ranged(0, least=0, most=MAX_REFILLS)
    # responses sampled at once; bounds the memory of the cache, changes no response
    batch_rows: int = ranged(512, least=1, cost_only=True)
    stop: list[str] = field(default_factory=list, metadata=HASHED_IF_CHANGED)
    # the in-process engine records a token's kernels on a GPU and replays them; false: it launches
    # each by itself
    cuda_graphs: bool = cost_only(True)
    dtype: str = choice("float32", DTYPES)
    quantization: str = choice("none", QUANTIZATIONS, metadata=HASHED_IF_CHANGED)
    routes: bool = False
    routes_floor: float = ranged(0.5, least=0, most=1, cost_only=True)
    sync_tolerance: float | None = ranged(None, above=0, cost_only=True)
    staleness: int = ranged(0, least=0)
    overlap: bool = cost_only(False)
    token_budget: int = ranged(0, least=0)
    in_flight: int = ranged(0, least=0)

    def __post_init__(self):
        super().__post_init__()
        self._check_extend()
        self._check_query_set()
        self._check_refill()
        self._check_ahead()
        check_stop(self.stop, "rollout.stop")

    def _check_extend(self) -> None:
        before = self.max_new_tokens
        for step, limit in sorted(self.extend.items()):
            if step < 2:
                raise ValueError(
                    f"rollout.extend={self.extend}: step {step} must be at least 2; max_new_tokens is 1's"
                )
            if limit <= before:
                raise ValueError(
                    f"rollout.extend={self.extend}: the limit {limit} from step {step} on must exceed the {before} "
                    f"before it (rollout.max_new_tokens={self.max_new_tokens})"
                )
            before = limit

    def _check_query_set(self) -> None:
        if self.refresh_every and not self.query_set:
            raise ValueError(
                f"rollout.refresh_every={self.refresh_every} with rollout.query_set=0: an unbounded stream has nothing "
                "to replace"
            )
        if self.query_set % self.prompts_per_step:  # also where it is smaller
            raise ValueError(
                f"rollout.query_set={self.query_set} is not a multiple of rollout.prompts_per_step="
                f"{self.prompts_per_step}: epochs would not end with a step"
            )

    def _check_refill(self) -> None:
        rounds, batches = self.refill_rounds, self.query_set // self.prompts_per_step
        if rounds and self.group_size == 1:
            raise ValueError(
                f"rollout.refill_rounds={rounds} with rollout.group_size=1: a single reward never varies"
            )
        if self.query_set and rounds >= batches:
            raise ValueError(
                f"rollout.refill_rounds={rounds} with rollout.query_set={self.query_set}, which is {batches} batches "
                f"of rollout.prompts_per_step={self.prompts_per_step}: a step would see a problem twice"
            )

    def _check_ahead(self) -> None:
        if self.overlap and not self.staleness:
            raise ValueError(
                "rollout.overlap=true with rollout.staleness=0: each batch waits for the update before it"
            )
        if self.in_flight and not self.token_budget:
            raise ValueError(
                f"rollout.in_flight={self.in_flight} is not read with rollout.token_budget=0"
            )
        if self.token_budget and self.in_flight <= self.prompts_per_step:
            raise ValueError(
                f"rollout.in_flight={self.in_flight} must exceed rollout.prompts_per_step={self.prompts_per_step} with "
                f"rollout.token_budget={self.token_budget}: else every response is finished before the step"
            )
        if self.token_budget and self.token_budget >= self.longest_limit:
            raise ValueError(
                f"rollout.token_budget={self.token_budget} must be below the longest response, "
                f"rollout.max_new_tokens={self.longest_limit}: else none is ever cut"
            )
        if self.query_set and self.in_flight > self.query_set:
            raise ValueError(
                f"rollout.in_flight={self.in_flight} exceeds rollout.query_set={self.query_set}: a problem would "
                "be under way twice"
            )
        if self.token_budget and self.refill_rounds:
            raise ValueError(
                f"rollout.token_budget={self.token_budget} with rollout.refill_rounds={self.refill_rounds}: dynamic "
                "sampling needs whole responses; use one of the two"
            )

    def tolerance(self, precision: str) -> float:
        """Return the largest mean |log-prob difference| in nats that the guard after a sync lets
        pass, where the trainer computes in this precision."""
        rounding = self.dtype if self.quantization == "none" else self.quantization
        return self.sync_tolerance or max(SYNC_TOLERANCE[rounding], SYNC_TOLERANCE[precision])

    def bound_by(self, positions: int) -> None:
        """Sample responses of at most half of a model's positions, if the longest would leave no
        room for a prompt.
        """
        if self.longest_limit >= positions:
            self.half_of_positions = positions // 2

    def limit(self, step: int) -> int:
        """Return the largest number of response tokens at a step; later steps never have a smaller
        one.
        """
        longest = max(
            [self.max_new_tokens, *(limit for start, limit in self.extend.items() if start <= step)]
        )
        return min(longest, self.half_of_positions or longest)

    @property
    def longest_limit(self) -> int:
        """The largest number of response tokens that any step can have."""
        return self.limit(max(self.extend, default=0))

    def sampling(self, step: int) -> Sampling:
        """Return how a step's responses are sampled."""
        return Sampling(
            self.temperature,
            self.limit(step),
            self.token_budget,
            tuple(self.stop),
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )


@dataclass
class OutsideRollout(RolloutSettings):
    """The settings of vLLM on a GPU or on the CPU, wherever it runs. `batch_rows` becomes vLLM's
    max_num_seqs.
    """

    # GPUs that vLLM uses together; with rollout=vllm and several ranks so many neighbours share a
    # vLLM on theirs
    tensor_parallel_size: int = ranged(1, least=1, cost_only=True)
    # tokens of prompt and response; null: the model's positions
    max_model_len: int | None = ranged(None, least=1)
    # GiB of the key/value cache, on the CPU
    kv_cache_gib: float = ranged(1.0, above=0, cost_only=True)
    # share of the GPU's memory for weights and cache, on CUDA
    gpu_memory: float = ranged(0.45, above=0, below=1, cost_only=True)
    eager: bool = cost_only(False)  # no CUDA graphs; always so on the CPU

    def __post_init__(self):
        super().__post_init__()
        if self.quantization != "none":
            raise ValueError(
                f"rollout.quantization={self.quantization} is read by rollout=local alone"
            )
        if not self.cuda_graphs:
            raise ValueError(
                "rollout.cuda_graphs=false is read by rollout=local alone; vLLM has rollout.eager=true"
            )
        if self.temperature != 1:
            for rule, value in self.rules.items():
                raise ValueError(
                    f"rollout.{rule}={value} with rollout.temperature={self.temperature} and rollout={self.name}: vLLM "
                    "reports log-probs before the temperature or after the truncation, and the ratio needs those "
                    "between; set rollout.temperature=1, or use rollout=local"
                )


@dataclass
class VLLMRollout(OutsideRollout):
    """The settings of a vLLM that the run starts beside the trainer."""

    name: str = "vllm"
    # whether the engine runs in a process of its own; false: in the trainer's
    own_process: bool = cost_only(True)
    # whether the trainer gets the engine's GPU memory between rollouts
    sleep: bool = cost_only(False)

    def __post_init__(self):
        super().__post_init__()
        if self.tensor_parallel_size > 1 and not self.own_process:
            raise ValueError(
                f"rollout.tensor_parallel_size={self.tensor_parallel_size} with rollout.own_process=false: its workers "
                "have processes of their own; set rollout.own_process=true"
            )
        if self.sleep and self.overlap:
            raise ValueError(
                "rollout.sleep=true with rollout.overlap=true: the engine is never idle"
            )


@dataclass
class VLLMServerRollout(OutsideRollout):
    """The settings of a vLLM server that `gspo serve` starts, with the same settings as the runs
    that use it.
    """

    name: str = "vllm_server"
    url: str = cost_only("http://127.0.0.1:8000")  # where the server listens
    # a folder that server and trainer both see, for weights on their way; empty: this machine's
    # memory
    folder: str = cost_only("")

    def __post_init__(self):
        super().__post_init__()
        try:
            address = urlsplit(self.url)
            fits = (
                address.scheme == "http"
                and address.hostname
                and address.port
                and not address.path.strip("/")
            )
        except ValueError:  # a port that is no number
            fits = False
        if not fits:
            raise ValueError(
                f"rollout.url={self.url!r} must be http://HOST:PORT, such as http://127.0.0.1:8000"
            )


# What an engine reads by itself, without a trainer. The other settings say what a step of training
# is made of.
OF_THE_ENGINE = frozenset([
    "name", "dtype", "quantization", "batch_rows", "tensor_parallel_size", "max_model_len", "kv_cache_gib",
    "gpu_memory", "eager", "own_process", "url", "folder",
])  # fmt: skip


def check_engine_alone(settings: RolloutSettings, instead: dict[str, str]) -> None:
    """Raise ValueError for a setting that was given where nothing is trained, and nothing would
    read it. `instead` says by which settings of the command the same is said."""
    for field_ in fields(settings):
        value = getattr(settings, field_.name)
        default = field_.default if field_.default_factory is MISSING else field_.default_factory()
        if value == default:
            continue
        if field_.name == "name":
            raise ValueError(
                f"rollout.name={value!r} cannot be changed; choose another option with rollout=..."
            )
        # else the server is refused
        as_started = field_.name == "routes" and settings.name == "vllm_server"
        if field_.name not in OF_THE_ENGINE and not as_started:
            hint = f"say {instead[field_.name]}=..." if field_.name in instead else "leave it out"
            raise ValueError(f"rollout.{field_.name}={value} is read in training alone; {hint}")


def engine_record(settings: RolloutSettings, positions: int | None) -> dict:
    """Return what the numbers of an engine depend on, beyond rounding, with the positions that it
    has.
    """
    kept = {name: getattr(settings, name) for name in ("name", "dtype", "quantization")}
    return kept | {"positions": positions}


def check_sampler(settings: RolloutSettings, sampler: Sampler) -> None:
    """Raise ValueError, naming keys and values, for a sampler that could not act under these
    settings.
    """
    batches = settings.query_set // settings.prompts_per_step
    if sampler.needs_query_set and batches < 2:
        raise ValueError(
            f"sampler={sampler.name} with rollout.query_set={settings.query_set}: it needs a query set of at least two "
            f"batches of rollout.prompts_per_step={settings.prompts_per_step}"
        )
    if sampler.reads_pass_rates and 0 < settings.refresh_every <= batches:
        raise ValueError(
            f"rollout.refresh_every={settings.refresh_every} replaces rollout.query_set={settings.query_set} within "
            f"its first epoch ({batches} steps): sampler={sampler.name} would never read a recorded pass rate"
        )

"""The settings under `rollout`: the batch of a step, its sampling, the engine, and stale batches.

`rollout=local` samples in the trainer's process (gspo.rollout.engines.local) and has only these
settings. gspo.rollout.vllm_settings adds those of vLLM.

`RolloutSettings` inherits a class for each subject. Each class checks its own settings. The order
of the classes is the order in which the settings are shown.
"""

from dataclasses import MISSING, dataclass, field, fields

from gspo.io.errors import SettingError
from gspo.io.ranges import HASHED_IF_CHANGED, Ranged, choice, cost_only, ranged
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
    "float32": 1e-4,
    "bfloat16": 0.15,
    "fp8_e4m3": 0.5,
    "fp8_e5m2": 1.0,
    "fp4_e2m1": 3.0,
    "int4": 3.0,
    "int3": 6.0,
    "int2": 9.0,
}


@dataclass
class BatchSettings(Ranged, key="rollout"):
    """The settings of a step's batch: its size, and the engine that samples it."""

    name: str = "local"  # the engine's name
    prompts_per_step: int = ranged(32, least=1)
    group_size: int = ranged(8, least=1)  # responses per prompt


@dataclass
class ResponseSettings(Truncation, key="rollout"):
    """The settings of a response: temperature, truncation and length.

    top_p, top_k and min_p exclude tokens from the draw (gspo.rollout.engines.truncation). Log-probs
    and ratios are still of the full distribution. With `keep_mask` they are of the softmax over the
    kept tokens (gspo.data.kept_tokens), for the engine and for the trainer.
    """

    # Bounds the length of responses (0: it does not). `bound_by` sets it. Without an annotation it
    # is no setting.
    half_of_positions = 0

    temperature: float = ranged(1.0, above=0, why="greedy groups are all alike")
    # whether log-probs, entropy and KL are of the softmax over the tokens that the rules keep
    keep_mask: bool = field(default=False, metadata=HASHED_IF_CHANGED)
    max_new_tokens: int = ranged(80, least=1)
    # {step: max_new_tokens from that step on}
    extend: dict[int, int] = ranged(default_factory=dict, least=1)

    def __post_init__(self):
        super().__post_init__()
        previous_limit = self.max_new_tokens
        for step, limit in sorted(self.extend.items()):
            if step < 2:
                raise SettingError(
                    "rollout.extend",
                    self.extend,
                    f"step {step} must be at least 2: step 1 has rollout.max_new_tokens",
                )
            if limit <= previous_limit:
                raise SettingError(
                    "rollout.extend",
                    self.extend,
                    f"the limit {limit} from step {step} on must exceed the "
                    f"{previous_limit} before it "
                    f"(rollout.max_new_tokens={self.max_new_tokens})",
                )
            previous_limit = limit

    def bound_by(self, positions: int) -> None:
        """Limit responses to half of the positions if the longest leaves no room for a prompt."""
        if self.longest_limit >= positions:
            self.half_of_positions = positions // 2

    def limit(self, step: int) -> int:
        """Return the largest number of response tokens at a step. It never decreases."""
        limits = [limit for start, limit in self.extend.items() if start <= step]
        largest = max([self.max_new_tokens, *limits])
        return min(largest, self.half_of_positions or largest)

    @property
    def longest_limit(self) -> int:
        """The largest number of response tokens of any step."""
        return self.limit(max(self.extend, default=0))


@dataclass
class ProblemSettings(BatchSettings):
    """The settings that choose the problems of a step, also for dynamic sampling."""

    # problems with longer prompts are replaced, and counted
    max_prompt_tokens: int | None = ranged(None, least=1)
    # number of different training problems; 0: an unbounded stream
    query_set: int = ranged(0, least=0)
    # steps (with token_budget: batches begun) until the next `query_set` problems; 0: never
    refresh_every: int = ranged(0, least=0)
    # dynamic sampling: further rounds of prompts_per_step problems; 0: none
    refill_rounds: int = ranged(0, least=0, most=MAX_REFILLS)

    def __post_init__(self):
        super().__post_init__()
        if self.refresh_every and not self.query_set:
            raise SettingError(
                "rollout.refresh_every",
                self.refresh_every,
                "with rollout.query_set=0, an unbounded stream has nothing to replace",
            )
        if self.query_set % self.prompts_per_step:  # also if it is smaller
            raise SettingError(
                "rollout.query_set",
                self.query_set,
                f"is not a multiple of rollout.prompts_per_step={self.prompts_per_step}: "
                "epochs would not end with a step",
            )
        if self.refill_rounds and self.group_size == 1:
            raise SettingError(
                "rollout.refill_rounds",
                self.refill_rounds,
                "with rollout.group_size=1, a single reward never varies",
            )
        batches = self.query_set // self.prompts_per_step
        if self.query_set and self.refill_rounds >= batches:
            raise SettingError(
                "rollout.refill_rounds",
                self.refill_rounds,
                f"with rollout.query_set={self.query_set}, which is {batches} batches of "
                f"rollout.prompts_per_step={self.prompts_per_step}, a step would see a "
                "problem twice",
            )


@dataclass
class EngineSettings(Ranged, key="rollout"):
    """The settings of the engine: batch size, stop strings, precision, and the trainer's checks.

    routes          whether the engine returns the experts of every token (MoE models)
    routes_floor    the smallest share of these experts that the trainer's router must choose too
    sync_tolerance  the largest mean |log-prob difference| of engine and trainer after a sync
    """

    # responses sampled at once; bounds the memory of the cache, changes no response
    batch_rows: int = ranged(512, least=1, cost_only=True)
    # strings that end a response, with the token that completes one
    # (gspo.rollout.engines.stop_strings)
    stop: list[str] = field(default_factory=list, metadata=HASHED_IF_CHANGED)
    # the in-process engine records a token's kernels on a GPU and replays them; false: it launches
    # each by itself
    cuda_graphs: bool = cost_only(True)
    # the precision that the engine computes in; the trainer's is policy.precision
    dtype: str = choice("float32", DTYPES)
    # none, or the format that the in-process engine's weights are rounded to
    # (gspo.rollout.engines.quantization)
    quantization: str = choice("none", QUANTIZATIONS, metadata=HASHED_IF_CHANGED)
    routes: bool = False  # Routing Replay R3 sets it
    routes_floor: float = ranged(0.5, least=0, most=1, cost_only=True)
    sync_tolerance: float | None = ranged(None, above=0, cost_only=True)  # null: by precision

    def tolerance(self, precision: str) -> float:
        """Return the largest mean |log-prob difference| in nats that is accepted after a sync.

        `precision` is the trainer's."""
        rounding = self.dtype if self.quantization == "none" else self.quantization
        return self.sync_tolerance or max(SYNC_TOLERANCE[rounding], SYNC_TOLERANCE[precision])


@dataclass
class OffPolicySettings(ProblemSettings, ResponseSettings, BatchSettings):
    """The settings that let responses be older than the weights of the step that trains on them.

    The check needs the settings of the batch and of the responses, so this class inherits them.
    """

    # step s trains on responses of the policy after step s - 1 - staleness
    staleness: int = ranged(0, least=0)
    # whether those are sampled while the trainer works (staleness >= 1); changes no number
    overlap: bool = cost_only(False)
    # the most tokens of a response sampled per step, the rest under later policies; 0: no limit
    token_budget: int = ranged(0, least=0)
    # with token_budget: problems under way at the start of a step; more than prompts_per_step
    in_flight: int = ranged(0, least=0)

    @property
    def samples_ahead(self) -> bool:
        """Whether responses may be older than the weights of the step that trains on them."""
        return bool(self.staleness or self.token_budget)

    def __post_init__(self):
        super().__post_init__()
        if self.overlap and not self.staleness:
            raise SettingError(
                "rollout.overlap",
                True,
                "with rollout.staleness=0, each batch waits for the update before it",
            )
        if self.in_flight and not self.token_budget:
            raise SettingError(
                "rollout.in_flight", self.in_flight, "is not read with rollout.token_budget=0"
            )
        if self.token_budget and self.in_flight <= self.prompts_per_step:
            raise SettingError(
                "rollout.in_flight",
                self.in_flight,
                f"must exceed rollout.prompts_per_step={self.prompts_per_step} with "
                f"rollout.token_budget={self.token_budget}: else every response is "
                "finished before the step",
            )
        if self.token_budget and self.token_budget >= self.longest_limit:
            raise SettingError(
                "rollout.token_budget",
                self.token_budget,
                f"must be below the longest response of {self.longest_limit} tokens "
                "(rollout.max_new_tokens, rollout.extend): else none is ever cut",
            )
        if self.query_set and self.in_flight > self.query_set:
            raise SettingError(
                "rollout.in_flight",
                self.in_flight,
                f"exceeds rollout.query_set={self.query_set}: a problem would be under way twice",
            )
        if self.token_budget and self.refill_rounds:
            raise SettingError(
                "rollout.token_budget",
                self.token_budget,
                f"with rollout.refill_rounds={self.refill_rounds}, dynamic sampling needs "
                "whole responses",
                remedy="use one of the two",
            )


@dataclass
class RolloutSettings(
    OffPolicySettings, EngineSettings, ProblemSettings, ResponseSettings, BatchSettings
):
    """The settings of a rollout with any engine. `rollout=local` has only these."""

    def __post_init__(self):
        super().__post_init__()
        check_stop(self.stop, "rollout.stop")

    @property
    def shares_weights(self) -> bool:
        """Whether the engine computes with the trainer's own float32 weights, in float32.

        The trainer rounds them if policy.precision=bfloat16."""
        is_exact = self.dtype == "float32" and self.quantization == "none"
        return self.name == "local" and is_exact

    def sampling(self, step: int) -> Sampling:
        """Return the sampling parameters of a step's responses."""
        return Sampling(
            self.temperature,
            self.limit(step),
            self.token_budget,
            tuple(self.stop),
            self.keep_mask,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )


# The settings that an engine reads without a trainer. The others describe a step of training.
ENGINE_FIELDS = frozenset(
    [
        "name",
        "dtype",
        "quantization",
        "batch_rows",
        "cuda_graphs",
        "tensor_parallel_size",
        "max_model_len",
        "kv_cache_gib",
        "gpu_memory",
        "eager",
        "own_process",
        "url",
        "folder",
    ]
)


def check_engine_alone(settings: RolloutSettings, instead: dict[str, str]) -> None:
    """Raise ValueError for a setting that only training reads, in a command that does not train.

    `instead` names, by field, the command's own setting of the same meaning."""
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        default = setting.default
        if setting.default_factory is not MISSING:
            default = setting.default_factory()
        if value == default:
            continue
        if setting.name == "name":
            raise SettingError(
                "rollout.name",
                value,
                "cannot be changed",
                remedy="choose another option with rollout=...",
            )
        # a server that was started with routes is refused without them
        is_read_by_server = setting.name == "routes" and settings.name == "vllm_server"
        if setting.name not in ENGINE_FIELDS and not is_read_by_server:
            remedy = "leave it out"
            if setting.name in instead:
                remedy = f"set {instead[setting.name]}=..."
            elif isinstance(value, bool):  # an option file may have set it
                remedy = f"set rollout.{setting.name}={str(default).lower()}"
            raise SettingError(
                f"rollout.{setting.name}", value, "is read in training alone", remedy
            )


def engine_record(settings: RolloutSettings, positions: int | None) -> dict:
    """Return the settings that change an engine's numbers beyond rounding, and its positions."""
    return {
        "name": settings.name,
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "positions": positions,
    }


def check_sampler(settings: RolloutSettings, sampler: Sampler) -> None:
    """Raise ValueError for a sampler that could not act under these settings."""
    batches = settings.query_set // settings.prompts_per_step
    if sampler.needs_query_set and batches < 2:
        raise SettingError(
            "sampler",
            sampler.name,
            f"with rollout.query_set={settings.query_set}, it needs a query set of at "
            f"least two batches of rollout.prompts_per_step={settings.prompts_per_step}",
        )
    if sampler.reads_pass_rates and 0 < settings.refresh_every <= batches:
        raise SettingError(
            "rollout.refresh_every",
            settings.refresh_every,
            f"replaces rollout.query_set={settings.query_set} within its first epoch "
            f"({batches} steps): sampler={sampler.name} would never read a recorded pass "
            "rate",
        )

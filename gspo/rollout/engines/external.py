"""The base class of engines outside the trainer's process: how rows go to them and weights are
handed over, by one rank or several.

For example, two ranks each have a vLLM of their own. Both go through the trainer's weights tensor
by tensor, because weights that are spread over ranks are whole for a moment only, and each writes
them, piece by piece, to a folder from which its vLLM loads them. Where two ranks share an engine,
the first of them alone speaks to it: it samples both ranks' rows, and deals out what was sampled.

Every rank goes through every call, and in step with the others: if the engine of one has ended, all
raise the same EngineEnded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from gspo.data.samples import Problem, Response
from gspo.data.seeding import seed_for
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.rollout.engines.base import Engine
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.pending_requests import PendingRequests, fill
from gspo.rollout.engines.requests import Row, Sampling
from gspo.rollout.engines.weights_folder import WeightsFolder
from gspo.rollout.settings import OutsideRollout

P, T = ParamSpec("P"), TypeVar("T")
PIECE_BYTES = 1e9  # a piece of the weights has at most so many, unless a single tensor has more
HELD = 2  # a stream gives the engine so many times the requests that it samples at once
Request = tuple[list[int], dict[str, Any]]  # a prompt, and the arguments of vLLM's SamplingParams


class Calls:
    """Calls an engine, until it has ended."""

    def __init__(self) -> None:
        self.ended = ""  # how it has ended

    def __call__(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """Return what the function returns; None from the call on that raises EngineEnded."""
        if self.ended:
            return None
        try:
            return function(*arguments, **named)
        except EngineEnded as error:
            self.ended = str(error)
            return None


class OutsideEngine(Engine):
    """Samples in another process, and hands weights over to it.

    `sharers` are the neighbouring ranks that sample with the same engine, the first of them for
    all. A rank that hands weights over has a `folder` to do so, the others have none.
    """

    shares_weights = False
    # whether the engine has a tokenizer, by which it can end a response at a stop string itself
    knows_text = False
    in_chunks = False
    folder: WeightsFolder | None = None

    def __init__(self, policy: Policy, settings: OutsideRollout, ranks: Ranks):
        self.policy, self.settings, self.ranks = policy, settings, ranks
        self.sharers = Ranks()
        self.batch_rows = settings.batch_rows
        self.shapes = policy.shapes()
        self.tied = tied_names(policy.model)
        # the precision that the engine stores all weights in, if it is one
        self.stored: torch.dtype | None = None

    @abstractmethod
    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine and return its result. Raises EngineEnded if the engine has
        ended.
        """

    def wake(self) -> None:
        """Take back what `rest` gave away."""

    # -------------------------------------------------------------------------------------------------------
    # weights
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sample from these weights from now on. Raises ValueError for names or shapes that are not
        those of the policy's model, about which vLLM would only warn.

        All ranks must go through the tensors together. None holds more than a piece of them."""
        self.wake()
        calls, wrong = Calls(), set(self.shapes)
        if self.folder:
            calls(self._ask, "begin_load")
        for piece in in_pieces(self._own(named_tensors, wrong), PIECE_BYTES if self.folder else 0):
            if self.folder:
                calls(self._hand_over, piece)
        if self.folder:
            calls(self._ask, "end_load")
            calls(self._forget_prefixes)
        self._agree(calls)
        if wrong:
            raise ValueError(
                f"weights do not belong to this model, or are missing: {', '.join(sorted(wrong))}"
            )

    def _own(
        self, named_tensors: Iterable[tuple[str, Tensor]], wrong: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that belong to the model, without those tied to an earlier one. What is
        `wrong`, at first every name of the model, is at the end the names that were missing,
        unknown or of another shape."""
        for name, tensor in named_tensors:
            if self.shapes.get(name) != tensor.shape:
                wrong.add(name)
                continue
            wrong.discard(name)
            if name not in self.tied:
                yield name, tensor

    def _hand_over(self, piece: dict[str, Tensor]) -> None:
        """Let the engine load a piece of the weights, in the precision that it stores."""
        on_cpu = {
            name: tensor.detach().to("cpu", self.stored or tensor.dtype)
            for name, tensor in piece.items()
        }
        path = self.folder.save_weights(on_cpu)
        self._ask("load", str(path))
        path.unlink()

    def _forget_prefixes(self) -> None:
        """Drop the cached keys and values of prompts, which were computed with the old weights."""
        if not self._ask("forget_prefixes"):
            raise RuntimeError("vLLM did not clear its prefix cache: requests are still running")

    def _note_precision(self) -> None:
        """Note the precision of the engine's weights: it is that in which they are handed over."""
        stored = self._ask("stored_dtype")
        self.stored = getattr(torch, stored) if stored else None

    def _agree(self, calls: Calls) -> None:
        """Raise EngineEnded on every rank, with the same message, if the engine of one has ended."""
        if ended := next((text for text in self.ranks.all_gather(calls.ended) if text), ""):
            raise EngineEnded(ended)

    # ------------------------------------------------------------------------------------------------------
    # sampling
    def _most(self, count: int) -> int:
        return max(self.ranks.all_gather(count))

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
            raise ValueError(
                "rollout.routes=false: this engine keeps no experts; set rollout.routes=true"
            )
        self.wake()
        calls = Calls()
        requests = [(row.prefix_ids, self._params(row, sampling, seed)) for row in rows]
        asked = self.sharers.all_gather(requests)
        answers = calls(self._sample_for_all, asked) if self.sharers.rank == 0 else None
        self._agree(calls)
        for row, sampled in zip(rows, self.sharers.scatter(answers), strict=True):
            fill(row, sampled, self.policy, sampling)
            row.experts = [sampled.experts] if record_experts else []
        ended(list(range(len(rows))))

    def stream(
        self,
        problems: list[Problem],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int | str, ...],
        policy_step: int = 0,
        finished: Callable[[list[Response]], None] | None = None,
    ) -> Iterator[list[list[Response]]]:
        """Yield groups as they become whole, in any order. The engine always holds more requests
        than it samples at once, until there are no more, so that none of its places is empty while
        a long response ends.

        This is for one process. An engine whose stream was broken off must be closed."""
        if self.ranks.world_size > 1:
            raise ValueError("an engine that several ranks share does not stream: use generate")
        self.wake()
        waiting = deque(problems)
        requests = PendingRequests(
            self.policy, self._ask, lambda row: self._params(row, sampling, seed), self._check_room
        )
        while waiting or requests.rows:
            while waiting and len(requests.rows) < HELD * self.batch_rows:
                requests.add(waiting.popleft(), group_size, sampling)
            ended, whole = requests.collect(sampling, policy_step)
            if finished and ended:
                finished(ended)
            if whole:
                yield whole

    def _sample_for_all(self, asked: list[list[Request]]) -> list[list]:
        """Sample the requests of all sharers together, and return what was sampled for each of
        them.
        """
        requests = [request for own in asked for request in own]
        sampled = iter(
            self._ask("generate", [r[0] for r in requests], [r[1] for r in requests])
            if requests
            else ()
        )
        return [[next(sampled) for _ in own] for own in asked]

    def _params(self, row: Row, sampling: Sampling, seed: tuple[int | str, ...]) -> dict[str, Any]:
        """Return the arguments of vLLM's SamplingParams for a row."""
        # vLLM takes signed 64-bit numbers and reads -1 as "no seed": the shift leaves non-negative
        # ones.
        own_seed = seed_for(*seed, row.problem.task, row.problem.index, row.sample, row.done) >> 1
        params = {
            "temperature": sampling.temperature,
            "seed": own_seed if sampling.temperature else None,
            "max_tokens": row.limit,
            "stop_token_ids": sorted(self.policy.stop_ids),
            "logprobs": 0,  # only that of the sampled token
            "detokenize": False,
        }
        if sampling.stop and self.knows_text:
            params |= {"stop": list(sampling.stop), "detokenize": True}
        return params | sampling.rules


def in_pieces(
    named_tensors: Iterable[tuple[str, Tensor]], most: float
) -> Iterator[dict[str, Tensor]]:
    """Cut a stream of tensors into pieces of at most `most` bytes each, or of a single larger
    tensor.
    """
    piece, size = {}, 0
    for name, tensor in named_tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if piece and size + bytes_ > most:
            yield piece
            piece, size = {}, 0
        piece[name] = tensor
        size += bytes_
    if piece:
        yield piece


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that are the same as one with an earlier name. An engine loads
    these once, under the first name."""
    first: dict[int, str] = {}
    names = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in names if first.setdefault(id(parameter), name) != name}

"""The base class of the vLLM engines: their requests and their weights.

For example, two ranks each have a vLLM of their own. Both go through the trainer's weights tensor
by tensor, because sharded weights are gathered one tensor at a time. Each rank writes the tensors,
piece by piece, to a folder from which its vLLM loads them. If two ranks share an engine, only the
first of them calls it: it samples the rows of both ranks, and scatters the results.

All ranks make the same calls in step: if the engine of one rank has ended, all ranks raise the same
EngineEnded.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gspo.data.seeding import seed_for
from gspo.distributed.ranks import Ranks
from gspo.io.errors import SettingError
from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import architecture
from gspo.model.sharding.sharded_files import tensors_in_files
from gspo.rollout.engines.base import Engine, Groups, OnFinished
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.pending_requests import PendingRequests, fill
from gspo.rollout.engines.requests import Row, SamplingRequest
from gspo.rollout.engines.vllm_host import Completion
from gspo.rollout.engines.vllm_kept import requested_logprobs, vocabulary_size
from gspo.rollout.engines.weights_folder import WeightsFolder
from gspo.rollout.vllm_settings import VLLMRolloutBase

P = ParamSpec("P")
T = TypeVar("T")
SettingsT = TypeVar("SettingsT", bound=VLLMRolloutBase)
# the largest piece of the weights that is handed over; a single larger tensor is a piece of its own
PIECE_BYTES = 1e9
# a stream gives the engine this many times as many requests as the engine samples at once
QUEUED_BATCHES = 2
Prompt = tuple[list[int], dict[str, Any]]  # token ids, and the arguments of vLLM's SamplingParams


class Calls:
    """Calls an engine until it has ended, and remembers why it ended."""

    def __init__(self) -> None:
        self.ended = ""  # the message of its EngineEnded

    def __call__(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """Return the function's result, or None from the call on that raises EngineEnded."""
        if self.ended:
            return None
        try:
            return function(*arguments, **named)
        except EngineEnded as error:
            self.ended = str(error)
            return None


class VLLMEngineBase(Engine, Generic[SettingsT]):
    """An engine that samples with vLLM, and loads the weights that it is handed.

    vLLM runs in the trainer's process (rollout.own_process=false), in a separate process, or behind
    a server. `sharers` are the neighbouring ranks that sample with the same engine. The first of
    them calls it for all. Only a rank that hands weights over has a `folder`.
    """

    shares_weights = False
    # whether the engine has a tokenizer: then it can end a response at a stop string itself
    has_tokenizer = False
    in_chunks = False
    folder: WeightsFolder | None = None

    def __init__(
        self, policy: Policy, settings: SettingsT, ranks: Ranks, max_model_len: int | None = None
    ):
        self.policy = policy
        self.settings = settings
        self.ranks = ranks
        self.sharers = Ranks()
        self.batch_rows = settings.batch_rows
        self.shapes = policy.shapes()
        self.tied = tied_names(policy.model)
        # such as the bias with which a router selects experts
        self.buffers = {name for name, _ in policy.model.named_buffers()}
        # the precision in which the engine stores its weights, None if there are several
        self.stored_dtype: torch.dtype | None = None
        # None: the model has no bound
        self.max_model_len = max_model_len or settings.max_model_len or policy.positions

    @property
    def positions(self) -> int | None:
        """The number of tokens of prompt and response together that the engine can hold."""
        return self.max_model_len

    @abstractmethod
    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine and return its result.

        Raises EngineEnded if the engine has ended."""

    def wake(self) -> None:
        """Take back the memory that `rest` gave away."""

    # weights

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sample from these weights from now on.

        All ranks must go through the tensors together. A rank holds at most one piece of them.
        Raises ValueError for names or shapes that differ from the policy's model: vLLM would only
        warn of them."""
        self.wake()
        calls = Calls()
        # `_matching` removes the names of tensors that fit, and adds unknown names. Names that are
        # left at the end are missing or wrong
        wrong_names = set(self.shapes)
        tensors = self._matching(named_tensors, wrong_names)
        if self.folder:
            calls(self._ask, "begin_load")
            for piece in in_pieces(tensors, PIECE_BYTES):
                calls(self._hand_over, piece, self.folder)
            calls(self._ask, "end_load")
            calls(self._forget_prefixes)
        else:
            # sharded tensors are gathered by all ranks, so this rank goes through them too
            for _ in tensors:
                pass
        self._raise_if_ended(calls)
        if wrong_names:
            raise ValueError(
                "weights do not belong to this model, or are missing: "
                f"{', '.join(sorted(wrong_names))}"
            )

    def _matching(
        self, named_tensors: Iterable[tuple[str, Tensor]], wrong_names: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that belong to the model, except those tied to an earlier tensor.

        Their names are removed from `wrong_names`. Unknown names are added to it, and so are names
        of tensors of another shape."""
        for name, tensor in named_tensors:
            if self.shapes.get(name) != tensor.shape:
                wrong_names.add(name)
                continue
            wrong_names.discard(name)
            if name not in self.tied:
                yield name, tensor

    def _hand_over(self, piece: dict[str, Tensor], folder: WeightsFolder) -> None:
        """Let the engine load a piece of the weights, in the precision in which it stores them.

        Buffers keep their precision: a rounded bias would send tokens to other experts. vLLM knows
        Mixtral's experts by their names in files alone."""
        on_cpu = {}
        model_class = architecture(self.policy.model)
        for name, tensor in piece.items():
            dtype = self.stored_dtype or tensor.dtype
            if name in self.buffers:
                dtype = tensor.dtype
            cpu_tensor = tensor.detach().to("cpu", dtype)
            if model_class == "MixtralForCausalLM":
                parts = tensors_in_files(model_class, name, range(len(cpu_tensor)), cpu_tensor)
                on_cpu |= {file_name: part.contiguous() for file_name, _, part in parts}
            else:
                on_cpu[name] = cpu_tensor
        path = folder.save_weights(on_cpu)
        self._ask("load", str(path))
        path.unlink()

    def _forget_prefixes(self) -> None:
        """Drop the cached keys and values of prompts, which were computed with the old weights."""
        if not self._ask("forget_prefixes"):
            raise RuntimeError("vLLM did not clear its prefix cache: requests are still running")

    def _note_precision(self) -> None:
        """Store the precision of the engine's weights, in which they will be handed over."""
        name = self._ask("stored_dtype")
        self.stored_dtype = getattr(torch, name) if name else None

    def _raise_if_ended(self, calls: Calls) -> None:
        """Raise EngineEnded, with the same message on every rank, if a rank's engine has ended."""
        messages = [message for message in self.ranks.all_gather(calls.ended) if message]
        if messages:
            raise EngineEnded(messages[0])

    # sampling

    def _largest_count(self, count: int) -> int:
        return max(self.ranks.all_gather(count))

    def _sample(
        self,
        rows: list[Row],
        rows_per_prefix: int,
        request: SamplingRequest,
        on_ended: Callable[[list[int]], None],
    ) -> None:
        """Sample each row as a request of its own: vLLM finds equal prefixes by itself."""
        if request.record_experts and not self.settings.routes:
            raise SettingError(
                "rollout.routes",
                False,
                "this engine keeps no experts",
                remedy="set rollout.routes=true",
            )
        self.wake()
        calls = Calls()
        prompts = [(row.prefix_ids, self._params(row, request)) for row in rows]
        prompts_by_rank = self.sharers.all_gather(prompts)
        sampled_by_rank = None
        if self.sharers.rank == 0:
            sampled_by_rank = calls(self._sample_for_sharers, prompts_by_rank)
        self._raise_if_ended(calls)
        for row, sampled in zip(rows, self.sharers.scatter(sampled_by_rank), strict=True):
            fill(row, sampled, self.policy, request.sampling)
            row.experts = []
            if request.record_experts and sampled.experts is not None:
                row.experts.append(self._of_moe_layers(sampled.experts))
        on_ended(list(range(len(rows))))

    def _of_moe_layers(self, experts_SLK: np.ndarray) -> np.ndarray:
        """Return the experts of the layers whose routers are recorded here.

        On a GPU, vLLM returns an entry for every layer of the model, also for dense layers."""
        routing = self.policy.routing
        layers = self.policy.model.config.get_text_config().num_hidden_layers
        if experts_SLK.shape[1] == layers > routing.layers:
            return experts_SLK[:, routing.layer_numbers]
        return experts_SLK

    def logprobs_of(
        self, prompts: list[list[int]], responses: list[list[int]]
    ) -> list[list[float]] | None:
        """Return the engine's log-probs of given response tokens at temperature 1, row by row.

        vLLM reports the log-probs of a prompt's tokens at temperature 1, whatever its mode of
        log-probs is. For such a request it does not read its prefix cache."""
        self.wake()
        calls = Calls()
        sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        sequences_by_rank = self.sharers.all_gather(sequences)
        logprobs_by_rank = None
        if self.sharers.rank == 0:
            logprobs_by_rank = calls(self._logprobs_for_sharers, sequences_by_rank)
        self._raise_if_ended(calls)
        logprobs = self.sharers.scatter(logprobs_by_rank)
        rows = zip(logprobs, responses, strict=True)
        return [values[len(values) - len(response) :] for values, response in rows]

    def _logprobs_for_sharers(
        self, sequences_by_rank: list[list[list[int]]]
    ) -> list[list[list[float]]]:
        """Return the log-probs of the sequences of all sharers, rank by rank."""
        sequences = [sequence for rank in sequences_by_rank for sequence in rank]
        logprobs = iter(self._ask("prompt_logprobs", sequences) if sequences else ())
        return [[next(logprobs) for _ in rank] for rank in sequences_by_rank]

    def stream(
        self, request: SamplingRequest, on_finished: OnFinished | None = None
    ) -> Iterator[Groups]:
        """Yield groups as they become complete, in any order.

        The engine always holds more requests than it samples at once, until there are no more. So
        its batch stays full while a long response ends.

        Only one process may call this. An engine must be closed if its stream was broken off."""
        if self.ranks.world_size > 1:
            raise ValueError("an engine that several ranks share does not stream: use generate")
        if request.record_experts:
            raise ValueError("a stream keeps no experts: use generate")
        self.wake()
        waiting = deque(request.problems)
        pending = PendingRequests(
            self.policy,
            request,
            self._ask,
            lambda row: self._params(row, request),
            self._check_room,
        )
        while waiting or pending.rows:
            while waiting and len(pending.rows) < QUEUED_BATCHES * self.batch_rows:
                pending.add(waiting.popleft())
            responses, complete_groups = pending.collect()
            if on_finished and responses:
                on_finished(responses)
            if complete_groups:
                yield complete_groups

    def _sample_for_sharers(self, prompts_by_rank: list[list[Prompt]]) -> list[list[Completion]]:
        """Sample the prompts of all sharers together, and return the results rank by rank."""
        token_ids = [ids for prompts in prompts_by_rank for ids, _ in prompts]
        params = [params for prompts in prompts_by_rank for _, params in prompts]
        sampled = iter(self._ask("generate", token_ids, params) if token_ids else ())
        return [[next(sampled) for _ in prompts] for prompts in prompts_by_rank]

    def _params(self, row: Row, request: SamplingRequest) -> dict[str, Any]:
        """Return the arguments of vLLM's SamplingParams for a row."""
        sampling = request.sampling
        problem = row.problem
        seed = seed_for(*request.random_key, problem.task, problem.index, row.sample, row.done)
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            # vLLM takes signed 64-bit numbers and reads -1 as "no seed". Shifted, none is negative.
            "seed": seed >> 1 if sampling.temperature else None,
            "max_tokens": row.limit,
            "stop_token_ids": sorted(self.policy.stop_ids),
            "logprobs": 0,  # only that of the sampled token
            "detokenize": False,
        }
        if sampling.keeps_mask:
            params["logprobs"] = requested_logprobs(sampling.top_k, vocabulary_size(self.policy))
        strings = self._strings_for_vllm(sampling.stop) if self.has_tokenizer else []
        if strings:
            params |= {
                "stop": strings,
                "detokenize": True,
                "skip_special_tokens": not self.policy.prompts.special_tokens,
            }
        return params | sampling.rules

    def _strings_for_vllm(self, strings: Iterable[str]) -> list[str]:
        """Return the stop strings that vLLM finds exactly where they are in the text of `Policy`.

        With `prompt.special_tokens` its text also has the words of tokens that `Policy.text` leaves
        out, such as <pad>. A string that could reach into such a word is found by `fill` alone."""
        policy = self.policy
        if not policy.prompts.special_tokens:
            return list(strings)
        ids = sorted(policy.textless_ids - policy.stop_ids)
        words = policy.tokenizer.convert_ids_to_tokens(ids)
        return [string for string in strings if not any(reach(string, word) for word in words)]


def reach(string: str, word: str) -> bool:
    """Return whether an occurrence of a string in a text may share characters with a word of it.

    >>> reach("ab", "<pad>"), reach("p", "<pad>"), reach("+ <", "<pad>"), reach("> 1", "<pad>")
    (False, True, True, True)
    """
    lengths = range(1, min(len(string), len(word)) + 1)
    at_an_end = any(string.endswith(word[:n]) or string.startswith(word[-n:]) for n in lengths)
    return at_an_end or string in word or word in string


def in_pieces(
    named_tensors: Iterable[tuple[str, Tensor]], max_bytes: float
) -> Iterator[dict[str, Tensor]]:
    """Cut a stream of tensors into pieces of at most `max_bytes`, or of a single larger tensor."""
    piece: dict[str, Tensor] = {}
    piece_bytes = 0
    for name, tensor in named_tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if piece and piece_bytes + tensor_bytes > max_bytes:
            yield piece
            piece = {}
            piece_bytes = 0
        piece[name] = tensor
        piece_bytes += tensor_bytes
    if piece:
        yield piece


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that share the tensor of a parameter with an earlier name.

    An engine loads such a tensor once, under the first name."""
    first_names: dict[int, str] = {}
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_names.setdefault(id(parameter), name) != name:
            tied.add(name)
    return tied

"""The requests of a stream that a vLLM engine has not answered yet."""

from collections.abc import Callable
from typing import Any

from gspo.data.problems import Problem
from gspo.data.samples import Response
from gspo.model.policy import Policy
from gspo.rollout.engines.requests import Row, Sampling, SamplingRequest, new_rows, to_response
from gspo.rollout.engines.vllm_host import Completion
from gspo.rollout.engines.vllm_kept import kept_of, vocabulary_size


class PendingRequests:
    """The unanswered requests of an engine, and the groups that are not complete yet.

    `ask` calls a method of the engine. `params` returns the arguments of vLLM's SamplingParams for
    a row. `check` raises for rows that do not fit into the engine.
    """

    def __init__(
        self,
        policy: Policy,
        request: SamplingRequest,
        ask: Callable[..., Any],
        params: Callable[[Row], dict[str, Any]],
        check: Callable[[list[Row]], None],
    ):
        self.policy = policy
        self.request = request
        self.ask = ask
        self.params = params
        self.check = check
        self.rows: dict[str, tuple[int, Row]] = {}  # request ID -> index of its group, and its row
        # index of an incomplete group -> its responses that have ended, by their index in it
        self.groups: dict[int, dict[int, Response]] = {}
        self.num_problems = 0  # that were added

    def add(self, problem: Problem) -> None:
        """Send a request to the engine for each response of a group."""
        rows = new_rows(self.policy, self.request.with_problems([problem]))
        self.check(rows)
        group_index = self.num_problems
        request_ids = [f"{group_index}x{row.sample}" for row in rows]
        prompts = [row.prefix_ids for row in rows]
        self.ask("add", request_ids, prompts, [self.params(row) for row in rows])
        for request_id, row in zip(request_ids, rows, strict=True):
            self.rows[request_id] = (group_index, row)
        self.groups[group_index] = {}
        self.num_problems += 1

    def collect(self) -> tuple[list[Response], list[list[Response]]]:
        """Wait until a response has ended.

        Returns the responses that have ended, and the groups that they complete."""
        responses = []
        complete_groups = []
        group_size = self.request.group_size
        for request_id, completion in self.ask("ended").items():
            group_index, row = self.rows.pop(request_id)
            fill(row, completion, self.policy, self.request.sampling)
            response = to_response(self.policy, row, self.request, None)
            responses.append(response)
            group = self.groups[group_index]
            group[row.sample] = response
            if len(group) == group_size:
                del self.groups[group_index]
                complete_groups.append([group[sample] for sample in range(group_size)])
        return responses, complete_groups


def fill(row: Row, completion: Completion, policy: Policy, sampling: Sampling) -> None:
    """Give a row the tokens and log-probs of its completion, up to the first stop string.

    With `keep_mask` it gets its kept tokens too."""
    if not completion.token_ids:
        raise RuntimeError(
            f"vLLM returned no token for problem {row.problem.index} ({completion.finish_reason})"
        )
    row.token_ids = completion.token_ids
    row.logprobs = completion.logprobs
    if sampling.keeps_mask:
        row.kept = kept_of(completion.finite_ids, sampling.top_k, vocabulary_size(policy))
    # vLLM does not see the earlier tokens of the response, and its server has no tokenizer
    if sampling.stop:
        row.cut_at_stop(policy, sampling)

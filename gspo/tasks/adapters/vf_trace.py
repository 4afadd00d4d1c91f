"""Reads messages and traces of verifiers, and compares their tokens with the policy's."""

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import verifiers.v1 as vf
from verifiers.v1.types import ToolCall, content_text

from gspo.data.samples import LARGEST_REWARD
from gspo.io.untrusted import check_depth
from gspo.tasks.environments.player import MAX_MEASURES, RESERVED_MEASURES
from gspo.tasks.environments.protocol import END_OF_THOUGHTS, SampledTurn

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
Value = TypeVar("Value", bound=float | None)
MAX_NAME_CHARS = 40  # of a measure (gspo.tasks.environments.player.MEASURE_NAME)


def compare_tokens(trace: vf.Trace, turns: list[SampledTurn]) -> None:
    """Compare the token ids, log-probs and mask of a trace with the turns that the policy sampled.

    Raises RuntimeError if they differ, or if the trace has several branches, as compaction and
    sub-agents make."""
    branches = trace.branches
    if len(branches) != 1:
        raise RuntimeError(
            f"the conversation has {len(branches)} branches, and one is supported: the harness "
            "has rewritten its history or begun a conversation beside it"
        )
    if not turns or not turns[-1].token_ids:
        return
    branch = branches[0]
    token_ids = turns[-1].context_ids + turns[-1].token_ids
    mask = [False] * len(token_ids)
    logprobs = [0.0] * len(token_ids)
    for turn in turns:
        span = slice(len(turn.context_ids), len(turn.context_ids) + len(turn.token_ids))
        mask[span] = [True] * len(turn.token_ids)
        logprobs[span] = turn.logprobs
    ours = (token_ids, mask, logprobs)
    if (branch.token_ids, branch.sampled_mask, branch.logprobs) != ours:
        raise RuntimeError("the tokens of the trace are not those that the policy has sampled")


def measures_of(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return rewards and metrics of a trace as measures, without those that have no value."""
    finite = {
        name: float(value)
        for name, value in by_plain_name(values).items()
        if value is not None and abs(value) <= LARGEST_REWARD  # false for NaN
    }
    return dict(list(finite.items())[: MAX_MEASURES - 1])


def by_plain_name(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return values under names that a measure may have.

    >>> by_plain_name({"a-b": 1.0, "a_b": 2.0, "turns": 3.0})
    {'a_b': 1.0, 'a_b_2': 2.0, '_turns': 3.0}
    """
    named: dict[str, Value] = {}
    for name, value in values.items():
        plain = first = plain_name(name)
        number = 1
        while plain in named:
            number += 1
            ending = f"_{number}"
            # one character is left for the mark of a reserved name
            plain = plain_name(first[: MAX_NAME_CHARS - 1 - len(ending)] + ending)
        named[plain] = value
    return named


def plain_name(name: str) -> str:
    """Return a function's name as the name of a measure, with ASCII letters alone."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    if not name.isidentifier() or RESERVED_MEASURES.fullmatch(name):
        name = f"_{name}"
    return name[:MAX_NAME_CHARS]


def text_of(message: Any) -> str:
    """Return the text of a message.

    Raises ValueError for images, and for calls of tools in the prompt."""
    if message.role == "assistant" and message.tool_calls:
        raise ValueError(
            "the environment's messages contain calls of tools by the assistant, which is not "
            "supported"
        )
    content = message.content
    if isinstance(content, list) and any(part.type != "text" for part in content):
        raise ValueError("the environment's messages are not text alone, which is not supported")
    return content_text(content)


def message_with_calls(text: str, turn: int) -> tuple[vf.AssistantMessage, bool]:
    """Return a turn of the policy, and whether it has a malformed call of a tool.

    A call is <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, after the thoughts.
    With a malformed call, the turn is the plain text and calls no tool. vLLM's parser of this form
    (hermes) does the same."""
    begin = text.rfind(END_OF_THOUGHTS) + len(END_OF_THOUGHTS) if END_OF_THOUGHTS in text else 0
    matches = list(CALL.finditer(text, begin))
    try:
        calls = [
            tool_call(match[1], f"call_{turn}_{number}") for number, match in enumerate(matches)
        ]
    except (ValueError, RecursionError):
        return vf.AssistantMessage(content=text), True
    if not calls:
        return vf.AssistantMessage(content=text), False
    content = text[: matches[0].start()]
    return vf.AssistantMessage(content=content, tool_calls=calls), False


def tool_call(text: str, call_id: str) -> ToolCall:
    """Return the call in a JSON text. Raises ValueError or RecursionError if it is malformed."""
    call = json.loads(text)
    check_depth(call)
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call needs a name, and an object of arguments")
    return ToolCall(id=call_id, name=call["name"], arguments=json.dumps(arguments))

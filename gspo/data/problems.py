"""The problems that tasks make, and prompts of several messages.

This module does not import torch, so tasks, rewards, figures and tests can use it on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A problem, which its task computes from (seed, split, index) alone."""

    task: str  # the task that makes and scores it, for example "math" or "code"
    index: int  # its position in the split
    prompt: str  # the text that the policy sees
    answer: Any  # the verifier compares a response with it; the policy and the sandbox never see it
    # the kind of problem within the task (number of operands, composition of operations)
    family: str = ""
    rating: float | None = None  # the difficulty on the Elo scale, for sets that have ratings


class ChatPrompt(str):
    """A prompt of several messages, such as a system turn and a question.

    As a text it is their contents, separated by empty lines. A chat template writes `messages`."""

    messages: list[dict[str, str]]

    def __new__(cls, messages: list[dict[str, str]]) -> ChatPrompt:
        text = "\n\n".join(message["content"] for message in messages)
        prompt = super().__new__(cls, text)
        prompt.messages = messages
        return prompt

    def __reduce__(self) -> tuple[type[ChatPrompt], tuple]:
        return ChatPrompt, (self.messages,)

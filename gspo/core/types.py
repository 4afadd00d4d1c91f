"""The words everybody shares: a problem, a response to it, and the verifier's score.

No torch here: tasks, rewards, figures and tests can use these on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Problem:
    """One query. A pure function of (seed, split, index) in the task that made it."""

    task: str  # which task made it, and scores it: "math", "code"
    index: int  # its position in the split
    prompt: str  # the text that the policy sees
    answer: Any  # what the verifier compares with; never shown to the policy, never sent to a sandbox
    family: str = ""  # the kind of problem within the task (number of operands, composition of operations)
    rating: float | None = None  # difficulty on the Elo scale, for rated sets


@dataclass(frozen=True)
class Score:
    """A verifier's judgement of one response."""

    reward: float | None  # in [0, 1]; None: it could not be judged, by no fault of the response, and is left out
    verdict: str  # one word why: "correct", "wrong", "truncated", "no-answer", "timeout", ...
    answer: str = ""  # normal form of the answer that was judged, for majority votes; "": none


@dataclass
class Response:
    """One sampled response. Arrays are over the T response tokens, the end-of-sequence token included."""

    problem: Problem
    sample: int  # which of the group's G samples
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray  # [T] float32, log-probabilities as the engine reported them, at the sampling temperature
    finish_reason: str  # "stop" (end of sequence sampled), "length" (token limit), "budget" (to be continued)
    text: str  # decoded, without special tokens
    policy_step: int  # the training step whose weights sampled it; of the first segment, if there are several
    experts: np.ndarray | None = None  # [prompt + T - 1, L, K]: the engine's, at every position that it was fed
    score: Score | None = None
    rendered: str = ""  # the prompt as the policy saw it: after the chat template, special tokens included
    segments: list[tuple[int, int]] = field(default_factory=list)  # (policy step, tokens) in order; empty: one
    old_logprobs: np.ndarray | None = None  # [T] float32: by the trainer, under the weights that sampled
    old_experts: np.ndarray | None = None  # [prompt + T, L, K] int16: the same pass's experts

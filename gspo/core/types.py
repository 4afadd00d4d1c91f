"""The types that all rooms share: a problem, a response to it, and the verifier's score.

This module does not import torch, so that tasks, rewards, figures and tests can use it on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Problem:
    """One query. The task that makes it computes it from (seed, split, index) alone."""

    task: str  # the task that makes and scores it, for example "math" or "code"
    index: int  # its position in the split
    prompt: str  # the text that the policy sees
    answer: Any  # the verifier compares a response with it; the policy and the sandbox never see it
    family: str = ""  # the kind of problem within the task (number of operands, composition of operations)
    rating: float | None = None  # the difficulty on the Elo scale, for sets that have ratings


@dataclass(frozen=True)
class Score:
    """A verifier's judgement of one response."""

    reward: float | None  # in [0, 1]; None: the verifier failed through no fault of the response, which is left out
    verdict: str  # the reason in one word: "correct", "wrong", "truncated", "no-answer", "timeout", ...
    answer: str = ""  # the normal form of the answer that was judged, for majority votes; "" if there is none
    reason: str = ""  # why there is no reward, in words, where the verifier said it


@dataclass
class Response:
    """One sampled response. Arrays are over its T tokens, the end-of-sequence token included."""

    problem: Problem
    sample: int  # its number among the G samples of the group
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray  # [T] float32, log-probabilities as the engine reported them, at the sampling temperature
    finish_reason: str  # "stop" (end of sequence), "length" (token limit), "budget" (to be continued)
    text: str  # the decoded tokens, without special ones
    policy_step: int  # the training step whose weights sampled it, or its first segment if there are several
    experts: np.ndarray | None = None  # [prompt + T - 1, L, K], chosen by the engine at every position it was fed
    score: Score | None = None
    rendered: str = ""  # the prompt as the policy saw it: after the chat template, special tokens included
    segments: list[tuple[int, int]] = field(default_factory=list)  # (policy step, tokens); empty if there is only one
    old_logprobs: np.ndarray | None = None  # [T] float32, computed by the trainer under the weights that sampled
    old_experts: np.ndarray | None = None  # [prompt + T, L, K] int16, the experts of that pass

"""Responses to problems, and the verifier's scores.

This module does not import torch, so tasks, rewards, figures and tests can use it on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np
from numpy import ndarray

from gspo.data.kept_tokens import KeptTokens
from gspo.data.problems import Problem
from gspo.io.errors import SettingError

# The verdicts on responses that the verifier cannot judge: no answer, an answer in another form
# than the problem requires, a text that is no program, a program without the function. A user's
# tasks may use them too. Runs before 2026-11-25 have "no_answer" for "no-answer" in their records.
NO_ANSWER = frozenset(
    ["no-answer", "no_answer", "malformed", "truncated", "compile-error", "missing"]
)


# a larger reward is a mistake, and its square overflows when deviations are computed
LARGEST_REWARD = 1e9
# rewards of a group that differ by less, relative to the largest, differ by rounding alone
SAME_REWARD = 1e-6


def all_same(rewards: list[float]) -> bool:
    """Return whether rewards differ by rounding alone.

    Sums of the same numbers in another order do.

    >>> all_same([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1])
    True
    """
    largest = max(map(abs, rewards))
    return max(rewards) - min(rewards) <= SAME_REWARD * max(largest, SAME_REWARD)


def is_right(reward: float | None, rewards: dict[str, float]) -> bool:
    """Return whether a reward is 1, or with several named `rewards`, whether each of them is 1.

    Their weighted sum says nothing: with the weights 1 and 0.2, the best sum is 1.2.

    >>> is_right(1.0, {}), is_right(1.0, {"correct": 1, "format": 0})
    (True, False)
    """
    if rewards:
        return all(value == 1 for value in rewards.values())
    return reward == 1


@dataclass(frozen=True)
class Score:
    """A verifier's judgement of a response."""

    # None: the verifier failed through no fault of the response, which is left out
    reward: float | None
    # the reason in one word: "correct", "wrong", "truncated", "no-answer", "timeout", ...
    verdict: str
    # the normal form of the answer that was judged, for majority votes; "" if there is none
    answer: str = ""
    reason: str = ""  # why there is no reward, in words, if the verifier said it
    # the rewards by name if the verifier gives several. `reward` is then their sum with the weights
    # of reward.weights
    rewards: dict[str, float] = field(default_factory=dict, hash=False)

    def weighted(self, weights: dict[str, float] | None) -> Score:
        """Return the score with the weighted sum of its named rewards as `reward`.

        Without named rewards it returns the score. `weights` of None are all 1. Raises ValueError
        if the weights are of other names, or if there are weights and only a single reward."""
        if self.reward is None:
            return self
        if not self.rewards:
            if not weights:
                return self
            raise SettingError(
                "reward.weights",
                weights,
                "a response got a single reward, and not one for each of these names",
                remedy="leave it out, or return a mapping from the reward function, or "
                "Outcome.rewards from the environment",
            )
        names = ", ".join(sorted(self.rewards))
        if weights is None:
            weights = dict.fromkeys(self.rewards, 1.0)
        if set(weights) != set(self.rewards):
            raise SettingError(
                "reward.weights",
                weights,
                f"a response got the rewards {names}",
                remedy="give each of them a weight, the same names in every response",
            )
        total = sum(weights[name] * self.rewards[name] for name in weights)
        return replace(self, reward=total)

    def truncated(self, reward: float | None, weights: dict[str, float] | None) -> Score:
        """Return the score of a truncated response: `reward`, also as each named reward."""
        return replace(self, reward=reward, rewards=dict.fromkeys(weights or (), reward))


@dataclass
class Turn:
    """A part of an episode, written by the policy or by the environment."""

    author: str  # "policy" or "environment"
    tokens: int
    # without special tokens; an environment's text is not yet in the chat's format
    text: str
    reward: float = 0.0  # the environment's reward for a turn of the policy


@dataclass
class Response:
    """A sampled response. Arrays are over its T tokens, the end-of-sequence token included.

    The response to a problem that is played in an environment is an episode: turns of the policy,
    with turns of the environment between them. Its tokens are the tokens of all turns, and `turns`
    says who wrote them. Without turns, the policy wrote all tokens.
    """

    problem: Problem
    sample: int  # its index in the group
    prompt_ids: list[int]
    token_ids: list[int]
    # [T] float32, log-probabilities as the engine reported them, at the sampling temperature. With
    # `kept` they are of the softmax over the kept tokens, else of the full distribution
    logprobs: ndarray
    # "stop" (end of sequence, or a stop string), "length" (token limit), "budget" (to be
    # continued); of an episode also "turns" (turn limit), "context" (the model has no room for
    # more), "environment" (it failed)
    finish_reason: str
    text: str  # the decoded tokens, without special ones; with the stop string if one has ended it
    # the training step whose weights sampled it, or its first segment if there are several
    policy_step: int
    # [prompt + T - 1, L, K], chosen by the engine at every position it was fed
    experts: ndarray | None = None
    # the prompt as the policy saw it: after the chat template, special tokens included
    rendered: str = ""
    # (policy step, tokens); empty if there is only one
    segments: list[tuple[int, int]] = field(default_factory=list)
    # [T] float32, computed by the trainer under the weights that sampled
    old_logprobs: ndarray | None = None
    old_experts: ndarray | None = None  # [prompt + T, L, K] int16, the experts of that pass
    turns: list[Turn] = field(default_factory=list)
    # the tokens that could be drawn at each position; None: not recorded, or the whole vocabulary
    kept: KeptTokens | None = None
    # the environment's numbers, summed over the turns
    measures: dict[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """The number of tokens that the policy wrote."""
        if not self.turns:
            return len(self.token_ids)
        return sum(turn.tokens for turn in self.turns if turn.author == "policy")

    @property
    def written_ids(self) -> list[int]:
        """The tokens that the policy wrote."""
        if not self.turns:
            return self.token_ids
        return list(compress(self.token_ids, self.policy_mask))

    @property
    def policy_mask(self) -> ndarray:
        """Which tokens the policy wrote: bool [T]."""
        if not self.turns:
            return np.ones(len(self.token_ids), dtype=bool)
        by_policy = [turn.author == "policy" for turn in self.turns]
        return np.repeat(by_policy, [turn.tokens for turn in self.turns])

    def scored(self, score: Score) -> ScoredResponse:
        """Return the response with its verifier's score."""
        return ScoredResponse(**vars(self), score=score)


@dataclass(kw_only=True)
class ScoredResponse(Response):
    """A response with its verifier's score."""

    score: Score

    @property
    def reward(self) -> float:
        """The verifier's reward. Raises ValueError if the verifier could not grade the response."""
        if self.score.reward is None:
            raise ValueError(
                f"response {self.sample}, problem {self.problem.index} has no reward: "
                f"{self.score.reason or self.score.verdict}"
            )
        return self.score.reward


def rewards_of(group: list[ScoredResponse]) -> list[float]:
    """Return the rewards of a group's responses.

    Rewards that differ by rounding alone all become the first of them, so no advantage is made of
    rounding."""
    return without_rounding([response.reward for response in group])


def named_rewards_of(group: list[ScoredResponse], name: str) -> list[float]:
    """Return the named rewards of a group's responses, as `rewards_of` returns their rewards."""
    return without_rounding([response.score.rewards[name] for response in group])


def without_rounding(rewards: list[float]) -> list[float]:
    """Return the rewards, or the first for all if they differ by rounding alone."""
    if all_same(rewards):
        return [rewards[0] for _ in rewards]
    return rewards

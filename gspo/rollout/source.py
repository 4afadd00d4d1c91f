"""Where the trainer's scored groups come from. The trainer does not know which source it has.

A source is anything with `next(step) -> Rollout`. The plain one samples every batch from the current weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gspo.records import Response
from gspo.rollout.engine import LocalEngine, Sampling
from gspo.tasks.base import Task


@dataclass
class RolloutSettings:
    """How much is sampled per training step, and how."""

    prompts_per_step: int = 32
    group_size: int = 8
    temperature: float = 1.0
    max_new_tokens: int = 80
    batch_rows: int = 512  # responses sampled at once: bounds the memory of the cache, changes no response

    def __post_init__(self):
        for key in ("prompts_per_step", "group_size", "batch_rows"):
            if getattr(self, key) < 1:
                raise ValueError(f"rollout.{key}={getattr(self, key)} must be at least 1")
        if not self.temperature > 0:
            raise ValueError(f"rollout.temperature={self.temperature} must be positive: greedy groups are all alike")
        if self.max_new_tokens < 1:
            raise ValueError(f"rollout.max_new_tokens={self.max_new_tokens} must be at least 1")

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.max_new_tokens)


@dataclass
class Rollout:
    """The scored groups of one training step, and what they cost in seconds."""

    groups: list[list[Response]]
    rollout_s: float
    score_s: float

    @property
    def responses(self) -> list[Response]:
        return [r for group in self.groups for r in group]


class OnPolicySource:
    """Samples each step's batch from the current weights. Step s (from 1) takes the problems P*(s-1) ... P*s - 1."""

    def __init__(self, engine: LocalEngine, task: Task, settings: RolloutSettings, seed: int):
        self.engine, self.task, self.settings, self.seed = engine, task, settings, seed

    def next(self, step: int) -> Rollout:
        count = self.settings.prompts_per_step
        problems = [self.task.problem(self.seed, "train", count * (step - 1) + i) for i in range(count)]
        started = time.perf_counter()
        groups = self.engine.generate(
            problems, self.settings.group_size, self.settings.sampling(), (self.seed, "rollout"), policy_step=step - 1
        )
        sampled = time.perf_counter()
        score(self.task, [r for group in groups for r in group])
        return Rollout(groups, sampled - started, time.perf_counter() - sampled)


def score(task: Task, responses: list[Response]) -> None:
    """Give every response its verifier's score."""
    scores = task.score([(r.problem, r.text, r.finish_reason == "stop") for r in responses])
    for response, verdict in zip(responses, scores, strict=True):
        response.score = verdict

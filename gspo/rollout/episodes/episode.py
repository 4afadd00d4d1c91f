"""One episode while it is played: what it has got until now, how it ends, and its environment."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from gspo.data.samples import Problem, Score, Turn
from gspo.tasks.environments.player import Call, EnvironmentFailed, Player, still_running
from gspo.tasks.environments.protocol import EnvironmentTask

log = logging.getLogger(__name__)
POLICY, ENVIRONMENT = "policy", "environment"
# Why an episode was cut off, and the verdict on it; its reward is what it had got until then.
CUT = {"length": "truncated", "context": "no-room", "turns": "turn-limit"}


class NoRoom(EnvironmentFailed):
    """Says that a prompt, which is `length` long, leaves no room for a response."""

    def __init__(self, length: str, positions: int):
        where = f"in the {positions} positions of model and engine"
        super().__init__(
            CUT["context"], f"its prompt of {length} leaves no room for a response {where}"
        )


@dataclass
class Seconds:
    """Where the time of sampling and scoring went. Scoring cost nothing beyond `waited`, because it
    ran while the engine sampled."""

    sampling: float = 0.0  # seconds that the engine sampled
    scoring: float = 0.0  # seconds that the verifiers worked
    # seconds spent waiting for verifiers, and for other ranks, with nothing left to sample
    waited: float = 0.0
    environments: float = 0.0  # seconds spent waiting for environments, a part of `sampling`


@dataclass(eq=False)
class Episode:
    """One episode, while it is played."""

    place: int  # its number in the chunk
    problem: Problem
    sample: int
    position: tuple[int | str, ...]  # of the environment's random numbers
    task: EnvironmentTask | None  # None for a problem without environment
    player: Player | None = None
    role: str = "user"  # whose turn its observations are
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: np.ndarray | None = None
    turns: list[Turn] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)
    finish_reason: str = ""  # empty while it goes on
    score: Score | None = None

    def new_player(self) -> Player:
        """Return a player of its environment, which is made with the first call."""
        return Player(
            lambda: self.task.environment(self.problem, self.position), self.task.step_seconds
        )

    @property
    def own_turns(self) -> list[Turn]:
        """The policy's turns."""
        return [turn for turn in self.turns if turn.author == POLICY]

    def fail(self, error: EnvironmentFailed) -> None:
        """End the episode without a reward: its environment has failed, or it could not begin."""
        self.finish_reason = "context" if isinstance(error, NoRoom) else ENVIRONMENT
        self.score = Score(None, error.verdict, reason=str(error))
        log.warning("problem %s of task %s: %s", self.problem.index, self.problem.task, error)

    def end(self, reason: str, verdict: str, answer: str = "") -> None:
        """End the episode with the rewards of its turns."""
        self.finish_reason = reason
        # ten times .1 is 1, which counts as solved
        total = math.fsum(turn.reward for turn in self.turns)
        self.score = Score(total, verdict, answer)

    def add(self, name: str, value: float) -> None:
        """Add to one of the episode's measures."""
        self.measures[name] = self.measures.get(name, 0.0) + value

    def repeats(self, closing: list[Call]) -> bool:
        """Play the episode a second time with the policy's words, and return whether its
        environment answers alike. The closing of that environment is added to `closing`."""
        player = self.new_player()
        try:
            calls = [("reset", self.problem), *(("step", turn.text) for turn in self.own_turns)]
            # the last turn may have no answer
            for call, before in zip(calls, self.player.answers, strict=False):
                player.finish(player.begin(*call))
                if player.answers[-1] != before:
                    return False
            return True
        except EnvironmentFailed:
            return False
        finally:
            closing.append(player.close())


def asked(episodes: list[Episode]) -> list[tuple[Episode, Call]]:
    """Let the environments begin to answer to the last turns: as many of a task at the same time as
    it allows. The time of a call that has to wait until others have ended begins after that."""
    running: dict[str, list[Call]] = defaultdict(list)
    begun = []
    for episode in episodes:
        name, most = episode.problem.task, episode.task.at_once
        if most:
            running[name] = still_running(running[name], most)
        call = episode.player.begin("step", episode.turns[-1].text)
        running[name].append(call)
        begun.append((episode, call))
    return begun

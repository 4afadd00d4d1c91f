"""One episode while it is played: its tokens and turns so far, its end, and its environment."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from gspo.data.kept_tokens import KeptTokens
from gspo.data.problems import Problem
from gspo.data.samples import Score, Turn
from gspo.rollout.engines.requests import RandomKey
from gspo.tasks.environments.player import Call, EnvironmentFailed, Player, still_running
from gspo.tasks.environments.protocol import EnvironmentTask

log = logging.getLogger(__name__)
POLICY = "policy"
ENVIRONMENT = "environment"
# By the reason why an episode was cut off: its verdict. It keeps the rewards that it had by then.
CUT = {"length": "truncated", "context": "no-room", "turns": "turn-limit"}


class NoRoom(EnvironmentFailed):
    """A prompt, whose length is `length` in words, leaves no room for a response."""

    def __init__(self, length: str, positions: int):
        super().__init__(
            CUT["context"],
            f"its prompt of {length} leaves no room for a response in the {positions} positions of "
            "model and engine",
        )


@dataclass
class Seconds:
    """The seconds that sampling and scoring took.

    Scoring runs while the engine samples, so only `waited` adds to the time of a step."""

    sampling: float = 0.0  # the engine sampled
    scoring: float = 0.0  # the verifiers worked
    # verifiers or other ranks still worked, and there was nothing left to sample
    waited: float = 0.0
    environments: float = 0.0  # the engine waited for environments; a part of `sampling`


@dataclass(eq=False)
class Episode:
    """One episode while it is played. This class is for problems without environment."""

    index: int  # in its chunk
    problem: Problem
    sample: int
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: np.ndarray | None = None
    kept: KeptTokens | None = None  # of all tokens so far, if the policy's turns have any
    turns: list[Turn] = field(default_factory=list)
    finish_reason: str = ""  # empty until it ends

    @property
    def policy_turns(self) -> list[Turn]:
        """The policy's turns."""
        return [turn for turn in self.turns if turn.author == POLICY]

    @property
    def filled_positions(self) -> int:
        """The number of tokens of its prompt and its turns."""
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(eq=False, kw_only=True)
class EnvironmentEpisode(Episode):
    """An episode of an environment while it is played. A new one begins with `player`."""

    task: EnvironmentTask
    random_key: RandomKey  # of the environment's random numbers
    player: Player = field(init=False)
    role: str = "user"  # the chat role of its observations
    measures: dict[str, float] = field(default_factory=dict)
    score: Score | None = None  # None until it ends

    def __post_init__(self):
        self.player = self.new_player()

    def new_player(self) -> Player:
        """Return a player, whose first call makes the episode's environment."""
        return Player(
            lambda: self.task.environment(self.problem, self.random_key), self.task.step_seconds
        )

    def fail(self, error: EnvironmentFailed) -> None:
        """End the episode without a reward: its environment failed, or it could not begin."""
        self.finish_reason = "context" if isinstance(error, NoRoom) else ENVIRONMENT
        self.score = Score(None, error.verdict, reason=str(error))
        log.warning("problem %s of task %s: %s", self.problem.index, self.problem.task, error)

    def end(self, reason: str, verdict: str, answer: str = "") -> None:
        """End the episode with the sum of its turns' rewards."""
        self.finish_reason = reason
        # ten times .1 is 1 with `fsum`, which counts as solved
        total = math.fsum(turn.reward for turn in self.turns)
        self.score = Score(total, verdict, answer)

    def add(self, name: str, value: float) -> None:
        """Add to one of the episode's measures."""
        self.measures[name] = self.measures.get(name, 0.0) + value

    def repeats(self, closing: list[Call]) -> bool:
        """Play the episode again with the same turns, and return whether the answers are the same.

        The call that closes the second environment is appended to `closing`."""
        player = self.new_player()
        calls: list[tuple[str, Problem | str]] = [("reset", self.problem)]
        calls += [("step", turn.text) for turn in self.policy_turns]
        try:
            # the last turn may have no answer
            for call, answer in zip(calls, self.player.answers, strict=False):
                player.finish(player.begin(*call))
                if player.answers[-1] != answer:
                    return False
            return True
        except EnvironmentFailed:
            return False
        finally:
            closing.append(player.close())


def begin_answers(episodes: list[EnvironmentEpisode]) -> list[tuple[EnvironmentEpisode, Call]]:
    """Let the environments begin to answer the last turns, as many at a time as each task allows.

    A call may have to wait until others have ended. Its time limit begins after that."""
    running: dict[str, list[Call]] = defaultdict(list)
    calls = []
    for episode in episodes:
        name = episode.problem.task
        limit = episode.task.at_once
        if limit:
            running[name] = still_running(running[name], limit)
        call = episode.player.begin("step", episode.turns[-1].text)
        running[name].append(call)
        calls.append((episode, call))
    return calls

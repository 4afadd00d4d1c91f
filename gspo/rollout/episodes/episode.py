"""One episode while it is played: its tokens and turns so far, its end, and its environment."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from gspo.data.kept_tokens import KeptTokens
from gspo.data.problems import Problem
from gspo.data.samples import Score, Turn
from gspo.rollout.engines.requests import RandomKey
from gspo.tasks.environments.player import Call, EnvironmentFailed, Player, still_running
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Outcome, SampledTurn

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
    group_size: int = 1
    reward_weights: dict[str, float] | None = None  # of named rewards; None or empty: not read
    player: Player = field(init=False)
    role: str = "user"  # the chat role of its observations
    measures: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)  # by name
    score: Score | None = None  # None until it ends
    settles: bool = False  # whether the environment's `settle` is called after a cut
    deferred: bool = False  # whether the environment's `settle` gives the reward
    answered_turns: int = 0  # the number of the policy's turns that the environment has answered
    is_closed: bool = False  # whether its environment has been told to close

    def __post_init__(self):
        self.player = self.new_player()

    def new_player(self) -> Player:
        """Return a player, whose first call makes the episode's environment."""
        return Player(self._environment, self.task.step_seconds)

    def _environment(self) -> Environment:
        environment = self.task.environment(self.problem, self.random_key)
        environment.group_size = self.group_size
        self.settles = environment.settles
        return environment

    def sampled_turns(self) -> list[SampledTurn]:
        """Return the policy's turns with their tokens."""
        turns = []
        begin = 0
        for turn in self.turns:
            if turn.author == POLICY:
                turns.append(self._sampled_turn(turn, begin))
            begin += turn.tokens
        return turns

    def last_turn(self) -> SampledTurn:
        """Return the last turn, which is the policy's, with its tokens."""
        turn = self.turns[-1]
        return self._sampled_turn(turn, len(self.token_ids) - turn.tokens)

    def _sampled_turn(self, turn: Turn, begin: int) -> SampledTurn:
        end = begin + turn.tokens
        return SampledTurn(
            turn.text,
            self.prompt_ids + self.token_ids[:begin],
            self.token_ids[begin:end],
            self.logprobs[begin:end],
        )

    def unsettled(self) -> bool:
        """Return whether it has ended and waits for the environment's `settle`."""
        was_cut = self.finish_reason in CUT
        return self.deferred or (self.settles and was_cut and bool(self.turns))

    def begin_to_reset(self) -> Call:
        """Let the environment begin the episode."""
        return self.player.begin("reset", self.problem)

    def begin_to_answer(self) -> Call:
        """Let the environment begin to answer the last turn."""
        call = self.player.begin("act", self.last_turn())
        self.answered_turns += 1
        return call

    def begin_to_settle(self) -> Call:
        """Let the environment begin to give the reward of an episode that has ended."""
        was_answered = self.answered_turns == len(self.policy_turns)
        return self.player.begin("settle", None if was_answered else self.last_turn())

    def settle(self, outcome: Outcome) -> None:
        """Add the reward that the environment gives after the end of the group."""
        self.turns[-1].reward += outcome.reward
        for name, value in outcome.measures.items():
            self.add(name, value)
        self.add_rewards(outcome.rewards)
        verdict = CUT.get(self.finish_reason, outcome.verdict)
        self.end(self.finish_reason, verdict, outcome.answer)

    def fail(self, error: EnvironmentFailed) -> None:
        """End the episode without a reward: its environment failed, or it could not begin."""
        self.finish_reason = "context" if isinstance(error, NoRoom) else ENVIRONMENT
        self.score = Score(None, error.verdict, reason=str(error))
        log.warning("problem %s of task %s: %s", self.problem.index, self.problem.task, error)

    def end(self, reason: str, verdict: str, answer: str = "") -> None:
        """End the episode with the sum of its turns' rewards, or of its weighted named rewards.

        Raises ValueError if the named rewards have other names than the weights."""
        self.finish_reason = reason
        # ten times .1 is 1 with `fsum`, which counts as solved
        total = math.fsum(turn.reward for turn in self.turns)
        score = Score(total, verdict, answer)
        if self.reward_weights and not self.deferred:
            score = replace(score, rewards=self.named_rewards()).weighted(self.reward_weights)
        self.score = score

    def named_rewards(self) -> dict[str, float]:
        """Return the named rewards. They are 0 if the episode was cut off before it gave any."""
        if self.reward_weights and not self.rewards and self.finish_reason in CUT:
            return dict.fromkeys(self.reward_weights, 0.0)
        return self.rewards

    def add_rewards(self, rewards: dict[str, float]) -> None:
        """Add to the episode's named rewards."""
        for name, value in rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value

    def add(self, name: str, value: float) -> None:
        """Add to one of the episode's measures."""
        self.measures[name] = self.measures.get(name, 0.0) + value

    def close(self) -> Call:
        """Begin to close the environment."""
        self.is_closed = True
        return self.player.close()

    def fault_of_replay(self, closing: list[Call]) -> str:
        """Play the episode again with the same turns, and return in words how the answers differ.

        The result is "" if they are the same. The call that closes the second environment is
        appended to `closing`."""
        player = self.new_player()
        calls: list[tuple[str, Problem | SampledTurn]] = [("reset", self.problem)]
        calls += [("act", turn) for turn in self.sampled_turns()[: self.answered_turns]]
        try:
            # the last turn may have no answer
            for call, expected in zip(calls, self.player.result_digests, strict=False):
                player.finish(player.begin(*call))
                if player.result_digests[-1] != expected:
                    return "the environment answered otherwise"
            return ""
        except EnvironmentFailed as error:
            return f"the environment failed: {error}"
        finally:
            closing.append(player.close())


def begin_calls(
    episodes: list[EnvironmentEpisode], begin: Callable[[EnvironmentEpisode], Call]
) -> list[tuple[EnvironmentEpisode, Call]]:
    """Begin a call of each environment, as many at a time as each task allows.

    A call may have to wait until others have ended. Its time limit begins after that."""
    running: dict[str, list[Call]] = defaultdict(list)
    calls = []
    for episode in episodes:
        name = episode.problem.task
        limit = episode.task.at_once
        if limit:
            running[name] = still_running(running[name], limit)
        call = begin(episode)
        running[name].append(call)
        calls.append((episode, call))
    return calls

"""Small environments, for tests of what plays them."""

import asyncio
from dataclasses import dataclass, field
from typing import ClassVar

from gspo.data.problems import Problem
from gspo.data.seeding import generator
from gspo.tasks.environments.protocol import Environment, EnvironmentTask, Outcome, SampledTurn


class Echo(Environment):
    """Answers with random letters beside the number of characters it was told; ends after `turns`
    turns.
    """

    def __init__(self, turns: int, position: tuple):
        self.left, self.rng, self.told = turns, generator(*position), 0

    async def step(self, text: str) -> Outcome:
        await asyncio.sleep(0)
        self.left, self.told = self.left - 1, self.told + len(text)
        said = "".join(self.rng.choices("abcdefgh", k=self.rng.randint(1, 9))) + str(self.told)
        reward = float(text[:1].isdigit() or text[:1].islower())
        return Outcome(said, reward, not self.left, "over", measures={"told": len(text)})


class TwoRewards(Environment):
    """Asks for a second turn. It gives `digit` of a first digit and `short` of a short text, and
    .5 x `short` to an episode that is cut off.
    """

    settles = True

    def __init__(self):
        self.turns = 0

    def step(self, text: str) -> Outcome:
        self.turns += 1
        if self.turns < 2:
            return Outcome("more")
        rewards = {"digit": float(text[:1].isdigit()), "short": 1 - len(text) / 64}
        return Outcome(reward=3.0, done=True, verdict="over", rewards=rewards)

    def settle(self, turn: SampledTurn | None) -> Outcome:
        return Outcome(done=True, rewards={"digit": 0.0, "short": 0.5})


@dataclass
class Echoes(EnvironmentTask):
    """Problems that `Echo` plays for `length` turns; with `silent` none has an environment."""

    name: str = "echo"
    length: int = 3
    replays: int = 0
    made: list = field(default_factory=list)

    def evaluation_sets(self) -> list[str]:
        return ["echo"]

    def problem(self, seed: int, split: str, index: int) -> Problem:
        return Problem(self.name, index, f"{index + 3}+{'5' * (index % 3 + 1)}=?", None)

    def environment(self, problem: Problem, position: tuple[int | str, ...]) -> Environment:
        return Echo(self.length, position)


@dataclass
class NamedEchoes(Echoes):
    """The problems of `Echoes`, each played by a `TwoRewards`."""

    names_rewards: ClassVar[bool] = True

    def environment(self, problem: Problem, position: tuple[int | str, ...]) -> Environment:
        return TwoRewards()

"""The base of adapters whose games begin from a seed."""

from functools import cached_property

from gspo.data.problems import Problem
from gspo.data.seeding import seed_for
from gspo.io.errors import SettingError
from gspo.tasks.base import SingleSet
from gspo.tasks.environments.protocol import EnvironmentTask, Outcome


class CannotBegin(SettingError):
    """Raised if a game cannot begin now. It may begin later."""


class SeededGames(SingleSet, EnvironmentTask):
    """Games whose seed is a function of (run seed, split, i).

    A subclass is a dataclass with a field `evaluation_size`, and defines `beginning`."""

    def beginning(self, seed: int) -> str:
        """Return the text with which the game of a seed begins."""
        raise NotImplementedError

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return game `index` of a split. Its prompt is its beginning, its answer the seed.

        Raises CannotBegin if the first game cannot begin. For a later game, the prompt is the
        reason instead of a beginning. Its episodes then try to begin the game themselves, and count
        a failure if they cannot."""
        self.check_split(split)
        game_seed = seed_for(seed, self.name, split, index) % 2**31
        if game_seed not in self._beginnings:
            try:
                beginning = self.beginning(game_seed)
            except CannotBegin as error:
                if not self._beginnings:
                    raise
                return Problem(self.name, index, f"(no beginning: {error})", game_seed)
            if len(self._beginnings) >= self.evaluation_size:
                self._beginnings.clear()
            self._beginnings[game_seed] = beginning
        return Problem(self.name, index, self._beginnings[game_seed], game_seed)

    @cached_property
    def _beginnings(self) -> dict[int, str]:
        """The beginnings of games, by seed. Evaluations use the same games again and again."""
        return {}


def invalid(why: str) -> Outcome:
    """Return the outcome of a turn without a valid action."""
    return Outcome(f"Invalid action: {why}.", measures={"invalid_actions": 1.0})

"""A taskset of the library verifiers (API v1): a digit is to be guessed, in a few guesses.

    gspo train task=vf task.taskset=digit_game 'task.arguments={rounds: 4}' ...

The environment answers `<` if the digit is smaller than the guess, and `>` if it is larger. A guess
is the last character of a turn.
"""

import verifiers.v1 as vf

__all__ = ["DigitEnv", "DigitTaskset"]
GAMES_PER_DIGIT = 40


class DigitConfig(vf.TasksetConfig):
    """`rounds` is the number of guesses."""

    rounds: int = 4


class DigitData(vf.TaskData):
    """A game, of which the policy does not see the digit."""

    digit: int
    rounds: int


class DigitTask(vf.Task[DigitData, vf.State, vf.TaskConfig]):
    """The rewards of a game."""

    @vf.reward
    async def found(self, task, trace) -> float:
        """Return 1 if the last guess is the digit."""
        return float(trace.last_reply[-1:] == str(task.digit))

    @vf.reward(weight=0.5)
    async def quick(self, task, trace) -> float:
        """Return 1 / number of turns if the last guess is the digit, else 0."""
        return float(trace.last_reply[-1:] == str(task.digit)) / trace.num_turns

    @vf.metric
    async def guesses(self, trace) -> float:
        """Return the number of guesses."""
        return float(trace.num_turns)


class DigitTaskset(vf.Taskset[DigitTask, DigitConfig]):
    """Games in a fixed order."""

    def load(self):
        for game in range(10 * GAMES_PER_DIGIT):
            digit, number = game % 10, game // 10
            prompt = f"{chr(ord('a') + number % 26)}:"
            data = DigitData(prompt=prompt, digit=digit, rounds=self.config.rounds)
            yield DigitTask(data, self.config.task)


class DigitEnvConfig(vf.EnvConfig):
    """One player."""

    player: vf.AgentConfig = vf.AgentConfig()


class DigitEnv(vf.Env[DigitEnvConfig]):
    """Answers guesses, as the user of a chat."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(task.data.rounds - 1):
                guess = segment.last_reply[-1:]
                if segment.terminated or guess == str(task.data.digit):
                    break
                is_above = guess.isdigit() and int(guess) > task.data.digit
                segment = await interaction.turn("<" if is_above else ">")

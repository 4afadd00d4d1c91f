"""A taskset of the library verifiers (API v1), as someone would write it: a number is to be guessed.

Tests play it, and load it by name.
"""

import asyncio

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]
ENDS: list[str] = []  # how each game has ended
EPISODES: list[vf.Episode] = []  # that have been scored
# bound to the event loop that first waits for it, as the clients of services are
LOCK = asyncio.Lock()


class GuessConfig(vf.TasksetConfig):
    rounds: int = 4
    size: int = 80
    numbers: int = 40
    fault: bool = False  # a reward raises
    slow: bool = False  # the rewards take longer than they may
    friends: int = 0  # other agents that the policy plays
    relative: bool = False  # the best player of a group gets a reward


class GuessData(vf.TaskData):
    secret: int
    rounds: int
    fault: bool
    slow: bool


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def found(self, task, trace) -> float:
        if task.fault:
            raise IndexError("nothing there")
        return float(trace.last_reply == str(task.secret))

    @vf.reward(weight=0.5)
    async def quick(self, task, trace) -> float:
        async with LOCK:
            await asyncio.sleep(60.0 if task.slow else 0.001)
        return 1 / trace.num_turns

    @vf.metric
    async def guesses(self, trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        c = self.config
        for i in range(c.size):
            data = GuessData(
                prompt=f"Guess my number, below {c.numbers}. Game {i // c.numbers}.",
                system_prompt="Answer by a number.",
                secret=i % c.numbers,
                rounds=c.rounds,
                fault=c.fault,
                slow=c.slow,
                timeout=vf.TaskTimeout(scoring=0.2 if c.slow else None),
            )
            yield GuessTask(data, c.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    players: int = 1


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Answers with higher or lower. With several players, the best of them gets the reward."""

    async def run(self, task, agents):
        async with asyncio.TaskGroup() as group:
            for _ in range(self.config.players + self.config.taskset.friends):
                group.create_task(self.play(task, agents))

    async def play(self, task, agents):
        end = "cancelled"
        try:
            async with agents.player.interaction(task) as interaction:
                segment = await interaction.turn()
                for _ in range(task.data.rounds - 1):
                    said = segment.last_reply
                    if segment.terminated or said == str(task.data.secret):
                        break
                    if said == "crash":
                        raise KeyError("said crash")
                    higher = said.isdigit() and int(said) < task.data.secret
                    segment = await interaction.turn("higher" if higher else "lower")
                end = "ended"
        finally:
            ENDS.append(end)

    async def finalize(self, task, episode):
        EPISODES.append(episode)
        if self.config.taskset.relative:
            best = max(trace.reward for trace in episode.traces)
            for trace in episode.traces:
                trace.record_reward("best", float(trace.reward == best), 2.0)

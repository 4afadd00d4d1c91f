"""A taskset of the library verifiers (API v1) with a tool: sums are to be answered."""

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class Calculator(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(task.answer in trace.last_reply)


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(16):
            yield SumTask(SumData(prompt=f"{i}+{i}?", answer=str(2 * i)), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Calculator(config.tools)]


if __name__ == "__main__":
    Calculator.run()

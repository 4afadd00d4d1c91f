"""The attack suite by another way: as turns of a policy that calls the Python tool of an
environment.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from audit.attacks import SUITE_LIMITS
from gspo.rewards.sandbox.runner import ProgramEnd
from gspo.tasks.environments.protocol import Outcome
from gspo.tasks.testbed.python_tool import PythonTool

T, R = TypeVar("T"), TypeVar("R")


class Noted:
    """A runner that keeps what became of its last program."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.last = b"", ProgramEnd("sandbox-error", detail="no program was run")

    def each(self, work: Callable[[Any, T], R], items: list[T]) -> list[R]:
        """Return what the runner returns."""
        found = self.runner.each(work, items)
        self.last = found[-1]
        return found

    def close(self) -> None:
        """Close the runner."""
        self.runner.close()


class ToolRunner:
    """Stands in for a CodeRunner and its only slot: every program is the turn `<py>...</py>` of an
    episode of its own.

    What is looked at is all that a program wrote, of which the policy reads a part at most. The
    tool gives programs no input. `outcomes` are what the environment answered to the turns.
    """

    def __init__(self, task: PythonTool) -> None:
        self.task, self.limits = task, task._runner.limits
        self.noted = task._runner = Noted(task._runner)
        self.outcomes: list[Outcome] = []

    def each(self, work: Callable[[Any, T], R], items: list[T]) -> list[R]:
        """Return work(self, item) for every item."""
        return [work(self, item) for item in items]

    def run_program(self, code: str, stdin: str) -> tuple[bytes, ProgramEnd]:
        """Let a policy call the tool with this code. Returns what it wrote and how it ended."""
        number = len(self.outcomes)
        episode = self.task.environment(self.task.problem(0, "train", number), (0, number))
        with contextlib.suppress(RuntimeError):  # the sandbox has failed; how it did is noted
            # the number, because the tool runs the same code once only
            self.outcomes.append(episode.step(f"<py>{code}\n# program {number}</py>"))
        return self.noted.last

    def close(self) -> None:
        """End the processes that run programs."""
        self.task.close()


def suite_tool(allow_weak: bool = False) -> ToolRunner:
    """Return the tool with the limits that the suite of attacks is made for."""
    limits = {
        name: getattr(SUITE_LIMITS, name) for name in ("cpu_seconds", "wall_seconds", "memory_mb")
    }
    return ToolRunner(PythonTool(**limits, allow_weak_sandbox=allow_weak))

"""The base of tasks whose responses are programs that are graded by tests."""

from gspo.data.samples import Score
from gspo.rewards.code.grader import CodeGrader, Submission
from gspo.tasks.base import Task


class GradedPrograms(Task):
    """A task with a grader of programs. A subclass is a dataclass with these fields.

    Up to `slots` programs run at a time. Each has limits on CPU seconds, on seconds of waiting
    (`wall_seconds`, without the time of computing) and on megabytes of memory."""

    slots: int
    cpu_seconds: float
    wall_seconds: float
    memory_mb: int
    allow_weak_sandbox: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._grader = CodeGrader(
            self.slots, self.cpu_seconds, self.wall_seconds, self.memory_mb, self.allow_weak_sandbox
        )

    def grade(self, submissions: list[Submission]) -> list[Score]:
        """Run the programs, and return reward 1 for programs that pass all tests, else 0.

        If the sandbox failed, the reward is None. The expected outputs never leave this process."""
        scores = []
        for grade in self._grader.grade(submissions):
            reward = None if grade.verdict == "sandbox-error" else float(grade.verdict == "pass")
            scores.append(Score(reward, grade.verdict))
        return scores

    def ready(self) -> dict[str, str]:
        """Start the sandbox and return its layers.

        The first call in a process runs a few attacks on the sandbox."""
        return self._grader.layers()

    def close(self) -> None:
        """End the processes that run programs."""
        self._grader.close()

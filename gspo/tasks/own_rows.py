"""The rows of the user's own file or data set, scored by a reward function of the user's own.

    gspo train task=rows task.train_path=problems.jsonl
    task.columns.prompt=question \
        task.reward=my_pkg.rewards:score model=hf model.path=MODEL

With `task.path` the problems of that file are held out. Without it 1 in 8 of the training file's
are, chosen by their text alone, so that every run holds out the same ones.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gspo.data.samples import ChatPrompt, Problem, Score
from gspo.io.ranges import outside_code, ranged
from gspo.rewards.reward_function import RewardFunction
from gspo.tasks.base import held_out
from gspo.tasks.benchmarks.base import Benchmark, Item, without
from gspo.tasks.benchmarks.records_file import Row

COLUMNS = ("prompt", "family", "rating")
ROLES = ("system", "user", "assistant")
MOST_TRIED = 100  # the row of the trial is one of the first so many
LONGEST_ROW = 160  # characters of a row in a message


@dataclass
class OwnRows(Benchmark):
    """Problems are rows of a file or of a hub data set; `reward` names the function that scores
    responses to them.

    The function gets the prompt, the response's text and the row as a dictionary; see
    gspo.rewards.reward_function. A response that was cut off scores 0 without being asked about,
    as in every task.
    """

    name: str = "rows"
    reward: str = outside_code()  # the reward function, for example my_pkg.rewards:score
    seconds: float = ranged(10.0, above=0)  # the longest that one call of it may take
    # processes that call it at the same time, for judges that wait; an async function needs no more
    # than one
    workers: int = ranged(1, least=1, most=256, cost_only=True)
    # which columns hold the prompt (a text, or a chat that ends with the user) and, if given, the
    # family and the rating
    columns: dict[str, str] = field(default_factory=lambda: {"prompt": "prompt"})
    # text after every prompt, for example an instruction on the form of the answer
    suffix: str = ""
    hub_split: str = "test"  # with `hub`: the split that is held out, and the one to train on
    hub_train_split: str = "train"

    key: ClassVar[str] = "task"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward:
            raise ValueError(
                f"{self.key}.reward is not given: say where your function is, my_pkg.rewards:score"
            )
        if unknown := set(self.columns) - set(COLUMNS):
            raise ValueError(f"{self.key}.columns.{min(unknown)}: choose from {', '.join(COLUMNS)}")
        if "prompt" not in self.columns:
            raise ValueError(
                f"{self.key}.columns.prompt is not given: say which column holds the prompt"
            )
        if "/" in self.name or not self.name:
            raise ValueError(
                f"{self.key}.name={self.name!r} must be a plain name: it stands in the names of metrics"
            )
        self._function = RewardFunction(
            self.reward, f"{self.key}.reward", self.seconds, self.workers
        )
        self._is_tried = False

    def item(self, row: Row, training: bool) -> Item | None:
        text = prompt_text(row, self.columns["prompt"])
        family = str(row.get(self.columns["family"], str, int)) if "family" in self.columns else ""
        rating = (
            float(row.get(self.columns["rating"], int, float)) if "rating" in self.columns else None
        )
        return Item(text, with_suffix(text, self.suffix), row.values, family, rating)

    def _evaluation_items(self) -> list[Item]:
        if self.path or self.hub:
            return super()._evaluation_items()
        items = [item for item in self._rows_of_training() if held_out(item.text)]
        if not items:
            raise ValueError(
                f"{self.key}.train_path={self.train_path}: none of its problems is among the 1 in 8 that are held out; "
                f"give {self.key}.path=FILE with problems to evaluate on"
            )
        return without(items, set())

    def _rows_of_training(self) -> list[Item]:
        return [self.item(row, training=True) for row in self._training_source().rows()]

    def score(self, answers: list[tuple[Problem, str, bool]]) -> list[Score]:
        """Score the responses that ended by themselves by the reward function, and 0 those that
        were cut off.
        """
        scores = [Score(0.0, "truncated")] * len(answers)
        asked = [place for place, (_, _, ended) in enumerate(answers) if ended]
        problems, texts = (
            [answers[place][0] for place in asked],
            [answers[place][1] for place in asked],
        )
        found = (
            self._function([p.prompt for p in problems], texts, [p.answer for p in problems])
            if asked
            else []
        )
        for place, score in zip(asked, found, strict=True):
            scores[place] = score
        return scores

    def ready(self) -> dict[str, str]:
        """Start the process of the reward function, which imports it, and call it once on a row.
        Raises ValueError if that fails, and prints a warning if it raises what may be due to the
        trial's response."""
        self._function.start()
        if not self._is_tried:
            # with all columns
            item = max(self._items(self.name)[:MOST_TRIED], key=lambda item: len(item.answer))
            where = f"it was tried before the first step, on the row {shown(item.answer)}"
            try:
                problem = self._function.try_out(item.prompt, item.answer)
            except ValueError as error:
                raise ValueError(f"{error}; {where}") from None
            if problem:
                print(
                    f"warning: {problem}; {where}. Such a response is left out, ungraded",
                    file=sys.stderr,
                )
            self._is_tried = True
        return {}

    def in_words(self, problem: Problem) -> str:
        return f"the row {shown(problem.answer)}"

    def close(self) -> None:
        """End the process of the reward function."""
        self._function.close()


def shown(row: dict[str, Any]) -> str:
    """Return the beginning of a row as JSON."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST_ROW else f"{text[:LONGEST_ROW]}..."


def prompt_text(row: Row, column: str) -> str:
    """Return the prompt of a row: a text, the content of a chat that is one user message, or a chat
    of several messages whose last is the user's."""
    value = row.get(column, str, list)
    if isinstance(value, str):
        return row.text(column)
    messages = [
        {"role": each["role"], "content": each["content"]}
        for each in value
        if isinstance(each, dict)
        and each.get("role") in ROLES
        and isinstance(each.get("content"), str)
    ]
    if not messages or len(messages) < len(value) or messages[-1]["role"] != "user":
        raise row.wrong(
            column,
            'must be a text, or a chat that ends with the user, [..., {"role": "user", "content": ...}]',
        )
    return messages[0]["content"] if len(messages) == 1 else ChatPrompt(messages)


def with_suffix(prompt: str, suffix: str) -> str:
    """Return a prompt with a text behind its last message."""
    if not isinstance(prompt, ChatPrompt):
        return prompt + suffix
    *others, last = prompt.messages
    return ChatPrompt([*others, last | {"content": last["content"] + suffix}])

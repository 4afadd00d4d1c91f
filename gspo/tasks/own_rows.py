"""A task from the user's own file or data set, scored by the user's own reward function.

    gspo train task=rows task.train_path=problems.jsonl task.columns.prompt=question \\
        task.reward=my_pkg.rewards:score model=hf model.path=MODEL

With `task.path` the problems of that file are held out. Without it 1 in 8 problems of the training
file is held out. The text of a problem alone decides, so every run holds out the same problems.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gspo.data.problems import ChatPrompt, Problem
from gspo.data.samples import Score
from gspo.io.errors import SettingError
from gspo.io.ranges import outside_code, ranged
from gspo.rewards.reward_function import RewardFunction
from gspo.tasks.base import Answer, held_out
from gspo.tasks.benchmarks.base import Benchmark, Item, without_repeats
from gspo.tasks.benchmarks.data_row import DataRow
from gspo.tasks.benchmarks.records_file import Source

COLUMNS = ("prompt", "family", "rating")
MAX_TRIAL_ROWS = 100  # the trial uses a row among the first rows
MAX_SHOWN_CHARS = 160  # of a row in a message


@dataclass
class OwnRows(Benchmark):
    """Problems from the rows of a file or of a hub data set, scored by the function `reward`.

    The function gets the prompt, the response's text and the row as a dictionary (see
    gspo.rewards.reward_function). As in every task, a truncated response scores 0, and the function
    is not called for it.
    """

    name: str = "rows"
    reward: str = outside_code()  # the reward function, for example my_pkg.rewards:score
    seconds: float = ranged(10.0, above=0)  # time limit of one call
    # processes that call it at the same time, for judges that wait; an async function needs only 1
    workers: int = ranged(1, least=1, most=256, cost_only=True)
    # The column of the prompt (a text, or a chat that ends with the user). The columns of the
    # family and of the rating are optional.
    columns: dict[str, str] = field(default_factory=lambda: {"prompt": "prompt"})
    # text after every prompt, for example an instruction on the form of the answer
    suffix: str = ""
    # with `hub`: the held-out split. "": 1 in 8 problems of the training split is held out
    hub_split: str = "test"
    hub_train_split: str = "train"  # with `hub`: the split to train on

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward:
            raise SettingError(
                f"{self.key}.reward",
                problem="is not given",
                remedy="name your function as my_pkg.rewards:score",
            )
        unknown = set(self.columns) - set(COLUMNS)
        if unknown:
            raise SettingError(
                f"{self.key}.columns.{min(unknown)}", remedy=f"choose from {', '.join(COLUMNS)}"
            )
        if "prompt" not in self.columns:
            raise SettingError(
                f"{self.key}.columns.prompt",
                problem="is not given",
                remedy="name the column that holds the prompt",
            )
        if "/" in self.name or not self.name:
            raise SettingError(
                f"{self.key}.name",
                self.name,
                "must be a plain name: it stands in the names of metrics",
            )
        self._is_tried = False

    @cached_property
    def _function(self) -> RewardFunction:
        return RewardFunction(self.reward, f"{self.key}.reward", self.seconds, self.workers)

    def item(self, row: DataRow, training: bool) -> Item | None:
        text = prompt_text(row, self.columns["prompt"])
        family = ""
        if "family" in self.columns:
            family = str(row.get(self.columns["family"], str, int))
        rating = None
        if "rating" in self.columns:
            rating = row.rating(self.columns["rating"])
        return Item(text, with_suffix(text, self.suffix), row.values, family, rating)

    def _evaluation_items(self) -> list[Item]:
        if self.path or (self.hub and self.hub_split):
            return super()._evaluation_items()
        all_items = self._items_of(self._training_source(), training=True)
        items = [item for item in all_items if held_out(item.text)]
        key, value = self._training_setting()
        if not all_items:
            raise SettingError(key, value, "it has no rows")
        if not items:
            raise SettingError(
                key,
                value,
                "none of its problems is among the 1 in 8 that are held out",
                remedy=f"give {self.key}.path=FILE with problems to evaluate on",
            )
        return without_repeats(items)

    def _source(self, split: str, hub_split: str) -> Source:
        source = super()._source(split, hub_split)
        name = "hub_train_split" if split == "train" else "hub_split"
        return replace(source, hub_split_setting=f"{self.key}.{name}")

    def score(self, answers: list[Answer]) -> list[Score]:
        """Return the reward function's scores, and 0 for truncated responses."""
        scores = [Score(0.0, "truncated")] * len(answers)
        completed = [index for index, (_, _, ended) in enumerate(answers) if ended]
        if not completed:
            return scores
        problems = [answers[index][0] for index in completed]
        texts = [answers[index][1] for index in completed]
        prompts = [problem.prompt for problem in problems]
        rows = [problem.answer for problem in problems]
        for index, score in zip(completed, self._function(prompts, texts, rows), strict=True):
            scores[index] = score
        return scores

    def ready(self) -> dict[str, str]:
        """Start the process of the reward function, and call the function once on a row.

        Raises ValueError if a mistake is certain. Prints a warning if the trial's response may be
        the reason of a failure."""
        self._function.start()
        if not self._is_tried:
            # the row with the most columns
            trial_items = self._items(self.name)[:MAX_TRIAL_ROWS]
            item = max(trial_items, key=lambda item: len(item.answer))
            where = f"it was tried before the first step, on the row {shown(item.answer)}"
            try:
                trial = self._function.try_out(item.prompt, item.answer)
            except ValueError as error:
                raise ValueError(f"{error}; {where}") from None
            for score in trial.scores:
                try:
                    score.weighted(self.reward_weights)
                except SettingError as error:
                    problem = f"{error.problem}; {where}"
                    raise SettingError(error.key, error.value, problem, error.remedy) from None
            if trial.reason:
                print(
                    f"warning: {trial.reason}; {where}. Such a response is left out, ungraded",
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
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def prompt_text(row: DataRow, column: str) -> str:
    """Return the prompt of a row, which is a text or a chat that ends with the user's message.

    A chat of one message gives the text of this message. Raises ValueError for anything else."""
    value = row.get(column, str, list)
    if isinstance(value, str):
        return row.text(column)
    messages = []
    for message in value:
        match message:
            case {"role": "system" | "user" | "assistant" as role, "content": str(content)}:
                messages.append({"role": role, "content": content})
    if not messages or len(messages) < len(value) or messages[-1]["role"] != "user":
        raise row.wrong(
            column,
            "must be a text, or a chat that ends with the user, "
            '[..., {"role": "user", "content": ...}]',
        )
    if not messages[-1]["content"].strip():
        raise row.wrong(column, "is empty: its last message has no text")
    return messages[0]["content"] if len(messages) == 1 else ChatPrompt(messages)


def with_suffix(prompt: str, suffix: str) -> str:
    """Return a prompt with the suffix after its last message."""
    if not isinstance(prompt, ChatPrompt):
        return prompt + suffix
    *earlier, last = prompt.messages
    return ChatPrompt([*earlier, last | {"content": last["content"] + suffix}])

"""The base of published benchmarks: records from files, and training sets without test problems.

The evaluation set keeps the order of its file: its first n problems are the file's first n, for
every seed. The training set is visited epoch after epoch. Epoch e is a permutation by (seed, e), so
within an epoch every problem comes once. Training on a benchmark without a training set is refused,
unless `train_path` gives one.

Training problems whose text is also in the evaluation set are left out. Repeated training problems
are left out too. Two texts are the same problem if they differ only in case and white space.
Paraphrases are not found. `data` counts the problems left out.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gspo.data.problems import Problem
from gspo.io.errors import SettingError
from gspo.tasks.base import TRAINING_SPLITS, SingleSet, epoch_order
from gspo.tasks.benchmarks.data_row import DataRow
from gspo.tasks.benchmarks.records_file import Source

# Replacements for problems with too long prompts have indices above this number. The index modulo
# it gives them epochs, and so an order, that no other problem has.
REPLACEMENT_INDEX = 2**40 + 15
WHITE_SPACE = re.compile(r"(?<=\w)\s+(?=\w)|(\s+)")  # between two words, and elsewhere


@dataclass(frozen=True)
class Item:
    """A problem before it has a position in a stream."""

    # The published problem without the wording of the prompt. Comparisons with the evaluation set
    # use this text.
    text: str
    prompt: str
    answer: Any
    family: str = ""
    rating: float | None = None


@dataclass
class Benchmark(SingleSet):
    """A finite evaluation set named like the task, and perhaps a training set.

    Subclasses turn records into items.

    path        file or folder of the evaluation set. "" reads the hub.
    train_path  file or folder of the training set. "" takes the benchmark's own training set, from
                `path` if that is a folder.
    hub         the Hugging Face dataset, as OWNER/NAME or hf://datasets/OWNER/NAME/FILES
    hub_config  its subset
    """

    name: str = ""
    path: str = ""
    train_path: str = ""
    hub: str = ""
    hub_config: str = ""

    # see gspo.tasks.base; each benchmark names the evaluation that its limit is from
    max_new_tokens: ClassVar[int] = 0
    # OwnRows has the next two as settings. They have no annotation, so they are no fields here.
    hub_split = "test"  # the hub's split that holds the evaluation set
    hub_train_split = ""  # the hub's training split; "" if the benchmark has none
    one_file: ClassVar[bool] = False  # whether training and evaluation problems share a file

    def __post_init__(self) -> None:
        super().__post_init__()
        # the items of the training set (True) and of the evaluation set, read when first needed
        self._cached_items: dict[bool, list[Item]] = {}
        # numbers of training problems that are not trained on, by the reason
        self._left_out: dict[str, int] = {}
        # numbers of records that gave no item, by the reason, for the training set (True) and for
        # the evaluation set
        self.skipped: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}

    def item(self, row: DataRow, training: bool) -> Item | None:
        """Return a record as an item, or None if it does not belong to this set.

        Raises ValueError for an invalid record."""
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        facts = {}
        for name in ("train", self.name):
            items = self._items(name)
            left_out = dict(self.skipped[name == "train"])
            facts[name] = {"problems": len(items), "left_out": left_out, "sha256": digest_of(items)}
        facts["train"]["left_out"] = self._left_out | self.skipped[True]
        return facts

    def left_out_of_evaluation(self) -> str:
        if not self.skipped[False]:
            return ""
        reasons = ", ".join(f"{count:,} {why}" for why, count in self.skipped[False].items())
        return f"{self.name}: problems are left out of the evaluation set: {reasons}"

    def size(self, split: str) -> int:
        """Return the number of problems of a split. Raises ValueError for an unknown split."""
        return len(self._items(split))

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of the evaluation set, or of the training stream by the seed.

        Raises ValueError for an unknown split, an unreadable file or an invalid record. Raises
        IndexError beyond the end of the evaluation set.
        """
        items = self._items(split)
        if split in TRAINING_SPLITS:
            epoch = index % REPLACEMENT_INDEX // len(items)
            order = epoch_order(len(items), seed, self.name, split, epoch)
            item = items[order[index % len(items)]]
        elif 0 <= index < len(items):
            item = items[index]
        else:
            raise IndexError(f"{self.name} has {len(items)} problems, and none at {index}")
        return Problem(self.name, index, item.prompt, item.answer, item.family, item.rating)

    def _items(self, split: str) -> list[Item]:
        self.check_split(split)
        training = split in TRAINING_SPLITS
        if training not in self._cached_items:
            items = self._training_items() if training else self._evaluation_items()
            self._cached_items[training] = items
        return self._cached_items[training]

    def _items_of(self, source: Source, training: bool) -> list[Item]:
        items = (self.item(row, training) for row in source.rows())
        return [item for item in items if item is not None]

    def _evaluation_items(self) -> list[Item]:
        items = self._items_of(self._source("test", self.hub_split), training=False)
        if not items:
            raise SettingError(f"{self.key}.path", self.path or self.hub, self._why_empty())
        return items

    def _why_empty(self) -> str:
        """Return why an evaluation set may be empty, as the end of an error message."""
        return f"there is no problem of {self.name} in it"

    def _training_items(self) -> list[Item]:
        evaluation_texts = {text_digest(item.text) for item in self._items(self.name)}
        items = self._items_of(self._training_source(), training=True)
        not_held_out = [item for item in items if text_digest(item.text) not in evaluation_texts]
        training_items = without_repeats(not_held_out)
        self._left_out = {
            "held out": len(items) - len(not_held_out),
            "repeated": len(not_held_out) - len(training_items),
        }
        if not training_items:
            key, value = self._training_setting()
            raise SettingError(
                key,
                value,
                f"of {len(items)} training problems none is left that is not also in the "
                f"evaluation set of {self.name}",
                remedy=f"give {self.key}.train_path=FILE with other problems",
            )
        return training_items

    def _training_setting(self) -> tuple[str, str]:
        """Return the key and the value of the setting that names the training set."""
        for name in ("train_path", "path", "hub"):
            value = getattr(self, name)
            if value:
                return f"{self.key}.{name}", value
        return f"{self.key}.train_path", ""

    def _training_source(self) -> Source:
        """Return the source of the training set.

        Raises ValueError if the benchmark has no training set and the settings give none."""
        if self.train_path:
            return Source(f"{self.key}.train_path", self.train_path, "train")
        if not self.hub_train_split:
            raise SettingError(
                "task",
                self.name,
                "is for evaluation and has no training set",
                remedy=(
                    f"train on another task, or give {self.key}.train_path=FILE with problems in "
                    "the same format"
                ),
            )
        if self.path and not self.one_file and not Path(self.path).expanduser().is_dir():
            raise SettingError(
                f"{self.key}.path",
                self.path,
                f"is one file, and such a file is what {self.name} is evaluated on",
                remedy=(
                    f"give {self.key}.train_path=FILE to train on beside it, or as "
                    f"{self.key}.path the folder that holds train and test files"
                ),
            )
        return self._source("train", self.hub_train_split)

    def _source(self, split: str, hub_split: str) -> Source:
        """Return the source that `path` or the hub is, for a split."""
        setting = f"{self.key}.path"
        return Source(setting, self.path, split, self.hub, self.hub_config, hub_split)


def text_digest(text: str) -> str:
    """Return a form of the text that is the same for all spellings of a problem.

    It ignores case and white space. Only white space between two words or numbers counts, as one
    blank.

    >>> text_digest(" What is\\n3 + 5?")
    'what is 3+5?'
    >>> text_digest("what is 3+5?") == text_digest("what is 3-5?")
    False
    """
    return WHITE_SPACE.sub(lambda match: "" if match[1] else " ", text.strip().casefold())


def without_repeats(items: Iterable[Item]) -> list[Item]:
    """Return the first item of each text, in their order."""
    first_items = {}
    for item in items:
        first_items.setdefault(text_digest(item.text), item)
    return list(first_items.values())


def digest_of(items: list[Item]) -> str:
    """Return a hash of prompts and answers in their order, as sixteen hexadecimal digits."""
    hasher = hashlib.sha256()
    for item in items:
        hasher.update(json.dumps([item.prompt, item.answer], sort_keys=True, default=repr).encode())
    return hasher.hexdigest()[:16]

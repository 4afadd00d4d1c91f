"""What published benchmarks share: records from files, the order of problems, training sets without
test problems.

The evaluation set is in the order of its file: its first n problems are the file's first n, for
every seed. The training set is visited epoch after epoch; epoch e is a permutation by (seed, e), so
within an epoch every problem comes once. A benchmark without a training set refuses to be trained
on, unless `train_path` gives one.

Training problems whose text is also in the evaluation set are left out, and each text is trained on
once. Two texts are the same problem if they differ in case and white space alone. Paraphrases are
not found. `data` counts what was left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gspo.data.samples import Problem
from gspo.data.seeding import permutation
from gspo.tasks.base import TRAINING_SPLITS, Task, check_split
from gspo.tasks.benchmarks.records_file import Row, Source

# replacements for problems with too long prompts come from positions beyond this; their epoch is
# kept small
FAR = 2**40 + 15
BLANKS = re.compile(r"(?<=\w)\s+(?=\w)|(\s+)")  # between two words, and others


@dataclass(frozen=True)
class Item:
    """A problem before it has a position in a stream."""

    # the published problem without the prompt's wording; it is compared with the evaluation set
    text: str
    prompt: str
    answer: Any
    family: str = ""
    rating: float | None = None


@dataclass
class Benchmark(Task):
    """A finite evaluation set named like the task, and perhaps a training set; subclasses turn
    records into items.

    path        file or folder of the evaluation set; "" reads the hub
    train_path  file or folder of the training set; "" takes the benchmark's own, from `path` if
                that is a folder
    hub         the Hugging Face dataset, as OWNER/NAME or hf://datasets/OWNER/NAME/FILES;
                hub_config is its subset
    """

    name: str = ""
    path: str = ""
    train_path: str = ""
    hub: str = ""
    hub_config: str = ""

    # see gspo.tasks.base; each benchmark says whose evaluation its limit is from
    max_new_tokens: ClassVar[int] = 0
    hub_split: ClassVar[str] = "test"  # the hub's split that holds the evaluation set
    hub_train_split: ClassVar[str] = ""  # the hub's training split; "" if the benchmark has none
    one_file: ClassVar[bool] = False  # whether training and evaluation problems share a file
    # the prefix of these settings in messages; `gspo evaluate` sets tasks.NAME
    key: ClassVar[str] = "task"

    def __post_init__(self) -> None:
        super().__post_init__()
        # whether it is the training set -> its items, read when first needed
        self._read: dict[bool, list[Item]] = {}
        self._orders: dict[tuple[int, str, int], list[int]] = {}
        # problems of the training set that are not trained on, by the reason
        self._left_out: dict[str, int] = {}
        # records that no item was made of, by the reason; of the training set (True) and of the
        # evaluation set
        self.skipped: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}

    def item(self, row: Row, training: bool) -> Item | None:
        """Return a record as an item, or None if it does not belong to this set. Raises ValueError
        for a record that is wrong."""
        raise NotImplementedError

    def evaluation_sets(self) -> list[str]:
        return [self.name]

    def data(self) -> dict[str, Any]:
        training, evaluation = self._items("train"), self._items(self.name)
        return {
            "train": {
                "problems": len(training),
                "left_out": self._left_out | self.skipped[True],
                "sha256": digest_of(training),
            },
            self.name: {
                "problems": len(evaluation),
                "left_out": dict(self.skipped[False]),
                "sha256": digest_of(evaluation),
            },
        }

    def left_out_of_evaluation(self) -> str:
        reasons = [f"{count:,} {why}" for why, count in self.skipped[False].items()]
        return (
            f"{self.name}: problems are left out of the evaluation set: {', '.join(reasons)}"
            if reasons
            else ""
        )

    def size(self, split: str) -> int:
        """Return the number of problems of a split. Raises ValueError for an unknown split."""
        return len(self._items(split))

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index`: by position in the evaluation set, whatever the seed, or from the
        stream in training.

        Raises ValueError for an unknown split, a file that cannot be read, or a record that is
        wrong, and IndexError beyond the end of the evaluation set.
        """
        items = self._items(split)
        if split in TRAINING_SPLITS:
            item = items[self._place(seed, split, index, len(items))]
        elif 0 <= index < len(items):
            item = items[index]
        else:
            raise IndexError(f"{self.name} has {len(items)} problems, and none at {index}")
        return Problem(self.name, index, item.prompt, item.answer, item.family, item.rating)

    def _place(self, seed: int, split: str, index: int, count: int) -> int:
        """Return the index of the item that stands at a position of the training stream."""
        epoch = index % FAR // count
        key = (seed, split, epoch)
        if key not in self._orders:
            # the stream moves on, so a handful of epochs serves a batch that spans two
            if len(self._orders) > 8:
                self._orders.clear()
            self._orders[key] = permutation(count, seed, self.name, split, epoch).tolist()
        return self._orders[key][index % count]

    def _items(self, split: str) -> list[Item]:
        check_split(split, self.evaluation_sets())
        training = split in TRAINING_SPLITS
        if training not in self._read:
            self._read[training] = self._training_items() if training else self._evaluation_items()
        return self._read[training]

    def _evaluation_items(self) -> list[Item]:
        rows = Source(
            f"{self.key}.path", self.path, "test", self.hub, self.hub_config, self.hub_split
        ).rows()
        items = [item for row in rows if (item := self.item(row, training=False))]
        if not items:
            raise ValueError(f"{self.key}.path={self.path or self.hub}: {self._nothing()}")
        return items

    def _nothing(self) -> str:
        """Return why an evaluation set may be empty, as the end of an error message."""
        return f"there is no problem of {self.name} in it"

    def _training_items(self) -> list[Item]:
        evaluation_texts = {fingerprint(item.text) for item in self._items(self.name)}
        rows = self._training_source().rows()
        items = [item for row in rows if (item := self.item(row, training=True))]
        others = [item for item in items if fingerprint(item.text) not in evaluation_texts]
        kept = without(others, set())
        self._left_out = {"held out": len(items) - len(others), "repeated": len(others) - len(kept)}
        if not kept:
            raise ValueError(
                f"{self.key}.train_path={self.train_path or self.path or self.hub}: of {len(items)} training "
                f"problems none is left that is not also in the evaluation set of {self.name}"
            )
        return kept

    def _training_source(self) -> Source:
        """Return where the training set is read from. Raises ValueError if the benchmark has none
        and none is given.
        """
        if self.train_path:
            return Source(f"{self.key}.train_path", self.train_path, "train")
        if not self.hub_train_split:
            raise ValueError(
                f"task={self.name} is for evaluation and has no training set. "
                f"Train on another task, or give {self.key}.train_path=FILE with problems in the same format"
            )
        if self.path and not self.one_file and not Path(self.path).expanduser().is_dir():
            raise ValueError(
                f"{self.key}.path={self.path} is one file, and such a file is what {self.name} is evaluated on: give "
                f"{self.key}.train_path=FILE to train on beside it, or as {self.key}.path the folder that holds train "
                "and test files"
            )
        return Source(
            f"{self.key}.path", self.path, "train", self.hub, self.hub_config, self.hub_train_split
        )


def fingerprint(text: str) -> str:
    """Return what two spellings of the same problem have in common: the text without regard to case
    and white space, of which only a blank between two words or numbers counts.

    >>> fingerprint(" What is\\n3 + 5?") == fingerprint("what is 3+5?") != fingerprint("what is
    3-5?") True
    """
    return BLANKS.sub(lambda found: "" if found[1] else " ", text.strip().casefold())


def without(items: Iterable[Item], excluded: set[str]) -> list[Item]:
    """Return the items whose text is not among the excluded fingerprints, each text once."""
    kept, seen = [], set(excluded)
    for item in items:
        mark = fingerprint(item.text)
        if mark not in seen:
            seen.add(mark)
            kept.append(item)
    return kept


def digest_of(items: list[Item]) -> str:
    """Hash prompts and answers, in their order, to sixteen hexadecimal digits."""
    hashed = hashlib.sha256()
    for item in items:
        hashed.update(json.dumps([item.prompt, item.answer], sort_keys=True, default=repr).encode())
    return hashed.hexdigest()[:16]

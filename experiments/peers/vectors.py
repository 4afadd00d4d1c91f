"""Golden vectors: inputs, and what a peer's own function returns for them.

A folder holds one JSON file per case: `case`, `settings`, `inputs` (nested lists) and `expected`,
which maps `"<peer>@<version>/<function>[options]"` to `config` (options in the peer's own names)
and any of `loss`, `grad_logp`, `metrics`, `outputs`, `precision`. Numbers are float64; "NaN",
"Infinity" and "-Infinity" are strings.

Shape suffixes: B responses, T response tokens.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

KEY = re.compile(r"(?P<peer>[^@/]+)@(?P<version>[^/]+)/(?P<function>[^\[\]]+)(\[(?P<labels>.*)\])?")


@dataclass(frozen=True)
class Entry:
    """One expected value: what a peer's function gives on the inputs of a case."""

    case: str
    key: str
    peer: str
    function: str
    labels: dict  # the options in the key's brackets; a word without a value is True
    config: dict
    settings: dict  # the settings of the case
    inputs: dict  # tensors (the mask as bool), or lists where they hold no numbers
    loss: float | None
    grad_BT: Tensor | None  # d loss / d logp
    metrics: dict[str, float]
    outputs: dict[str, Tensor]
    precision: str  # not empty if the peer computes in float32; it names the tolerance

    @property
    def mask_BT(self) -> Tensor:
        return self.inputs["mask"]

    @property
    def groups(self) -> list:
        """The name of the problem that each response answers: the entry's own, the case's, or by
        `num_generations`.
        """
        names = (
            self.config.get("groups") or self.settings.get("groups") or self.inputs.get("groups")
        )
        if names is None and "index" in self.inputs:
            names = self.inputs["index"].tolist()
        if names is None:
            size = self.settings["num_generations"]
            names = [i // size for i in range(len(self.inputs["rewards"]))]
        return names


@dataclass(frozen=True)
class Unreadable:
    """A file or an entry that is not a golden vector, and why."""

    name: str
    reason: str


def load(folder: str | Path) -> tuple[list[Entry], list[Unreadable]]:
    """Return all entries of a folder, by file name. Raises ValueError if there is no folder or no
    entry in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"vectors={folder}: no such folder")
    entries, unreadable = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            found, bad = read(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            found, bad = [], [Unreadable(path.name, one_line(error))]
        entries += found
        unreadable += bad
    if not entries:
        why = f" ({unreadable[0].name}: {unreadable[0].reason})" if unreadable else ""
        raise ValueError(
            f"vectors={folder}: no golden vectors, that is JSON files with `inputs` and `expected`{why}"
        )
    return entries, unreadable


def read(case: dict) -> tuple[list[Entry], list[Unreadable]]:
    """Return the entries of one file. Raises KeyError, TypeError or ValueError for anything but a
    case.
    """
    inputs = {name: values(value) for name, value in case["inputs"].items()}
    if isinstance(inputs.get("mask"), Tensor):
        inputs["mask"] = inputs["mask"] != 0
    entries, unreadable = [], []
    for key, value in case["expected"].items():
        try:
            entries.append(entry(str(case["case"]), key, value, case.get("settings", {}), inputs))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            unreadable.append(Unreadable(f"{case['case']}: {key}", one_line(error)))
    return entries, unreadable


def entry(case: str, key: str, expected: dict, settings: dict, inputs: dict) -> Entry:
    match = KEY.fullmatch(key)
    if match is None:
        raise ValueError("the key is not <peer>@<version>/<function>[options]")
    grad = expected.get("grad_logp")
    metrics = expected.get("metrics") or {}
    # metrics of each response are compared like outputs
    of_rows = {name: value for name, value in metrics.items() if isinstance(value, list)}
    outputs = {**(expected.get("outputs") or {}), **of_rows}
    return Entry(
        case=case,
        key=key,
        peer=match["peer"],
        function=match["function"],
        labels=labels(match["labels"] or ""),
        config=expected.get("config") or {},
        settings=settings,
        inputs=inputs,
        loss=None if expected.get("loss") is None else float(expected["loss"]),
        grad_BT=None if grad is None else values(grad),
        metrics={name: float(value) for name, value in metrics.items() if name not in of_rows},
        outputs={name: values(value) for name, value in outputs.items()},
        precision=expected.get("precision") or "",
    )


def values(nested: object) -> object:
    """Return a float64 tensor of nested lists of numbers; anything else (names of groups) is
    returned unchanged.
    """
    try:
        return torch.tensor(numbers(nested), dtype=torch.float64)
    except (ValueError, TypeError):
        if isinstance(nested, list) and any(isinstance(row, list) for row in nested):
            raise ValueError(
                "a list is not rectangular or holds something else than numbers"
            ) from None
        return nested


def numbers(nested: object) -> object:
    return [numbers(x) for x in nested] if isinstance(nested, list) else float(nested)


def labels(text: str) -> dict:
    """Return `level=token,clip=0.2/0.28,std` as {"level": "token", "clip": "0.2/0.28", "std":
    True}.
    """
    found = {}
    # the options may stand in several brackets: [gdpo][weights]
    for part in filter(None, (part.strip() for part in text.replace("][", ",").split(","))):
        name, equals, value = part.partition("=")
        found[name] = scalar(value) if equals else True
    return found


def scalar(text: str) -> object:
    words = {"True": True, "False": False, "None": None, "null": None}
    if text in words:
        return words[text]
    try:
        # float("0.5_2.0") fails, float("1_2") would not
        return float(text) if "_" not in text else text
    except ValueError:
        return text


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")

"""Rollouts in a checkpoint: those that were sampled ahead of the training, and responses that are to be continued.

<folder>/held.json   what is text or a number;   <folder>/held.npz   log-probs and experts, end to end
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gspo.core.types import Problem, Response, Score
from gspo.core.untrusted import LONG, parse_json, read_bytes
from gspo.rollout.on_policy import Held, Rollout

ARRAYS = ("logprobs", "experts", "old_logprobs", "old_experts")  # of a response, end to end along their first axis
NUMBERS = (
    "rollout_s",
    "score_s",
    "limit",
    "filtered",
    "behaviour_s",
    "waited_s",
    "in_flight",
    "synced",
)  # of a rollout


def save_held(held: Held, folder: Path) -> None:
    """Write what a source holds; nothing if it holds nothing."""
    if not held.rollouts and not held.groups:
        return
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in ARRAYS}

    def kept(response: Response) -> dict[str, Any]:
        lengths = {}
        for name in ARRAYS:
            array = getattr(response, name)
            if array is not None:
                arrays[name].append(array)
                lengths[name] = len(array)
        score = asdict(response.score) if response.score else None
        plain = {key: value for key, value in vars(response).items() if key not in (*ARRAYS, "problem", "score")}
        return plain | {"problem": response.problem.index, "score": score, "lengths": lengths}

    content = {
        "rollouts": {
            step: {key: getattr(rollout, key) for key in NUMBERS}
            | {"groups": [[kept(r) for r in group] for group in rollout.groups]}
            | {"dropped": [[kept(r) for r in group] for group in rollout.dropped]}
            | {"ungraded": [kept(r) for r in rollout.ungraded]}
            for step, rollout in held.rollouts.items()
        },
        "groups": [[draw, [kept(r) for r in group]] for draw, group in held.groups],
    }
    np.savez(folder / "held.npz", **{name: np.concatenate(parts) for name, parts in arrays.items() if parts})
    (folder / "held.json").write_text(json.dumps(content), encoding="utf-8")


def load_held(folder: Path, problem: Callable[[int], Problem]) -> Held:
    """What `save_held` wrote, bit by bit; `problem` gives the training problem of an index."""
    if not (folder / "held.json").exists():
        return Held()
    content = parse_json(read_bytes(folder / "held.json", LONG))
    with np.load(folder / "held.npz", allow_pickle=False) as file:
        if any(part.compress_type != zipfile.ZIP_STORED for part in file.zip.infolist()):  # to gigabytes
            raise ValueError(f"{folder / 'held.npz'} is compressed, which is never written: it is damaged")
        arrays = {name: file[name] for name in file.files}
    taken = dict.fromkeys(ARRAYS, 0)

    def response(kept: dict[str, Any]) -> Response:
        parts = {}
        for name, length in kept.pop("lengths").items():
            parts[name] = arrays[name][taken[name] : taken[name] + length]
            taken[name] += length
        score = kept.pop("score")
        kept["segments"] = [tuple(segment) for segment in kept["segments"]]
        kept["problem"] = problem(kept["problem"])
        return Response(**{"logprobs": None} | kept | parts, score=Score(**score) if score else None)

    rollouts = {}
    for step, rollout in content["rollouts"].items():  # in the order of writing, which is that of the arrays
        groups = [[response(r) for r in group] for group in rollout.pop("groups")]
        dropped = [[response(r) for r in group] for group in rollout.pop("dropped")]
        ungraded = [response(r) for r in rollout.pop("ungraded")]
        rollouts[int(step)] = Rollout(groups, dropped=dropped, ungraded=ungraded, **rollout)
    return Held(rollouts, [(draw, [response(r) for r in group]) for draw, group in content["groups"]])

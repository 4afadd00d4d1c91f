"""Reads and writes the part of a checkpoint that holds pending rollouts: what was sampled and not
yet trained on.

<checkpoint>/held.json   texts and numbers
<checkpoint>/held.npz    log-probs and experts of all responses, end to end
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gspo.data.samples import Problem, Response, Score, ScoredResponse, Turn
from gspo.io.untrusted import LONG, parse_json, read_bytes
from gspo.rollout.sources.base import PendingRollouts, Rollout

# fields of Response that are arrays
ARRAYS = ("logprobs", "experts", "old_logprobs", "old_experts")
NUMBERS = (  # fields of Rollout beside its responses
    "rollout_s",
    "score_s",
    "limit",
    "filtered",
    "behaviour_s",
    "waited_s",
    "in_flight",
    "environment_s",
    "synced",
)


def save_pending(pending: PendingRollouts, folder: Path) -> None:
    """Write a source's pending rollouts into a checkpoint; write no file if there are none."""
    if not pending.rollouts and not pending.groups:
        return
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in ARRAYS}

    def kept(response: Response) -> dict[str, Any]:
        lengths = {}
        for name in ARRAYS:
            array = getattr(response, name)
            if array is not None:
                arrays[name].append(array)
                lengths[name] = len(array)
        score = asdict(response.score) if isinstance(response, ScoredResponse) else None
        plain = {
            key: value
            for key, value in vars(response).items()
            if key not in (*ARRAYS, "problem", "score")
        }
        plain["turns"] = [asdict(turn) for turn in response.turns]
        return plain | {"problem": response.problem.index, "score": score, "lengths": lengths}

    content = {
        "rollouts": {
            step: {key: getattr(rollout, key) for key in NUMBERS}
            | {"groups": [[kept(r) for r in group] for group in rollout.groups]}
            | {"dropped": [[kept(r) for r in group] for group in rollout.dropped]}
            | {"ungraded": [kept(r) for r in rollout.ungraded]}
            for step, rollout in pending.rollouts.items()
        },
        "groups": [[draw, [kept(r) for r in group]] for draw, group in pending.groups],
    }
    np.savez(
        folder / "held.npz",
        **{name: np.concatenate(pieces) for name, pieces in arrays.items() if pieces},
    )
    (folder / "held.json").write_text(json.dumps(content), encoding="utf-8")


def load_pending(folder: Path, problem: Callable[[int], Problem]) -> PendingRollouts:
    """Read what `save_pending` wrote, equal to the bit; `problem` returns the training problem of
    an index.

    Raises ValueError for files that `save_pending` does not write."""
    if not (folder / "held.json").exists():
        return PendingRollouts()
    content = parse_json(read_bytes(folder / "held.json", LONG))
    with np.load(folder / "held.npz", allow_pickle=False) as file:
        # A compressed file of a megabyte could unpack to gigabytes.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.zip.infolist()):
            raise ValueError(
                f"{folder / 'held.npz'} is compressed, which is never written: it is damaged"
            )
        arrays = {name: file[name] for name in file.files}
    read = dict.fromkeys(ARRAYS, 0)  # how many rows of each array the responses so far have used

    def response(kept: dict[str, Any]) -> Response:
        own = {}
        for name, length in kept.pop("lengths").items():
            own[name] = arrays[name][read[name] : read[name] + length]
            read[name] += length
        score = kept.pop("score")
        kept["segments"] = [tuple(segment) for segment in kept["segments"]]
        kept["turns"] = [Turn(**turn) for turn in kept["turns"]]
        kept["problem"] = problem(kept["problem"])
        read_back = Response(**{"logprobs": None} | kept | own)
        return read_back.scored(Score(**score)) if score else read_back

    rollouts = {}
    # in the order in which the arrays were written
    for step, rollout in content["rollouts"].items():
        groups = [[response(r) for r in group] for group in rollout.pop("groups")]
        dropped = [[response(r) for r in group] for group in rollout.pop("dropped")]
        ungraded = [response(r) for r in rollout.pop("ungraded")]
        rollouts[int(step)] = Rollout(groups, dropped=dropped, ungraded=ungraded, **rollout)
    return PendingRollouts(
        rollouts, [(draw, [response(r) for r in group]) for draw, group in content["groups"]]
    )

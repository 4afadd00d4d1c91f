"""Reads and writes the pending rollouts of a checkpoint: sampled, but not yet trained on.

<checkpoint>/held.json   texts and numbers
<checkpoint>/held.npz    log-probs and experts of all responses, concatenated
"""

import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gspo.data.kept_tokens import KeptTokens
from gspo.data.problems import Problem
from gspo.data.samples import Response, Score, ScoredResponse, Turn
from gspo.io.untrusted import MAX_ROWS_FILE_BYTES, parse_json, read_bytes
from gspo.rollout.sources.base import PendingRollouts, Rollout

# the arrays of a response; `kept_counts` and `kept_ids` are those of Response.kept
ARRAYS = ("logprobs", "experts", "old_logprobs", "old_experts", "kept_counts", "kept_ids")
# fields of Rollout other than its responses; `num_unfinished` has the key "in_flight"
NUMBERS = (
    "rollout_s",
    "score_s",
    "limit",
    "filtered",
    "behaviour_s",
    "waited_s",
    "environment_s",
    "synced",
)


def arrays_of(response: Response) -> dict[str, np.ndarray | None]:
    """Return the arrays of a response by their names in ARRAYS."""
    kept = response.kept
    return {
        "logprobs": response.logprobs,
        "experts": response.experts,
        "old_logprobs": response.old_logprobs,
        "old_experts": response.old_experts,
        "kept_counts": None if kept is None else kept.counts,
        "kept_ids": None if kept is None else kept.ids,
    }


def save_pending(pending: PendingRollouts, folder: Path) -> None:
    """Write a source's pending rollouts into a checkpoint, or no file if there are none."""
    if not pending.rollouts and not pending.groups:
        return
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in ARRAYS}

    def as_json(response: Response) -> dict[str, Any]:
        """Return a response without its arrays, which are appended to `pieces`."""
        lengths = {}
        for name, array in arrays_of(response).items():
            if array is not None:
                pieces[name].append(array)
                lengths[name] = len(array)
        special = (*ARRAYS, "kept", "problem", "score")
        content = {key: value for key, value in vars(response).items() if key not in special}
        content["turns"] = [asdict(turn) for turn in response.turns]
        content["problem"] = response.problem.index
        content["score"] = None
        if isinstance(response, ScoredResponse):
            score = asdict(response.score)
            if not score["rewards"]:
                del score["rewards"]
            content["score"] = score
        content["lengths"] = lengths
        return content

    rollouts = {}
    for step, rollout in pending.rollouts.items():
        rollouts[step] = {key: getattr(rollout, key) for key in NUMBERS}
        rollouts[step]["in_flight"] = rollout.num_unfinished
        rollouts[step]["groups"] = [[as_json(r) for r in group] for group in rollout.groups]
        rollouts[step]["dropped"] = [[as_json(r) for r in group] for group in rollout.dropped]
        rollouts[step]["ungraded"] = [as_json(r) for r in rollout.ungraded]
    groups = [[draw, [as_json(r) for r in group]] for draw, group in pending.groups]
    arrays = {name: np.concatenate(parts) for name, parts in pieces.items() if parts}
    np.savez(folder / "held.npz", allow_pickle=False, **arrays)
    text = json.dumps({"rollouts": rollouts, "groups": groups})
    (folder / "held.json").write_text(text, encoding="utf-8")


def load_pending(folder: Path, problem: Callable[[int], Problem]) -> PendingRollouts:
    """Read the files of `save_pending`, equal to the bit.

    `problem` returns the training problem of an index. Raises ValueError for files that
    `save_pending` does not write."""
    if not (folder / "held.json").exists():
        return PendingRollouts()
    content = parse_json(read_bytes(folder / "held.json", MAX_ROWS_FILE_BYTES))
    with np.load(folder / "held.npz", allow_pickle=False) as file:
        # A compressed file of a megabyte could unpack to gigabytes.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.zip.infolist()):
            raise ValueError(
                f"{folder / 'held.npz'} is compressed, which is never written: it is damaged"
            )
        arrays = {name: file[name] for name in file.files}
    rows_read = dict.fromkeys(ARRAYS, 0)  # by array: the rows of the responses so far

    def response(fields: dict[str, Any]) -> Response:
        """Return the response of its fields, with the next rows of the arrays."""
        own_arrays: dict[str, Any] = {}
        for name, length in fields.pop("lengths").items():
            first = rows_read[name]
            own_arrays[name] = arrays[name][first : first + length]
            rows_read[name] += length
        if "kept_counts" in own_arrays:
            counts = own_arrays.pop("kept_counts")
            own_arrays["kept"] = KeptTokens(counts, own_arrays.pop("kept_ids"))
        score = fields.pop("score")
        fields["segments"] = [tuple(segment) for segment in fields["segments"]]
        fields["turns"] = [Turn(**turn) for turn in fields["turns"]]
        fields["problem"] = problem(fields["problem"])
        arguments: dict[str, Any] = fields | own_arrays
        read_response = Response(**arguments)
        return read_response.scored(Score(**score)) if score else read_response

    def scored_response(fields: dict[str, Any]) -> ScoredResponse:
        """Return a response of a whole batch, which has a score."""
        scored = response(fields)
        if not isinstance(scored, ScoredResponse):
            raise ValueError(
                f"{folder / 'held.json'} has a batch with a response without score: it is damaged"
            )
        return scored

    rollouts = {}
    # responses must be read in the order in which they were written
    for step, rollout in content["rollouts"].items():
        groups = [[scored_response(r) for r in group] for group in rollout.pop("groups")]
        dropped = [[scored_response(r) for r in group] for group in rollout.pop("dropped")]
        ungraded = [scored_response(r) for r in rollout.pop("ungraded")]
        rollout["num_unfinished"] = rollout.pop("in_flight", 0)
        rollouts[int(step)] = Rollout(groups, dropped=dropped, ungraded=ungraded, **rollout)
    unfinished = [(draw, [response(r) for r in group]) for draw, group in content["groups"]]
    return PendingRollouts(rollouts, unfinished)

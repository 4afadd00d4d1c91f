"""Runs that end when they collapse, as with monitor.action=stop: no comparison drops them in silence.

The other seeds of an arm are no fair sample of it.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gspo.analysis import claims, doses, fig_contrast, load, reproduce, study_parts
from gspo.analysis.verdicts import direction
from recorded_runs import COLLAPSED, HEALTHY, write

SEEDS = range(1, 9)
COLLAPSED_SEEDS = range(1, 5)
LAST = 59  # the batch after which a collapsed run ends: its last fifth has no evaluation


def write_arm(folder: Path, name: str, collapsed: range = range(0), **changes: object) -> None:
    """Write an arm of eight seeds with a held-out score every 20 batches. Some collapse and end."""
    for seed in SEEDS:
        is_collapsed = seed in collapsed
        rewards = COLLAPSED if is_collapsed else (np.array(HEALTHY) + 0.01 * (seed % 3)).tolist()
        run = write(folder, name, rewards, seed, **changes)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        if is_collapsed:
            rows = rows[: LAST + 1]
        for row in rows:
            if row["step"] % 20 == 0:
                row["eval/math/avg@2"] = 0.0 if is_collapsed and row["step"] > 30 else 0.5
            # the share varies with the seed, so that it has an interval
            row["clip/token_active"] = row.get("clip/token_active", 0.0) * (1 + 0.01 * seed)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_last_score_is_that_of_every_seed(tmp_path):
    write_arm(tmp_path, "gspo")
    write_arm(tmp_path, "grpo", COLLAPSED_SEEDS)
    data = load.load([tmp_path])
    # four of eight seeds end with 0, and four with .5
    assert reproduce.entries(data, "GRPO")["eval/math/avg@2"] == "0.500 -> 0.250"
    assert reproduce.entries(data, "GSPO")["eval/math/avg@2"] == "0.500 -> 0.500"


def test_the_clipped_shares_of_the_other_seeds_show_nothing(tmp_path):
    write_arm(tmp_path, "gspo")
    write_arm(tmp_path, "grpo", range(1, 3))
    verdict = claims.clipping(load.load([tmp_path])).verdict
    assert (
        verdict
        == "undecided (left out, because these runs collapsed and ended: GRPO, 2 seeds (1, 2))"
    )


def test_a_gain_between_studies_has_no_interval(tmp_path):
    for study in ("A", "B"):
        write_arm(tmp_path / study, "gspo")
        write_arm(tmp_path / study, "grpo", COLLAPSED_SEEDS if study == "B" else range(0))
    first, second = (load.load([tmp_path / study]) for study in ("A", "B"))
    gains = fig_contrast.between(first, second)
    assert gains["GSPO"].mean == pytest.approx(0)
    assert math.isnan(gains["GRPO"].mean)
    line = next(x for x in fig_contrast.table([first, second]) if "- |" in x and "| GRPO " in x)
    assert (
        "undecided (left out, because these runs collapsed and ended: GRPO, 4 seeds (1, 2, 3, 4))"
        in line
    )
    # seeds that one of the studies lacks are not compared, so their collapse is no reason
    second.runs = [run for run in second.runs if run.seed > 4]
    gains = fig_contrast.between(first, load.Data(second.runs))
    assert gains["GRPO"].mean == pytest.approx(0)
    rows = fig_contrast.table([first, load.Data(second.runs)])
    line = next(row for row in rows if "| GRPO  " in row and "+0.000" in row)
    assert "undecided" not in line


def test_an_outcome_that_was_not_measured_any_more_decides_nothing(tmp_path):
    for rate in (1e-4, 2e-4):
        write_arm(tmp_path, "gspo", COLLAPSED_SEEDS if rate == 2e-4 else range(0), optim__lr=rate)
        write_arm(tmp_path, "grpo", optim__lr=rate)
    data = load.load([tmp_path])
    score = "eval/math/avg@2"
    numbers = doses.measure(data, ["optim.lr"], "clip/token_active", [], outcome=score)
    (pair,) = doses.compared(numbers, "GRPO")[0].values()
    low, high = (interval for _, _, interval in doses.intervals(pair))
    assert low.seeds == 8
    assert low.mean == 0
    assert math.isnan(high.mean)
    assert direction(high, 0.03) == "undecided"
    by_dose = doses.dose_differences(numbers).set_index("arm")["interval"]
    assert math.isnan(by_dose["GSPO"].mean)
    assert by_dose["GRPO"].seeds == 8
    # the reward is measured until the run ends, so it is compared
    numbers = doses.measure(data, ["optim.lr"], "clip/token_active", [])
    (pair,) = doses.compared(numbers, "GRPO")[0].values()
    assert [interval.seeds for _, _, interval in doses.intervals(pair)] == [8, 8]


def test_the_report_of_a_study_compares_no_survivors(tmp_path):
    """Without the collapsed seeds GRPO may lie above GSPO, with an interval that leaves 0 out."""
    write_arm(tmp_path, "gspo")
    write_arm(tmp_path, "grpo", COLLAPSED_SEEDS)
    blocks = study_parts.differences(load.load([tmp_path]), "")
    (remarks,) = blocks
    (line,) = remarks.texts
    assert line.startswith("GSPO is not compared with GRPO: undecided (left out, because these")
    assert "GRPO, 4 seeds (1, 2, 3, 4)" in line and "no fair sample" in line


def test_a_survivors_p_is_not_stated(tmp_path):
    write_arm(tmp_path, "gspo")
    write_arm(tmp_path, "grpo", COLLAPSED_SEEDS)
    _, text = claims.last_half(load.load([tmp_path]), "GSPO", "GRPO")
    assert "p =" not in text and "GSPO, seed 1 (its other run did not finish)" in text
    _, text = claims.last_half(load.load([tmp_path]), "GSPO", "GSPO")
    assert "p =" in text

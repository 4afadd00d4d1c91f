"""The scaling figure: exponents by hand, and that it draws what is there, also before all points
are.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

from gspo.analysis import fig_scaling  # noqa: E402 (analysis/ is no package)


def point(curve: str, x: int, threads: int, seconds: float) -> dict:
    return {
        "curve": curve, "x": x, "threads": threads, "total_s": seconds, "rollout_s": seconds / 2,
        "update_s": seconds / 3, "peak_memory_mib": 500.0 + x, "tokens": 100 * x,
    }  # fmt: skip


POINTS = [point("experts", x, 1, x / 10) for x in (16, 4, 8)] + [point("experts", 4, 2, 0.3)]
POINTS += [point("response tokens", x, 1, (x / 64) ** 2) for x in (64, 128)]


def test_exponents_are_slopes_between_neighbouring_points():
    found = fig_scaling.lines(POINTS)
    assert [p["x"] for p in found["experts", 1]] == [4, 8, 16]
    assert fig_scaling.exponent(found["experts", 1], "total_s") == pytest.approx(1)
    assert fig_scaling.exponent(found["response tokens", 1], "total_s") == pytest.approx(2)
    table = fig_scaling.table(POINTS)
    assert len(table) == 2 + len(POINTS)
    assert "| experts | 1 | 8 | 0.80 | 0.40 | 0.27 | 1000 | 508 | 1.00 |" in [
        " ".join(line.split()) for line in table
    ]


@pytest.mark.slow
def test_the_script_draws_and_says_what_is_missing(tmp_path):
    (tmp_path / "scaling.json").write_text(json.dumps({"points": POINTS}))
    command = [sys.executable, str(ROOT / "analysis" / "fig_scaling.py")]
    done = subprocess.run(
        [*command, str(tmp_path / "scaling.json"), f"out={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fig_scaling.png").stat().st_size > 10_000 and (
        tmp_path / "fig_scaling.pdf"
    ).exists()
    missing = subprocess.run(
        [*command, str(tmp_path / "none.json")], capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2 and "curves=true" in missing.stderr


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "no points"),
        ([{"curve": "experts"}], "has no threads"),
        ([point("experts", 4, 2, 0.3)], "'experts' was not measured with one thread"),
    ],
)
def test_points_that_cannot_be_drawn_are_refused(points, message):
    with pytest.raises(ValueError, match=message):
        fig_scaling.check_records(points)

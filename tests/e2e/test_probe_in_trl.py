"""The probe in TRL's GRPOTrainer, in TRL's own environment, beside our trainer on the same batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.analysis.foreign import read_foreign

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peer" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="TRL is not installed: make setup-peer"),
]


def trained(case: str, folder: Path) -> tuple[list[dict], list[dict]]:
    """The rows of TRL's trainer_state.json, and our metrics of the same rollout batches."""
    script = ROOT / "tests" / "support" / "probe_in_trl.py"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "1",
    }
    command = [str(PYTHON), str(script), str(folder), case]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    return result["trl"], result["ours"]


def probed(row: dict) -> dict[str, float]:
    """The probe's metrics in a row, by our names."""
    return {
        name.removeprefix("gspo/"): value for name, value in row.items() if name.startswith("gspo/")
    }


def read_as_ours(rows: list[dict], case: str, folder: Path) -> list[dict[str, float]]:
    """The rows of the figures, read from TRL's history; a figure of them is drawn too."""
    state = {"log_history": rows, "max_steps": 8, "logging_steps": 1}
    (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    about = f"objective: {case}\nupdates_per_batch: 4\nsteps: 2\n"
    (folder / "foreign_run.yaml").write_text(about, encoding="utf-8")
    words = ["metrics=[clip/token_active,routing/consistency]", f"out={folder / 'figures'}"]
    command = [sys.executable, "-m", "gspo", "figure", "curves", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((folder / "figures").glob("*.png")), done.stdout
    return read_foreign(folder / "trainer_state.json").rows


def assert_equal(measured: dict[str, float], ours: dict[str, float]) -> None:
    assert measured.keys() <= ours.keys()
    for name, value in measured.items():
        allowed = 1e-4
        if name == "ratio/floor_of_range":
            allowed = 0.1  # it is rounding itself
        if name.startswith("routing/"):
            allowed = 3e-3  # rounding may decide a tie of a router
        assert value == pytest.approx(ours[name], rel=1e-3, abs=allowed), name


@pytest.mark.parametrize("case", ["gspo", "grpo"])
def test_the_rows_of_trl_have_the_numbers_of_our_trainer(case, tmp_path):
    rows, ours = trained(case, tmp_path)
    with_probe = [row for row in rows if probed(row)]
    assert [row["step"] for row in with_probe] == [4, 8], "the last update on each rollout batch"
    for row, expected in zip(with_probe, ours, strict=True):
        measured = probed(row)
        assert len(measured) > 40
        assert_equal(measured, expected)
        assert 0 < measured["routing/consistency"] < 1
        assert 0 < measured["clip/token_active"] < 1
        drawn = read_as_ours(rows, case, tmp_path)[row["step"] // 4 - 1]
        assert {name: drawn[name] for name in measured} == measured
        if case == "gspo":
            # TRL's own share is of the sequences of an update
            updates = [r for r in rows if row["step"] - 4 < r["step"] <= row["step"]]
            own_shares = [r["clip_ratio/region_mean"] for r in updates if "loss" in r]
            mean = sum(own_shares) / len(own_shares)
            assert measured["clip/sequence_active"] == pytest.approx(mean, abs=1e-6)


def test_a_dense_model_with_one_update_has_ratios_of_1_and_no_routing(tmp_path):
    rows, ours = trained("dense", tmp_path)
    with_probe = [row for row in rows if probed(row)]
    assert [row["step"] for row in with_probe] == [1, 2]
    for row, expected in zip(with_probe, ours, strict=True):
        measured = probed(row)
        assert_equal(measured, expected)
        assert measured["ratio/token_min"] == measured["ratio/token_max"] == 1
        assert measured["clip/token_active"] == 0
        assert not any(name.startswith(("routing/", "ratio/floor")) for name in measured)

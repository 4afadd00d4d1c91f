"""The probe in TRL's GRPOTrainer, in TRL's own environment, beside our trainer on the same batches."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peer" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="TRL is not installed: make setup-peer"),
]


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_rows_of_trl_have_the_numbers_of_our_trainer(level, tmp_path):
    script = ROOT / "tests" / "support" / "probe_in_trl.py"
    command = [str(PYTHON), str(script), str(tmp_path), level]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    rows = [row for row in result["trl"] if "gspo/clip/token_active" in row]
    assert [row["step"] for row in rows] == [4, 8], "the last update on each rollout batch"

    region = "clip_ratio/region_mean"
    for row, ours in zip(rows, result["ours"], strict=True):
        probed = {
            name.removeprefix("gspo/"): value
            for name, value in row.items()
            if name.startswith("gspo/")
        }
        assert len(probed) > 40 and probed.keys() <= ours.keys()
        for name, value in probed.items():
            allowed = 1e-4
            if name == "ratio/floor_of_range":
                allowed = 0.1  # it is rounding itself
            if name.startswith("routing/"):
                allowed = 3e-3  # rounding may decide a tie of a router
            assert value == pytest.approx(ours[name], rel=1e-3, abs=allowed), name
        assert 0 < probed["routing/consistency"] < 1
        assert 0 < probed["clip/token_active"] < 1
        # TRL's own number: the mean over the four updates of the rollout batch
        updates = [r for r in result["trl"] if row["step"] - 4 < r["step"] <= row["step"]]
        mean = sum(update.get(region, 0) for update in updates) / 4
        if level == "sequence":
            assert probed["clip/sequence_active"] == pytest.approx(mean, abs=1e-6)

"""analysis/fig_objectives.py on runs whose numbers are known."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from gspo.algorithm import objectives
from gspo.analysis import fig_objectives, load
from gspo.config.settings import Settings
from gspo.io.ranges import fields_with
from gspo.tracking import metrics

STEPS = 20
CLIPPED = {"gspo": (0.2, 0.4), "grpo": (0.001, 0.002), "sapo": (0.0, 0.0), "luspo": (0.08, 0.15)}
WEIGHT = {"gspo": 0.8, "grpo": 0.998, "sapo": 1.0, "luspo": 29.6}
GAINS = {
    "gspo": {1: 0.1, 2: 0.2, 3: 0.3},
    "grpo": {1: 0.25, 2: 0.25, 3: 0.25},
    "sapo": {1: 0.3},
    "luspo": {2: -0.1},
}


def write_run(folder: Path, name: str, seed: int, gain: float, steps: int = STEPS) -> Path:
    """Reward 0.5 in the first 5 batches, 0.5 + gain in the last 10, something else between; row 0
    is not a batch.
    """
    active, outside = CLIPPED[name]
    rows: list[dict] = [{"step": 0, "reward/mean": 9.0, "clip/weight": 9.0}]
    for s in range(1, steps + 1):
        # s / 10.5: mean 1 over 1 .. 20
        share = {"clip/token_active": active * s / 10.5, "clip/token_outside": outside}
        row = {
            "step": s,
            "reward/mean": 0.5 if s <= 5 else 0.7 if s <= STEPS - 10 else 0.5 + gain,
            **share,
        }
        rows.append(
            row
            | {
                "clip/weight": WEIGHT[name],
                "optim/grad_norm": None if s == 1 else 0.4,
                "length/mean": 21,
            }
        )
    settings = {
        "seed": seed,
        "steps": STEPS,
        "objective": {"name": name},
        "policy": {"routing_replay": "none"},
        "rollout": {"prompts_per_step": 16, "group_size": 8},
        "trainer": {
            "minibatches": 4,
            "aggregation": {"mode": "token-mean" if name == "sapo" else "seq-mean"},
        },
        "optim": {"max_grad_norm": 1.0},
        "model": {"name": "tiny_moe"},
    }
    folder = folder / f"{name}-seed{seed}"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("objectives")
    for name, gains in GAINS.items():
        for seed, gain in gains.items():
            write_run(folder, name, seed, gain)
    return folder


def cells(lines: list[str]) -> dict[str, dict[str, str]]:
    """The Markdown table as {arm: {column: cell}}, in its order."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_the_table_has_the_known_numbers(runs):
    table = cells(fig_objectives.table(fig_objectives.measure(load.load([runs]))))
    assert list(table) == ["SAPO", "GRPO", "GSPO", "LUSPO"]  # by gain
    assert table["GSPO"] == {
        "arm": "GSPO",
        "seeds": "1, 2, 3",
        "reward, start": "0.500",
        "end": "0.700",
        "gain [min, max over seeds]": "+0.200 [+0.100, +0.300]",
        "active": "0.2",
        "outside": "0.4",
        "weight": "0.800",
        "grad norm": "0.4",
        "mean length": "21.0",
    }
    assert table["GRPO"]["active"] == "0.001" and table["LUSPO"]["weight"] == "29.600"
    assert table["SAPO"]["active"] == table["SAPO"]["outside"] == "never"


def test_unequal_seeds(runs):
    data = load.load([runs])
    table = cells(fig_objectives.table(fig_objectives.measure(data)))
    assert (table["SAPO"]["seeds"], table["SAPO"]["gain [min, max over seeds]"]) == ("1", "+0.300")
    text = load.describe(data, data.arms)
    assert "GSPO, GRPO: 3 seeds (1, 2, 3); LUSPO: 1 seed (2); SAPO: 1 seed (1); 20 batches" in text
    assert text.endswith("The runs differ also in trainer.aggregation.mode.")


@pytest.mark.slow
def test_the_figure_shows_zero_as_never_and_is_the_same_twice(runs, tmp_path, monkeypatch):
    shown = []
    save = fig_objectives.style.save
    monkeypatch.setattr(
        fig_objectives.style, "save", lambda *args: (shown.append(args), save(*args))[1]
    )
    data = load.load([runs])
    first, again = (fig_objectives.draw(data, tmp_path / name) for name in ("first", "again"))
    assert [path.suffix for path in first] == [".pdf", ".png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]

    figure, _, _, caption, _ = shown[0]
    gain, active, outside, weight, _ = figure.axes
    assert [text.get_text() for text in gain.get_yticklabels()] == ["SAPO", "GRPO", "GSPO", "LUSPO"]
    # SAPO, in row 0, at the place of "never": left of every share that is not 0
    for ax in (active, outside):
        never = ax.get_xticks()[[text.get_text() for text in ax.get_xticklabels()].index("never")]
        at = {
            y: x
            for line in ax.lines
            for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        }
        assert at.pop(0) == never and never < min(at.values())
    assert "29.6" in weight.texts[0].get_text() and weight.get_xlim()[1] < 2
    assert (
        "never: not of one token (SAPO: no band)" in caption
        and "seed" in caption
        and "norm 1." in caption
    )


@pytest.mark.slow
def test_one_arm_that_always_clips_and_old_runs_without_weight(tmp_path, capsys, monkeypatch):
    file = write_run(tmp_path / "runs", "gspo", 1, 0.1) / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(
        "".join(json.dumps({k: v for k, v in r.items() if k != "clip/weight"}) + "\n" for r in rows)
    )
    monkeypatch.setattr(
        sys, "argv", ["fig_objectives.py", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    )
    fig_objectives.main()
    printed = capsys.readouterr().out
    assert "| GSPO | 1     | 0.500 " in printed and "never" not in printed
    assert (
        cells([line for line in printed.splitlines() if line.startswith("|")])["GSPO"]["weight"]
        == "-"
    )
    assert all(
        (tmp_path / "out" / f"fig_objectives.{suffix}").is_file() for suffix in ("pdf", "png")
    )


def test_all_runs_are_cut_to_the_batches_they_share(tmp_path):
    write_run(tmp_path, "gspo", 1, 0.1)
    write_run(tmp_path, "grpo", 1, 0.1, steps=16)
    numbers = fig_objectives.measure(load.load([tmp_path]))
    # of batches 1 .. 16
    assert numbers.loc[("GSPO", 1), "active"] == pytest.approx(0.2 * 8.5 / 10.5)
    short = write_run(tmp_path, "sapo", 1, 0.1, steps=14)
    with pytest.raises(load.RunsError) as stop:
        fig_objectives.measure(load.load([tmp_path]))
    assert (
        str(stop.value) == f"fig_objectives needs 15 rollout batches of every run; {short} has 14"
    )


def test_names_and_metrics_are_those_of_the_package():
    assert set(load.OBJECTIVES) == {objective.name for objective in objectives.OBJECTIVES}
    assert {*fields_with(Settings, "outside_result"), "seed"} == set(load.NOT_THE_ARM)
    assert all(metrics.lookup(name).meaning for name in fig_objectives.MEANS.values())

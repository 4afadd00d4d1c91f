"""analysis/fig_sweep.py, fig_clip_range.py and early_warning.py on runs whose numbers are known."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from gspo.analysis import (
    arm_styles,
    choosing,
    early_warning,
    fig_clip_range,
    fig_contrast,
    fig_curves,
    fig_routing,
    fig_sweep,
    load,
    panels,
    style,
    warning_rules,
)
from gspo.analysis.grid import run_numbers
from gspo.tracking.collapse import SIGNALS
from gspo.tracking.monitor import Thresholds
from recorded_runs import COLLAPSED, HEALTHY, write

ROOT = Path(__file__).parents[3]


def cells(lines: list[str]) -> list[dict[str, str]]:
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def learning_rates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lr")
    for seed in (1, 2, 3):
        for lr in (1e-4, 4e-4):
            write(folder, "gspo", [0.4] * 5 + [0.5 + 0.01 * seed] * 85, seed, optim__lr=lr)
            write(folder, "grpo", COLLAPSED if lr > 1e-4 else HEALTHY, seed, optim__lr=lr)
    return folder


def test_a_sweep_by_hand(learning_rates):
    table = cells(
        fig_sweep.table(
            fig_sweep.measure(load.load([learning_rates]), "optim.lr", ""), "optim.lr", ""
        )
    )
    assert [row["learning rate"] for row in table] == ["0.0001", "0.0001", "0.0004", "0.0004"]
    grpo, gspo = table[2:]
    assert (grpo["objective"], grpo["collapsed"], grpo["end"], grpo["clipped"]) == (
        "GRPO",
        "3 of 3",
        "0.100",
        "0.001",
    )
    assert (gspo["collapsed"], gspo["start"], gspo["end"], gspo["range"]) == (
        "0 of 3",
        "0.400",
        "0.520",
        "0.51-0.53",
    )
    # .41, .42, .43: mean .42, t(2) = 4.303, sd .01, sqrt 3
    assert gspo["GSPO - GRPO"] == "+0.420 [+0.395, +0.445]" and not grpo["GSPO - GRPO"]


def test_the_end_has_as_many_batches_as_one_says(tmp_path):
    write(tmp_path, "gspo", [0.4] * 50 + [0.5] * 20 + [0.6] * 20, objective__clip_high=0.3)
    write(tmp_path, "gspo", [0.4] * 90, 2, objective__clip_low=0.1, objective__clip_high=0.2)
    data, x = load.load([tmp_path]), "objective.clip_low"
    ends = [
        fig_sweep.measure(data, x, "", *end).set_index("seed")["end"][1]
        for end in ((), (40,), (90,))
    ]
    assert ends == pytest.approx([0.6, 0.55, (0.4 * 50 + 0.5 * 20 + 0.6 * 20) / 90])
    with pytest.raises(load.RunsError, match="at least one batch"):
        fig_sweep.measure(data, x, "", 0)


def test_the_recorded_options_make_no_other_arm(tmp_path):
    """A run from before they were recorded, and one that was made with objective=gspo_tiny
    experiment=micro_moe.
    """
    write(tmp_path, "gspo", HEALTHY, seed=1)
    file = write(tmp_path, "gspo", HEALTHY, seed=2) / "settings.yaml"
    options = {"objective": "gspo_tiny", "experiment": "micro_moe"}
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"options": options}))
    data = load.load([tmp_path])
    assert data.arms == ["GSPO"] and data.seeds("GSPO") == [1, 2] and data.notes == []
    assert data.of("GSPO")[1].settings["options.objective"] == "gspo_tiny"


@pytest.mark.slow
def test_a_sweep_over_two_settings_wants_both_named(learning_rates, tmp_path):
    write(tmp_path, "gspo", HEALTHY, trainer__minibatches=16)
    data = load.load([learning_rates, tmp_path])
    with pytest.raises(load.RunsError):
        fig_sweep.measure(data, "optim.lr", "")
    numbers = fig_sweep.measure(data, "optim.lr", "trainer.minibatches")
    assert fig_sweep.ordered(numbers["row"]) == [4, 16] and len(numbers) == 13
    with pytest.raises(load.RunsError):
        fig_sweep.measure(data, "optim.momentum", "")
    write(tmp_path / "wide", "gspo", HEALTHY, objective__clip_low=0.4)
    write(tmp_path / "short", "gspo", HEALTHY[:30])
    for odd in ("wide", "short"):
        with pytest.raises(load.RunsError):
            fig_sweep.measure(load.load([learning_rates, tmp_path / odd]), "optim.lr", "")
    assert [
        p.name for p in fig_sweep.draw(data, numbers, "optim.lr", "trainer.minibatches", tmp_path)
    ] == [
        "fig_sweep_known.pdf",
        "fig_sweep_known.png",
    ]


def test_replay_is_a_setting_where_it_is_swept(tmp_path):
    for replay in ("none", "r2"):
        write(tmp_path, "grpo", HEALTHY, policy__routing_replay=replay)
    data = load.load([tmp_path])
    assert set(fig_sweep.measure(data, "policy.routing_replay", "")["arm"]) == {"GRPO"}
    for run in data.runs:
        run.settings["optim.lr"] = 1e-4 if run.settings["policy.routing_replay"] == "none" else 2e-4
    assert set(fig_sweep.measure(data, "optim.lr", "")["arm"]) == {
        "GRPO",
        "GRPO + Routing Replay (R2)",
    }


def test_the_first_and_the_last_batches_count_by_step_and_whole_rows_of_means(tmp_path):
    """A log of another framework with a row per ten batches, and a run that has lost rows."""
    (run,) = load.load([write(tmp_path / "a", "gspo", [step / 200 for step in range(200)])]).runs
    run.rows = run.rows[run.rows["step"] % 10 == 0]
    run.settings["batches_per_row"] = 10
    numbers = run_numbers(run, 40, 40, {})
    assert numbers["start"] == pytest.approx((9 + 19 + 29 + 39) / 4 / 200)
    assert numbers["end"] == pytest.approx((169 + 179 + 189 + 199) / 4 / 200)
    assert run_numbers(run, 5, 10, {})["start"] == pytest.approx(9 / 200)
    (lost,) = load.load([write(tmp_path / "b", "gspo", HEALTHY)]).runs
    lost.rows = lost.rows[~lost.rows["step"].between(80, 89)]
    assert run_numbers(lost, 5, 11, {})["end"] == 0.5, "the one row that is left of them"


def test_where_takes_several_values_and_a_rollback_makes_an_arm(tmp_path):
    for seed in (1, 2, 3):
        write(tmp_path, "gspo", HEALTHY, seed)
    data = load.load([tmp_path], {"seed": "[1,3]"})
    assert [run.seed for run in data.runs] == [1, 3]
    with pytest.raises(load.RunsError, match=r"where\.seed=9: no run has it; there are 1, 2, 3"):
        load.load([tmp_path], {"seed": "[1,9]"})
    write(tmp_path, "gspo", HEALTHY, 1, monitor__action="rollback")
    write(tmp_path, "gspo", HEALTHY, 1, monitor__action="stop")
    with pytest.raises(load.RunsError, match="the same arm and seed twice"):
        load.load([tmp_path], {"monitor.action": "[null,stop]"})
    arms = load.load([tmp_path], {"monitor.action": "[rollback,stop]"}).arms
    assert arms == ["GSPO [monitor.action=rollback]", "GSPO [monitor.action=stop]"]


def test_an_unfinished_run_does_not_dilute_the_difference_of_two_studies(tmp_path):
    for study, rewards in (("a", [0.3] * 90), ("b", [0.3] * 10 + [0.4] * 80)):
        for seed in (1, 2, 3):
            write(tmp_path / study, "grpo", rewards, seed)
    (unfinished,) = (tmp_path / "b").glob("grpo-seed3*")
    rows = (unfinished / "metrics.jsonl").read_text().splitlines(keepends=True)
    (unfinished / "metrics.jsonl").write_text("".join(rows[:9]))
    first, second = (load.load([tmp_path / study]) for study in "ab")
    difference = fig_contrast.between(first, second)["GRPO"]
    assert difference.mean == pytest.approx(0.1) and difference.seeds == 2


@pytest.mark.slow
def test_clip_ranges_by_hand(tmp_path):
    for seed in (1, 2):
        for low, high in ((3e-4, 4e-4), (0.2, 0.27)):
            for name in ("gspo", "grpo"):
                clip_range = {"objective__clip_low": low, "objective__clip_high": high}
                write(tmp_path, name, HEALTHY, seed, **clip_range)
    numbers = fig_clip_range.measure(load.load([tmp_path]))
    first, second = cells(fig_clip_range.table(numbers))
    assert (
        first["range"] == "0.0003 / 0.0004"
        and first["GSPO clipped"] == "0.2"
        and second["GRPO clipped"] == "0.001"
    )
    assert first["GSPO / GRPO"].startswith("200 ") and "200 " in fig_clip_range.disparity(numbers)
    fig_clip_range.draw(load.load([tmp_path]), numbers, tmp_path)
    same_low = write(tmp_path / "more", "gspo", HEALTHY, 1, objective__clip_high=0.3)
    with pytest.raises(load.RunsError, match=r"two runs of GSPO, seed 1, low 0.2: choose one"):
        fig_clip_range.measure(load.load([tmp_path, same_low]))
    write(only := tmp_path / "only", "gspo", HEALTHY, objective__clip_high=1.0)
    write(two := tmp_path / "two", "grpo", HEALTHY, optim__lr=0.5)
    for folders in ([only], [only, two]):
        with pytest.raises(load.RunsError):
            fig_clip_range.measure(load.load(folders))


@pytest.fixture(scope="module")
def stressed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stressed")
    for kind in ({}, {"rollout__staleness": 8}, {"trainer__minibatches": 16}):
        for seed in range(1, 5):
            write(folder, "gspo", HEALTHY, seed, **kind)
        for seed in (1, 2):
            write(folder, "grpo", COLLAPSED, seed, optim__lr=1e-3, **kind)
    return folder


@pytest.mark.slow
def test_recorded_runs_give_the_table_of_the_runs_themselves(
    stressed, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(early_warning, "RECORDED", tmp_path / "kept")
    for arguments in ([str(stressed), "save=true"], []):
        monkeypatch.setattr(
            sys, "argv", ["early_warning.py", *arguments, f"out={tmp_path / 'figures'}"]
        )
        early_warning.main()
    first, second = re.sub(" +", " ", capsys.readouterr().out).split("6 of 18 runs collapsed")[1:]
    assert first == second and "| rollout.staleness=8 | GRPO | - | 2 of 2 |" in first
    assert sorted(p.stem for p in (tmp_path / "kept").iterdir()) == [
        "16_mini_batches", "learning_rate_alone", "rollout_staleness_8",
    ]  # fmt: skip
    row = next(line for line in first.splitlines() if line.startswith("| mismatch"))
    # fewer than five settings and seeds: the interval of a share is as of one run
    assert "| 1.00 [1.00, 1.00] |" in row and "| 1.00 [0.21, 1.00] |" in row
    assert next(
        line for line in first.splitlines() if line.startswith("| learning rate alone | 1.00")
    ).count("| - |")


def test_a_run_that_the_monitor_ended_counts_as_collapsed(tmp_path):
    for seed, planned in ((1, 90), (2, 300)):
        folder = write(tmp_path, "grpo", COLLAPSED, seed)
        settings = yaml.safe_load((folder / "settings.yaml").read_text()) | {"steps": planned}
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    assert early_warning.from_runs([tmp_path])[0]["run"].nunique() == 2


def test_unfinished_runs_are_not_judged(tmp_path):
    write(tmp_path, "gspo", HEALTHY)
    short = write(tmp_path, "gspo", HEALTHY, 2)
    lines = (short / "metrics.jsonl").read_text().splitlines()
    (short / "metrics.jsonl").write_text("\n".join(lines[:50]) + "\n")
    frame, notes = early_warning.from_runs([tmp_path])
    assert frame["run"].nunique() == 1 and any(note.startswith("unfinished") for note in notes)


@pytest.mark.slow
def test_the_recorded_runs_are_enough_and_small():
    frame = pd.read_parquet(early_warning.RECORDED)
    runs = warning_rules.stressor_runs(frame)
    collapsed = sum(run.collapsed is not None for run in runs)
    assert collapsed >= 20 and len(runs) - collapsed >= 20 and len({run.group for run in runs}) == 6
    assert sum(path.stat().st_size for path in early_warning.RECORDED.iterdir()) < 2e6
    assert {s.metric for s in SIGNALS.values()} <= set(frame)
    assert early_warning.shipped(frame) == {k: v for k, v in asdict(Thresholds()).items() if v}


@pytest.mark.slow
def test_curves_of_any_study(learning_rates, tmp_path, capsys):
    data = load.load([learning_rates])
    pdf, png = fig_curves.draw(data, tmp_path)
    assert (
        pdf.name == "fig_curves_known.pdf"
        and png.read_bytes() == fig_curves.draw(data, tmp_path)[1].read_bytes()
    )
    assert capsys.readouterr().out == ""
    fig_curves.draw(data, tmp_path, metrics=["reward/mean", "routing/consistency"])
    assert "have not recorded routing/consistency" in capsys.readouterr().out
    for metrics, said in (
        (["clop/share"], "'clop/share' is not in gspo/tracking/metrics.py"),
        (["kl/ref"], "none of kl/ref"),
    ):
        with pytest.raises(load.RunsError, match=said):
            fig_curves.draw(data, tmp_path, metrics=metrics)


@pytest.mark.slow
def test_a_sweep_tells_of_lost_batches_and_draws_runs_that_recorded_the_reward_alone(
    tmp_path, monkeypatch, capsys
):
    for lr in (1e-4, 4e-4):
        file = write(tmp_path / "runs", "gspo", HEALTHY, optim__lr=lr) / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [row for row in rows if row["step"] != 7]
        for row in rows:
            row.pop("clip/token_active", None)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["fig_sweep", str(tmp_path / "runs"), "x=optim.lr", f"out={tmp_path}"]
    monkeypatch.setattr("sys.argv", words)
    fig_sweep.main()
    printed = capsys.readouterr()
    assert "has no row of batch 7" in printed.out + printed.err
    assert (tmp_path / "fig_sweep_known.png").is_file()


def test_the_advice_to_choose_runs_can_be_followed(tmp_path):
    for seed in (1, 2):
        for lr in (1e-4, 4e-4):
            write(tmp_path, "gspo", HEALTHY, seed, optim__lr=lr, optim__warmup=0)
        write(tmp_path, "gspo", HEALTHY, seed, optim__lr=1e-4)
    data = load.load([tmp_path])
    advice = choosing.choose_one(data)
    assert "x=optim.lr" in advice and "x=optim.warmup" not in advice
    words = re.findall(r"where\.([\w.]+)=(\S+?)[ ;]", advice)
    runs = data.runs
    for key, value in words:
        runs = choosing.having(runs, key, value)
    assert sorted(run.seed for run in runs) == [1, 2]


@pytest.mark.parametrize("bands", [True, False])
def test_thin_lines_are_described_if_they_are_drawn(tmp_path, bands):
    data = load.load([write(tmp_path, "gspo", HEALTHY)])
    text = panels.how_drawn(data, data.arms, style.DEFAULTS, bands)
    assert ("Thin lines" in text) is bands


def test_a_figure_of_routing_says_that_models_have_no_experts_if_they_have_none(tmp_path):
    data = load.load([write(tmp_path, "gspo", HEALTHY)])
    assert "no experts" in fig_routing.why_not_drawn(data)
    for run in data.runs:
        run.settings["model.experts"] = 8
    assert "no experts" not in fig_routing.why_not_drawn(data)


def test_a_metric_of_ones_own_has_the_unit_that_a_run_directory_gives(tmp_path, monkeypatch):
    folder = write(tmp_path / "runs", "gspo", HEALTHY)
    rows = [
        json.loads(line) | {"custom/answers": 0.5}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels = []
    monkeypatch.setattr(
        style, "save", lambda figure, *_: labels.append(figure.axes[0].get_ylabel()) or []
    )
    for text in ('{"custom/answers": {"unit": "share", "meaning": "m"}}', "damaged", None):
        (folder / "custom_metrics.json").write_text(text) if text else (
            folder / "custom_metrics.json"
        ).unlink()
        fig_curves.draw(load.load([tmp_path]), tmp_path, metrics=["custom/answers"])
    assert labels == ["share", "unit not recorded", "unit not recorded"]


def test_what_a_logarithmic_axis_cannot_show_is_a_gap():
    ax = Figure().add_subplot()
    values = pd.DataFrame(
        {seed: [0.1 + 0.01 * seed, 0.0, 0.2, 0.3] for seed in (1, 2, 3)}, index=[1, 2, 3, 4]
    )
    panels.curve(
        ax,
        values,
        arm_styles.arm_style("GSPO"),
        style.FigureOptions(smooth=0, seeds=True),
        minimum=0.1,
    )
    thick = ax.lines[-1].get_ydata()
    assert pd.isna(thick).tolist() == [False, True, False, False] and thick[0] == pytest.approx(
        0.12
    )
    assert all((line.get_ydata()[np.isfinite(line.get_ydata())] >= 0.1).all() for line in ax.lines)


def test_values_are_sorted_by_size_and_written_so_that_they_are_found_again(tmp_path):
    rate = 10**-3.5
    runs = [
        write(tmp_path, "gspo", HEALTHY, seed, optim__lr=rate, trainer__minibatches=count)
        for seed, count in ((1, 16), (2, 4))
    ]
    data = load.load(runs)
    assert load.setting_values(data.runs, "trainer.minibatches") == "4 or 16"
    [text] = choosing.in_order([rate])
    assert choosing.having(data.runs, "optim.lr", text) == data.runs
    assert choosing.in_order([0.5, 1e-4, "a"]) == ["0.0001", "0.5", "a"]

"""What figures draw and say: the options, the arms that are there, the judged difference, 95 %
everywhere.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import yaml

from gspo.analysis import (
    arm_styles,
    early_warning,
    fig1_stability,
    fig2_clipping,
    fig3_routing_replay,
    fig_clip_range,
    fig_curves,
    fig_efficiency,
    fig_objectives,
    fig_routing,
    fig_scaling,
    fig_sweep,
    load,
    panels,
    paper,
    reproduce,
    script,
    style,
)
from gspo.analysis.load import GRPO, GRPO_R2, GSPO
from gspo.analysis.style import FigureOptions
from gspo.io.arguments import help_text, parsed
from gspo.statistics import t_quantile
from gspo.tracking.metrics import METRICS
from three_arms import write_arms, write_run

ANALYSIS = Path(__file__).parents[3] / "analysis"

THREE = {GSPO: (0.25, 0.2), GRPO_R2: (0.25, 0.1), GRPO: (0.25, 0.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_arms(tmp_path_factory.mktemp("figures") / "synthetic", THREE, steps=40)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> load.Data:
    """GSPO and GRPO, no replay, nothing routed."""
    folder = tmp_path_factory.mktemp("dense")
    for arm in (GSPO, GRPO):
        for seed in (1, 2, 3):
            file = (
                write_run(folder, arm, seed, 0.25, 0.1, 40, model={"name": "tiny_dense"})
                / "metrics.jsonl"
            )
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            rows = [
                {key: v for key, v in row.items() if not key.startswith("routing/")} for row in rows
            ]
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load.load([folder])


@pytest.fixture
def drawn(monkeypatch) -> list[tuple]:
    """What was given to `style.save`: (figure, caption) each, in place of files."""
    kept = []
    monkeypatch.setattr(
        style, "save", lambda figure, out, name, caption, view: kept.append((figure, caption)) or []
    )
    return kept


def said(capsys, call, *arguments) -> str:
    """The one line of an error with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        script.command(lambda: call(*arguments))
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, message
    return message


def panel(figure, title: str):
    (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left").startswith(title))
    return ax


# ----------------------------------------------------------------------------------------------------------
# options
def test_the_options_are_those_of_every_figure_and_explained():
    text = help_text(script.Options, "what it shows")
    for word in (
        "PATH ...",
        "where.KEY=VALUE",
        "seeds=false",
        "smooth=5",
        "log_x=false",
        "formats=[pdf,png]",
        "caption=true",
        "width=9",
    ):
        assert re.search(rf"{re.escape(word)}\s+[a-z]\w+", text), word
    for file in ANALYSIS.glob("*.py"):
        if re.match(r"fig|early|study_report|reproduce", file.name):
            assert "command_options(" in file.read_text() or "script.run(" in file.read_text()


@pytest.mark.parametrize(
    ("refused", "option", "why"),
    [
        (fig2_clipping.REFUSED, "smooth=3", "no curve"),
        (fig2_clipping.REFUSED, "log_x=true", "bars start at 0"),
        (
            fig_efficiency.REFUSED,
            "smooth=3",
            "trailing means of 10 batches, as the criterion says",
        ),
        (fig_objectives.REFUSED, "seeds=true", "dots already"),
        (fig_sweep.REFUSED, "smooth=1", "no curve"),
        (fig_clip_range.REFUSED, "log_x=true", "logarithmic already"),
        (fig_scaling.REFUSED, "seeds=true", "it measures time"),
        (early_warning.REFUSED, "seeds=true", "signals"),
    ],
)
def test_an_option_that_can_do_nothing_is_refused(refused, option, why, capsys, tmp_path):
    message = said(capsys, parsed, script.Options, ["runs", f"out={tmp_path}", option], refused)
    key = option.split("=")[0]
    assert f"{key}: does nothing here: " in message and why in message
    assert f"  {key}=" not in help_text(script.Options, "", refused)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("smooth=-1", "smooth=-1: must be a whole number of at least 0"),
        ("formats=gif", "formats=gif: choose one of pdf, png, svg"),
        ("width=2", "width=2.0: must lie in [6, 40]"),
        ("width=wide", "width=wide: must be a number"),
        ("out=/proc/nowhere", "out=/proc/nowhere cannot be made: "),
    ],
)
def test_wrong_values_are_refused(option, why, capsys, tmp_path):
    assert why in said(capsys, parsed, script.Options, ["runs", f"out={tmp_path}", option])


def test_a_refused_figure_leaves_no_folder(tmp_path):
    script.Options(paths=("runs",), out=tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_formats_width_and_caption(folder, tmp_path):
    data, view = load.load([folder]), FigureOptions(formats=("svg", "png"), width=7)
    svg, png = fig2_clipping.draw(data, tmp_path / "a", view)
    assert (svg.suffix, png.suffix) == (".svg", ".png")
    assert svg.read_bytes() == fig2_clipping.draw(data, tmp_path / "b", view)[0].read_bytes()
    (bare,) = fig2_clipping.draw(
        data, tmp_path / "c", FigureOptions(formats=("png",), width=7, caption=False)
    )
    whole, alone = matplotlib.image.imread(png), matplotlib.image.imread(bare)
    assert whole.shape[1] == alone.shape[1] == 7 * 160 and whole.shape[0] > alone.shape[0] + 50


@pytest.mark.slow
def test_seeds_smoothing_and_the_logarithmic_axis(folder, drawn):
    data = load.load([folder])
    for view in (FigureOptions(), FigureOptions(seeds=True), FigureOptions(smooth=0, log_x=True)):
        fig3_routing_replay.draw(data, Path(), view)
    plain, seeds, raw = (panel(figure, "Training reward") for figure, _ in drawn)
    assert len(seeds.lines) == len(plain.lines) + 6, "a line more for each of 2 x 3 seeds"
    assert raw.get_xscale() == "log" and plain.get_xscale() == "linear"
    mean = data.table(GRPO_R2, "reward/mean").mean(axis=1)
    (unsmoothed,) = (
        x
        for x in raw.lines
        if x.get_color() == arm_styles.arm_style(GRPO_R2).colour and x.get_linewidth() > 2
    )
    assert unsmoothed.get_ydata() == pytest.approx(mean.to_numpy())
    captions = [caption for _, caption in drawn]
    assert "single seeds" not in captions[0] and "Thin lines: single seeds." in captions[1]
    assert (
        "smoothed over ±5 batches" in captions[0] and "mean over seeds, not smoothed" in captions[2]
    )


def test_seeds_of_single_seeds_are_refused(tmp_path, capsys):
    write_arms(tmp_path / "study", THREE, seeds=(1,), steps=12)
    options = script.Options(paths=(str(tmp_path),), out=tmp_path / "out", seeds=True)
    assert "seeds=true does nothing with one seed of every arm" in said(
        capsys, script.read, options
    )


def test_a_folder_of_two_studies_says_what_to_type(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gspo figure stability"])
    for study in ("dense", "moe"):
        write_run(tmp_path / study, GSPO, 1, 0.2, 0.1, steps=5, study=study)
    options = script.Options(paths=(str(tmp_path),), out=tmp_path / "out")
    assert said(capsys, script.read, options) == (
        f"error: {tmp_path} holds 2 studies (dense, moe): name one, as in: "
        f"gspo figure stability {tmp_path / 'dense'}\n"
    )
    assert len(script.read(replace(options, paths=(str(tmp_path / "moe"),))).runs) == 1
    # studies are meant to be together in curves
    settings = tmp_path / "dense" / "gspo-none-seed1" / "settings.yaml"
    settings.write_text(yaml.safe_dump(yaml.safe_load(settings.read_text()) | {"seed": 2}))
    assert len(script.read(options, several_studies=True).runs) == 2


# ------------------------------------------------------------------------------------------------
# the arms there are
@pytest.mark.slow
def test_a_dense_study_draws_the_arms_that_it_has(dense, drawn, capsys):
    for figure in (fig1_stability, fig2_clipping, fig_efficiency):
        figure.draw(dense, Path())
    for _, caption in drawn:
        assert "Arms: GSPO, GRPO." in caption and "tiny_dense" in caption
    names = [
        text.get_text() for text in panel(drawn[0][0], "Training reward").texts if text.get_text()
    ]
    assert sorted(names) == ["GRPO", "GSPO"]
    message = said(capsys, fig3_routing_replay.draw, dense, Path())
    assert message.startswith(
        "error: fig3 needs arms GRPO + Routing Replay (R2) and GRPO (these runs route nothing: "
    )
    assert "error: fig_routing needs routing/consistency_layer_*" in said(
        capsys, fig_routing.draw, dense, Path()
    )
    _, left_out = reproduce.draw_all(dense, Path(), FigureOptions())
    assert [line.split(" ")[0] for line in left_out] == ["fig3_routing_replay", "fig_routing"]


def test_one_arm_is_drawn_alone(folder, drawn):
    data = load.load([path for path in folder.iterdir() if "gspo" in path.name])
    fig1_stability.draw(data, Path())
    fig2_clipping.draw(data, Path())
    assert (
        "No difference is drawn: only GSPO is there." in drawn[0][1] and "Claim" not in drawn[0][1]
    )
    assert "Arm: GSPO." in drawn[1][1]


def test_runs_without_compute_are_drawn_over_batches(folder):
    data = load.load([folder])
    data.rows = data.rows.drop(columns="compute/flops")
    assert fig_efficiency.why_not_drawn(data) == "needs compute/flops of every run"
    ax = style.canvas(3, FigureOptions()).subplots()
    panels.reward_against_compute(ax, data, (GSPO, GRPO), FigureOptions())
    assert ax.get_xlabel() == "rollout batch"


# ---------------------------------------------------------------------------------------------------
# what is judged
def test_the_judged_difference_is_drawn(folder, drawn):
    data = load.load([folder])
    fig1_stability.draw(data, Path())
    fig3_routing_replay.draw(data, Path())
    for (figure, caption), (a, b) in zip(drawn, ((GSPO, GRPO_R2), (GRPO_R2, GRPO)), strict=True):
        ax = panel(figure, "Paired difference")
        each = (data.table(a, "reward/mean") - data.table(b, "reward/mean")).loc[21:].mean()
        zero, dots, interval, mean = ax.lines
        assert list(zero.get_ydata()) == [0, 0]
        assert dots.get_ydata() == pytest.approx(each.to_numpy())
        half = t_quantile(2) * each.std() / np.sqrt(3)
        assert interval.get_ydata() == pytest.approx([each.mean() - half, each.mean() + half])
        assert mean.get_ydata() == pytest.approx([each.mean()])
        assert ax.get_title(loc="left") == f"Paired difference\n{each.mean():+.3f}, p = 0.25"
        assert (
            "paired by seed; bar: 95 % t interval over 3 seeds; p: exact sign-flip test" in caption
        )


def test_the_papers_benchmarks_stand_below_our_scores(folder, drawn):
    fig1_stability.draw(load.load([folder]), Path())
    for name, first, last in (
        ("AIME'24", 66.97, 82.68),
        ("LiveCodeBench", 54.51, 67.98),
        ("CodeForces", 1791, 2075),
    ):
        gspo, rival = panel(drawn[0][0], f"The paper's {name}").lines
        assert [gspo.get_ydata()[0], gspo.get_ydata()[-1]] == pytest.approx([first, last], abs=0.5)
        assert (
            gspo.get_color() == arm_styles.arm_style(GSPO).colour
            and rival.get_color() == arm_styles.arm_style(GRPO_R2).colour
        )
    # two of CodeForces hidden
    assert len(paper.series("fig1_aime24", GRPO_R2).dropna()) == len(rival.get_ydata()) + 1


@pytest.mark.slow
def test_bars_and_bands_are_95_percent_and_said_to_be(folder, drawn):
    data = load.load([folder])
    for figure in (
        fig1_stability,
        fig2_clipping,
        fig3_routing_replay,
        fig_efficiency,
        fig_routing,
        fig_curves,
    ):
        figure.draw(data, Path())
    for _, caption in drawn:
        assert re.search("95 % (t )?intervals?", caption) and "1 standard error" not in caption
    bars = panel(drawn[0][0], "math hard").collections[0].get_segments()
    assert [bar[1, 1] - bar[0, 1] for bar in bars] == pytest.approx([2 * 1.96 * 0.02] * len(bars))


@pytest.mark.slow
def test_every_axis_has_a_label(folder, drawn):
    assert not [
        metric.name for metric in METRICS if metric.unit in ("1", "") and metric.name != "custom/*"
    ]
    data = load.load([folder])
    fig1_stability.draw(data, Path())
    fig3_routing_replay.draw(data, Path())
    for title in ("Training reward", "Paired difference", "The paper's", "Experts kept"):
        for figure, _ in drawn:
            for ax in figure.axes:
                if ax.get_title(loc="left").startswith(title):
                    assert ax.get_ylabel() and ax.get_xlabel(), title

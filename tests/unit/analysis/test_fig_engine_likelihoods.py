"""analysis/fig_engine_likelihoods.py on runs whose numbers are known."""

import json
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml

from gspo.analysis import engine_likelihoods, load
from gspo.analysis import fig_engine_likelihoods as fig
from gspo.tracking import metrics

STEPS = 20
RANGES = {"gspo": (0.0004, 0.0005), "grpo": (0.2, 0.27)}
FIRST = {"gspo": 0.6, "grpo": 0.002}  # outside in the first mini-batch: bfloat16, engine
# bfloat16, engine - trainer
LOSS = {"gspo": {1: -0.01, 2: -0.02, 3: -0.03}, "grpo": {1: -0.11, 2: -0.13, 3: -0.12}}
K3 = {"none": 4e-4, "r3": 1e-4}


def write_run(
    folder: Path, seed: int, name: str, old: str, dtype: str, replay: str, loss: float = 0.0
) -> Path:
    """Reward 0.5 in the first 5 batches, 0.5 + seed / 20 + loss in the last 10, something else
    between; the shares' means over the 20 batches are those above. Row 0 is not a batch."""
    coarse, gap = dtype == "bfloat16", old == "engine" and dtype == "bfloat16"
    rows: list[dict] = [{"step": 0, "reward/mean": 9.0, "mismatch/k3": 9.0}]
    for s in range(1, STEPS + 1):
        reward = (
            0.5
            if s <= 5
            else 0.1
            if s <= STEPS - 10
            else 0.5 + seed / 20 + loss + (0.04 if s % 2 else -0.04)
        )
        first = FIRST[name] * s / 10.5 if gap else 0.0
        row = {
            "step": s,
            "reward/mean": reward,
            "clip/token_outside_minibatch_1": first,
            "clip/token_outside": 0.3,
        }
        row |= {
            "clip/token_active_minibatch_1": first / 2,
            "clip/token_active": 0.1,
            "optim/grad_norm": 0.4,
        }
        row |= {
            "mismatch/k3": K3[replay] if coarse else 1e-13,
            "mismatch/sequence_log_abs": 0.0012 if coarse else 1e-7,
        }
        row |= {
            "mismatch/beyond_2": 0.01 if coarse else 0.0,
            "routing/engine_agreement": 0.95 if coarse else 1.0,
        }
        rows.append(row)
    low, high = RANGES[name]
    settings = {
        "seed": seed,
        "steps": STEPS,
        "objective": {"name": name, "clip_low": low, "clip_high": high},
        "policy": {"routing_replay": replay, "old_logprobs": old},
        "rollout": {"dtype": dtype},
        "model": {"name": "tiny_moe"},
    }
    folder = folder / f"{name}-{old}-{dtype}-{replay}-seed{seed}"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_all(folder: Path, seeds: tuple[int, ...] = (1, 2, 3), losses: dict = LOSS) -> Path:
    arms = product(
        ("gspo", "grpo"), ("step_start", "engine"), ("float32", "bfloat16"), ("none", "r3")
    )
    for (name, old, dtype, replay), seed in product(arms, seeds):
        lost = old == "engine" and dtype == "bfloat16"
        write_run(folder, seed, name, old, dtype, replay, losses[name][seed] if lost else 0.0)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_all(tmp_path_factory.mktemp("likelihoods"))


@pytest.fixture
def runs(whole, tmp_path) -> Path:
    """A copy of all the runs, to take some away."""
    return Path(shutil.copytree(whole, tmp_path / "runs"))


def read(folder: Path) -> load.Data:
    return fig.chosen(load.load([folder]))


def cells(lines: list[str]) -> dict[str, dict[str, str]]:
    """A Markdown table as {first cell: {column: cell}}."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


@pytest.mark.slow
def test_the_effect_is_paired_by_seed(whole):
    interval, seeds = fig.effect(read(whole), "bfloat16", "GSPO", "R3")
    assert seeds.to_dict() == pytest.approx(LOSS["gspo"])
    half = 4.302653 * 0.01 / 3**0.5  # the seeds' own levels, 0.05 apart, cancel
    assert (interval.mean, interval.low, interval.high) == pytest.approx(
        (-0.02, -0.02 - half, -0.02 + half), abs=1e-6
    )
    interval, seeds = fig.effect(read(whole), "float32", "GRPO", "no replay")
    assert interval.mean == pytest.approx(0, abs=1e-12) and seeds.abs().max() < 1e-12


def test_the_difference_of_differences(whole):
    interval, both = engine_likelihoods.contrast(read(whole), "bfloat16", "no replay")
    assert both["GRPO"].to_dict() == pytest.approx(LOSS["grpo"])
    spread = 0.01  # of 0.10, 0.11, 0.09
    half = 4.302653 * spread / 3**0.5
    assert (interval.mean, interval.low, interval.high) == pytest.approx(
        (0.10, 0.10 - half, 0.10 + half), abs=1e-6
    )
    assert interval.p() == 0.25


@pytest.mark.slow
def test_the_table_has_the_known_numbers(whole):
    table = cells(fig.arm_table(read(whole)))
    assert len(table) == 16
    assert table["GSPO, bfloat16, R3, engine"] == {
        "arm": "GSPO, bfloat16, R3, engine",
        "seeds": "1, 2, 3",
        "reward, start": "0.500",
        "last 10": "0.580",
        "gain [min, max over seeds]": "+0.080 [+0.040, +0.120]",
        "outside, first": "0.6",
        "outside, all": "0.3",
        "active, first": "0.3",
        "active, all": "0.1",
        "k3": "0.0001",
        "abs log s": "0.0012",
        "F(2)": "0.01",
        "agreement": "0.9500",
        "grad norm": "0.4",
    }
    assert table["GSPO, bfloat16, R3, trainer"]["outside, first"] == "0"  # by construction
    assert table["GRPO, bfloat16, no replay, engine"]["active, first"] == "0.001"
    effects = cells(fig.effect_table(read(whole)))
    assert (
        effects["GRPO, bfloat16, R3"]["each seed"] == "1: -0.110, 2: -0.130, 3: -0.120"
        and len(effects) == 8
    )


def test_the_gap_in_words(whole):
    text = "\n".join(fig.verdict(read(whole)))
    assert "outside the clip range: 0.6 of GSPO's tokens (0.3 clipped), 0.002 of GRPO's" in text
    assert (
        "no replay, trainer's log-probs: mean |log s| 0.0012, 3 times the lower side of GSPO's clip range"
        in text
    )
    routing = "GRPO, bfloat16, trainer's log-probs: k3 0.0004 without R3, 0.0001 with: a share of 0.75 [0.75, 0.75]"
    assert routing in text
    assert "in float32, where only rounding differs, a single seed's effect is up to 0.000" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "gspo, words",
    [
        (
            {1: -0.01, 2: -0.02, 3: -0.03},
            "Points to this: GSPO loses less (or gains more) than GRPO; p is not below 0.05",
        ),
        (
            {1: -0.21, 2: -0.22, 3: -0.23},
            "Points to this: GSPO loses more (or gains less) than GRPO; p is not below",
        ),
        (
            {1: 0.05, 2: -0.15, 3: -0.16},
            "Not told apart: the interval includes 0, and any difference within it",
        ),
        (
            {1: 0.05, 2: -0.25, 3: -0.26},
            "Not told apart: the interval includes 0, and any difference within it",
        ),
    ],
)
def test_the_answer_of_three_seeds(tmp_path, gspo, words):
    data = read(write_all(tmp_path, losses={"gspo": gspo, "grpo": LOSS["grpo"]}))
    sentence = engine_likelihoods.answer(data, "bfloat16", "no replay")
    assert words in sentence and sentence.count("old apart") == ("Not told" in words)
    assert "by -0.120 with GRPO" in sentence and "3 seeds cannot go below 0.25" in sentence
    assert "GSPO - GRPO +0.000" in engine_likelihoods.answer(data, "float32", "no replay")


@pytest.mark.parametrize(
    ("loss", "words"), [(-0.02, "GSPO loses less"), (-0.22, "GSPO loses more")]
)
def test_six_seeds_are_told_apart(tmp_path, loss, words):
    for seed, old in product(range(1, 7), ("step_start", "engine")):
        engine = old == "engine"
        write_run(
            tmp_path, seed, "gspo", old, "bfloat16", "none", engine * (loss + 0.01 * (seed % 2))
        )
        write_run(tmp_path, seed, "grpo", old, "bfloat16", "none", engine * -0.12)
    sentence = engine_likelihoods.answer(read(tmp_path), "bfloat16", "no replay")
    assert (
        f"exact sign-flip p = 0.031: 6 seeds cannot go below 0.031). Told apart: {words}"
        in sentence
    )


def test_one_seed_is_not_judged(tmp_path):
    data = read(write_all(tmp_path, seeds=(2,)))
    sentence = engine_likelihoods.answer(data, "bfloat16", "R3")
    assert "GSPO - GRPO +0.110" in sentence and "within the single run, not over seeds" in sentence
    assert (
        "Not judged: one seed" in sentence
        and "old apart" not in sentence
        and "t interval" not in sentence
    )
    assert cells(fig.effect_table(data))["GSPO, bfloat16, R3"]["each seed"] == "2: -0.020"


@pytest.mark.slow
def test_missing_and_unfinished_runs_are_named_and_left_out(runs, tmp_path, monkeypatch):
    for seed in (1, 2, 3):
        shutil.rmtree(runs / f"grpo-engine-bfloat16-r3-seed{seed}")
    shutil.rmtree(runs / "gspo-step_start-bfloat16-none-seed3")
    file = runs / "grpo-engine-bfloat16-none-seed1" / "metrics.jsonl"
    # 7 of 20 batches
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:8]))
    data = read(runs)
    assert data.notes == [
        "missing or unfinished, left out: 5 of 48 runs (arm: seeds): GSPO, bfloat16, no replay, trainer: 3; "
        "GRPO, bfloat16, no replay, engine: 1; GRPO, bfloat16, R3, engine: 1, 2, 3"
    ]
    assert len(data.runs) == 43 and {run.last for run in data.runs} == {20}
    # common seeds only
    assert list(fig.effect(data, "bfloat16", "GSPO", "no replay")[1].index) == [1, 2]
    interval, both = engine_likelihoods.contrast(data, "bfloat16", "no replay")
    assert list(both.index) == [2] and interval.mean == pytest.approx(0.11) and interval.seeds == 1
    assert fig.effect(data, "bfloat16", "GRPO", "R3") is None
    assert engine_likelihoods.answer(data, "bfloat16", "R3").endswith(
        "not judged, its four arms have no finished seed in common."
    )
    monkeypatch.setattr(fig.style, "save", lambda figure, out, name, caption, view: [caption])
    assert "43 of 48 runs, 3 seeds (1, 2, 3)" in fig.draw(data, tmp_path)[0]


def test_it_ends_in_one_line_without_arms_to_compare(tmp_path):
    write_run(tmp_path / "a", 1, "gspo", "step_start", "bfloat16", "none")
    write_run(tmp_path / "a", 2, "gspo", "engine", "bfloat16", "none")  # another seed: no pair
    with pytest.raises(
        load.RunsError, match=r"^fig_engine_likelihoods needs finished runs"
    ) as stop:
        read(tmp_path / "a")
    assert str(stop.value).endswith(
        "found: GSPO, bfloat16, no replay, engine; GSPO, bfloat16, no replay, trainer"
    )
    write_run(tmp_path / "b", 1, "gspo", "behaviour", "bfloat16", "none")
    with pytest.raises(load.RunsError, match=r"found: none$"):
        read(tmp_path / "b")


def test_two_runs_of_one_arm_and_seed_are_refused(tmp_path):
    write_run(tmp_path, 1, "gspo", "engine", "bfloat16", "none")
    other = write_run(tmp_path / "again", 1, "gspo", "engine", "bfloat16", "none") / "settings.yaml"
    other.write_text(yaml.safe_dump(yaml.safe_load(other.read_text()) | {"optim": {"lr": 1.0}}))
    with pytest.raises(
        load.RunsError,
        match=r"same arm and seed twice \(GSPO, bfloat16, no replay, engine, seed 1\)",
    ):
        read(tmp_path)


@pytest.mark.slow
def test_the_program_prints_and_draws(whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fig", str(whole), f"out={tmp_path}"])
    fig.main()
    printed = capsys.readouterr().out
    assert "note:" not in printed and "GSPO against GRPO, bfloat16, R3: the engine's" in printed
    assert all(f"fig_engine_likelihoods.{suffix}" in printed for suffix in ("pdf", "png"))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".pdf", ".png"]


@pytest.mark.slow
def test_the_figure_shows_the_arms_where_their_numbers_are(whole, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(fig.style, "save", lambda *args: shown.append(args) or [])
    fig.draw(read(whole), tmp_path)
    figure, _, _, caption, _ = shown[0]
    reward, outside, active, _, sequences, _, _ = figure.axes
    assert [text.get_text() for text in reward.get_yticklabels()][:2] == [
        "GSPO bfloat16",
        "GSPO bfloat16 + R3",
    ]
    means = {
        y: x
        for line in reward.lines
        if line.get_marker() == "|"
        for x, y in zip(*line.get_data(), strict=True)
    }
    assert [means[row] for row in range(4)] == pytest.approx([-0.02, -0.02, -0.12, -0.12])
    for ax, half in ((outside, 1), (active, 2)):  # diamonds: the first mini-batch
        first = {
            y: x
            for line in ax.lines
            if line.get_marker() == "D"
            for x, y in zip(*line.get_data(), strict=True)
        }
        assert [first[row - 0.24] for row in range(8)] == pytest.approx(
            [x / half for x in (0.6, 0.6, 2e-3, 2e-3, *[0] * 4)]
        )
    assert [line.get_xdata()[0] for line in sequences.lines[-2:]] == pytest.approx([0.4, 0.5])
    assert "Points to this: GSPO loses less" in caption


def test_a_metric_that_is_not_reported_and_other_settings_that_differ(tmp_path):
    for old in ("step_start", "engine"):
        write_run(tmp_path, 1, "gspo", old, "bfloat16", "r3")
    file = tmp_path / "gspo-engine-bfloat16-r3-seed1" / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(
        "".join(
            json.dumps({**row, "mismatch/k3": None, "optim/grad_norm": None}) + "\n" for row in rows
        )
    )
    settings = file.parent / "settings.yaml"
    settings.write_text(
        yaml.safe_dump(yaml.safe_load(settings.read_text()) | {"optim": {"lr": 1.0}})
    )
    data = read(tmp_path)
    row = cells(fig.arm_table(data))["GSPO, bfloat16, R3, engine"]
    assert (row["k3"], row["grad norm"], row["agreement"]) == ("-", "-", "0.9500")
    assert data.notes[0] == "the runs differ also in optim.lr" and len(data.notes) == 2
    fig.verdict(data)


def test_runs_that_are_finished_but_too_short(tmp_path):
    for old in ("step_start", "engine"):
        folder = write_run(tmp_path, 1, "gspo", old, "bfloat16", "r3")
        settings, file = folder / "settings.yaml", folder / "metrics.jsonl"
        settings.write_text(yaml.safe_dump(yaml.safe_load(settings.read_text()) | {"steps": 14}))
        file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[:15]))
    with pytest.raises(load.RunsError, match="needs 15 batches of every run"):
        read(tmp_path)


def test_the_metrics_are_those_of_the_package():
    assert all(metrics.lookup(name).meaning for name in fig.MEANS.values())

"""The figure of doses on runs of a known truth: which arms it sees, what it pairs, what it refuses."""

import json

import pytest

from gspo.analysis import doses, fig_dose, load
from gspo.analysis.sequential import Design
from recorded_runs import write

DOSE, METRIC = ["optim.router_lr_factor"], "routing/consistency_after_step"
ARMS = ["policy.freeze_router"]
LOSS = {1.0: 0.0, 10.0: 0.1, 60.0: 0.3}  # what GRPO without replay loses at a factor
SEEDS = range(1, 7)


def run_of(
    folder,
    name: str,
    factor: float | None,
    seed: int,
    loss: float,
    replay: str = "none",
    frozen: bool = False,
):
    """Write a run of 50 batches that begins at .4, and from the tenth on has lost `loss` and what
    its seed is off.
    """
    rewards = [0.4] * 10 + [0.4 - loss + 0.001 * seed] * 40
    policy = {"policy__routing_replay": replay, "policy__freeze_router": frozen}
    run = write(folder, name, rewards, seed, optim__router_lr_factor=factor, **policy)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        # sunk runs change all their experts
        row[METRIC] = 1 - (factor or 5.0) / 1000 if row["step"] <= 10 else 0.5
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def study(tmp_path):
    for factor, loss in LOSS.items():
        for seed in SEEDS:
            run_of(tmp_path / "runs", "grpo", factor, seed, loss)
            run_of(tmp_path / "runs", "gspo", factor, seed, loss / 2)
            run_of(tmp_path / "runs", "grpo", factor, seed, 0.0, replay="r2")
    for seed in SEEDS:
        run_of(tmp_path / "runs", "grpo", 1.0, seed, 0.05, frozen=True)
    return tmp_path / "runs"


@pytest.mark.slow
def test_arms_doses_and_pairs(study):
    numbers = doses.measure(load.load([study]), DOSE, METRIC, ARMS)
    assert doses.order(numbers) == [1.0, 10.0, 60.0]
    replayed, frozen = "GRPO + Routing Replay (R2)", "GRPO [frozen router]"
    assert set(numbers["arm"]) == {"GSPO", "GRPO", replayed, frozen}
    got = numbers[numbers["arm"] == "GRPO"].groupby("level")["measured"].mean()
    assert got.tolist() == pytest.approx([0.999, 0.99, 0.94]), (
        "of the first fifth, before runs have sunk"
    )
    assert set(numbers.loc[numbers["collapsed"], "level"]) == {60.0}
    objectives, remedies = doses.compared(numbers)
    assert set(objectives) == {("GSPO", "GRPO")} and set(remedies) == {
        (replayed, "GRPO"),
        (frozen, "GRPO"),
    }
    means = {
        level: interval.mean for _, level, interval in doses.intervals(objectives["GSPO", "GRPO"])
    }
    assert means == pytest.approx({1.0: 0.0, 10.0: 0.05, 60.0: 0.15})
    [(_, level, interval)] = doses.intervals(remedies[frozen, "GRPO"])
    assert level == 1.0 and interval.mean == pytest.approx(-0.05) and interval.seeds == 6
    lines = fig_dose.dose_table(doses.dose_differences(numbers))
    assert any(
        line.startswith("| GRPO ") and "60.0 - 1.0" in line and "-0.300" in line for line in lines
    )
    assert not any(frozen in line for line in lines), "it has one dose"
    assert sum("6 of 6" in line for line in fig_dose.table(numbers, DOSE, METRIC)) == 2


@pytest.mark.slow
def test_objectives_can_be_set_beside_another_and_the_table_can_show_more(study):
    numbers = doses.measure(load.load([study]), DOSE, METRIC, ARMS, ["optim/lr"])
    objectives, _ = doses.compared(numbers, "GSPO")
    assert set(objectives) == {("GRPO", "GSPO")}
    means = {
        level: interval.mean for _, level, interval in doses.intervals(objectives["GRPO", "GSPO"])
    }
    assert means == pytest.approx({1.0: 0.0, 10.0: -0.05, 60.0: -0.15})
    head, _, *lines = fig_dose.table(numbers, DOSE, METRIC, ["optim/lr"])
    assert head.rstrip(" |").endswith("optim/lr") and len(lines) == 10
    expected = f"{numbers['optim/lr'].mean():.4g}"
    assert all(line.rstrip(" |").endswith(expected) for line in lines)


def figure_options(folder, **changes) -> fig_dose.Options:
    chosen = {"paths": (folder,), "out": folder, "dose": tuple(DOSE), "measured": METRIC}
    return fig_dose.Options(**(chosen | {"formats": ("png",)} | changes))


@pytest.mark.slow
def test_it_draws(study, tmp_path):
    data = load.load([study])
    numbers = doses.measure(data, DOSE, METRIC, ARMS)
    options = figure_options(tmp_path)
    [path] = fig_dose.draw(data, numbers, "GRPO", None, options)
    assert path.name == "fig_dose_known.png" and path.stat().st_size > 10_000
    alone = numbers[numbers["arm"] == "GRPO"]
    assert fig_dose.draw(data, alone, "GRPO", None, options) == [path], "without pairs too"


@pytest.mark.slow
def test_a_row_per_arm_shows_each_dose_minus_the_reference(study, tmp_path, monkeypatch):
    data = load.load([study])
    numbers = doses.measure(data, DOSE, METRIC, ARMS)
    drawn = []
    monkeypatch.setattr(fig_dose.style, "save", lambda figure, *_: drawn.append(figure) or [])
    differences = doses.dose_differences(numbers, reference="1")
    fig_dose.draw_rows_by_dose(data, numbers, differences, figure_options(tmp_path, rows=True))
    [figure] = drawn
    panels = figure.axes
    assert [ax.get_title(loc="left") for ax in panels] == ["10", "60"]
    names = [text.get_text() for text in panels[0].get_yticklabels()]
    assert names == ["GRPO + Routing Replay", "GSPO", "GRPO"], "by their reward"
    for ax, factor in zip(panels, (10.0, 60.0), strict=True):
        marks = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"]
        gspo_and_grpo = [-LOSS[factor] / 2, -LOSS[factor]]
        assert sorted(marks, reverse=True) == pytest.approx([0.0, *gspo_and_grpo])

    captions = []
    monkeypatch.setattr(fig_dose.style, "save", lambda *given: captions.append(given[3]) or [])
    without_least = numbers[(numbers["arm"] != "GSPO") | (numbers["level"] != 1.0)]
    own = doses.dose_differences(without_least)
    fig_dose.draw_rows_by_dose(data, without_least, own, figure_options(tmp_path, rows=True))
    assert "the same arm's at its least optim.router_lr_factor (1.0, 10.0)," in captions[0]

    alone = doses.dose_differences(numbers[numbers["level"] == 1.0])
    with pytest.raises(load.RunsError, match="no arm has runs of one seed at the reference"):
        fig_dose.draw_rows_by_dose(data, numbers, alone, figure_options(tmp_path))


@pytest.mark.slow
def test_doses_in_words_are_in_the_order_of_what_was_measured(study):
    names = {1.0: "fp8", 10.0: "none", 60.0: "bfloat16"}
    data = load.load([study])
    for run in data.runs:
        run.settings["rollout.dtype"] = names[run.settings["optim.router_lr_factor"]]
    numbers = doses.measure(data, ["rollout.dtype", *DOSE], METRIC, ARMS)
    assert doses.order(numbers) == ["bfloat16, 60.0", "10.0", "fp8, 1.0"]


@pytest.mark.slow
def test_runs_that_cannot_be_told_apart_are_refused(study):
    with pytest.raises(
        load.RunsError,
        match=r"two runs of GRPO, seed 1, level 1\.0: name with arms=\[...\] what they differ in",
    ):
        doses.measure(load.load([study]), DOSE, METRIC, [])
    with pytest.raises(load.RunsError, match=r"not all runs have a setting optim\.lrr"):
        doses.measure(load.load([study]), ["optim.lrr"], METRIC, ARMS)
    with pytest.raises(load.RunsError, match="no metric 'routing/consistenc'"):
        doses.measure(load.load([study]), DOSE, "routing/consistenc", ARMS)
    write(
        study,
        "grpo",
        [0.4] * 50,
        77,
        optim__router_lr_factor=10.0,
        policy__freeze_router=False,
        optim__lr=9e-4,
    )
    with pytest.raises(load.RunsError, match=r"the runs of GRPO at 10\.0 differ also in optim\.lr"):
        doses.measure(load.load([study]), DOSE, METRIC, ARMS)


@pytest.mark.slow
def test_another_outcome_than_the_reward(study):
    """A held-out score that only the last row has is compared at the end, paired by seed."""
    for path in study.glob("*/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        gain = 0.02 if path.parent.name.startswith("gspo") else 0.0
        rows[25]["eval/math/avg@4"] = 0.9  # before the last fifth
        rows[-1]["eval/math/avg@4"] = 0.3 + gain
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = "eval/math/avg@4"
    numbers = doses.measure(load.load([study]), DOSE, METRIC, ARMS, outcome=outcome)
    assert numbers["end"].max() == pytest.approx(0.32)
    objectives, _ = doses.compared(numbers)
    for _, _, interval in doses.intervals(objectives["GSPO", "GRPO"]):
        assert interval.mean == pytest.approx(0.02)
    with pytest.raises(load.RunsError, match="no run reports policy/entropy in the last fifth"):
        doses.measure(load.load([study]), DOSE, METRIC, ARMS, outcome="policy/entropy")
    head = fig_dose.table(numbers, DOSE, METRIC, outcome=outcome)[0]
    assert "eval/math/avg@4, last fifth" in head and "reward" not in head


@pytest.mark.slow
def test_null_is_a_dose_and_an_absent_objective_is_refused(study, monkeypatch):
    for seed in SEEDS:
        run_of(study, "grpo", None, seed, 0.2)
    numbers = doses.measure(load.load([study]), DOSE, METRIC, ARMS)
    assert set(numbers["level"]) == {1.0, 10.0, 60.0, "null"}
    words = ["fig_dose", str(study), f"dose={DOSE[0]}", f"measured={METRIC}", "against=sapo"]
    monkeypatch.setattr("sys.argv", [*words, f"arms=[{ARMS[0]}]"])
    with pytest.raises(load.RunsError, match="against=sapo: there are no runs of SAPO, but of"):
        fig_dose.main()


@pytest.mark.slow
def test_doses_are_compared_with_a_reference_at_the_level_of_the_look(study):
    numbers = doses.measure(load.load([study]), DOSE, METRIC, ARMS)
    design = Design((6, 12))
    differences = doses.dose_differences(numbers, design, "10")
    lines = fig_dose.dose_table(differences, reference="10")
    assert "minus that at dose 10" in lines[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    gains = {(row[0], row[1]): row[2:] for row in rows}
    assert gains["GRPO", "1.0 - 10.0"][0].startswith("+0.100")
    assert gains["GRPO", "1.0 - 10.0"][2:] == [f"{design.level(6):.2g}", "undecided"]
    assert not [arm for arm, _ in gains if "frozen" in arm], "an arm without the reference"
    with pytest.raises(load.RunsError, match=r"reference=7: .*there are 1\.0, 10\.0, 60\.0"):
        doses.dose_differences(numbers, reference="7")
    with pytest.raises(load.RunsError, match="run 1 more"):
        doses.dose_differences(numbers, Design((7, 12)))


@pytest.mark.slow
def test_an_objective_with_two_ranges_is_two_objectives(study):
    """Study I: GRPO is in at the paper's range and at a quarter of it, in every precision."""
    folder = study.parent / "two"
    for factor in LOSS:
        for seed in SEEDS:
            for clip_low, loss in ((0.2, 0.1), (0.05, 0.0)):
                rewards = [0.4] * 40 + [0.4 - loss] * 10
                changes = {"optim__router_lr_factor": factor, "objective__clip_low": clip_low}
                write(folder, "grpo", rewards, seed, **changes)
            write(folder, "gspo", [0.4] * 50, seed, optim__router_lr_factor=factor)
    numbers = doses.measure(load.load([folder]), DOSE, "reward/mean", [])
    wide, narrow = "GRPO [clip range 0.2]", "GRPO [clip range 0.05]"
    assert set(numbers["arm"]) == set(numbers["objective"]) == {"GSPO", wide, narrow}
    objectives, remedies = doses.compared(numbers, "GSPO")
    assert set(objectives) == {(wide, "GSPO"), (narrow, "GSPO")} and not remedies
    lost = [interval.mean for _, _, interval in doses.intervals(objectives[wide, "GSPO"])]
    assert lost == pytest.approx([-0.1] * 3)

"""The figure of critical rates on runs of a known truth: what it counts, which arms it sees, what
it refuses.
"""

import json
import subprocess
import sys

import pandas as pd
import pytest
import yaml

from commands import ROOT
from gspo.analysis import fig_contrast, fig_critical_rate, load, rate_ratios, reproduce
from gspo.analysis.sequential import Design
from gspo.analysis.style import FigureOptions
from recorded_runs import COLLAPSED, HEALTHY, write
from three_arms import write_run

RATES = (1e-4, 2e-4, 4e-4, 8e-4)
PAPERS = "GRPO [clip range 0.2]"
LAST = {"gspo": 4e-4, "grpo": 2e-4}  # the largest rate at which an objective's runs do not collapse


@pytest.fixture
def study(tmp_path):
    for rate in RATES:
        for seed in (1, 2, 3, 4):
            for name, clip, scale in (("gspo", 0.2, 1.0), ("grpo", 0.2, 2.0), ("grpo", 0.05, 1.0)):
                late = seed == 4 and rate == LAST[name]  # one seed falls a rate earlier
                rewards = COLLAPSED if rate > LAST[name] or late else HEALTHY
                run = write(
                    tmp_path / "runs", name, rewards, seed, optim__lr=rate, objective__clip_low=clip
                )
                rows = [
                    json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
                ]
                rows = [row | {"kl/old_k3": scale * rate} if row["step"] else row for row in rows]
                (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for seed in (1, 2):
        write(tmp_path / "runs", "grpo", HEALTHY, seed, optim__lr=5e-5)
    return tmp_path / "runs"


def rate_of(run) -> float:
    return yaml.safe_load((run / "settings.yaml").read_text())["optim"]["lr"]


@pytest.mark.slow
def test_what_is_counted(study):
    numbers = fig_critical_rate.measure(load.load([study]))
    assert sorted(numbers["arm"].unique()) == ["GRPO [clip range 0.05]", PAPERS, "GSPO"]
    share = numbers.groupby(["arm", "rate"])["collapsed"].mean()
    assert share["GSPO"].tolist() == [0, 0, 0.25, 1] and share[PAPERS].tolist() == [
        0,
        0,
        0.25,
        1,
        1,
    ]
    cell = numbers[(numbers["arm"] == PAPERS) & (numbers["rate"] == 4e-4)]
    assert cell["kl"].tolist() == pytest.approx([8e-4] * 4) and cell[
        "end"
    ].tolist() == pytest.approx([0.1] * 4)
    ratios = rate_ratios.compare(numbers)
    rate_ratio = ratios["GSPO", "GRPO [clip range 0.05]"]
    value, p = rate_ratio.interval, rate_ratio.p
    assert rate_ratio.measured and rate_ratio.text() == value.text(".2f")
    assert value.mean == pytest.approx(2, rel=0.05) and value.low > 1 and p == pytest.approx(2 / 16)
    assert ("GSPO", PAPERS) in ratios and value.seeds == 4
    lines = "\n".join(fig_critical_rate.ratio_table(numbers, ratios))
    assert "GSPO / GRPO [clip range 0.05] " in lines and "e-04" not in lines
    lines = fig_critical_rate.difference_table(numbers)
    cell = next(
        line for line in lines if line.startswith("| 0.0004 ") and f"GSPO - {PAPERS} " in line
    )
    assert "+0." in cell and cell.count("|") == 6


def settled(arm: str, seeds, collapsed: dict[float, int]) -> pd.DataFrame:
    """Runs of an arm at these rates, of which the first seeds' runs collapsed."""
    rows = [
        {"arm": arm, "seed": seed, "rate": rate, "collapsed": index < count}
        for rate, count in collapsed.items()
        for index, seed in enumerate(seeds)
    ]
    return pd.DataFrame(rows)


@pytest.mark.slow
def test_runs_of_an_arm_that_differ_in_more_than_the_rate_are_refused(study):
    runs = study.parent / "more"
    write(runs, "grpo", HEALTHY, 5, objective__clip_high=0.9)
    write(runs, "grpo", HEALTHY, 6, objective__clip_high=0.27)
    with pytest.raises(load.RunsError, match=r"the runs of GRPO differ also in .*clip_high"):
        fig_critical_rate.measure(load.load([runs]))
    with pytest.raises(load.RunsError, match="are of 60, 90 steps: give those of one length"):
        shorter = write(runs.parent / "short", "grpo", HEALTHY[:60], 9)
        fig_critical_rate.measure(load.load([study, shorter]))
    with pytest.raises(load.RunsError, match="lr=0 must be a number above 0"):
        fig_critical_rate.measure(
            load.load([write(runs.parent / "zero", "grpo", HEALTHY, optim__lr=0)])
        )


def test_an_arm_whose_runs_all_collapsed_or_none_bounds_the_ratio_and_is_never_the_same():
    seeds = range(4)
    some = settled("A", seeds, {1e-4: 0, 2e-4: 2, 4e-4: 4})
    never = settled("B", seeds, dict.fromkeys((1e-4, 2e-4, 4e-4), 0))
    neither = settled("C", seeds, dict.fromkeys((1e-4, 2e-4, 4e-4), 0))
    always = settled("D", seeds, dict.fromkeys((1e-4, 2e-4, 4e-4), 4))
    numbers = pd.concat([some, never, neither, always], ignore_index=True)
    ratios = rate_ratios.compare(numbers)
    # the critical rate of A is 2e-4; that of B and C lies above 4e-4, that of D below 1e-4
    assert ratios["A", "B"].text() == "below 0.50"
    assert ratios["A", "D"].text() == "above 2.00"
    assert ratios["B", "D"].text() == "above 4.00"
    assert ratios["B", "C"].text() == "-"
    assert ratios["B", "C"].interval.low == pytest.approx(1), "the prior's, and no measurement"
    design = Design((4, 8))
    names = ("B", "C")
    assert "go on to 8" in rate_ratios.decision(ratios[names], names, design, 0.1)


def test_a_look_has_the_seeds_that_ran_at_every_rate_in_both_arms():
    rates = {1e-4: 0, 2e-4: 2, 4e-4: 4}
    both = [settled("A", range(4), rates), settled("B", range(4), rates)]
    numbers = pd.concat([*both, settled("A", range(4, 6), rates)], ignore_index=True)
    design = Design((4, 8))
    ratios = rate_ratios.compare(numbers, design)
    assert ratios["A", "B"].interval.seeds == 4, "seeds 4 and 5 have no runs of B"
    assert rate_ratios.compare(numbers)["A", "B"].interval.seeds == 4, "also without a design"
    assert rate_ratios.incomplete_seeds(numbers) == []
    missing = numbers.drop(numbers.index[(numbers["arm"] == "B") & (numbers["seed"] == 3)][:1])
    with pytest.raises(
        load.RunsError, match=r"A and B: 3 seeds: the design looks at 4, 8.*: run 1 more"
    ):
        rate_ratios.compare(missing, design)
    line = "Not in the looks: B, seeds 3, which lack runs at some rates."
    assert rate_ratios.incomplete_seeds(missing) == [line]


@pytest.mark.slow
def test_the_script_draws_and_prints(study, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "analysis" / "fig_critical_rate.py"),
        "runs",
        "formats=png",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (
        "| 4 of 4 " in done.stdout
        and (tmp_path / "figures" / "fig_critical_rate.png").stat().st_size > 10_000
    )


@pytest.mark.slow
def test_one_rate_has_differences_and_no_critical_rate(study, tmp_path):
    data = load.load([run for run in study.iterdir() if rate_of(run) == 4e-4])
    numbers = fig_critical_rate.measure(data)
    assert set(numbers["rate"]) == {4e-4} and rate_ratios.compare(numbers) == {}
    assert len(fig_critical_rate.difference_table(numbers)) == 2 + 3
    assert "two learning rates" in fig_critical_rate.ratio_table(numbers, {})[0]
    assert fig_critical_rate.draw(data, numbers, {}, tmp_path, FigureOptions(formats=("png",)))[
        0
    ].exists()


def test_a_seed_may_have_an_initial_network_of_its_own(tmp_path):
    for seed in (1, 2):
        for rate in RATES:
            own = {"cold_start__seed": seed, "optim__lr": rate}
            write(tmp_path / "own", "gspo", HEALTHY, seed, **own)
            write(tmp_path / "own", "grpo", HEALTHY, seed, **own)
    numbers = fig_critical_rate.measure(load.load([tmp_path / "own"]))
    assert sorted(numbers["arm"].unique()) == ["GRPO", "GSPO"] and len(numbers) == 16
    write(tmp_path / "own", "gspo", HEALTHY, 2, cold_start__seed=7, optim__lr=9e-4)
    with pytest.raises(load.RunsError, match=r"cold_start\.seed"):
        fig_critical_rate.measure(load.load([tmp_path / "own"]))


def test_runs_that_differ_in_more_are_refused(study):
    write(study, "gspo", HEALTHY, 9, trainer__minibatches=16)
    with pytest.raises(load.RunsError, match=r"trainer\.minibatches"):
        fig_critical_rate.measure(load.load([study]))


# ----------------------------------------------------------------------------------------------------------
# contrast
def arms_of(folder, rate: float, gain: dict[str, float]):
    for arm, more in gain.items():
        for seed in range(1, 7):
            write_run(folder, arm, seed, 0.3, more, optim={"lr": rate})
    return load.load([folder])


@pytest.mark.slow
def test_the_contrast_names_the_rates_and_finds_the_difference_where_it_is(tmp_path):
    calm = arms_of(tmp_path / "calm", 2e-4, dict.fromkeys(load.ARMS[:3], 0.2))
    edge = arms_of(tmp_path / "edge", 8e-4, dict(zip(load.ARMS[:3], (0.3, 0.2, 0.1), strict=True)))
    assert fig_contrast.titles([calm, edge]) == ["learning rate 2e-4", "learning rate 8e-4"]
    pair = load.ARMS[0], load.ARMS[2]
    assert "same within" in fig_contrast.judged(calm)[pair][1] and fig_contrast.judged(edge)[pair][
        1
    ].startswith("seen")
    paths = fig_contrast.draw([calm, edge], tmp_path, FigureOptions(formats=("png",)))
    assert [path.name for path in paths] == ["fig_contrast.png"]
    text = "\n".join(reproduce.summary(edge, paths, [], [calm]))
    assert text.startswith("# What the runs show\n\n## The studies beside each other\n")
    assert text.index("| learning rate 8e-4 ") < text.index("| learning rate 2e-4 "), (
        "the runs first"
    )
    assert "Recorded studies" not in text
    lines = fig_contrast.table([calm, edge])
    assert len(lines) == 2 + 6 + 3 and "learning rate 8e-4" in lines[7]
    gains = {arm: interval.mean for arm, interval in fig_contrast.between(calm, edge).items()}
    assert gains[load.ARMS[0]] == pytest.approx(0.1 * 0.87, abs=0.02), (
        "of a rise by .1 more, over the last half"
    )
    assert gains[load.ARMS[1]] == pytest.approx(0, abs=1e-9), "the same rewards in both"
    assert lines[-1].startswith("| learning rate 8e-4 - learning rate 2e-4 | GRPO  ")


def test_a_contrast_says_whose_setting_differs(tmp_path):
    for name, rate, clip in (("calm", 1e-4, 0.05), ("wide", 3e-4, 0.2), ("edge", 3e-4, 0.05)):
        for arm in load.ARMS[:3]:
            own, kind = 7e-4 if arm == load.GSPO else clip, "gspo" if arm == load.GSPO else "grpo"
            objective = {"name": kind, "clip_low": own, "clip_high": 4 / 3 * own}
            write_run(tmp_path / name, arm, 1, 0.3, 0.2, optim={"lr": rate}, objective=objective)
    studies = [load.load([tmp_path / name]) for name in ("calm", "wide", "edge")]
    assert fig_contrast.titles(studies) == [
        "learning rate 1e-4, GRPO's clip range 0.05",
        "learning rate 3e-4, GRPO's clip range 0.2",
        "learning rate 3e-4, GRPO's clip range 0.05",
    ]
    assert fig_contrast.titles(studies[1:]) == ["GRPO's clip range 0.2", "GRPO's clip range 0.05"]


def test_a_contrast_says_each_arms_own_value(tmp_path):
    for name, scale in (("narrow", 1), ("wide", 2)):
        for arm in load.ARMS[:3]:
            kind, clip = ("gspo", 3e-4) if arm == load.GSPO else ("grpo", 0.05)
            write_run(
                tmp_path / name,
                arm,
                1,
                0.3,
                0.2,
                objective={"name": kind, "clip_low": scale * clip},
            )
    assert fig_contrast.titles([load.load([tmp_path / name]) for name in ("narrow", "wide")]) == [
        "GSPO's clip range 3e-4, GRPO's clip range 0.05",
        "GSPO's clip range 6e-4, GRPO's clip range 0.1",
    ]


def test_a_contrast_says_how_many_settings_it_does_not_name(tmp_path):
    for name, size in (("one", 1), ("other", 2)):
        own = {
            "optim": {"lr": size * 1e-4, "beta": size},
            "task": {"largest": size},
            "model": {"layers": size},
        }
        for arm in load.ARMS[:2]:
            write_run(tmp_path / name, arm, 1, 0.3, 0.2, **own)
    titles = fig_contrast.titles([load.load([tmp_path / name]) for name in ("one", "other")])
    assert titles[0].startswith("learning rate 1e-4, ") and titles[0].endswith(
        ", and 2 more settings differ"
    )


def test_a_step_that_a_run_lost_is_left_out_of_its_difference_alone(tmp_path):
    calm = arms_of(tmp_path / "calm", 2e-4, {load.GSPO: 0.2})
    edge = arms_of(tmp_path / "edge", 8e-4, {load.GSPO: 0.2})
    run = next((tmp_path / "edge").iterdir())
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for folder in (tmp_path / "edge").iterdir():
        (folder / "metrics.jsonl").write_text(
            "".join(row for row in rows if '"step": 70,' not in row)
        )
    again = load.load([tmp_path / "edge"])
    assert fig_contrast.between(calm, edge)[load.GSPO].mean == pytest.approx(0, abs=1e-9)
    assert fig_contrast.between(calm, again)[load.GSPO].seeds == 6


def effect_and_range(folder):
    """An effect with the wide range, and a study of GRPO with replay at the narrow range alone."""
    for seed in range(1, 7):
        for arm, more in ((load.GSPO, 0.3), (load.GRPO_R2, 0.1), (load.GRPO, 0.1)):
            wide = {"name": "gspo" if arm == load.GSPO else "grpo", "clip_low": 0.2}
            write_run(folder / "effect", arm, seed, 0.3, more, objective=wide)
        narrow = {"name": "grpo", "clip_low": 0.05}
        write_run(folder / "range", load.GRPO_R2, seed, 0.3, 0.3, objective=narrow)
    return [load.load([folder / name]) for name in ("effect", "range")]


@pytest.mark.slow
def test_a_study_without_gspo_shows_that_of_the_first_and_what_its_arm_gains(tmp_path):
    effect, narrow = effect_and_range(tmp_path)
    assert narrow.arms == [load.GRPO_R2]
    studies = fig_contrast.completed([effect, narrow])
    assert studies[0] is effect and studies[1].arms == [load.GSPO, load.GRPO_R2]
    ((pair, (interval, verdict)),) = fig_contrast.judged(studies[1]).items()
    assert pair == (load.GSPO, load.GRPO_R2) and abs(interval.mean) < 0.02
    assert verdict.startswith("the same")
    assert fig_contrast.gains(effect, effect) == {}
    ((arm, gain),) = fig_contrast.gains(*studies).items()
    assert arm == load.GRPO_R2 and gain.mean == pytest.approx(0.2 * 0.87, abs=0.02)
    assert fig_contrast.titles(studies) == [
        "GRPO + R2's clip range 0.2",
        "GRPO + R2's clip range 0.05",
    ]
    # a third study that the gain skips: the gain has a row of its own
    lines = fig_contrast.table([studies[0], effect, studies[1]])
    assert lines[-1].startswith(
        "| GRPO + R2's clip range 0.05 - GRPO + R2's clip range 0.2 | GRPO + R2"
    )


@pytest.mark.slow
def test_gspo_is_not_taken_from_a_study_of_another_rate(tmp_path):
    effect, _ = effect_and_range(tmp_path)
    other = arms_of(tmp_path / "other", 8e-4, {load.GRPO_R2: 0.2})
    assert fig_contrast.completed([effect, other])[1] is other
    assert (
        fig_contrast.gains(
            effect, arms_of(tmp_path / "calm", 2e-4, dict.fromkeys(load.ARMS[:2], 0.2))
        )
        == {}
    )


@pytest.mark.slow
def test_the_summary_has_the_recorded_studies_by_name(tmp_path):
    effect, narrow = effect_and_range(tmp_path)
    text = "\n".join(reproduce.summary(effect, [], [], [narrow], [effect]))
    recorded = text.partition("## Recorded studies, which were not run now")[2]
    name = effect.runs[0].study
    assert f"| {name}, learning rate " in recorded.partition("## The runs")[0]
    assert text.index("beside each other") < text.index("Recorded") < text.index("## The runs")


def test_a_contrast_is_between_two(tmp_path):
    calm = arms_of(tmp_path / "calm", 2e-4, dict.fromkeys(load.ARMS[:3], 0.2))
    with pytest.raises(load.RunsError, match="two studies"):
        fig_contrast.draw([calm], tmp_path)

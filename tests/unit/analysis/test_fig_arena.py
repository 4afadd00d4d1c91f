"""The arena on runs of a known truth: pairs, verdicts, ranks, and what is refused."""

import shutil

import numpy as np
import pandas as pd
import pytest

from gspo.analysis import fig_arena, grid, load
from gspo.analysis.runs import RunsError
from gspo.analysis.sequential import Design
from gspo.analysis.stats import Interval
from gspo.analysis.verdicts import direction
from recorded_runs import write

CELLS = {"arena_sums_edge": 0.1, "arena_sums_stale": 0.0, "arena_tools_edge": -0.02}
SEEDS = range(1, 11)


def noise(name: str, cell: str, seed: int) -> float:
    """A small number that belongs to the arm, the cell and the seed, of mean 0 over the seeds."""
    rng = np.random.default_rng(sum(map(ord, name + cell)))
    values = rng.normal(0, 0.004, len(SEEDS))
    return float((values - values.mean())[seed - 1])


@pytest.fixture(scope="module")
def written_arena(tmp_path_factory):
    """GRPO is ahead of GSPO by the cell's number; SAPO is .2 behind everywhere; CISPO is level."""
    folder = tmp_path_factory.mktemp("arena")
    behind = {"gspo": 0.0, "sapo": 0.2, "cispo": 0.0}
    for cell, lead in CELLS.items():
        for seed in SEEDS:
            for name in ("gspo", "grpo", "sapo", "cispo"):
                reward = 0.5 + lead if name == "grpo" else 0.5 - behind[name]
                reward += noise(name, cell, seed)
                write_in(folder, cell, name, [0.5] * 40 + [reward] * 10, seed)
    return folder


@pytest.fixture
def arena(written_arena, tmp_path):
    """A copy to which a test may add runs."""
    return shutil.copytree(written_arena, tmp_path / "arena")


def write_in(folder, study: str, name: str, rewards: list[float], seed: int, **changes: object):
    rate = 1e-4 * (1 + list(CELLS).index(study))  # the cells differ in a setting
    run = write(folder / study, name, rewards, seed, **{"optim__lr": rate} | changes)
    settings = (run / "settings.yaml").read_text().replace("study: known", f"study: {study}")
    (run / "settings.yaml").write_text(settings)


def measured(folder, *settings: str):
    return fig_arena.measure(load.load([folder / cell for cell in CELLS]), settings)


@pytest.mark.slow
def test_pairs_and_verdicts(arena):
    numbers = measured(arena)
    assert list(dict.fromkeys(numbers["cell"])) == ["sums edge", "sums stale", "tools edge"]
    differences = fig_arena.paired(numbers, "GSPO")
    by_cell = differences.set_index(["cell", "arm"])["interval"]
    assert by_cell["sums edge", "GRPO"].mean == pytest.approx(0.1)
    verdicts = {key: direction(interval, 0.03) for key, interval in by_cell.items()}
    assert verdicts["sums edge", "GRPO"] == "above"
    assert verdicts["sums stale", "GRPO"] == "same"
    assert verdicts["tools edge", "GRPO"] == "below"
    assert {verdicts[cell, "SAPO"] for cell in numbers["cell"]} == {"below"}
    assert {verdicts[cell, "CISPO"] for cell in numbers["cell"]} == {"same"}


@pytest.mark.slow
def test_the_ranking_has_ties(arena):
    ranking = fig_arena.rank(measured(arena))
    mean = sum(CELLS.values()) / len(CELLS)
    assert ranking.arms[0] == "GRPO" and ranking.arms[-1] == "SAPO"
    assert ranking.ranks("GRPO") == (1, 1)
    assert ranking.ranks("GSPO") == ranking.ranks("CISPO") == (2, 3), "told apart from the others"
    assert ranking.ranks("SAPO") == (4, 4)
    pair = next(pair for pair in ranking.comparisons if set(pair) == {"GRPO", "GSPO"})
    assert abs(ranking.comparisons[pair].mean) == pytest.approx(mean)
    lines = fig_arena.ranking_table(measured(arena), ranking, "GSPO")
    assert any(line.startswith("| 2 to 3 | CISPO") for line in map(squeezed, lines))


def squeezed(line: str) -> str:
    return " ".join(line.split())


@pytest.mark.slow
def test_an_arm_that_misses_a_cell_is_not_ranked(arena):
    for seed in SEEDS:
        write_in(arena, "arena_sums_edge", "gmpo", [0.9] * 50, seed)
    numbers = measured(arena)
    assert "GMPO" not in fig_arena.rank(numbers).arms
    # it has the highest reward, and stands below those that can be ranked
    assert fig_arena.arms_in_order(numbers) == [*fig_arena.rank(numbers).arms, "GMPO"]
    assert "GMPO" in set(fig_arena.paired(numbers, "GSPO")["arm"])


def test_the_mean_over_cells_by_hand():
    """Two cells with means 1 and 3, each with variance s^2 / n = 2 / 2 = 1: 2 ± t(2) sqrt(2) / 2."""
    cells = [np.array([0.0, 2.0]), np.array([2.0, 4.0])]
    interval = fig_arena.mean_over_cells(cells)
    # the degrees of freedom are (1 + 1)^2 / (1 + 1) = 2
    half = 4.302652729911275 * 2**0.5 / 2
    assert interval.mean == 2.0 and interval.seeds == 4
    assert (interval.low, interval.high) == pytest.approx((2 - half, 2 + half))


@pytest.mark.slow
def test_a_sequential_design_sets_the_level(arena):
    numbers = measured(arena)
    differences = fig_arena.paired(numbers, "GSPO", Design((10, 20)))
    levels = {interval.level for interval in differences["interval"]}
    assert levels == {Design((10, 20)).level(10)}
    # nine of ten seeds on one side are p = .0215 at best: below .05, not below the look's level
    values = (*[0.1] * 9, -0.01)
    early = Interval(0.089, 0.01, 0.17, 10, values, level=Design((10, 20)).level(10))
    assert direction(early, 0.03) == "undecided"
    open_pairs = pd.DataFrame({"interval": [early, *differences["interval"]]})
    line, _ = fig_arena.interim(open_pairs, Design((10, 20)), 0.03)
    assert line.startswith("The ranking is not judged yet: ")
    assert "(1 undecided pair with fewer than 20 seeds)" in line
    assert fig_arena.interim(differences, Design((10, 20)), 0.03) == [], "all are decided"
    assert fig_arena.interim(open_pairs, Design((5, 10)), 0.03) == []
    assert fig_arena.interim(open_pairs, None, 0.03) == []
    with pytest.raises(RunsError, match=r"^CISPO and GSPO in sums edge: .*run 2 more"):
        fig_arena.paired(numbers, "GSPO", Design((12, 20)))


@pytest.mark.slow
def test_ranges_and_corrections_make_arms(arena):
    for cell in CELLS:
        for seed in SEEDS:
            write_in(arena, cell, "grpo", [0.4] * 50, seed, objective__clip_low=0.05)
    arms = set(measured(arena)["arm"])
    assert {"GRPO [clip range 0.2]", "GRPO [clip range 0.05]", "GSPO"} <= arms


@pytest.mark.slow
def test_what_is_refused(arena):
    with pytest.raises(RunsError, match="DAPO"):
        fig_arena.paired(measured(arena), "DAPO")
    write_in(arena, "arena_sums_edge", "gspo", [0.5] * 50, 11, optim__lr=1.0)
    with pytest.raises(RunsError, match=r"the runs of sums edge differ also in optim\.lr"):
        measured(arena)


@pytest.mark.slow
def test_an_arm_has_one_setting_and_may_have_its_own_old_policy(arena):
    for cell in CELLS:
        for seed in SEEDS:
            write_in(arena, cell, "dppo", [0.4] * 50, seed, policy__old_logprobs="behaviour")
    assert "DPPO" in set(measured(arena)["arm"])
    write_in(arena, "arena_sums_edge", "dppo", [0.4] * 50, 11, objective__delta=0.15)
    with pytest.raises(RunsError, match=r"of DPPO in sums edge differ also in objective\.delta"):
        measured(arena)


@pytest.mark.slow
def test_settings_outside_a_group_and_their_usual_values_leave_names_plain(arena):
    assert fig_arena.groups_of(["correction.name", "steps"]) == ["correction.", "steps"]
    for cell in CELLS:
        for seed in SEEDS:
            for name in ("gspo", "grpo", "sapo", "cispo"):
                write_in(arena / "new", cell, name, [0.5] * 50, seed, policy__precision="float32")
    assert "GSPO" in set(measured(arena / "new", "policy.precision")["arm"])


@pytest.mark.slow
def test_the_panels_of_a_row_share_their_axis_and_each_has_its_numbers(arena, monkeypatch):
    figures = []
    monkeypatch.setattr(fig_arena.style, "save", lambda figure, *_: figures.append(figure) or [])
    numbers = measured(arena)
    numbers["arm"] = numbers["arm"].replace("GRPO", "GRPO + Routing Replay (R2)")
    differences = fig_arena.paired(numbers, "GSPO")
    options = fig_arena.Options(paths=("x",), out=arena, columns=2)
    fig_arena.draw(numbers, differences, "GSPO", options)
    panels = [ax for ax in figures[0].axes if ax.get_visible()]
    assert all(ax.get_xlabel() for ax in panels)
    assert all(ax.xaxis.get_tick_params()["labelbottom"] for ax in panels)
    assert panels[0].get_xlim() == panels[1].get_xlim() != panels[2].get_xlim()
    names = [text.get_text() for text in panels[0].get_yticklabels()]
    assert "GRPO + Routing Replay" in names


def test_the_caption_never_calls_an_interval_of_100_percent():
    levels = (
        0.05,
        Design((10, 20)).level(10),
        Design((10, 20, 30, 40)).level(10),
        Design((1, 40)).level(1),
    )
    texts = [grid.coverage(level) for level in levels]
    assert texts[:3] == ["95 %", "99.7 %", "99.999 %"] and texts[3].startswith("99.99")


def test_the_command_draws_and_prints(arena, monkeypatch, capsys):
    studies = [str(arena / cell) for cell in CELLS]
    words = ["gspo figure arena", *studies, f"out={arena}", "looks=[10,20]", "formats=[png]"]
    monkeypatch.setattr("sys.argv", words)
    fig_arena.main()
    printed = capsys.readouterr().out
    assert (arena / "fig_arena.png").stat().st_size > 10_000
    for text in ("sums edge", "| 2 to 3 ", "| level ", "core-hours", "above"):
        assert text in printed


@pytest.mark.slow
def test_a_run_that_collapsed_before_its_end_leaves_its_pair_unjudged(arena):
    numbers = measured(arena)
    is_broken = (numbers["cell"] == "sums edge") & (numbers["arm"] == "SAPO")
    first = numbers[is_broken].index[0]
    numbers.loc[first, "end"] = np.nan
    numbers.loc[first, "collapsed"] = True
    intervals = fig_arena.paired(numbers, "GSPO").set_index(["cell", "arm"])["interval"]
    assert np.isnan(intervals["sums edge", "SAPO"].mean), "the other seeds are no fair sample"
    assert not np.isnan(intervals["sums edge", "GRPO"].mean)
    pairs = fig_arena.rank(numbers).comparisons
    assert not any("SAPO" in pair for pair in pairs)
    differences = fig_arena.paired(numbers, "GSPO")
    design = Design((len(SEEDS), 2 * len(SEEDS)))
    assert "undecided pair" in fig_arena.interim(differences, design, 0.0)[0]
    unjudged = differences[[np.isnan(x.mean) for x in differences["interval"]]]
    assert fig_arena.interim(unjudged, design, 0.0) == [], "further seeds cannot decide it"

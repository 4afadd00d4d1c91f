"""analysis/: every verdict on runs with a known effect, loading, the figures. Statistics:
test_analysis_stats.py.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.analysis import (
    claims,
    fig1_stability,
    fig2_clipping,
    fig_efficiency,
    fig_routing,
    load,
    reproduce,
    script,
    stability_claims,
)
from gspo.analysis.load import GRPO, GRPO_R2, GSPO
from gspo.tracking import metrics
from three_arms import CLIPPED, write_arms, write_run

ANALYSIS = Path(__file__).parents[3] / "analysis"

# ------------------------------------------------------------------------------------------ runs
# with a known effect
# start, gain over the run
PAPER_LIKE = {GSPO: (0.25, 0.25), GRPO_R2: (0.25, 0.12), GRPO: (0.25, -0.12)}


@pytest.fixture(scope="module")
def paper_like(tmp_path_factory) -> Path:
    return write_arms(tmp_path_factory.mktemp("paper_like"), PAPER_LIKE, seeds=range(1, 7))


@pytest.fixture(scope="module")
def equal(tmp_path_factory) -> load.Data:
    same = {GSPO: (0.25, 0.12), GRPO_R2: (0.25, 0.12)}
    return load.load([write_arms(tmp_path_factory.mktemp("equal"), same, seeds=range(1, 7))])


@pytest.fixture(scope="module")
def below(tmp_path_factory) -> load.Data:
    worse = {GSPO: (0.25, -0.12), GRPO_R2: (0.25, 0.12), GRPO: (0.25, 0.12)}
    return load.load([write_arms(tmp_path_factory.mktemp("below"), worse, seeds=range(1, 7))])


# --------------------------------------------------------------------------------------------------------
# verdicts
def verdicts(data: load.Data) -> dict[str, str]:
    return {claim.claim: claim.verdict for claim in claims.all_claims(data)}


@pytest.mark.slow
def test_effects_that_are_there_are_seen(paper_like):
    found = verdicts(load.load([paper_like]))
    assert len(found) == 8
    assert all(verdict.startswith("seen") for verdict in found.values()), found


@pytest.mark.slow
def test_of_five_seeds_the_same_effects_only_point(paper_like):
    found = verdicts(load.load([file for file in paper_like.iterdir() if "seed6" not in file.name]))
    assert len(found) == 8
    assert all(
        verdict.startswith("points to it (interval over 5 seeds") for verdict in found.values()
    ), found


@pytest.mark.slow
def test_equal_arms_are_the_same_or_undecided(equal):
    for claim in (claims.reward(equal), claims.held_out(equal)):
        assert claim.verdict.startswith("the same within ±0.03 (interval over 6 seeds"), claim
    assert claims.cheaper(equal).verdict == "undecided (interval over 6 seeds, includes 1)"


def test_reaching_the_level_of_a_collapsed_rival_is_no_efficiency(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path, GSPO, seed, 0.5, 0.2)
        write_run(tmp_path, GRPO_R2, seed, 0.5, -0.4)
    data = load.load([tmp_path])
    assert claims.reward(data).verdict.startswith("points to it")
    assert claims.cheaper(data).verdict == "undecided (the rival ends no higher than it starts)"


@pytest.mark.slow
def test_the_opposite_is_reported_as_not_seen(below):
    for claim in (
        claims.reward(below),
        claims.held_out(below),
        claims.cheaper(below),
        stability_claims.stable(below),
    ):
        assert claim.verdict.startswith("not seen: contradicted"), claim
    assert stability_claims.collapse_without_replay(below).verdict.startswith(
        "not seen: contradicted"
    )
    assert claims.replay_helps(below).verdict.startswith("the same within ±0.03")


@pytest.mark.slow
def test_clipping_verdicts(tmp_path, monkeypatch):
    for share, verdict in (
        (0.15, "seen"),
        (0.004, "not seen: contradicted"),
        (0.0, "points against it"),
    ):
        monkeypatch.setitem(CLIPPED, GSPO, (share, 2 * share))
        folder = write_arms(
            tmp_path / str(share), {GSPO: (0.2, 0), GRPO_R2: (0.2, 0)}, range(1, 7), steps=20
        )
        assert claims.clipping(load.load([folder])).verdict.startswith(verdict)


def test_a_single_seed_gives_within_run_intervals(tmp_path):
    data = load.load([write_arms(tmp_path, PAPER_LIKE, seeds=(7,))])
    assert "within the single run, not over seeds" in claims.reward(data).verdict
    assert "over problems, not over seeds" in claims.held_out(data).verdict
    assert "1 seed (7)" in load.describe(data, data.arms)


# ---------------------------------------------------------------------------------------------------------
# loading
def test_tidy_frame(paper_like):
    data = load.load([paper_like / "gspo-none-seed1", paper_like])  # a run named twice counts once
    assert list(data.rows.columns[:4]) == ["run", "arm", "seed", "step"] and len(data.runs) == 18
    assert data.arms == [GSPO, GRPO_R2, GRPO]
    assert data.table(GSPO, "reward/mean").shape == (80, 6)
    assert data.table(GSPO, "optim/grad_norm").isna().all(axis=None)  # null
    assert data.table(GSPO, "eval/elo", first_step=0).dropna().index.tolist() == [0, 20, 40, 60, 80]


def test_cut_last_line_and_unfinished_run(tmp_path):
    write_run(tmp_path, GSPO, 1, 0.2, 0.1, steps=30)
    file = write_run(tmp_path, GRPO_R2, 1, 0.2, 0.1, steps=30) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:21]) + lines[21][:40])
    data = load.load([tmp_path])
    assert data.common_step(GSPO, GRPO_R2) == 20
    assert any("no rows: 22" in note for note in data.notes) and any(
        "20 of 30" in note for note in data.notes
    )
    assert "Unfinished: GRPO + Routing Replay (R2), seed 1, 20 of 30" in load.describe(
        data, data.arms
    )
    assert "batches 11 to 20" in claims.reward(data).finding


def test_errors_are_one_line(tmp_path, capsys, monkeypatch):
    def error(*paths: Path) -> str:
        with pytest.raises(load.RunsError) as stop:
            fig_efficiency.draw(load.load(list(paths)), tmp_path / "out")
        monkeypatch.setattr(
            sys, "argv", ["fig_efficiency.py", *map(str, paths), f"out={tmp_path / 'out'}"]
        )
        with pytest.raises(SystemExit) as end:
            script.command(
                lambda: script.run("", fig_efficiency.draw, fig_efficiency.judged_claims)
            )
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"error: {stop.value}"
        return line + "\n"

    assert "no runs under" in error(tmp_path)
    assert "does not exist" in error(tmp_path / "nothing")
    first = write_run(tmp_path / "a", GSPO, 1, 0.2, 0.1, steps=5)
    needs = "error: fig_efficiency needs arms GSPO and GRPO + Routing Replay (R2); found: GSPO\n"
    assert error(tmp_path) == needs
    write_run(tmp_path / "a", GRPO_R2, 2, 0.2, 0.1, steps=5)
    assert "share none" in error(tmp_path)
    again = write_run(tmp_path / "b", GSPO, 1, 0.2, 0.1, steps=6, study="other")
    message = error(tmp_path / "a", tmp_path / "b")
    assert str(first) in message and str(again) in message and "twice" in message


def test_every_script_says_what_it_refuses_in_one_line():
    for file in ANALYSIS.glob("*.py"):
        _, ends, last = file.read_text().partition('if __name__ == "__main__":')
        assert not ends or "script.command(" in last, (
            f"{file} shows a traceback for a folder that is not there"
        )
        assert file.name == "script.py" or "SystemExit" not in file.read_text(), (
            f"{file}: raise load.RunsError instead"
        )


def test_differing_settings_are_appended(tmp_path):
    write_run(tmp_path / "a", GSPO, 1, 0.2, 0.1, steps=5)
    write_run(tmp_path / "b", GSPO, 1, 0.2, 0.1, steps=5, optim={"lr": 0.01})
    data = load.load([tmp_path])
    assert data.arms == ["GSPO [optim.lr=0.001]", "GSPO [optim.lr=0.01]"]


# ---------------------------------------------------------------------------------------------------------
# figures
@pytest.mark.slow
def test_reproduce_writes_everything_and_the_same_bytes(paper_like, tmp_path, monkeypatch, capsys):
    three = [str(file) for file in sorted(paper_like.iterdir()) if file.name[-1] in "123"]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *three, f"out={tmp_path / 'figures'}"])
    reproduce.main()
    printed, summary = capsys.readouterr().out, (tmp_path / "figures" / "summary.md").read_text()
    assert reproduce.ESCAPED.sub(r"\1", summary) in printed and "\\<" not in printed
    names = (
        "fig1_stability",
        "fig2_clipping",
        "fig3_routing_replay",
        "fig_efficiency",
        "fig_routing",
    )
    for name in names:
        for suffix, magic in ((".pdf", b"%PDF"), (".png", b"\x89PNG")):
            path = tmp_path / "figures" / (name + suffix)
            assert path.read_bytes().startswith(magic) and str(path) in printed
    data = load.load(three)
    for path in fig2_clipping.draw(data, tmp_path / "again") + fig_routing.draw(
        data, tmp_path / "again"
    ):
        assert path.read_bytes() == (tmp_path / "figures" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_one_seed_and_censored_runs_draw(tmp_path, below):
    write_arms(tmp_path / "runs", {GSPO: (0.25, 0.1), GRPO_R2: (0.25, 0.1)}, seeds=(1,), steps=8)
    assert all(
        path.is_file() for path in fig2_clipping.draw(load.load([tmp_path / "runs"]), tmp_path)
    )
    assert all(path.is_file() for path in fig_efficiency.draw(below, tmp_path))


@pytest.mark.slow
def test_runs_as_a_script_without_torch():
    modules = ", ".join(
        sorted(file.stem for file in ANALYSIS.glob("*.py") if file.stem != "wandb_report")
    )
    code = f"import sys; sys.path.insert(0, {str(ANALYSIS)!r}); import {modules}; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert not {"'torch'", "'transformers'", "'wandb'", "'hydra'"} & set(
        loaded.strip("[]\n").split(", ")
    )
    script = [sys.executable, str(ANALYSIS / "fig2_clipping.py"), "--help"]
    shown = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert (
        "which share of the tokens is clipped" in shown
        and "Expected" in shown
        and "  out=figures  " in shown
    )


@pytest.mark.slow
def test_without_evaluation_and_routing(tmp_path):
    for arm in (GSPO, GRPO_R2):
        file = write_run(tmp_path, arm, 1, 0.2, 0.1, steps=12) / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [
            {k: v for k, v in row.items() if not k.startswith(("eval/", "routing/"))}
            for row in rows
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load.load([tmp_path])
    assert all(path.is_file() for path in fig1_stability.draw(data, tmp_path / "figures"))
    with pytest.raises(load.RunsError):
        fig_routing.draw(data, tmp_path / "figures")
    assert len(claims.all_claims(data)) == 4
    assert "routing consistency" in "\n".join(reproduce.table(data))


def test_a_caption_says_that_the_compute_of_a_run_is_not_known(tmp_path):
    folders = [write_run(tmp_path, arm, 1, *PAPER_LIKE[arm], steps=6) for arm in (GSPO, GRPO_R2)]
    assert "not known" not in load.describe(load.load(folders), [GSPO, GRPO_R2])
    path = folders[0] / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(
            json.dumps({k: v for k, v in row.items() if k != "compute/flops"}) + "\n"
            for row in rows
        )
    )
    said = load.describe(load.load(folders), [GSPO, GRPO_R2])
    assert f"Training compute is not known of {GSPO}: the runs report no compute/flops." in said


def test_every_metric_read_is_in_the_registry():
    kinds = "reward|clip|eval|routing|compute"
    for file in ANALYSIS.glob("*.py"):
        for name in re.findall(rf'"((?:{kinds})/[a-z_]+)"', file.read_text()):
            assert metrics.lookup(name + "0" if name.endswith("_") else name).meaning, (
                f"{file}: {name}"
            )

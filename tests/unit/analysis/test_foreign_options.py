"""framework=, objective= and updates_per_batch= in every command that reads runs; and runs of other
frameworks on W&B's server, read by the real client from a stand-in.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from foreign_logs import trl_row, verl_row, write_lines, write_state
from gspo.analysis import early_warning, fig_contrast, fig_curves, load, notebooks, script, sources
from gspo.cli import compare, report, view
from gspo.tracking.foreign_options import ForeignOptions
from recorded_runs import HEALTHY, write
from wandb_server import SavedRun, serving

TRL_ROWS = [trl_row(step) for step in range(1, 31)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def trl(tmp_path) -> str:
    return str(write_state(tmp_path / "trl" / "trainer_state.json", TRL_ROWS))


@pytest.fixture
def ours(tmp_path) -> str:
    return str(write(tmp_path / "ours" / "gspo-seed0", "gspo", HEALTHY))


def called(main, monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """The exit code of a command, and what it printed."""
    monkeypatch.setattr("sys.argv", ["gspo", *words])
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    printed = capsys.readouterr()
    return code, printed.out, printed.err


# ------------------------------------------------------------------------------------------------
# their effect
def test_they_apply_to_runs_of_other_frameworks_alone(trl, ours):
    options = ForeignOptions(objective="gspo", updates_per_batch=5)
    data = load.load([ours, trl], None, options)
    assert data.arms == ["GSPO", "GSPO (TRL)"]
    own, foreign = data.runs
    assert foreign.last == 6 and "clip/sequence_active" in foreign.rows
    (alone,) = load.load([ours]).runs
    assert own.settings == alone.settings and own.rows.equals(alone.rows)
    forced = load.load([trl], None, ForeignOptions(framework="ms-swift")).runs[0]
    assert forced.settings["framework"] == "ms-swift"


def test_load_runs(trl, ours):
    runs = notebooks.load_runs(trl, ours, objective="gspo", updates_per_batch=5).runs
    assert runs["arm"].tolist() == ["GSPO", "GSPO (TRL)"] and runs["batches"].tolist()[1] == 6
    with pytest.raises(load.RunsError, match="framework=other: choose one of trl, ms_swift, verl"):
        notebooks.load_runs(trl, framework="other")
    with pytest.raises(load.RunsError, match="updates_per_batch=-1: must be a whole number of at"):
        notebooks.load_runs(trl, updates_per_batch=-1)
    with pytest.raises(load.RunsError, match=r"^objective=gspo: none of these is a run of another"):
        notebooks.load_runs(ours, objective="gspo")


@pytest.mark.slow
def test_compare_and_curves(trl, ours, tmp_path, monkeypatch, capsys):
    words = [ours, trl, "objective=grpo", "updates_per_batch=3"]
    code, out, _ = called(compare.main, monkeypatch, capsys, *words)
    assert code == 0 and "10/34" in out and "grpo" in out and "clipped tokens" in out
    words += [f"out={tmp_path / 'figures'}", "formats=[png]", "caption=false"]
    code, out, _ = called(lambda: script.command(fig_curves.main), monkeypatch, capsys, *words)
    assert code == 0 and Path(out.split()[-1]).is_file()


def test_the_live_page(trl, ours):
    sent = {}
    store = SimpleNamespace(
        validate_project_name=lambda name: None,
        bulk_log=lambda study, name, metrics, *rest, **options: sent.update({name: metrics}),
        delete_run=lambda study, name, **options: sent.pop(name),
    )
    page = view.Page(store)
    assert page.update([trl], ForeignOptions(objective="gspo", updates_per_batch=5)) == 6
    assert "clip/sequence_active" in sent["trl"][0] and "trl/loss" in sent["trl"][0]
    assert page.has_foreign_runs
    # newer checkpoints are the same run
    folder = Path(trl).parent
    write_state(folder / "checkpoint-5" / "trainer_state.json", TRL_ROWS[:5])
    Path(trl).unlink()
    write_state(folder / "checkpoint-30" / "trainer_state.json", TRL_ROWS)
    page.update([str(folder)])
    assert sent.keys() == {"trl"} and len(sent["trl"]) == 30


# ------------------------------------------------------------------------------------------------
# refusals
@pytest.mark.parametrize(
    "main", [report.main, compare.main, view.main, lambda: script.command(fig_curves.main)]
)
@pytest.mark.parametrize(
    ("word", "refusal"),
    [
        ("framework=other", "framework=other: choose one of trl, ms_swift, verl, prime_rl"),
        ("updates_per_batch=0", "updates_per_batch=0: must be a whole number of at least 1"),
        ("updates_per_batch=x", "updates_per_batch=x: must be a whole number"),
    ],
)
def test_a_wrong_value_is_refused(main, word, refusal, trl, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = called(main, monkeypatch, capsys, trl, word)
    assert code == 2 and not out and err.startswith(f"error: {refusal}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "main", [report.main, compare.main, lambda: script.command(fig_curves.main)]
)
def test_an_option_without_effect_is_refused(main, ours, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = called(main, monkeypatch, capsys, ours, "objective=gspo")
    refusal = "objective=gspo: none of these is a run of another framework"
    assert code == 2 and not out and err.startswith(f"error: {refusal}") and err.count("\n") == 1


def test_an_option_without_effect_on_the_live_page(ours, tmp_path, monkeypatch):
    store = SimpleNamespace(
        validate_project_name=lambda name: None, bulk_log=lambda *rest, **options: None
    )
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(SQLiteStorage=store))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    options = view.Options(paths=(ours,), objective="gspo", open=False)
    with pytest.raises(ValueError, match=r"^objective=gspo: none of these is a run of another"):
        view.browser([ours], tmp_path, options)


def test_the_refusal_names_what_could_not_be_read(ours, tmp_path):
    odd = write_lines(tmp_path / "odd.jsonl", [{"step": 1, "mine": 1.0}])
    with pytest.raises(load.RunsError, match=r"objective=gspo: none of .*prove no framework"):
        load.load([ours, odd], None, ForeignOptions(objective="gspo"))


def test_a_path_that_does_not_exist(tmp_path, monkeypatch, capsys):
    missing = str(tmp_path / "missing")
    code, _, err = called(report.main, monkeypatch, capsys, missing, "objective=gspo")
    assert code == 2 and "missing" in err and "none of these" not in err


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (view.main, ["in=terminal"]),
        (lambda: script.command(fig_contrast.main), []),
        (lambda: script.command(early_warning.main), []),
    ],
)
def test_commands_in_which_they_have_no_effect(main, words, ours, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paths = [] if main is not view.main else [ours]
    code, _, err = called(main, monkeypatch, capsys, *paths, *words, "framework=trl")
    assert code == 2 and "framework" in err and err.count("\n") == 1


# ------------------------------------------------------------------------------------------------
# W&B's server
def saved(number: str, config: dict, rows: list[dict]) -> SavedRun:
    about = {"displayName": "cloud", "project": "p", "groupName": "g", "jobType": None}
    config = {name: {"value": value} for name, value in config.items()}
    history = {step: row | {"_step": step} for step, row in enumerate(rows)}
    return SavedRun(number, about, config, history, ended=True)


VERL_CONFIG = {"data": {"seed": 5}, "actor_rollout_ref": {"actor": {}}}


@pytest.fixture
def server(monkeypatch):
    with serving() as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        rows = [verl_row(step) for step in range(1, 4)]
        for number in ("aaa", "bbb"):
            made.runs[number] = saved(number, VERL_CONFIG | {"seed": ord(number[0])}, rows)
        yield made


@pytest.mark.slow
def test_pages_of_runs_on_the_server(server, tmp_path, monkeypatch, capsys):
    words = ["wandb:team/p", "objective=gspo", f"out={tmp_path / 'pages'}"]
    code, out, err = called(report.main, monkeypatch, capsys, *words)
    assert code == 0, err
    names = [Path(line).name for line in out.splitlines()]
    assert names == ["cloud-aaa.html", "cloud-bbb.html"], "two runs of one name"
    page = (tmp_path / "pages" / names[0]).read_text()
    assert "objective gspo" in page and "a run of verl, read from a W&amp;B file" in page
    config = {"objective": {"name": "gspo"}, "steps": 3, "seed": 1, "record": {"run": "mine"}}
    server.runs["ccc"] = saved("ccc", config, [{"step": 1, "reward/mean": 0.5}])
    code, out, err = called(report.main, monkeypatch, capsys, *words)
    assert code == 2 and len(out.splitlines()) == 2
    assert "wandb:team/p: 1 run of this repository (cloud), whose page is made from the run" in err
    code, _, err = called(report.main, monkeypatch, capsys, "wandb:team/p/other")
    assert code == 2 and "wandb:team/p/other: there is no training run" in err
    code, _, err = called(report.main, monkeypatch, capsys, "wandb:team")
    assert code == 2 and "write wandb:ENTITY/PROJECT" in err


@pytest.mark.slow
def test_rows_that_were_cached_under_other_options_are_read_again(server):
    plain = sources.records("wandb:team/p")[0]
    assert "clip/token_active" not in plain.rows
    options = ForeignOptions(objective="gspo")
    first, second = sources.records("wandb:team/p", options)
    assert "clip/token_active" in first.rows and first.path != second.path
    asked = len(server.scanned)
    assert "clip/token_active" in sources.records("wandb:team/p", options)[0].rows
    assert len(server.scanned) == asked, "from the cache"
    assert "clip/token_active" not in sources.records("wandb:team/p")[0].rows
    both = load.load(["wandb:team/p/g"], None, options)
    assert [run.settings["log"] for run in both.runs] == ["aaa", "bbb"]
    assert len(both.arms) == 2
    data = load.load(["wandb:team/p/bbb"], None, options)
    assert [run.id for run in data.runs] == ["bbb"]


def test_a_run_of_the_server_without_the_server(tmp_path, monkeypatch):
    rows = [{"_step": step} | verl_row(step) for step in (1, 2)]
    run = SimpleNamespace(
        config={"data": {"seed": 5}},
        name="cloud",
        id="abc",
        scan_history=lambda page_size: iter(json.loads(json.dumps(rows))),
    )
    # no file of this machine says anything of it
    monkeypatch.chdir(tmp_path)
    Path("foreign_run.yaml").write_text("objective: grpo\nseed: 9\n")
    record = sources.from_server(run, ForeignOptions(objective="gspo"))
    assert record.settings["objective.name"] == "gspo" and record.settings["seed"] == 5
    verl = sources.from_server(run, ForeignOptions(updates_per_batch=4))
    assert any("updates_per_batch=4 changes nothing: the steps of verl" in n for n in verl.notes)
    assert record.id == "abc" and record.path == Path("cloud/abc")
    assert sources.from_server(run).settings["objective.name"].startswith("not logged, cloud")

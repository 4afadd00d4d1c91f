"""analysis/sources.py: the same run from its directory, from W&B's offline files (written by the
real client), damaged ones, segments of a resumed run, and from the cache."""

import json
import math
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gspo.analysis import fig_objectives, foreign, load, notebooks, sources
from gspo.tracking.metrics import METRICS
from recorded_wandb import log, rows, same


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A run in two segments: the second begins after step 25, as a run does that was resumed."""
    folder = tmp_path_factory.mktemp("runs") / "gspo-seed1-abc"
    log(folder, rows(0, 25))
    time.sleep(1.1)  # folders are named by the second
    log(folder, rows(26, 40))
    return folder


@pytest.fixture
def wandb_folder(recorded, tmp_path) -> Path:
    """W&B's files alone, away from the run directory."""
    return shutil.copytree(recorded / "wandb", tmp_path / "elsewhere", symlinks=True)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
def test_directory_and_offline_files_are_the_same_run(recorded, wandb_folder):
    (directory,) = sources.records(recorded)
    (offline,) = sources.records(wandb_folder)
    same(directory.rows, offline.rows)
    assert (
        directory.settings == offline.settings
        and offline.path.name == recorded.name
        and not offline.notes
    )
    assert len(list(wandb_folder.glob("offline-run-*"))) == 2 and offline.rows[
        "step"
    ].tolist() == list(range(41))
    assert len(sources.records(recorded.parent)) == 1, (
        "W&B's files in a run directory are not another run"
    )
    tables = [
        notebooks.load_runs(source).metric("reward/mean") for source in (recorded, wandb_folder)
    ]
    assert tables[0].equals(tables[1]) and len(tables[0]) == 40
    (single,) = sources.records(sorted(wandb_folder.glob("offline-run-*/*.wandb"))[0])
    assert single.rows["step"].max() == 25


@pytest.mark.slow
def test_a_copy_that_followed_links_is_not_read_twice(recorded, tmp_path):
    shutil.copytree(recorded / "wandb", tmp_path / "followed", symlinks=False)
    assert (tmp_path / "followed" / "latest-run").is_dir() and not (
        tmp_path / "followed" / "latest-run"
    ).is_symlink()
    (record,) = sources.records(tmp_path / "followed")
    assert record.rows["step"].tolist() == list(range(41)) and not record.notes
    _, problems, _ = foreign.read_foreign_runs(tmp_path / "followed")
    segments = list((recorded / "wandb").glob("offline-run-*"))
    assert len(problems) == len(segments), "each segment is named once as a run of ours"


@pytest.mark.slow
def test_the_same_figure_comes_out_of_both(recorded, wandb_folder, tmp_path):
    files = {}
    for name, source in (("directory", recorded), ("offline", wandb_folder)):
        data = load.load([source])
        files[name] = [path.read_bytes() for path in fig_objectives.draw(data, tmp_path / name)]
    assert files["directory"] == files["offline"]


@pytest.mark.slow
def test_what_is_damaged_is_said_and_the_rest_is_read(tmp_path):
    log(tmp_path / "gspo-seed1-abc", rows(0, 400))  # several blocks
    wandb_folder = shutil.copytree(
        tmp_path / "gspo-seed1-abc" / "wandb", tmp_path / "elsewhere", symlinks=True
    )
    (whole,) = sources.records(wandb_folder)
    good = {row["step"]: row for row in whole.rows.to_dict("records")}
    (file,) = wandb_folder.glob("offline-run-*/*.wandb")
    data, draw, most = file.read_bytes(), random.Random(0), 0
    for trial in range(60):
        damaged = bytearray(data)
        if trial % 3 == 0:
            del damaged[draw.randrange(len(damaged)) :]
        elif trial % 3 == 1:
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        else:
            start = draw.randrange(len(damaged))
            damaged[start : start + draw.randrange(2000)] = bytes(draw.randrange(2000))
        file.write_bytes(damaged)
        for record in sources.records(wandb_folder):
            read = record.rows.to_dict("records")
            for row in read:  # never a wrong number
                assert all(row[k] == good[row["step"]][k] or math.isnan(row[k]) for k in row), trial
            assert len(read) == len(good) or record.notes, trial
            most += trial % 3 == 1 and len(read) > 200
    assert most >= 15, (
        "of 20 files with one bit flipped, three quarters give half of their rows or more"
    )
    for odd in (b"", b":W&B", b"\0" * 100, data[:7]):
        file.write_bytes(odd)
        (record,) = sources.records(wandb_folder)
        assert not len(record.rows)
        if odd != data[:7]:
            assert record.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("settings.yaml", b"a: [", "settings.yaml holds no settings: while parsing"),
        ("settings.yaml", b"- 1", "settings.yaml holds no settings: [1]"),
        ("settings.yaml", b"seed: \xff", "settings.yaml holds no settings: "),
        ("settings.yaml", b"seed: null", "its settings have no seed, steps, objective.name"),
        (
            "metrics.jsonl",
            b'3\n{"step": "x"}\n\xff\xfe\n{"reward/mean": 1}\n{"st',
            "no rows: 1, 2, 3, 4, 5",
        ),
    ],
)
def test_a_damaged_run_directory_is_noted_and_the_others_are_read(
    recorded, tmp_path, file, content, said
):
    for name in ("gspo-seed1-abc", "gspo-seed2-bad"):
        shutil.copytree(recorded, tmp_path / "runs" / name, ignore=shutil.ignore_patterns("wandb"))
    (tmp_path / "runs" / "gspo-seed2-bad" / file).write_bytes(content)
    data = load.load([tmp_path / "runs"])
    assert [run.path.name for run in data.runs] == ["gspo-seed1-abc"] and any(
        said in note for note in data.notes
    )


@pytest.mark.slow
def test_runs_of_one_name_in_two_studies_are_two(recorded, tmp_path):
    for study in ("one", "two"):
        folder = tmp_path / study / "gspo-seed1-abc"
        log(folder, rows(0, 3))
        shutil.copytree(folder / "wandb", tmp_path / "copied" / study, symlinks=True)
    found = sources.records(tmp_path / "copied")
    assert len(found) == 1 and any("two W&B runs" in note for note in found[0].notes), (
        "of one study: the newer"
    )
    assert (
        len(sources.joined([replace(found[0], settings={"study": study}) for study in "ab"])) == 2
    )


@pytest.mark.slow
def test_a_later_run_of_the_name_replaces_an_earlier_one(tmp_path):
    """A rollback: the directory goes on as a W&B run of its own."""
    folder = tmp_path / "gspo-seed1-abc"
    log(folder, rows(0, 30))
    (folder / "wandb_id").unlink()
    kept = [
        line
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["step"] <= 10
    ]
    (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    time.sleep(1.1)
    log(folder, rows(11, 20))
    (offline,) = sources.records(
        shutil.copytree(folder / "wandb", tmp_path / "elsewhere", symlinks=True)
    )
    assert offline.rows["step"].tolist() == list(range(21))


def test_the_cache_is_used_and_gives_way(recorded, monkeypatch, tmp_path):
    copy = shutil.copytree(recorded, tmp_path / "copy", symlinks=True)
    (first,) = sources.records(copy)
    monkeypatch.setattr(sources, "from_folder", lambda folder: pytest.fail("not from the cache"))
    (second,) = sources.records(copy)
    same(first.rows, second.rows)
    assert first.settings == second.settings and first.path == second.path
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "reward/mean": 0.9}\n{"step": 42, "rew')
    (third,) = sources.records(copy)
    assert (
        third.rows["step"].max() == 41 and "lines left out that are no rows: 43" in third.notes[0]
    )
    (kept,) = (tmp_path / "cache" / "gspo").iterdir()
    kept.write_bytes(b"PAR1 no longer")
    same(sources.records(copy)[0].rows, third.rows)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    same(sources.records(copy)[0].rows, third.rows)


def test_without_an_account_one_line_says_so(monkeypatch):
    for name, value in {"NETRC": "/nonexistent", "WANDB_API_KEY": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(load.RunsError, match=r"^wandb:entity/project: .*$"):
        load.load(["wandb:entity/project"])


@pytest.mark.slow
def test_two_thousand_steps_of_sixty_metrics_are_read_in_seconds(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: F401, W&B's own import is not what is timed

    folder, names = (
        tmp_path / "gspo-seed1-long",
        [metric.name.replace("*", "7") for metric in METRICS[1:61]],
    )
    log(
        folder,
        [
            {"step": i} | {name: (i * 7919 % 1000) / 1000 + n for n, name in enumerate(names)}
            for i in range(2000)
        ],
    )
    shutil.copytree(folder / "wandb", tmp_path / "elsewhere", symlinks=True)
    seconds = {}
    for name, source in (("offline", tmp_path / "elsewhere"), ("directory", folder)):
        for kind in ("first", "cached"):
            started = time.process_time()  # of the processor: a busy machine fails no test
            (record,) = sources.records(source)
            seconds[name, kind] = time.process_time() - started
            assert record.rows.shape == (2000, 61)
    print({" ".join(key): round(value, 3) for key, value in seconds.items()})
    assert seconds["offline", "first"] < 4 and seconds["directory", "first"] < 4
    assert seconds["offline", "cached"] < seconds["offline", "first"] / 4

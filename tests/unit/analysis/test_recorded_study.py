"""A study in one Parquet file: figures and verdicts are those of its run directories; what is none
is one line.
"""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from commands import ROOT
from gspo.analysis import claims, load, recorded_study, sources
from gspo.analysis.load import GRPO, GRPO_R2, GSPO
from recorded_runs import COLLAPSED, HEALTHY, write
from three_arms import write_run


@pytest.fixture
def study(tmp_path):
    for arm, gain in ((GSPO, 0.3), (GRPO_R2, 0.2), (GRPO, 0.1)):
        for seed in (1, 2, 3):
            write_run(tmp_path / "runs", arm, seed, 0.3, gain)
    return tmp_path / "runs"


@pytest.mark.slow
def test_the_verdicts_are_those_of_the_runs(study, tmp_path):
    data = load.load([study])
    recorded_study.write(data, tmp_path / "study.parquet", ["*"])
    again = load.load([tmp_path / "study.parquet"])
    assert [run.settings for run in again.runs] == [run.settings for run in data.runs] and len(
        again.runs
    ) == 9
    assert [run.path.name for run in again.runs] == [run.path.name for run in data.runs]
    for mine, theirs in zip(again.runs, data.runs, strict=True):
        recorded = theirs.rows.dropna(axis="columns", how="all")
        assert set(mine.rows) == set(recorded)
        for name in recorded:
            np.testing.assert_allclose(mine.rows[name], theirs.rows[name], rtol=1e-6)
    assert [claim.verdict for claim in claims.all_claims(again)] == [
        c.verdict for c in claims.all_claims(data)
    ]


@pytest.mark.slow
def test_a_script_reads_it_and_writes_the_same_bytes_again(study, tmp_path):
    def script(name: str, *arguments: str) -> str:
        command = [sys.executable, str(ROOT / "analysis" / name), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    said = script("recorded_study.py", "runs", "out=one", "metrics=reward/mean")
    assert said.startswith("one/synthetic.parquet: ")
    script("recorded_study.py", "one/synthetic.parquet", "out=two")
    assert (tmp_path / "one/synthetic.parquet").read_bytes() == (
        tmp_path / "two/synthetic.parquet"
    ).read_bytes()
    columns = parquet.read_table(tmp_path / "one/synthetic.parquet").column_names
    assert columns == ["run", "step", "reward/mean"]


def test_a_run_that_collapsed_is_kept_and_one_that_may_go_on_is_refused(tmp_path):
    write(tmp_path / "runs", "gspo", COLLAPSED)
    cut = write(tmp_path / "runs", "grpo", HEALTHY)
    rows = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(rows[:-5]))
    with pytest.raises(load.RunsError, match="is unfinished: 85 of 90 batches"):
        recorded_study.write(load.load([tmp_path / "runs"]), tmp_path / "study.parquet")
    assert not (tmp_path / "study.parquet").exists()
    (cut / "metrics.jsonl").write_text("".join(rows))
    data = load.load([tmp_path / "runs"])
    recorded_study.write(data, tmp_path / "study.parquet")
    again = load.load([tmp_path / "study.parquet"])
    assert [run.collapsed for run in again.runs] == [run.collapsed for run in data.runs]
    assert sum(run.collapsed is None for run in again.runs) == 1


def test_two_runs_of_one_name_are_refused(tmp_path):
    for part, seed in (("a", 1), ("b", 2)):
        write(tmp_path / part, "gspo", HEALTHY, seed).rename(tmp_path / part / "run1")
    with pytest.raises(
        load.RunsError, match="several runs have the name run1: rename their folders"
    ):
        recorded_study.write(load.load([tmp_path]), tmp_path / "study.parquet")


def test_a_metric_that_no_run_has_is_refused(study, tmp_path):
    with pytest.raises(load.RunsError, match=r"no run has recorded reward/meen.*reward/mean"):
        recorded_study.write(
            load.load([study]), tmp_path / "study.parquet", ["reward/meen", "step"]
        )
    assert not (tmp_path / "study.parquet").exists()


def strange(tmp_path):
    """Files that are no recorded study."""
    table = pa.table({"run": ["a"], "step": [1], "reward/mean": [0.5]})
    yield b"no Parquet at all"
    runs = ("[]", "{}", '{"b": {}}', '{"a": 3}', '{"a": ["x"]}', '{"a": {}}')
    for about in (
        None,
        b"[]",
        b"{",
        *(f'{{"common": [], "runs": {text}}}'.encode() for text in runs),
    ):
        changed = table.replace_schema_metadata({sources.STUDY_KEY: about} if about else None)
        parquet.write_table(changed, tmp_path / "made.parquet")
        yield (tmp_path / "made.parquet").read_bytes()
    nameless = table.rename_columns(["name", "step", "reward/mean"])
    about = json.dumps({"common": {}, "runs": {"a": {}}}).encode()
    parquet.write_table(
        nameless.replace_schema_metadata({sources.STUDY_KEY: about}), tmp_path / "made.parquet"
    )
    yield (tmp_path / "made.parquet").read_bytes()
    words = pa.table({"run": ["a"], "step": ["one"]}).replace_schema_metadata(
        {sources.STUDY_KEY: about}
    )
    parquet.write_table(words, tmp_path / "made.parquet")
    yield (tmp_path / "made.parquet").read_bytes()


def test_what_is_no_recorded_study_is_one_line(tmp_path):
    for number, content in enumerate(strange(tmp_path)):
        (tmp_path / "study.parquet").write_bytes(content)
        with pytest.raises(load.RunsError) as refused:
            load.load([tmp_path / "study.parquet"])
        assert "\n" not in str(refused.value) and "study.parquet" in str(refused.value), number

"""What code.json says of the code."""

import json
import subprocess

from gspo.run import code_state
from gspo.run.directory import RunDirectory


def test_a_copy_that_lies_in_another_repository_has_no_commit(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path, check=True
        )

    file = tmp_path / "env" / "directory.py"
    file.parent.mkdir()
    file.write_text("")
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "theirs")
    monkeypatch.setattr(code_state, "__file__", str(file))
    state = code_state.code_state()
    assert (
        state["commit"] is None and state["changed_files"] == [] and code_state.uncommitted() == ""
    )
    git("add", "env")
    git("commit", "-q", "-m", "ours")
    file.write_text("changed")
    assert (
        "+changed" in code_state.uncommitted() and "a/env/directory.py" in code_state.uncommitted()
    )
    state = code_state.code_state()
    assert len(state["commit"]) == 40 and state["changed_files"] == ["env/directory.py"]
    file.write_text("changed\n" * 200_000)
    assert "env/directory.py" in code_state.uncommitted() and len(code_state.uncommitted()) < 1000
    monkeypatch.setattr(code_state, "MAX_CHANGED_BYTES", 1000)
    assert code_state.uncommitted() == "# changed: env/directory.py\n", (
        "git is not asked what has changed in it"
    )
    file.unlink()
    assert "-" in code_state.uncommitted() and "deleted file" in code_state.uncommitted()


def test_a_run_that_goes_on_with_other_code_says_so_and_keeps_the_record_of_both(
    tmp_path,
):
    run = RunDirectory(tmp_path)

    def start(commit: str, diff: str) -> list[str]:
        state = {"commit": commit, "command": ["gspo"]}
        warnings = run._keep_earlier_code(state, diff)
        (tmp_path / "code.json").write_text(json.dumps(state))
        if diff:
            (tmp_path / "code.diff").write_text(diff)
        return warnings

    assert start("a" * 40, "") == [] and start("a" * 40, "") == []
    (changed,) = start("a" * 40, "+x")
    assert "commit aaaaaaaaaa (see code.1.json)" in changed
    assert changed.endswith("from now on commit aaaaaaaaaa and uncommitted changes")
    (committed,) = start("b" * 40, "")
    assert "commit aaaaaaaaaa and uncommitted changes (see code.2.json)" in committed
    assert (tmp_path / "code.2.diff").read_text() == "+x"
    assert not (tmp_path / "code.1.diff").exists() and not (tmp_path / "code.diff").exists()
    # what another user wrote there
    (tmp_path / "code.json").write_text("[1]")
    assert "commit None" in start("b" * 40, "")[0] and (tmp_path / "code.3.json").exists()

"""What code.json says of the code."""

import subprocess

from gspo.run import code_state


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

"""What code.json says of the code."""

import subprocess

from gspo.run import directory


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
    monkeypatch.setattr(directory, "__file__", str(file))
    state = directory.code_state()
    assert (
        state["commit"] is None and state["changed_files"] == [] and directory.uncommitted() == ""
    )
    git("add", "env")
    git("commit", "-q", "-m", "ours")
    file.write_text("changed")
    assert "+changed" in directory.uncommitted() and "a/env/directory.py" in directory.uncommitted()
    state = directory.code_state()
    assert len(state["commit"]) == 40 and state["changed_files"] == ["env/directory.py"]
    file.write_text("changed\n" * 200_000)
    assert "env/directory.py" in directory.uncommitted() and len(directory.uncommitted()) < 1000
    monkeypatch.setattr(directory, "MOST_CHANGED", 1000)
    assert directory.uncommitted() == "# changed: env/directory.py\n", (
        "git is not asked what has changed in it"
    )
    file.unlink()
    assert "-" in directory.uncommitted() and "deleted file" in directory.uncommitted()

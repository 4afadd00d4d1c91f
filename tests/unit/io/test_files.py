"""What is said of a path that should be a run directory and is none."""

import pytest

from gspo.io.files import check_run_directory


def test_a_path_that_is_no_run_directory_is_refused_with_what_it_is(tmp_path):
    study = tmp_path / "study"
    for name in "abcd":
        (study / name).mkdir(parents=True)
        (study / name / "settings.yaml").touch()
    page = study / "a" / "report.html"
    page.touch()
    check_run_directory(study / "a")
    problems = {
        tmp_path / "nothing": "does not exist: name a run directory, such as runs/STUDY/RUN",
        tmp_path: "is not a run directory: it has no settings.yaml",
        study: "is not a run directory: it has no settings.yaml; name one of its runs: "
        f"{study / 'a'}, {study / 'b'}, {study / 'c'}, ...",
        page: f"is not a run directory: name its folder, {study / 'a'}",
    }
    for path, problem in problems.items():
        with pytest.raises(ValueError) as caught:
            check_run_directory(path)
        assert str(caught.value) == f"{path} {problem}"

"""Where Hydra finds the option files. conf/ and sweeps/ lie beside gspo/ in the repository, and in
it in a wheel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, open_dict

from gspo.config.load import register_schemas, to_settings
from gspo.config.settings import Settings
from gspo.config.synonyms import our_name
from gspo.io.untrusted import SURROGATES


def folder_of(name: str) -> Path:
    """Return the folder conf or sweeps of this installation (pyproject.toml says where it is
    installed).
    """
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


TAKE_A_RUN = ("sample", "evaluate")  # commands that take a run directory also without run=
MULTIRUN = ("-m", "--multirun")
CONF, SWEEPS = folder_of("conf"), folder_of("sweeps")


class SweepFiles(SearchPathPlugin):
    """Lets `gspo train -cn paper_figures -m` find the sweeps that come with the program, in any
    folder.

    They are looked for last, so that an edited copy in a folder that the user names with -cd is the
    one that counts: Hydra puts that folder right before the first entry with the name "schema",
    which is why they have this name."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("schema", f"file://{SWEEPS}")


def composed(name: str, job: Callable[[DictConfig], object]) -> Callable[[], None]:
    """Return the command that composes conf/<name>.yaml and the command line, and calls `job` with
    the result.

    `job` is a function of a module, decorated with `one_line`, so that a sweep's worker processes
    import it."""
    register_schemas()
    main = hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)

    def command() -> object:
        refuse_dashes(sys.argv[1:])
        refuse_folders(sys.argv[1:])
        words = list(map(quoted, multirun_first(sys.argv[1:])))
        if name in TAKE_A_RUN:
            words = [
                f"run={word}" if Path(word, "settings.yaml").is_file() else word for word in words
            ]
        resumes = any(word.startswith("resume=") for word in words)
        sys.argv[1:] = map(of_any_option, words) if resumes else words
        return main()

    return command


def refuse_dashes(words: list[str]) -> None:
    """Raise ValueError for the first setting that is given as an option, such as
    --learning_rate=1e-5 or --lr 1e-5.
    """
    flags = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("--") and name not in flags:
            key = name.lstrip("-").replace("-", "_")
            here, _, condition = (our_name(key) or key).partition(" (with ")
            said = here if "=" in here else f"{here}={value or '...'}"
            option = f"{condition.removesuffix(')')} " if condition else ""
            raise ValueError(f"{word}: settings have no dashes and an equals sign, {option}{said}")


def refuse_folders(words: list[str]) -> None:
    """Raise ValueError for Hydra's own settings of folders, which nothing here reads."""
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"):
            raise ValueError(
                f"{word}: runs are written to RUNS/STUDY/NAME; say runs=FOLDER or study=NAME"
            )


def multirun_first(words: list[str]) -> list[str]:
    """Return the words with -m at the front, the one place in which Hydra accepts it beside
    settings on both sides.

    >>> multirun_first(["objective=gspo,grpo", "-m", "seed=1,2"])
    ['-m', 'objective=gspo,grpo', 'seed=1,2']
    """
    others = [word for word in words if word not in MULTIRUN]
    return ["-m", *others] if len(others) < len(words) else words


def of_any_option(word: str) -> str:
    """Return a word beside resume= so that Hydra takes settings of options that it has not
    composed: those of the run. Whether the run has the setting is checked when the run is read.

    >>> of_any_option("rollout.url=http://127.0.0.1:8000")
    '++rollout.url=http://127.0.0.1:8000'
    """
    key, sign, _ = word.partition("=")
    plain = sign and "." in key and key[0].isalpha() and not key.startswith("hydra.")
    return f"++{word}" if plain else word


def quoted(word: str) -> str:
    """Return a word of the command line as Hydra's grammar can read it.

    Values such as paths with `=`, `~`, `#` or letters of other alphabets are put into quotes, which
    the shell has taken away if the user wrote them. The carriage return that a script from Windows
    leaves at the end of a line is dropped.

    >>> quoted("model.path=checkpoints/epoch=9")
    "model.path='checkpoints/epoch=9'"
    """
    word = word.rstrip("\r")
    key, sign, value = word.partition("=")
    if word.startswith("-") or not sign or not value or SURROGATES.search(word):
        return word  # of a word that is not UTF-8 the program says so
    parser = OverridesParser.create()
    try:
        parser.parse_override(word)
        return word
    except HydraException:
        escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
        in_quotes = f"{key}='{escaped}'"
    try:
        parser.parse_override(in_quotes)
        return in_quotes
    except HydraException:
        return word  # Hydra says what is wrong with it


def composed_settings(words: list[str]) -> Settings:
    """Return the settings of the run that `gspo train` would make of these words."""
    register_schemas()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=list(map(quoted, words)), return_hydra_config=True)
        choices = config.hydra.runtime.choices
        with open_dict(config):
            del config["hydra"]
        return to_settings(config, choices)

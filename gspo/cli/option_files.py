"""Shows Hydra the option files, and prepares the words of the command line for Hydra.

conf/ and sweeps/ are beside gspo/ in the repository, and inside gspo/ in an installed wheel.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from string import Template

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from gspo.config.load import chosen_settings, register_schemas
from gspo.config.schema import GROUPS_BESIDE_SETTINGS
from gspo.config.settings import CHOICES, Settings
from gspo.config.synonyms import our_name
from gspo.io.arguments import HELP
from gspo.io.untrusted import SURROGATES


def folder_of(name: str) -> Path:
    """Return the folder conf or sweeps of this installation, as pyproject.toml installs it."""
    package = Path(__file__).parents[1]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


# settings that are names, of which digits may be a part
NAMES = ("study", "runs", "tracking.project", "tracking.entity")
RUN_COMMANDS = ("sample", "evaluate")  # commands that also accept a run directory without run=
MULTIRUN = ("-m", "--multirun")
# options of Hydra whose value is the next word
OPTIONS_WITH_VALUE = (
    *("-cd", "--config-dir", "-cn", "--config-name", "-cp", "--config-path"),
    *("-c", "--cfg", "-p", "--package"),
)
CONF = folder_of("conf")
SWEEPS = folder_of("sweeps")


class SweepFiles(SearchPathPlugin):
    """A Hydra plugin: `gspo train -cn paper_figures -m` finds the program's sweeps in any folder.

    They are searched last. An edited copy in a folder that the user gives with -cd comes first,
    because Hydra inserts that folder before the first entry with the name "schema"."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("schema", f"file://{SWEEPS}")


def register_options() -> None:
    """Let Hydra find the schemas, and the options of `gspo train` in sweeps/ too."""
    register_schemas()
    Plugins.instance().register(SweepFiles)


def composed(name: str, job: Callable[[DictConfig], object]) -> Callable[[], None]:
    """Return the command that composes conf/<name>.yaml with the command line and calls `job`.

    `job` gets the composed configuration. It must be a module's function, decorated with
    `one_line`, because the worker processes of a sweep import it."""
    register_schemas()
    main = hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)

    def command() -> None:
        words = sys.argv[1:]
        refuse_dashes(words)
        refuse_folders(words)
        refuse_misread(name, words)
        words = options_first(words)
        if name in RUN_COMMANDS:
            words = with_run(name, words)
        words = with_recorded_options(list(map(quoted, words)))
        options = {word for word in words if word.startswith("-")}
        if options and options <= HELP:
            print(help_of(name, [word for word in words if word not in HELP]))
            sys.exit(0)
        sys.argv[1:] = words
        main()

    return command


def with_run(command: str, words: list[str]) -> list[str]:
    """Return the words with run= before the path of the run directory.

    Raises ValueError if they name more than one run.

    >>> with_run("evaluate", ["runs/STUDY/RUN", "-cd", "mine", "k=2"])
    ['run=runs/STUDY/RUN', '-cd', 'mine', 'k=2']
    """
    previous_words = ["", *words]
    result = []
    paths = []
    for word, previous in zip(words, previous_words, strict=False):
        if previous not in OPTIONS_WITH_VALUE and is_path_word(word):
            paths.append(word)
            result.append(f"run={word}")
        else:
            result.append(word)
    if paths:
        paths += [word.removeprefix("run=") for word in words if word.startswith("run=")]
    if len(paths) > 1:
        names = ", ".join(paths[:2]) + (", ..." if len(paths) > 2 else "")
        raise ValueError(f"{command} takes one run, and {len(paths)} are given: {names}")
    return result


def is_path_word(word: str) -> bool:
    """Whether a word of the command line is a path, not `key=value` or an option of Hydra."""
    # unlike Path.exists, it is False for a word that is too long for a path
    return ("=" not in word and word[:1] not in ("-", "~", "+")) or os.path.exists(word)


def help_of(name: str, words: list[str]) -> str:
    """Return the help that Hydra prints for these settings.

    Hydra also lists all groups of options for it, which takes a second and is not printed."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(name, overrides=words, return_hydra_config=True)
        template = Template(config.hydra.help.template)
        with open_dict(config):
            del config["hydra"]
        return template.substitute(CONFIG=OmegaConf.to_yaml(config)).rstrip()


def refuse_dashes(words: list[str], options: Sequence[str] = ()) -> None:
    """Raise ValueError for a setting with dashes, such as --learning_rate=1e-5 or --lr 1e-5.

    `options` are the command's own options beside the settings of a run."""
    flags = get_args_parser()._option_string_actions
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("--") and name not in flags:
            key = name.lstrip("-").replace("-", "_")
            similar = [option for option in options if option.startswith(key)]
            similar += get_close_matches(key, options, 1, 0.8)
            suggestion = similar[0] if similar else our_name(key) or key
            setting, _, condition = suggestion.partition(" (with ")
            if "=" not in setting:
                setting = f"{setting}={value or '...'}"
            option = f"{condition.removesuffix(')')} " if condition else ""
            raise ValueError(
                f"{word}: settings are written without dashes, with an equals sign: "
                f"{option}{setting}"
            )


def refuse_folders(words: list[str]) -> None:
    """Raise ValueError for Hydra's settings of output folders, which this program does not use."""
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"):
            raise ValueError(
                f"{word}: runs are written to RUNS/STUDY/NAME; set runs=FOLDER or study=NAME"
            )


def refuse_misread(command: str, words: list[str]) -> None:
    """Raise ValueError for a word that the command or Hydra would misread without a message."""
    multirun = [word for word in words if word in MULTIRUN]
    if command in RUN_COMMANDS and multirun:
        raise ValueError(
            f"{multirun[0]}: gspo {command} makes no sweep: call it once for each run or setting"
        )
    for word in words:
        group, _, option = word.partition("=")
        if command == "train" and option == "null" and group in (*CHOICES, *GROUPS_BESIDE_SETTINGS):
            raise ValueError(f"{word}: null is no option: leave the word out")
    resumes = any(word.startswith("resume=") for word in words)
    shown = [word for word in words if word in ("--cfg", "-c")]
    if resumes and shown:
        raise ValueError(
            f"{shown[0]} shows options of conf/, and a resumed run has its own: read settings.yaml "
            "in its directory"
        )


def options_first(words: list[str]) -> list[str]:
    """Return the words with Hydra's options at the front. Hydra refuses them between two settings.

    >>> options_first(["objective=gspo,grpo", "-cd", "mine", "seed=1,2", "-m"])
    ['-cd', 'mine', '-m', 'objective=gspo,grpo', 'seed=1,2']
    """
    options = []
    settings = []
    previous = ""
    for word in words:
        has_value = previous in OPTIONS_WITH_VALUE
        if previous in ("--info", "-i"):  # its value may be left out
            has_value = "=" not in word
        if word.startswith("-") or has_value:
            options.append(word)
        else:
            settings.append(word)
        previous = word
    return [*options, *settings]


def with_recorded_options(words: list[str]) -> list[str]:
    """Return the words in a form in which they can change the settings of a resumed run.

    Raises ValueError if resume= has no value, which would start a run with the default settings."""
    runs = [word.removeprefix("resume=") for word in words if word.startswith("resume=")]
    if not runs:
        return words
    if any(run.strip("'\"") in ("", "null") for run in runs):
        raise ValueError("resume= has no value: name the run, as in resume=runs/STUDY/RUN")
    return list(map(of_any_option, words))


def of_any_option(word: str) -> str:
    """Return a setting with "++", so that Hydra accepts settings of options it has not composed.

    A command line with resume= can set the options of the resumed run. They are checked when the
    run is read.

    >>> of_any_option("rollout.url=http://127.0.0.1:8000")
    '++rollout.url=http://127.0.0.1:8000'
    """
    key, equals_sign, _ = word.partition("=")
    is_option_setting = (
        equals_sign and "." in key and key[0].isalpha() and not key.startswith("hydra.")
    )
    return f"++{word}" if is_option_setting else word


def quoted(word: str) -> str:
    """Return a word of the command line in a form that Hydra's grammar can read.

    Values such as paths with `=`, `~`, `#` or letters of other alphabets are quoted. The shell has
    already removed the user's quotes. A carriage return at the end, from a Windows script, is
    dropped.

    >>> quoted("model.path=checkpoints/epoch=9"), quoted("study=2026_11_28")
    ("model.path='checkpoints/epoch=9'", "study='2026_11_28'")
    """
    word = word.rstrip("\r")
    key, _, value = word.partition("=")
    # A word that is not UTF-8 is refused later, with a clear message.
    if word.startswith("-") or not value or SURROGATES.search(word):
        return word
    escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
    parser = OverridesParser.create()
    for candidate in (word, f"{key}='{escaped}'"):
        with suppress(HydraException):
            parsed = parser.parse_override(candidate)
            # a name such as 2026_11_28 or 1.10 would become another number
            is_number = isinstance(parsed.value(), int | float)
            if key.lstrip("+") in NAMES and candidate == word and is_number:
                continue
            return candidate
    return word  # Hydra explains the mistake


def composed_settings(words: list[str]) -> Settings:
    """Return the settings that `gspo train` would use for these words."""
    refuse_dashes(words)
    for word in words:
        if word.startswith("-"):
            raise ValueError(
                f"{word} is an option of gspo train: this command reads KEY=VALUE only"
            )
    refuse_misread("train", words)
    words = with_recorded_options(list(map(quoted, words)))
    register_options()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=words, return_hydra_config=True)
        choices = config.hydra.runtime.choices
        with open_dict(config):
            del config["hydra"]
        return chosen_settings(config, words, choices)

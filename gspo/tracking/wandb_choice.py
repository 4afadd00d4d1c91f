"""A run's description for W&B, its mode and account, and its notes, without importing W&B.

`import wandb` takes a second, and a run with tracking.wandb=disabled does not need the package.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from requests.utils import get_netrc_auth

from gspo.io.errors import SettingError
from gspo.io.ownership import is_own_file
from gspo.tracking.settings import TrackingSettings, check_project, check_tags

# the variables that `wandb agent` sets for the runs that it starts
AGENT = ("WANDB_SWEEP_ID", "WANDB_RUN_ID")
# what WANDB_MODE may be: W&B's modes, and their older names
MODE_NAMES = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
# the types of our artifacts
MODEL = "model"
EVALUATION = "evaluation"
# the names of W&B's files and folders in a run's folder
OF_WANDB = ("wandb", "wandb_id", "wandb_online", "signed.json")


@dataclass(frozen=True)
class About:
    """The description of a run that W&B gets when the run begins."""

    config: dict
    group: str
    tags: list[str]
    job_type: str = "train"  # or "eval"
    name: str = ""  # empty: the name of its folder
    id: str = ""  # empty: drawn when the run first begins
    record: dict = field(default_factory=dict)  # the run's origin, besides the settings


def read_note(file: Path) -> str:
    """Return the text of a note, "" if the file does not exist or another user wrote it."""
    return file.read_text(encoding="utf-8") if is_own_file(file) else ""


def server_run(folder: Path) -> list[str]:
    """Return entity, project and id of a folder's run on W&B's server.

    They are three times "" if the server does not have the run."""
    note = read_note(folder / "wandb_online")
    names = note.split("/") if note else []
    return [""] * (3 - len(names)) + names


def default_project() -> str:
    """Return the project of runs whose settings name no project."""
    return os.environ.get("WANDB_PROJECT") or "gspo"


def default_tags() -> list[str]:
    """Return the tags of runs whose settings name none."""
    return [tag for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag]


def mode_of_environment() -> str:
    """Return the mode that WANDB_MODE or WANDB_DISABLED chooses, "" if neither is set.

    transformers reads WANDB_DISABLED. Raises SettingError for a mode that is not known."""
    mode = os.environ.get("WANDB_MODE", "")
    if mode and mode not in MODE_NAMES:
        raise SettingError("WANDB_MODE", mode, "choose online, offline or disabled, or unset it")
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return "disabled"
    return MODE_NAMES.get(mode, "")


def check_variables(settings: TrackingSettings) -> None:
    """Raise SettingError for a variable of the environment that W&B would refuse."""
    mode_of_environment()
    if not settings.project:
        check_project("WANDB_PROJECT", default_project())
    if not settings.tags:
        check_tags("WANDB_TAGS", default_tags())


def under_agent() -> bool:
    """Return whether the agent of a W&B sweep (`wandb agent`) started this process."""
    return bool(os.environ.get(AGENT[0]))


def own_arguments(arguments: list[str], written: Collection[str]) -> list[str]:
    """Return the arguments of `wandb agent` as they were at the run's first start.

    An agent that takes over a run also passes the complete recorded configuration. Its blocks, such
    as "optim={'lr': ...}", are left out, because the other arguments compose them. So are settings
    without a value, as `resume=`, and those that the program has `written`."""
    own = []
    for argument in arguments:
        key, equals_sign, value = argument.partition("=")
        is_recorded = equals_sign and (not value or value.startswith("{") or key in written)
        if "." in key or not is_recorded:
            own.append(argument)
    return own


def chosen_mode(wanted: str) -> str:
    """Return W&B's mode: "online", "offline" or "disabled".

    "auto" becomes the mode of the environment. Without one it becomes online if an account is
    configured, else offline. Raises ValueError if W&B is needed and not installed."""
    if wanted == "disabled":
        return wanted
    check_installed(f"tracking.wandb={wanted}")
    if wanted != "auto":
        return wanted
    return mode_of_environment() or ("online" if account() else "offline")


def account() -> bool:
    """Return whether the environment or the netrc file has an API key of W&B."""
    import wandb

    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(wandb.Settings().base_url))


def check_installed(needed_by: str) -> None:
    """Raise ValueError if W&B is not installed. `needed_by` is a setting or a command."""
    if find_spec("wandb") is None:
        raise ValueError(
            f"{needed_by}: W&B is not installed: `pip install wandb` "
            "(tracking.wandb=disabled needs none)"
        )

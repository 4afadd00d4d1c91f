"""What a run is for W&B, and whether there is an account: all that can be known without importing
W&B.

`import wandb` takes a second, and a run with tracking.wandb=disabled does not need the package at
all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from requests.utils import get_netrc_auth

from gspo.io.ownership import is_own_file
from gspo.tracking.settings import MODES

# the variables that `wandb agent` sets for the runs that it starts
AGENT = ("WANDB_SWEEP_ID", "WANDB_RUN_ID")
MODEL, EVALUATION = "model", "evaluation"  # the types of our artifacts
# what a W&B run leaves in its folder
OF_WANDB = ("wandb", "wandb_id", "wandb_online", "signed.json")


@dataclass(frozen=True)
class About:
    """What W&B is told about a run when it begins."""

    config: dict
    group: str
    tags: list[str]
    job_type: str = "train"  # or "eval"
    name: str = ""  # empty: that of its folder
    id: str = ""  # empty: drawn when the run first begins
    record: dict = field(default_factory=dict)  # beside the settings: where the run comes from


def noted_in(file: Path) -> str:
    """Return what a note holds; "" if it is not there, or if another user wrote it."""
    return file.read_text(encoding="utf-8") if is_own_file(file) else ""


def server_run(folder: Path) -> list[str]:
    """Return entity, project and id under which W&B's server has the run of a folder; three times
    "" if that is not noted."""
    noted = noted_in(folder / "wandb_online")
    names = noted.split("/") if noted else []
    return [""] * (3 - len(names)) + names


def default_project() -> str:
    """Return the project of runs that name none."""
    return os.environ.get("WANDB_PROJECT") or "gspo"


def under_agent() -> bool:
    """Return whether the agent of a W&B sweep (`wandb agent`) started this process."""
    return bool(os.environ.get(AGENT[0]))


def own_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments of `wandb agent` as they were at the run's first start.

    An agent that takes over a run also passes the whole recorded configuration. Its blocks, such as
    "optim={'lr': ...}", are left out here: the other arguments compose them."""
    pairs = [argument.partition("=") for argument in arguments]
    return ["".join(pair) for pair in pairs if "." in pair[0] or not pair[2].startswith("{")]


def chosen_mode(wanted: str) -> str:
    """Return the mode that W&B runs in; for "auto" that of WANDB_MODE, else online if an account is
    configured, else offline. Raises ValueError if W&B is to be used and is not installed."""
    if wanted == "disabled":
        return wanted
    check_installed(f"tracking.wandb={wanted}")
    if wanted != "auto":
        return wanted
    if os.environ.get("WANDB_MODE") in MODES[1:]:
        return os.environ["WANDB_MODE"]
    return "online" if account() else "offline"


def account() -> bool:
    """Return whether a W&B account is configured: an API key in the environment or in the netrc
    file.
    """
    import wandb

    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(wandb.Settings().base_url))


def check_installed(asked: str) -> None:
    """Raise ValueError if the package is missing. `asked` is the setting or command that needs it."""
    if find_spec("wandb") is None:
        raise ValueError(
            f"{asked}: W&B is not installed: `pip install wandb` (tracking.wandb=disabled needs none)"
        )

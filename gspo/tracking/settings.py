"""The settings under `tracking` and `profile`: where a run is shown, and which of its steps are
looked into.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gspo.io.ranges import Ranged, choice, ranged

MODES = ("auto", "online", "offline", "disabled")


@dataclass
class TrackingSettings(Ranged, key="tracking"):
    """Where a run is shown. These settings change nothing in its results.

    They take precedence over W&B's own environment variables, and those over the defaults.
    WANDB_RUN_GROUP and WANDB_NAME replace the study and the directory's name; WANDB_NOTES is added.
    A run that W&B's server has stays in the project where it began."""

    # auto: online if an account is configured, else offline | online | offline | disabled
    wandb: str = choice("auto", MODES)
    project: str = ""  # empty: WANDB_PROJECT, else gspo
    entity: str = ""  # W&B user or team; empty: WANDB_ENTITY, else the account's default
    tags: list[str] = field(default_factory=list)  # tags beside the run's own; empty: WANDB_TAGS
    # seconds that a run waits at its end for W&B's upload; what is left then, `wandb sync` uploads
    finish_timeout: float = ranged(300.0, least=0)
    # steps between saved rollout batches; the first and the last are always saved
    rollouts_every: int = ranged(10, least=1)
    # responses of a saved batch that are also shown as a W&B table
    table_rows: int = ranged(16, least=1)
    # upload checkpoints to W&B too; without it W&B is only told where they lie
    upload_checkpoints: bool = False
    # write the rows as TensorBoard's event files too, in the run directory
    tensorboard: bool = False

    def __post_init__(self):
        super().__post_init__()
        if len(self.project) > 128 or set(self.project) & set("/\\#?%:"):
            raise ValueError(
                f"tracking.project={self.project!r}: W&B takes up to 128 characters, none of /\\#?%:"
            )
        if wrong := [tag for tag in self.tags if not 1 <= len(tag) <= 64]:
            raise ValueError(f"tracking.tags={wrong!r}: W&B takes tags of 1 to 64 characters")
        if self.upload_checkpoints and self.wandb == "disabled":
            raise ValueError(
                "tracking.upload_checkpoints=true with tracking.wandb=disabled: there is no W&B to upload to"
            )


@dataclass
class ProfileSettings(Ranged, key="profile"):
    """Which steps PyTorch's profiler looks into (gspo.run.profiling). The run's results do not
    depend on it.
    """

    # each leaves a trace and a table of the dearest operations
    steps: list[int] = ranged(default_factory=list, least=1)

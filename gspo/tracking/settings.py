"""The settings under `tracking` and `profile`: how a run is shown, and which steps are profiled."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gspo.io.errors import SettingError
from gspo.io.ranges import Ranged, choice, ranged

MODES = ("auto", "online", "offline", "disabled")


def check_project(key: str, project: str) -> None:
    """Raise SettingError if W&B does not take a project of this name."""
    if len(project) > 128 or set(project) & set("/\\#?%:"):
        raise SettingError(key, project, "W&B takes up to 128 characters, none of /\\#?%:")


def check_tags(key: str, tags: list[str]) -> None:
    """Raise SettingError if W&B does not take one of the tags."""
    bad_tags = [tag for tag in tags if not 1 <= len(tag) <= 64]
    if bad_tags:
        raise SettingError(key, bad_tags, "W&B takes tags of 1 to 64 characters")


@dataclass
class TrackingSettings(Ranged, key="tracking"):
    """The settings under `tracking`. They change nothing in a run's results.

    They take precedence over W&B's own environment variables, which take precedence over the
    defaults. WANDB_RUN_GROUP and WANDB_NAME replace the study and the directory's name. WANDB_NOTES
    is added. A run that W&B's server has stays in the project in which it began."""

    # auto: online if an account is configured, else offline | online | offline | disabled
    wandb: str = choice("auto", MODES)
    project: str = ""  # empty: WANDB_PROJECT, else gspo
    entity: str = ""  # W&B user or team; empty: WANDB_ENTITY, else the account's default
    tags: list[str] = field(default_factory=list)  # tags beside the run's own; empty: WANDB_TAGS
    # seconds that a run waits at its end for W&B's upload. `wandb sync` uploads the rest.
    finish_timeout: float = ranged(300.0, least=0)
    # steps between saved rollout batches; the first and the last are always saved
    rollouts_every: int = ranged(10, least=1)
    # record every so many steps for `gspo replay`: token IDs, log-probs, advantages, clips, experts
    # (docs/replay.md); 0: none
    record_every: int = ranged(0, least=0)
    # also keep the records of so many last steps: at the end of the run, and before each fall of
    # the reward. Every step is then recorded, and older records are deleted; 0: none
    record_last: int = ranged(0, least=0)
    # whether records hold the experts of MoE models, which are most of their bytes
    record_experts: bool = True
    # whether records hold log-probs after the last update too: a pass over all responses of the
    # step
    record_after: bool = False
    # measure every so many steps how much responses tell of their prompts (information/*): every
    # response is scored under every prompt, of the first prompts of the step and a few responses of
    # each; 0: never
    information_every: int = ranged(0, least=0)
    information_prompts: int = ranged(16, least=2)
    information_samples: int = ranged(2, least=1)
    # measure every so many steps signal and noise of the gradient (optim/snr), from the gradients
    # of two halves of the batch: a forward and backward pass over it; 0: never
    snr_every: int = ranged(0, least=0)
    # responses of a saved batch that are also shown as a W&B table
    table_rows: int = ranged(16, least=1)
    # upload checkpoints to W&B too. Otherwise W&B gets only their paths.
    upload_checkpoints: bool = False
    # write the rows as TensorBoard's event files too, in the run directory
    tensorboard: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_project("tracking.project", self.project)
        check_tags("tracking.tags", self.tags)
        if not (self.record_every or self.record_last):
            self.refuse_changed(
                ("record_experts", "record_after"),
                "without tracking.record_every or tracking.record_last, nothing is recorded",
            )
        if not self.information_every:
            self.refuse_changed(
                ("information_prompts", "information_samples"),
                "is not read with tracking.information_every=0",
            )
        if self.upload_checkpoints and self.wandb == "disabled":
            raise SettingError(
                "tracking.upload_checkpoints",
                True,
                "with tracking.wandb=disabled, there is no W&B to upload to",
            )

    def refuse_changed(self, names: Sequence[str], problem: str) -> None:
        """Raise SettingError for the first of these settings that is not at its default."""
        for name in names:
            value = getattr(self, name)
            if value != getattr(TrackingSettings, name):
                raise SettingError(f"tracking.{name}", value, problem)


@dataclass
class ProfileSettings(Ranged, key="profile"):
    """The steps that PyTorch's profiler records (gspo.run.profiling).

    The run's results do not depend on them."""

    # each leaves a trace and a table of the most expensive operations
    steps: list[int] = ranged(default_factory=list, least=1)

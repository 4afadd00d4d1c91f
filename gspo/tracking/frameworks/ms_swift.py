"""ms-swift, whose GRPO trainer keeps most of TRL's names and changes some definitions."""

from gspo.tracking.frameworks import trl
from gspo.tracking.frameworks.table import Axis, Table, other, reweighted, same

# these stand before TRL's, of which the first that matches counts
CHANGED = (
    reweighted("entropy/mean", "policy/entropy", trl.MEAN_OF_MEANS),
    other("entropy/*", "largest and smallest entropy, and the threshold of a mask"),
    reweighted(
        "clip_ratio/region_mean",
        "clip/token_active",
        "weighted by tokens, also with importance_sampling_level=sequence; mean over micro-batches",
        objectives=(*trl.TOKEN_LEVEL, "gspo"),
    ),
    other("clip_ratio/region_mean", "depends on the objective, which is not known"),
    other("clip_ratio/*", "low_min and high_max are over ranks"),
    other("reward_std", "mean of the groups' standard deviations"),
    same("rollout_correction/kl", "mismatch/k1"),
    same("rollout_correction/k3_kl", "mismatch/k3"),
    same("rollout_correction/log_ppl_abs_diff", "mismatch/sequence_log_abs"),
    other("rollout_correction/*", "verl's measures of engine against trainer"),
)

TABLE = Table(
    name="ms_swift",
    title="ms-swift",
    version="4.6.0",
    entries=(*CHANGED, *trl.ENTRIES),
    axes=(
        Axis("train/global_step", "updates"),
        Axis("global_step/max_steps", "updates"),
        Axis("iteration", "updates"),
        Axis("step", "updates"),
    ),
    proofs=(
        ("reward", "global_step/max_steps"),
        ("reward", "memory(GiB)"),
        ("reward", "train_speed(*)"),
        ("reward", "rollout_correction/*"),
    ),
    prefixes=trl.PREFIXES,
    # each row has its own speed and memory, also two rows of one step
    ignored=(
        "profiling/*",
        "global_step",
        "percentage",
        "elapsed_time",
        "remaining_time",
        "memory(GiB)",
        "train_speed(*)",
    ),
    row_is_mean=True,
    gradient_norm="ms_swift/grad_norm",
    settings=trl.SETTINGS,
    trained_by=trl.TRAINED_BY,
    objectives=trl.OBJECTIVES,
    updates=trl.TABLE.updates,
)

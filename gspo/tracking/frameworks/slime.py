"""slime, which writes rows of rollout batches and rows of optimizer steps, each with its own axis."""

from gspo.tracking.frameworks.table import Axis, Table, other, reweighted, same

PER_RESPONSE = "mean per response, unless --calculate-per-token-loss"

ENTRIES = (
    same("rollout/raw_reward", "reward/mean"),
    other("rollout/rewards", "after the normalisation by group, so it is about 0"),
    same("rollout/response_len/mean", "length/mean"),
    same("rollout/truncated_ratio", "length/truncated"),
    other("rollout/repetition_frac", "its own measure of repetition"),
    other("rollout/zero_std/count_*", "number of groups with equal rewards of this value"),
    other("rollout/*", "of the rollout batch"),
    other("train/pg_clipfrac", f"active tokens, {PER_RESPONSE}; without the dual clip"),
    reweighted("train/ppo_kl", "kl/old_k1", PER_RESPONSE),
    other("train/kl_loss", f"KL to the reference, {PER_RESPONSE}"),
    reweighted("train/entropy_loss", "policy/entropy", PER_RESPONSE),
    same("train/grad_norm", "optim/grad_norm"),
    same("train/lr-pg_0", "optim/lr"),
    reweighted("train/train_rollout_logprob_abs_diff", "mismatch/logp_abs", PER_RESPONSE),
    other("train/ois", "its own importance weight"),
    other("train/tis*", "importance weight of engine and trainer after truncation"),
    other("train/*", "of an optimizer step"),
    other("eval/*-truncated_ratio", "share of truncated held-out responses"),
    other("eval/*-pass@*", "share of held-out problems"),
    same("eval/*", "eval/*/avg@k", "samples per problem (k) are not logged"),
    same("perf/rollout_time", "time/rollout_s"),
    other("perf/*", "seconds and tokens per second"),
    other("passrate/*", "estimates of pass@k from the rollout batch's groups"),
    other("multi_turn/*", "lengths with and without the environment's tokens, and rounds"),
)  # fmt: skip

TABLE = Table(
    name="slime",
    title="slime",
    version="commit of 2026-11",
    entries=ENTRIES,
    axes=(
        Axis("train/step", "updates", first=0, prefix="train/"),
        Axis("rollout/step", first=0, prefix="rollout/"),
        Axis("rollout/step", first=0, prefix="perf/"),
        Axis("rollout/step", first=0, prefix="passrate/"),
        Axis("rollout/step", first=0, prefix="multi_turn/"),
        Axis("eval/step", first=0, prefix="eval/"),
        # of TensorBoard's events
        Axis("step", "updates", first=0, prefix="train/"),
        Axis("step", first=0),
    ),
    proofs=(("rollout/raw_reward",), ("train/pg_clipfrac", "train/lr-pg_0")),
    gradient_norm="optim/grad_norm",
    settings={
        "seed": ("seed",),
        "optim.lr": ("lr",),
        "steps": ("num_rollout",),
        "rollout.group_size": ("n_samples_per_prompt",),
        "rollout.prompts_per_step": ("rollout_batch_size",),
        "objective.clip_low": ("eps_clip",),
        "objective.clip_high": ("eps_clip_high",),
        "kl.coef": ("kl_loss_coef",),
        "model.name": ("hf_checkpoint",),
    },
    objectives=(
        ({"advantage_estimator": "gspo"}, "gspo"),
        ({"advantage_estimator": "grpo"}, "grpo"),
        ({"advantage_estimator": "ppo"}, "ppo"),
    ),
    updates=("num_steps_per_rollout",),
)

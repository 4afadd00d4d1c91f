"""SkyRL. The definitions are from skyrl/train/trainer.py and its workers."""

from gspo.tracking.frameworks.table import Axis, Table, other, reweighted, same

ENTRIES = (
    same("reward/avg_raw_reward", "reward/mean"),
    other("reward/avg_pass_at_*", "share of groups with a reward above 0"),
    other("reward/num_zero_variance_filtered", "number of groups"),
    other("reward/*", "of the rollout batch"),
    same("generate/avg_num_tokens", "length/mean"),
    other("generate/*", "of the rollout batch"),
    reweighted(
        "policy/loss_metrics/clip_ratio",
        "clip/token_active",
        "plain mean over micro-batches; tokens of clipped responses",
        objectives=("gspo",),
    ),
    reweighted(
        "policy/loss_metrics/clip_ratio",
        "clip/token_active",
        "plain mean over micro-batches, without the dual clip",
        objectives=("grpo", "ppo", "drgrpo", "regular", "dual_clip"),
    ),
    other(
        "policy/loss_metrics/clip_ratio",
        "active tokens (regular, dual_clip, gspo), tokens outside the range (cispo), not computed "
        "(sapo), or another definition. Under our name only if the objective is known",
        absent_if_all_zero=True,
    ),
    other("policy/policy_kl", "KL to the reference"),
    reweighted("policy/policy_entropy", "policy/entropy", "plain mean over micro-batches"),
    same("policy/policy_lr", "optim/lr"),
    same("policy/grad_norm", "optim/grad_norm"),
    same("policy/rollout_train_logprobs_abs_diff_mean", "mismatch/logp_abs"),
    same("policy/rollout_train_logprobs_abs_diff_max", "mismatch/logp_abs_max"),
    other("policy/response_length", "the padded width"),
    other("policy/raw_grad_norm", "norm before clipping, mean over mini-batches"),
    other("policy/*", "of the training step"),
    reweighted("eval/*/avg_score", "eval/*/avg@k", "samples per problem (k) are not logged"),
    other("eval/*", "of held-out problems"),
    other("loss/avg_final_rewards", "the reward with the KL in the reward applied"),
    other("loss/*", "of the advantages and of the KL"),
    other("timing/*", "seconds of a part of the step"),
)

ALGORITHM = "trainer.algorithm"
LOSS = f"{ALGORITHM}.policy_loss_type"
ESTIMATOR = f"{ALGORITHM}.advantage_estimator"
TABLE = Table(
    name="skyrl",
    title="SkyRL",
    version="commit of 2026-11",
    entries=ENTRIES,
    axes=(Axis("trainer/global_step"), Axis("step"), Axis("_step")),
    proofs=(("reward/avg_raw_reward",), ("policy/policy_entropy", "policy/policy_lr")),
    ignored=("trainer/global_step", "trainer/epoch"),
    gradient_norm="skyrl/policy/raw_grad_norm",
    settings={
        "seed": ("trainer.seed",),
        "optim.lr": ("trainer.policy.optimizer_config.lr",),
        "rollout.group_size": ("generator.n_samples_per_prompt",),
        "rollout.prompts_per_step": ("trainer.train_batch_size",),
        "model.name": ("trainer.policy.model.path",),
    },
    objectives=(
        ({LOSS: "regular", ESTIMATOR: "grpo"}, "grpo"),
        ({LOSS: "regular", ESTIMATOR: "gae"}, "ppo"),
        ({LOSS: "dual_clip", ESTIMATOR: "grpo"}, "grpo"),
        ({LOSS: "dual_clip", ESTIMATOR: "gae"}, "ppo"),
        *(({LOSS: name}, name) for name in ("gspo", "cispo", "sapo", "clip_cov", "kl_cov")),
        *(({LOSS: name}, name) for name in ("regular", "dual_clip")),  # another estimator
    ),
    trained_by=(
        "generator.sampling_params.max_generate_length",
        "generator.sampling_params.temperature",
        "generator.sampling_params.top_p",
        f"{ALGORITHM}.advantage_estimator",
        f"{ALGORITHM}.eps_clip_high",
        f"{ALGORITHM}.eps_clip_low",
        f"{ALGORITHM}.loss_reduction",
        f"{ALGORITHM}.policy_loss_type",
        f"{ALGORITHM}.use_kl_loss",
        "trainer.policy.optimizer_config.max_grad_norm",
        "trainer.policy.optimizer_config.num_warmup_steps",
        "trainer.policy.optimizer_config.weight_decay",
        "trainer.policy_mini_batch_size",
        "trainer.update_epochs_per_batch",
    ),
)

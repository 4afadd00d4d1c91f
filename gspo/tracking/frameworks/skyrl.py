"""SkyRL. The definitions are from skyrl/train/trainer.py and its workers."""

from gspo.tracking.frameworks.table import Axis, Table, other, reweighted, same

ENTRIES = (
    same("reward/avg_raw_reward", "reward/mean"),
    other("reward/avg_pass_at_*", "share of groups with a reward above 0"),
    other("reward/num_zero_variance_filtered", "number of groups"),
    other("reward/*", "of the rollout batch"),
    same("generate/avg_num_tokens", "length/mean"),
    other("generate/*", "of the rollout batch"),
    other(
        "policy/loss_metrics/clip_ratio",
        "SAPO clips nothing",
        objectives=("sapo",),
        absent_if_all_zero=True,
    ),
    reweighted(
        "policy/loss_metrics/clip_ratio",
        "clip/sequence_active",
        "plain mean over micro-batches, responses weighted by their tokens",
        objectives=("gspo",),
    ),
    reweighted(
        "policy/loss_metrics/clip_ratio",
        "clip/token_active",
        "plain mean over micro-batches",
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
    objectives=tuple(
        ({"trainer.algorithm.policy_loss_type": name}, name) for name in ("gspo", "cispo", "sapo")
    ),
    trained_by=(
        "generator.sampling_params.max_generate_length",
        "generator.sampling_params.temperature",
        "generator.sampling_params.top_p",
        "trainer.algorithm.advantage_estimator",
        "trainer.algorithm.eps_clip_high",
        "trainer.algorithm.eps_clip_low",
        "trainer.algorithm.loss_reduction",
        "trainer.algorithm.policy_loss_type",
        "trainer.algorithm.use_kl_loss",
        "trainer.policy.optimizer_config.max_grad_norm",
        "trainer.policy.optimizer_config.num_warmup_steps",
        "trainer.policy.optimizer_config.weight_decay",
        "trainer.policy_mini_batch_size",
        "trainer.update_epochs_per_batch",
    ),
)

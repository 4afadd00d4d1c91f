"""OpenRLHF. The definitions are from openrlhf/trainer/ray/ppo_actor.py."""

from gspo.tracking.frameworks.table import Axis, Table, other, reweighted, same

ENTRIES = (
    reweighted("rollout/reward_mean", "reward/mean", "length penalties are in it"),
    other("rollout/reward_std", "over all responses"),
    same("rollout/response_length_mean", "length/mean"),
    same("rollout/truncated_rate", "length/truncated"),
    other("rollout/*", "of the rollout batch"),
    other("group_reward_std", "mean of the groups' standard deviations"),
    reweighted(
        "ppo_clip_ratio",
        "clip/token_active",
        "token mean, without the dual clip; with GSPO the tokens of clipped responses",
    ),
    same("ppo_kl", "kl/old_k1"),
    other("kl", "KL to the reference, by the configured estimator"),
    other("vllm_kl", "of engine and trainer, only with a correction"),
    other("entropy_loss", "only with an entropy bonus"),
    other("actor_grad_norm", "norm of the last update"),
    other("actor_lr", "of the last micro-batch"),
    other("dynamic_filtering_pass_rate", "share of groups that were kept"),
    same("eval/eval_*_pass1", "eval/*/avg@k", "samples per problem (k) are not logged"),
    other("eval/*", "of held-out problems; its logged axis is not the rollout batch"),
    other("timing/*", "seconds of a part of the step"),
    # of older versions, which average over the micro-batches of the training
    reweighted("reward", "reward/mean", "of the responses that were trained on"),
    reweighted("response_length", "length/mean", "of the responses that were trained on"),
    other("total_length", "tokens of prompt and response"),
    other("return", "mean return"),
    other("policy_loss", "the loss without KL and entropy terms"),
)

TABLE = Table(
    name="openrlhf",
    title="OpenRLHF",
    version="commit of 2026-11",
    entries=ENTRIES,
    axes=(Axis("train/global_step"), Axis("eval/global_step"), Axis("step")),
    proofs=(("rollout/reward_mean",), ("ppo_clip_ratio", "ppo_kl"), ("policy_loss", "actor_lr")),
    prefixes={"train/": ""},
    ignored=("global_step", "eval/global_step", "eval/epoch"),
    gradient_norm="openrlhf/actor_grad_norm",
    settings={
        "seed": ("seed",),
        "optim.lr": ("actor_learning_rate",),
        "rollout.group_size": ("n_samples_per_prompt",),
        "rollout.prompts_per_step": ("rollout_batch_size",),
        "kl.coef": ("init_kl_coef",),
        "model.name": ("pretrain",),
    },
    objectives=(({"policy_loss_type": "gspo"}, "gspo"),),
    trained_by=(
        "advantage_estimator",
        "entropy_loss_coef",
        "eps_clip",
        "generate_max_len",
        "kl_estimator",
        "l2",
        "lr_warmup_ratio",
        "max_epochs",
        "policy_loss_type",
        "temperature",
        "top_p",
        "train_batch_size",
        "use_kl_loss",
    ),
)

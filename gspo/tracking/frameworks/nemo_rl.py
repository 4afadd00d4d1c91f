"""NeMo-RL. The definitions are from nemo_rl/algorithms/loss_functions.py and grpo.py."""

from gspo.tracking.frameworks.table import Axis, Table, other, reweighted, same, scaled

TOKEN_LEVEL = ("grpo", "ppo")
SUM_OF_UPDATES = "summed over the updates of a batch"
NO_RATIO = -1.0  # of a batch without a valid ratio

ENTRIES = (
    same("train/reward", "reward/mean"),
    other("train/filtered_reward", "of the groups that dynamic sampling kept"),
    scaled(
        "train/baseline_reward/pct_0",
        "group/zero_variance",
        "groups with a mean reward of exactly 0 or 1, so only with rewards of 0 and 1",
        factor=0.01,
        plus="train/baseline_reward/pct_1",
    ),
    scaled("train/baseline_reward/pct_1", "group/all_correct", factor=0.01),
    other("train/baseline_reward/*", "percent of groups with this mean reward"),
    same("train/mean_gen_tokens_per_sample", "length/mean"),
    same("train/truncation_rate", "length/truncated"),
    other("train/probs_ratio", f"mean ratio, {SUM_OF_UPDATES}"),
    same("train/probs_ratio_min", "ratio/token_min", objectives=TOKEN_LEVEL, absent_value=NO_RATIO),
    same("train/probs_ratio_max", "ratio/token_max", objectives=TOKEN_LEVEL, absent_value=NO_RATIO),
    other(
        "train/probs_ratio*",
        "ratios of tokens or of responses, by the loss, or after the clip",
        absent_value=NO_RATIO,
    ),
    other("train/kl_penalty", "the KL term of the loss"),
    other("train/token_mult_prob_error", "mean of exp|log-prob difference| of engine and trainer"),
    other(
        "train/gen_kl_error",
        f"KL of engine and trainer by reference_policy_kl_type (default: k3), {SUM_OF_UPDATES}",
    ),
    other("train/policy_kl_error", "the same in the other direction: k3 of trainer to engine"),
    other("train/js_divergence_error", "an estimate of the Jensen-Shannon divergence of both"),
    other(
        "train/sampling_importance_ratio", "weight of engine and trainer, token or response mean"
    ),
    other("train/is_oob_ratio", "share of tokens or responses with a weight outside its range"),
    other("train/loss", "the loss with its KL term"),
    other("train/num_valid_samples", "number of responses in the loss"),
    other("train/approx_entropy", "of the sampled tokens alone"),
    other("train/grad_norm", "norm of the last update"),
    other("train/moe/*", "load of the experts"),
    reweighted("validation/accuracy", "eval/validation/avg@k", "k is not logged"),
    other("validation/*", "of held-out problems"),
    other("timing/*", "seconds of a part of the step"),
    other("performance/*", "tokens per second"),
)

TABLE = Table(
    name="nemo_rl",
    title="NeMo-RL",
    version="commit of 2026-11",
    entries=ENTRIES,
    axes=(Axis("step"), Axis("_step")),
    proofs=(
        ("train/token_mult_prob_error",),
        ("train/reward", "train/mean_gen_tokens_per_sample"),
        ("train/probs_ratio_clamped",),
    ),
    gradient_norm="nemo_rl/train/grad_norm",
    settings={
        "seed": ("grpo.seed",),
        "steps": ("grpo.max_num_steps",),
        "rollout.group_size": ("grpo.num_generations_per_prompt",),
        "rollout.prompts_per_step": ("grpo.num_prompts_per_step",),
        "model.name": ("policy.model_name",),
        "optim.lr": ("policy.optimizer.kwargs.lr",),
        "optim.max_grad_norm": ("policy.max_grad_norm",),
        "objective.clip_low": ("loss_fn.ratio_clip_min",),
        "objective.clip_high": ("loss_fn.ratio_clip_max",),
    },
    trained_by=(
        "grpo.normalize_rewards",
        "grpo.use_dynamic_sampling",
        "grpo.use_leave_one_out_baseline",
        "loss_fn.ratio_clip_c",
        "loss_fn.reference_policy_kl_penalty",
        "loss_fn.token_level_loss",
        "loss_fn.use_importance_sampling_correction",
        "policy.generation.temperature",
        "policy.generation.top_k",
        "policy.generation.top_p",
        "policy.max_total_sequence_length",
        "policy.optimizer.kwargs.weight_decay",
        "policy.train_global_batch_size",
    ),
    objectives=(
        ({"loss_fn.sequence_level_importance_ratios": True}, "gspo"),
        ({"loss_fn.sequence_level_importance_ratios": False}, "grpo"),
    ),
)

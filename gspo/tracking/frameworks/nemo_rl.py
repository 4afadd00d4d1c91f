"""NeMo-RL. The definitions are from nemo_rl/algorithms/loss_functions.py and grpo.py."""

from gspo.tracking.frameworks.table import Axis, Table, other, reweighted, same, scaled

ENTRIES = (
    same("train/reward", "reward/mean"),
    other("train/filtered_reward", "of the groups that dynamic sampling kept"),
    scaled("train/baseline_reward/pct_1", "group/all_correct", factor=0.01),
    other("train/baseline_reward/*", "percent of groups with this mean reward"),
    same("train/mean_gen_tokens_per_sample", "length/mean"),
    same("train/truncation_rate", "length/truncated"),
    same("train/probs_ratio", "ratio/token_mean"),
    other("train/probs_ratio_*", "ratios after the clip, or their extremes by micro-batch"),
    other("train/kl_penalty", "the KL term of the loss"),
    other("train/token_mult_prob_error", "mean of exp|log-prob difference| of engine and trainer"),
    other("train/gen_kl_error", "KL of engine to trainer, by reference_policy_kl_type"),
    other("train/policy_kl_error", "KL of trainer to engine, by reference_policy_kl_type"),
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
    },
)

"""TRL's GRPOTrainer. The definitions are from trl/trainer/grpo_trainer.py."""

from gspo.tracking.frameworks.table import ANY, PROBE, Axis, Table, other, reweighted, same

# transformers calls eval_reward eval/reward in TensorBoard and W&B
PREFIXES = {"train/": "", "eval/": "eval_"}
TOKEN_LEVEL = ("grpo", "drgrpo", "dapo", "bnpo")
LEVEL = (
    "share of tokens, or of responses with importance_sampling_level=sequence. Under our name only "
    "if the objective is known"
)
# metrics of AsyncGRPO alone (trl/experimental/async_grpo)
ASYNC = ("ratio", "training_tok/s", "sample/staleness_mean")
RESPONSES = ("gspo", "luspo", "rloo")  # with a ratio per response
MEAN_OF_MEANS = "unweighted mean over the micro-batches since the last row"

ENTRIES = (
    same(PROBE, ANY),
    same("reward", "reward/mean"),
    same("frac_reward_zero_std", "group/zero_variance", "with scale_rewards=batch: of the batch"),
    same("completions/mean_length", "length/mean"),
    same("completions/clipped_ratio", "length/truncated"),
    same("learning_rate", "optim/lr", "with several updates of a batch: their mean"),
    reweighted("entropy", "policy/entropy", MEAN_OF_MEANS),
    other(
        "clip_ratio/region_mean", "AsyncGRPO: tokens, by the ratio to the sampler", beside=ASYNC
    ),
    reweighted(
        "clip_ratio/region_mean", "clip/token_active", MEAN_OF_MEANS, objectives=TOKEN_LEVEL
    ),
    reweighted(
        "clip_ratio/region_mean", "clip/sequence_active", MEAN_OF_MEANS, objectives=RESPONSES
    ),
    other("clip_ratio/region_mean", LEVEL),
    other("clip_ratio/low_mean", "the part of region_mean below the range, with advantage < 0"),
    other("clip_ratio/high_mean", "the part of region_mean above the range, with advantage > 0"),
    other("clip_ratio/low_min", "smallest mean of a micro-batch or rank, then a mean"),
    other("clip_ratio/high_max", "largest mean of a micro-batch or rank, then a mean"),
    other("clip_ratio", "before TRL 0.17: share of tokens"),
    other("sample/*", "AsyncGRPO: age, tokens and time in the queue of the responses"),
    other("batch/*", "AsyncGRPO: tokens and responses of the rows of a batch"),
    other("perf/*", "AsyncGRPO: seconds of a part of the step"),
    other("training_tok/s", "AsyncGRPO: tokens per second"),
    other("ratio", "AsyncGRPO: mean ratio of the current policy to the sampler, over tokens"),
    other("cispo_clip_ratio", "share of tokens above an absolute bound, not relative to 1"),
    other("grad_norm", "norm before clipping of the row's last update alone"),
    other("loss", "mean over the row's steps; a NaN is replaced by the mean so far"),
    other("kl", "AsyncGRPO: k3 of the current policy to the sampler, not to a reference", beside=ASYNC),
    reweighted("kl", "kl/ref_k1", "RLOO: mean over the batches of the row", objectives=("rloo",)),
    reweighted(
        "kl",
        "kl/ref_k3",
        "of the current policy, ours of the old one. RLOO's is k1 of the old one, and only its "
        "configuration or objective=rloo tells it",
    ),
    other("reward_std", "over all responses since TRL 0.27, before it the mean of the groups'"),
    same("rewards/*/mean", "reward/*/mean", "over the responses that the function has scored"),
    other("rewards/*/std", "standard deviation of one reward function"),
    other("rewards/*", "before TRL 0.17: mean of one reward function"),
    other("completions/*", "unweighted mean over the batches of the row, also of minima and maxima"),
    other("completion_length", "older name of completions/mean_length; Unsloth writes both"),
    other("num_tokens", "tokens so far, with the prompts"),
    other("step_time", "seconds of a whole step"),
    other("aux_loss", "load-balancing loss of the router"),
    other("policy_loss", "the loss without the entropy bonus, only with one"),
    other("entropy_coef", "coefficient of the entropy bonus"),
    other("tools/call_frequency", "calls of tools per response"),
    other("tools/failure_frequency", "share of the calls of tools that failed"),
    other("vespo/phi_seq_mean", "mean of the weights of responses, only with loss_type=vespo"),
    reweighted(
        "sampling/sampling_logp_difference/mean",
        "mismatch/logp_abs",
        "mean over processes and micro-batches",
    ),
    other("sampling/sampling_logp_difference/max", "largest of a batch, then a mean over batches"),
    other(
        "sampling/importance_sampling_ratio/*",
        "after truncation or masking, by default the product over a response",
    ),
    reweighted(
        "eval_reward", "eval/held_out/avg@k", "samples per prompt (k) are not in the row"
    ),
    other("eval_clip_ratio/*", "always 0: no update in an evaluation", absent_if_all_zero=True),
    other("eval_*", "of the held-out set, defined as in training"),
    other("train_*", "summary at the end of the run"),
    other("epoch", "passes over the prompts"),
    other("total_flos", "transformers' estimate for a pass over the prompts"),
)  # fmt: skip

SETTINGS = {
    "seed": ("seed",),
    "optim.lr": ("learning_rate",),
    "optim.max_grad_norm": ("max_grad_norm",),
    "rollout.group_size": ("num_generations",),
    "objective.clip_low": ("epsilon",),
    "objective.clip_high": ("epsilon_high",),
    "kl.coef": ("beta",),
    "model.name": ("_name_or_path",),
}
TRAINED_BY = (
    # the objective
    "loss_type",
    "delta",
    "entropy_coef",
    "mask_truncated_completions",
    "multi_objective_aggregation",
    "normalize_advantages",
    "off_policy_mask_threshold",
    "router_aux_loss_coef",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "scale_rewards",
    "top_entropy_quantile",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
    # sampling
    "max_completion_length",
    "max_prompt_length",
    "min_p",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "use_vllm",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    # updates
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "cast_lm_head_to_fp32",
    "fp16",
    "generation_batch_size",
    "gradient_accumulation_steps",
    "lr_scheduler_type",
    "num_iterations",
    "optim",
    "per_device_train_batch_size",
    "ref_model_sync_steps",
    "steps_per_generation",
    "sync_ref_model",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
)
OBJECTIVES = (
    # RLOOTrainer alone has this setting
    ({"normalize_advantages": False}, "rloo"),
    ({"normalize_advantages": True}, "rloo"),
    ({"loss_type": "cispo"}, "cispo"),
    ({"loss_type": "sapo"}, "sapo"),
    ({"loss_type": "vespo"}, "vespo"),
    ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "luspo"),
    ({"loss_type": "luspo", "importance_sampling_level": "token"}, "luspo, ratios of tokens"),
    ({"importance_sampling_level": "sequence"}, "gspo"),
    ({"importance_sampling_level": "sequence_token"}, "gspo_token"),
    ({"importance_sampling_level": "token", "loss_type": "dapo"}, "dapo"),
    ({"importance_sampling_level": "token", "loss_type": "dr_grpo"}, "drgrpo"),
    ({"importance_sampling_level": "token", "loss_type": "bnpo"}, "bnpo"),
    ({"importance_sampling_level": "token", "loss_type": "grpo"}, "grpo"),
)

TABLE = Table(
    name="trl",
    title="TRL",
    version="1.16.0",
    entries=ENTRIES,
    axes=(Axis("train/global_step", "updates"), Axis("step", "updates")),
    proofs=(("reward", "completions/mean_length"), ("reward", "completion_length")),
    disproofs=("global_step/max_steps", "memory(GiB)", "train_speed(*)", "rollout_correction/*"),
    prefixes=PREFIXES,
    ignored=("profiling/*", "global_step"),
    row_is_mean=True,
    gradient_norm="trl/grad_norm",
    settings=SETTINGS,
    trained_by=TRAINED_BY,
    objectives=OBJECTIVES,
    updates=((("num_iterations", "steps_per_generation"), ("gradient_accumulation_steps",)),),
)

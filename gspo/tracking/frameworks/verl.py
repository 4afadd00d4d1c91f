"""verl. The definitions are from verl/trainer/ppo/metric_utils.py and core_algos.py."""

from gspo.tracking.frameworks.table import ANY, PROBE, Axis, Table, other, reweighted, same, scaled

MEAN_OF_MEANS = "token mean of a micro-batch, then plain mean over micro-batches and ranks"
PADDED = (
    "share of responses as long as the batch's padded width. In version 1 this is the longest "
    "response, so it is no share of truncated responses"
)

ENTRIES = (
    same("critic/score/mean", "reward/mean", "without empty responses"),
    other("critic/score/*", "of single responses"),
    other("critic/rewards/*", "the score with the KL in the reward applied"),
    other("critic/advantages/*", "over response tokens"),
    other("critic/returns/*", "over response tokens"),
    other("critic/v*", "of the critic"),
    other("critic/grad_norm", "of the critic"),
    other("critic/lr", "of the critic"),
    same("response_length/mean", "length/mean"),
    other("response_length/clip_ratio", PADDED),
    other("response_length/*", "of single responses"),
    other("response_length_non_aborted/*", "of the responses that are not empty"),
    other("response/aborted_ratio", "share of responses of length 0"),
    other("prompt_length/*", "of prompts"),
    reweighted(
        "actor/entropy", "policy/entropy", "of the old policy, by loss_agg_mode (default: tokens)"
    ),
    other("actor/entropy_loss", "the entropy as a term of the loss"),
    other("actor/kl_loss", "KL to the reference by kl_loss_type and loss_agg_mode"),
    same("actor/kl_coef", "kl/coef"),
    other("actor/reward_kl_penalty", "KL in the reward, mean over responses"),
    other("actor/reward_kl_penalty_coeff", "coefficient of the KL in the reward"),
    same("actor/grad_norm", "optim/grad_norm"),
    same("actor/lr", "optim/lr"),
    reweighted("actor/ppo_kl", "kl/old_k1", MEAN_OF_MEANS),
    reweighted(f"actor/{PROBE}", ANY, "plain mean over micro-batches, or their minimum or maximum"),
    # clipping: the meaning depends on the loss
    reweighted(
        "actor/pg_clipfrac",
        "clip/token_active",
        f"{MEAN_OF_MEANS}; tokens of clipped sequences",
        objectives=("gspo",),
    ),
    reweighted(
        "actor/pg_clipfrac",
        "clip/token_active",
        f"{MEAN_OF_MEANS}; the part of the dual clip is added",
        objectives=("grpo", "ppo", "dapo", "drgrpo"),
        plus="actor/pg_clipfrac_lower",
    ),
    other(
        "actor/pg_clipfrac",
        "active tokens (vanilla, gspo), tokens outside (cispo), masked tokens (dppo), or not "
        "computed (sapo). Under our name only if the objective is known",
        absent_if_all_zero=True,
    ),
    reweighted(
        "actor/pg_clipfrac_lower",
        "clip/token_dual",
        MEAN_OF_MEANS,
        objectives=("grpo", "ppo", "dapo", "drgrpo"),
    ),
    other(
        "actor/pg_clipfrac_lower",
        "tokens of the dual clip, not in pg_clipfrac; not computed with gspo",
        absent_if_all_zero=True,
    ),
    other("actor/pg_loss", "the loss of the policy alone"),
    other("actor/loss", "all terms of the loss, mean over mini-batches"),
    other("actor/perf/*", "memory of the devices"),
    # engine against trainer
    same("rollout_corr/kl", "mismatch/k1"),
    same("rollout_corr/k3_kl", "mismatch/k3"),
    same("rollout_corr/log_ppl_abs_diff", "mismatch/sequence_log_abs"),
    scaled("rollout_corr/log_ppl_diff_max", "mismatch/sequence_min", factor=-1, is_log=True),
    scaled("rollout_corr/log_ppl_diff_min", "mismatch/sequence_max", factor=-1, is_log=True),
    other("rollout_corr/*", "of the weights between engine and trainer"),
    other("training/rollout_probs_diff_*", "differences of probabilities, not of log-probs"),
    other("training/filter_groups/*", "counts of dropped samples"),
    reweighted(
        "training/off_policy/trajectory_staleness/mean", "staleness/mean", "mean over responses"
    ),
    other("training/rollout_actor_probs_pearson_corr", "correlation of probabilities"),
    other("training/off_policy/*", "age of the weights that sampled, in rollout batches"),
    other("training/num_turns/*", "turns of an episode"),
    other("num_turns/*", "turns of an episode"),
    other("tool_call_counts/*", "calls of tools in an episode"),
    other("train/num_gen_batches", "generated batches for a batch of dynamic sampling (DAPO)"),
    other("training/epoch", "passes over the prompts"),
    scaled("rollout/moe/max_vio/avg", "routing/load_max", "measured in the engine", offset=1),
    other("rollout/moe/*", "load of single layers, measured in the engine"),
    # held-out problems
    same("val-core/*/acc/mean@*", "eval/*/avg@*"),
    same("val-core/*/reward/mean@*", "eval/*/avg@*"),
    other("val-core/*/best@*", "best of k draws with replacement, smaller than pass@k"),
    other("val-core/*/maj@*", "majority of k draws with replacement"),
    other("val-core/*", "of held-out problems"),
    other("val-aux/*", "of held-out problems"),
    other("val/*", "of held-out problems"),
    # time
    same("timing_s/gen", "time/rollout_s"),
    other("timing_s/update_actor", "the updates alone; ours has old log-probs and diagnostics too"),
    other("timing_s/*", "seconds of a part of the step"),
    other("timing_per_token_ms/*", "milliseconds per token"),
    other("perf/*", "tokens of this step with prompts, tokens per second and device"),
    other("global_seqlen/*", "tokens of the devices"),
    # names of old versions
    scaled("actor/lr(1e-4)", "optim/lr", factor=1e-4),
    other("critic/lr(1e-4)", "of the critic, times 10,000"),
    other("critic/kl", "KL in the reward, mean over responses"),
    other("critic/kl_coeff", "coefficient of the KL in the reward"),
    other("mfu/*", "share of the devices' peak speed"),
    same("timing/gen", "time/rollout_s"),
    other("timing/*", "seconds of a part of the step"),
)  # fmt: skip

ACTOR = "actor_rollout_ref.actor"
TABLE = Table(
    name="verl",
    title="verl",
    version="0.9.1",
    entries=ENTRIES,
    axes=(Axis("training/global_step"), Axis("step"), Axis("_step")),
    proofs=(
        ("critic/score/mean", "actor/pg_loss"),
        ("critic/score/mean", "response_length/mean"),
        ("val-core/*",),
    ),
    disproofs=("critic/correct/mean", "actor/policykl"),
    gradient_norm="optim/grad_norm",
    settings={
        "seed": ("data.seed", f"{ACTOR}.data_loader_seed"),
        "optim.lr": (f"{ACTOR}.optim.lr",),
        "rollout.group_size": ("actor_rollout_ref.rollout.n",),
        "rollout.prompts_per_step": ("data.train_batch_size",),
        "objective.clip_low": (f"{ACTOR}.clip_ratio_low",),
        "objective.clip_high": (f"{ACTOR}.clip_ratio_high",),
        "kl.coef": (f"{ACTOR}.kl_loss_coef",),
        "model.name": ("actor_rollout_ref.model.path",),
        "steps": ("trainer.total_training_steps",),
        "optim.max_grad_norm": (f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad"),
    },
    switches={"kl.coef": f"{ACTOR}.use_kl_loss"},
    trained_by=(
        "algorithm.adv_estimator",
        "algorithm.filter_groups.enable",
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.use_kl_in_reward",
        "data.max_prompt_length",
        "data.max_response_length",
        f"{ACTOR}.clip_ratio",
        f"{ACTOR}.clip_ratio_c",
        f"{ACTOR}.entropy_coeff",
        f"{ACTOR}.kl_loss_type",
        f"{ACTOR}.loss_agg_mode",
        f"{ACTOR}.optim.lr_scheduler_type",
        f"{ACTOR}.optim.lr_warmup_steps",
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
        f"{ACTOR}.optim.weight_decay",
        f"{ACTOR}.policy_loss.loss_mode",
        f"{ACTOR}.ppo_epochs",
        f"{ACTOR}.ppo_mini_batch_size",
        f"{ACTOR}.use_kl_loss",
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.rollout.top_k",
        "actor_rollout_ref.rollout.top_p",
    ),
    objectives=(
        ({f"{ACTOR}.policy_loss.loss_mode": "gspo"}, "gspo"),
        ({f"{ACTOR}.policy_loss.loss_mode": "cispo"}, "cispo"),
        ({f"{ACTOR}.policy_loss.loss_mode": "sapo"}, "sapo"),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "vanilla", "algorithm.adv_estimator": "grpo"},
            "grpo",
        ),
        ({f"{ACTOR}.policy_loss.loss_mode": "vanilla", "algorithm.adv_estimator": "gae"}, "ppo"),
    ),
)

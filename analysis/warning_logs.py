"""Which frameworks log the metrics of the monitor's rules.

Read in the sources of TRL 1.16, verl 0.9.1, ms-swift 4.6 and the other frameworks of November 2026.
"""

from __future__ import annotations

FRAMEWORKS = (
    "TRL",
    "verl",
    "prime-rl",
    "ROLL",
    "slime",
    "OpenRLHF",
    "NeMo-RL",
    "SkyRL",
    "ms-swift",
)
SAME = "same"  # the same number
NEARLY = "nearly"  # the same up to weights, a factor or a sum of two numbers: the rule works on it
OTHER = "other"  # another definition under a similar name: the rule does not work on it
MISSING = "-"

# By metric: each framework's mark and name. Frameworks that do not log it are left out.
LOGGED = {
    "reward/mean": {
        "TRL": (SAME, "reward"),
        "verl": (SAME, "critic/score/mean"),
        "prime-rl": (SAME, "train/agg/all/{agent}/reward/mean"),
        "ROLL": (SAME, "critic/score/mean"),
        "slime": (SAME, "rollout/raw_reward"),
        "OpenRLHF": (NEARLY, "train/rollout/reward_mean, with length penalties"),
        "NeMo-RL": (SAME, "train/reward"),
        "SkyRL": (SAME, "reward/avg_raw_reward"),
        "ms-swift": (SAME, "reward"),
    },
    "group/zero_variance": {
        "TRL": (SAME, "frac_reward_zero_std"),
        "prime-rl": (NEARLY, "solved_none + solved_all"),
        "ROLL": (NEARLY, "group/all_correct_groups_ratio + all_incorrect_groups_ratio"),
        "slime": (NEARLY, "sum of rollout/zero_std/count_{reward}, per group"),
        "NeMo-RL": (NEARLY, "train/baseline_reward/pct_0 + pct_1, in percent"),
        "SkyRL": (NEARLY, "reward/num_zero_variance_filtered, per group, if it filters"),
        "ms-swift": (SAME, "frac_reward_zero_std"),
    },
    "routing/consistency": {},
    "mismatch/k3": {
        "verl": (SAME, "rollout_corr/k3_kl"),
        "prime-rl": (OTHER, "mismatch_kl/all/mean: of the current policy"),
        "OpenRLHF": (OTHER, "vllm_kl: k1"),
        "NeMo-RL": (SAME, "train/gen_kl_error, policy_kl_error"),
        "ms-swift": (SAME, "rollout_correction/k3_kl"),
    },
    # verl's and ms-swift's rollout_is_eff_sample_size is of the engine's weights
    "ratio/ess_token": {"verl": (OTHER, "rollout_is_eff_sample_size")},
    "ratio/ess_sequence": {"verl": (OTHER, "rollout_is_eff_sample_size")},
    "ratio/token_max": {
        "TRL": (OTHER, "sampling/importance_sampling_ratio/max: of the engine"),
        "ROLL": (NEARLY, "actor/ratio_max"),
        "NeMo-RL": (SAME, "train/probs_ratio_max"),
    },
    "ratio/token_min": {
        "TRL": (OTHER, "sampling/importance_sampling_ratio/min: of the engine"),
        "ROLL": (NEARLY, "actor/ratio_min"),
        "NeMo-RL": (SAME, "train/probs_ratio_min"),
    },
    # k1, or a KL to the reference
    "kl/old_k3": {
        "TRL": (OTHER, "kl"),
        "verl": (OTHER, "actor/ppo_kl"),
        "ROLL": (OTHER, "actor/policykl"),
        "slime": (OTHER, "train/ppo_kl"),
        "OpenRLHF": (OTHER, "ppo_kl"),
        "SkyRL": (OTHER, "policy/policy_kl"),
        "ms-swift": (OTHER, "kl"),
    },
    "policy/entropy": {
        "TRL": (SAME, "entropy"),
        "verl": (NEARLY, "actor/entropy, of the old policy"),
        "prime-rl": (NEARLY, "entropy/all/mean"),
        "ROLL": (NEARLY, "critic/entropy/mean"),
        "slime": (NEARLY, "train/entropy_loss, mean of responses"),
        "OpenRLHF": (NEARLY, "entropy_loss, if entropy_coef is set"),
        "NeMo-RL": (NEARLY, "train/approx_entropy, of the sampled tokens"),
        "SkyRL": (NEARLY, "policy/policy_entropy"),
        "ms-swift": (NEARLY, "entropy/mean, with log_entropy"),
    },
    "optim/grad_norm": {
        "TRL": (NEARLY, "grad_norm, of the row's last update"),
        "verl": (SAME, "actor/grad_norm"),
        "prime-rl": (SAME, "optim/grad_norm"),
        "ROLL": (NEARLY, "actor_train/grad_norm"),
        "slime": (NEARLY, "train/grad_norm, of each update"),
        "OpenRLHF": (NEARLY, "actor_grad_norm, of the last update"),
        "NeMo-RL": (NEARLY, "train/grad_norm, of the last update"),
        "SkyRL": (NEARLY, "policy/grad_norm"),
        "ms-swift": (NEARLY, "grad_norm, of the row's last update"),
    },
    "optim/grad_norm_max": {
        "TRL": (NEARLY, "largest grad_norm, with logging_steps=1"),
        "slime": (SAME, "largest train/grad_norm"),
        "ms-swift": (NEARLY, "largest grad_norm, with logging_steps=1"),
    },
    "length/repetition": {"slime": (OTHER, "rollout/repetition_frac")},
    "length/truncated": {
        "TRL": (SAME, "completions/clipped_ratio"),
        "verl": (OTHER, "response_length/clip_ratio: no truncation in v1"),
        "prime-rl": (SAME, "is_truncated/mean"),
        "ROLL": (NEARLY, "tokens/total_response_length/clip, a count"),
        "slime": (SAME, "rollout/truncated_ratio"),
        "OpenRLHF": (SAME, "train/rollout/truncated_rate"),
        "NeMo-RL": (SAME, "train/truncation_rate"),
        "ms-swift": (SAME, "completions/clipped_ratio"),
    },
    "clip/token_active": {
        "TRL": (SAME, "clip_ratio/region_mean; with sequence ratios it counts sequences"),
        "verl": (NEARLY, "actor/pg_clipfrac + pg_clipfrac_lower"),
        "prime-rl": (OTHER, "is_masked/mean"),
        "ROLL": (OTHER, "actor/clipfrac"),
        "slime": (OTHER, "train/pg_clipfrac"),
        "OpenRLHF": (NEARLY, "ppo_clip_ratio, without the dual clip"),
        "SkyRL": (NEARLY, "policy/loss_metrics/clip_ratio"),
        "ms-swift": (SAME, "clip_ratio/region_mean"),
    },
}


def marks(metric: str) -> list[str]:
    """Return the mark of every framework for a metric."""
    logged = LOGGED.get(metric, {})
    return [logged.get(framework, (MISSING, ""))[0] for framework in FRAMEWORKS]

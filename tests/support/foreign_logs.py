"""Records as other frameworks write them: names as they stand in their source, numbers made up."""

import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT.parent / "shared" / "data" / "foreign_logs"
needs_samples = pytest.mark.skipif(not SAMPLES.is_dir(), reason="needs ../shared/data/foreign_logs")


def trl_row(step: int, **changes: object) -> dict:
    row = {
        "loss": 0.01,
        "grad_norm": 0.5,
        "learning_rate": 1e-6,
        "reward": 0.5 + step / 1000,
        "reward_std": 0.3,
        "frac_reward_zero_std": 0.25,
        "completions/mean_length": 100.0,
        "completions/clipped_ratio": 0.125,
        "clip_ratio/region_mean": 0.01,
        "clip_ratio/low_mean": 0.004,
        "entropy": 0.4,
        "kl": 0.001,
        "rewards/correct/mean": 0.5,
        "epoch": step / 100,
        "step": step,
    }
    return row | changes


def verl_row(step: int, **changes: object) -> dict:
    data = {
        "critic/score/mean": 0.5 + step / 1000,
        "response_length/mean": 900.0,
        "response_length/clip_ratio": 0.0078125,
        "actor/entropy": 0.3,
        "actor/pg_loss": 0.1,
        "actor/grad_norm": 0.25,
        "actor/lr": 1e-6,
        "actor/ppo_kl": 1e-4,
        "actor/pg_clipfrac": 0.02,
        "actor/pg_clipfrac_lower": 0.0,
        "rollout_corr/k3_kl": 3e-4,
        "rollout_corr/log_ppl_diff_max": math.log(2),
        "rollout/moe/max_vio/avg": 0.5,
        "timing_s/gen": 32.0,
        "training/global_step": step,
    }
    return data | changes


def prime_rl_rows(step: int) -> list[dict]:
    """The orchestrator's row, two of the trainer's five, and those of an evaluation."""
    rows: list[dict] = [
        {
            "step": step,
            "train/agg/all/solver/reward/mean": 0.4,
            "train/agg/all/solver/is_truncated/mean": 0.1,
            "progress/tokens": 1000,
            "time/step": 60.0,
        },
        {"step": step, "optim/lr": 1e-6, "optim/grad_norm": 0.3, "optim/zero_grad_ratio": 0.0},
        {"step": step, "time/step": 20.0, "time/forward_backward": 15.0},
        {"step": step, "mismatch_kl/all/mean": 2e-4, "max_vio/mean": 0.5, "entropy/all/mean": 0.3},
        {"step": step, "eval/aime/effective/solver/avg@4": 0.2},
    ]
    # its file has the time of each row
    return [row | {"time": 1.7e9 + 60 * step + number} for number, row in enumerate(rows)]


def ms_swift_line(step: int, **changes: object) -> dict:
    row = trl_row(step) | {"entropy/mean": 0.4, "rollout_correction/k3_kl": 1e-3}
    del row["step"]
    del row["entropy"]
    row |= {"global_step/max_steps": f"{step}/160", "elapsed_time": "6s"}
    return row | {"memory(GiB)": 16.0 + step, "train_speed(iter/s)": 0.1} | changes


def slime_rows(rollout: int, updates: int = 2) -> list[dict]:
    rows = [
        {
            "rollout/raw_reward": 0.5,
            "rollout/rewards": 0.0,
            "rollout/truncated_ratio": 0.1,
            "rollout/step": rollout,
        },
        {"perf/rollout_time": 30.0, "rollout/step": rollout},
    ]
    for update in range(updates):
        rows.append(
            {
                "train/grad_norm": 1.0 + update,
                "train/ppo_kl": 0.01,
                "train/pg_clipfrac": 0.02,
                "train/lr-pg_0": 1e-6,
                "train/step": rollout * updates + update,
            }
        )
    return rows


OTHER_ROWS = {
    "roll": {
        "step": 0,
        "critic/score/mean": 0.5,
        "critic/correct/mean": 0.4,
        "actor/policykl": 0.01,
        "actor_train/grad_norm": 0.3,
        "tokens/response_length/mean": 50.0,
        "tokens/total_response_length/clip": 3.0,
    },
    "openrlhf": {
        "train/global_step": 1,
        "train/rollout/reward_mean": 0.5,
        "train/rollout/truncated_rate": 0.1,
        "train/ppo_clip_ratio": 0.02,
        "train/ppo_kl": 0.01,
        "train/actor_grad_norm": 0.3,
    },
    "nemo_rl": {
        "step": 1,
        "train/reward": 0.5,
        "train/mean_gen_tokens_per_sample": 50.0,
        "train/truncation_rate": 0.1,
        "train/baseline_reward/pct_1": 25.0,
        "train/token_mult_prob_error": 1.02,
        "train/grad_norm": 0.3,
    },
    "skyrl": {
        "step": 1,
        "reward/avg_raw_reward": 0.5,
        "generate/avg_num_tokens": 50.0,
        "policy/policy_lr": 1e-6,
        "policy/policy_entropy": 0.3,
        "policy/loss_metrics/clip_ratio": 0.02,
        "policy/grad_norm": 0.3,
        "policy/response_length": 900.0,
    },
}


def write_lines(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_state(file: Path, rows: list[dict], max_steps: int = 100) -> Path:
    """A trainer_state.json as transformers writes it."""
    state = {"global_step": rows[-1]["step"], "log_history": rows, "max_steps": max_steps}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(state, indent=2))
    return file

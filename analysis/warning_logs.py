"""Which frameworks log the metrics of the monitor's rules.

The answer is read from the tables of gspo.tracking.frameworks. Only the names that look alike and
mean another thing are listed here.
"""

from gspo.tracking.frameworks.known import TABLES
from gspo.tracking.frameworks.table import ANY, Table

FRAMEWORKS = tuple(table.title for table in TABLES.values())
SAME = "same"  # the same number
NEARLY = "nearly"  # the same up to weights, a factor or a sum of two numbers: the rule works on it
OTHER = "other"  # another definition under a similar name: the rule does not work on it
MISSING = "-"

# By our metric: the name in a framework's table on which the rule must not be used.
LOOKALIKES = {
    "mismatch/k3": {
        "prime_rl": "mismatch_kl/*",  # of the current policy
        "openrlhf": "vllm_kl",  # k1
        "nemo_rl": "train/gen_kl_error",  # a sum over the updates of a batch
    },
    # of the engine's weights
    "ratio/ess_token": {"verl": "rollout_corr/*", "ms_swift": "rollout_correction/*"},
    "ratio/ess_sequence": {"verl": "rollout_corr/*", "ms_swift": "rollout_correction/*"},
    "ratio/token_max": {
        "trl": "sampling/importance_sampling_ratio/*",  # of the engine
        "roll": "actor/ratio_*",
    },
    "ratio/token_min": {
        "trl": "sampling/importance_sampling_ratio/*",
        "roll": "actor/ratio_*",
    },
    # k1, or a KL to the reference
    "kl/old_k3": {
        "trl": "kl",
        "ms_swift": "kl",
        "verl": "actor/ppo_kl",
        "roll": "actor/policykl",
        "slime": "train/ppo_kl",
        "openrlhf": "ppo_kl",
        "skyrl": "policy/policy_kl",
    },
    "policy/entropy": {
        "openrlhf": "entropy_loss",  # only with an entropy bonus
        "nemo_rl": "train/approx_entropy",  # of the sampled tokens
    },
    "length/repetition": {"slime": "rollout/repetition_frac"},
    "length/truncated": {
        "verl": "response_length/clip_ratio",  # of the padded width
        "roll": "tokens/total_response_length/clip",  # a count
    },
    "group/zero_variance": {
        "slime": "rollout/zero_std/count_*",  # counts
        "skyrl": "reward/num_zero_variance_filtered",
    },
    "clip/token_active": {
        "prime_rl": "is_masked*",
        "roll": "actor/clipfrac",
        "slime": "train/pg_clipfrac",
    },
}
# a rule on the gradient compares a norm with the norms before it, so any norm will do
GRADIENT_NORMS = ("optim/grad_norm", "optim/grad_norm_max")


def marks(metric: str) -> list[str]:
    """Return the mark of every framework for a metric of ours."""
    return [mark(table, metric) for table in TABLES.values()]


def mark(table: Table, metric: str) -> str:
    """Return whether a framework logs a metric of ours, without gspo.probe."""
    relations = {entry.relation for entry in table.entries if entry.ours == metric != ANY}
    if SAME in relations:
        return SAME
    if relations or (metric in GRADIENT_NORMS and table.gradient_norm):
        return NEARLY
    if table.name in LOOKALIKES.get(metric, {}):
        return OTHER
    return MISSING

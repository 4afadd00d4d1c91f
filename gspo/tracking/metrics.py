"""The registry of metrics: name, unit and meaning of each. The tracker refuses a metric that is not
in it.

    python -m gspo.tracking.metrics > docs/metrics.md          writes the page of the documentation
                                                               anew

Dashboards, figures and documentation read the registry. A name with `*` stands for a family:
`reward/*` has one member per task. Each metric is computed by a tested function of
gspo.train.diagnostics, gspo.evaluation.evaluate or the trainer. All averages over a step are
weighted by what they count (tokens, responses), over all its mini-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gspo.io.untrusted import read_json

# the file of a run directory that defines the metrics of the user's own
CUSTOM = "custom_metrics.json"


@dataclass(frozen=True)
class Metric:
    """The definition of one metric, or of a family of metrics.

    `summary` says what W&B's summary of a run keeps beside the last value: "recent": the mean over
    the last ten batches; "max": the largest value; "last": nothing more."""

    name: str
    unit: str
    meaning: str
    summary: str = "recent"


TOKEN, SEQUENCE = "share of tokens", "share of responses"

METRICS = [
    Metric(
        "step",
        "rollout batches",
        "the step axis: row s describes rollout batch s; row 0 is the start",
        "last",
    ),
    # rewards and what the verifiers said
    Metric(
        "reward/mean",
        "reward",
        "mean reward of the step's responses, also of those that dynamic sampling dropped",
    ),
    Metric("reward/*", "reward", "mean reward of one task's responses"),
    Metric(
        "verdict/*",
        SEQUENCE,
        "responses with this verdict (task_verdict); of more than 20 of a task the rarest are task_other",
    ),
    Metric(
        "group/zero_variance",
        "share of groups",
        "groups whose responses all have the same reward: no signal (but for advantage=turn_normalized)",
    ),
    Metric("group/all_correct", "share of groups", "groups in which every response has reward 1"),
    Metric(
        "reward/overlong_penalty",
        "reward",
        "mean soft overlong penalty that was added to rewards (0 or negative)",
    ),
    Metric("advantage/mean", "advantage", "mean over response tokens, after whitening and clip"),
    Metric("advantage/std", "advantage", "standard deviation over response tokens"),
    Metric("advantage/abs_max", "advantage", "largest size of an advantage of the step"),
    Metric(
        "filter/zero_variance",
        "groups",
        "groups dropped by dynamic sampling because all their rewards were equal",
    ),
    Metric(
        "filter/surplus", "groups", "groups dropped by dynamic sampling because the batch was full"
    ),
    Metric(
        "filter/filled",
        "groups",
        "groups without signal that were trained on because the refill rounds ran out",
    ),
    Metric(
        "filter/refill_rounds", "rounds", "further rounds that dynamic sampling took in this step"
    ),
    Metric(
        "filter/prompt_too_long",
        "problems",
        "problems replaced because their prompt exceeds max_prompt_tokens, or leaves no room for the response",
    ),
    Metric(
        "filter/ungraded",
        "responses",
        "responses left out because their verifier failed (twice), not they",
    ),
    Metric(
        "filter/truncated",
        SEQUENCE,
        "responses left out of the loss because a limit has cut them off",
    ),
    # held-out evaluation
    Metric(
        "eval/*/avg@*", "reward", "mean reward over k samples per problem of a held-out set", "max"
    ),
    Metric("eval/*/stderr", "reward", "standard error of avg@k over the set's problems", "last"),
    Metric(
        "eval/*/pass@*",
        "share of problems",
        "problems solved by at least one of k samples (k samples drawn)",
        "max",
    ),
    Metric(
        "eval/*/maj@*",
        "share of problems",
        "problems whose most frequent answer of k samples is right",
        "max",
    ),
    Metric("eval/*/truncated", SEQUENCE, "held-out responses that hit the token limit", "last"),
    Metric("eval/*/tokens", "tokens", "mean length of held-out responses", "last"),
    Metric(
        "eval/*/ungraded",
        "responses",
        "held-out responses that could not be graded and are left out of the rest",
        "last",
    ),
    Metric(
        "eval/*/prompt_too_long",
        "problems",
        "held-out problems left out because prompt and response together exceed the model's positions",
        "last",
    ),
    Metric(
        "eval/elo",
        "Elo points",
        "rating at which the rated set's solves are as expected (MAP; prior: mean 1500, standard deviation 700)",
        "max",
    ),
    Metric(
        "eval/elo_stderr",
        "Elo points",
        "standard error of the rating, from the curvature of the posterior",
        "last",
    ),
    Metric(
        "eval/*/episode_*",
        "per episode",
        "the same as episode/*, over the held-out episodes: episode_turns and others",
        "last",
    ),
    # clipping; active: the clip removed the gradient, which depends on the advantage's sign;
    # outside: the ratio left the clip range
    Metric(
        "clip/token_active", TOKEN, "tokens whose gradient the clip removed (Fig 2 of the paper)"
    ),
    Metric("clip/token_outside", TOKEN, "tokens whose ratio lies outside the clip range"),
    Metric(
        "clip/sequence_active",
        SEQUENCE,
        "mean over responses of the share of their tokens that are clipped",
    ),
    Metric(
        "clip/sequence_outside",
        SEQUENCE,
        "mean over responses of the share of their tokens outside the range",
    ),
    Metric("clip/token_active_positive", TOKEN, "token_active among tokens with advantage > 0"),
    Metric("clip/token_active_negative", TOKEN, "token_active among tokens with advantage < 0"),
    Metric("clip/token_outside_positive", TOKEN, "token_outside among tokens with advantage > 0"),
    Metric("clip/token_outside_negative", TOKEN, "token_outside among tokens with advantage < 0"),
    Metric(
        "clip/sequence_active_positive", SEQUENCE, "sequence_active over tokens with advantage > 0"
    ),
    Metric(
        "clip/sequence_active_negative", SEQUENCE, "sequence_active over tokens with advantage < 0"
    ),
    Metric(
        "clip/sequence_outside_positive",
        SEQUENCE,
        "sequence_outside over tokens with advantage > 0",
    ),
    Metric(
        "clip/sequence_outside_negative",
        SEQUENCE,
        "sequence_outside over tokens with advantage < 0",
    ),
    Metric(
        "clip/token_dual",
        TOKEN,
        "tokens whose gradient the dual clip removed (counted in token_active too)",
    ),
    Metric(
        "clip/weight",
        "weight",
        "mean over tokens of what is left on A grad log pi (1 on policy; LUSPO: the length)",
    ),
    Metric(
        "clip/token_active_minibatch_*",
        TOKEN,
        "token_active in mini-batch n of the step; 0 in the first",
    ),
    Metric(
        "clip/token_outside_minibatch_*", TOKEN, "outside the range, in mini-batch n of the step"
    ),
    Metric(
        "clip/log_ratio_bounded",
        TOKEN,
        "tokens whose log-ratio left the numerical bound: no gradient, and counted",
    ),
    # importance ratios pi / pi_old
    Metric("ratio/sequence_mean", "ratio", "mean over responses of s = exp(mean log-ratio)"),
    Metric("ratio/sequence_min", "ratio", "smallest s of the step"),
    Metric("ratio/sequence_max", "ratio", "largest s of the step"),
    Metric(
        "ratio/sequence_log_abs",
        "nats",
        "mean |log s|, the quantity GSPO's clip range is compared with",
    ),
    Metric("ratio/token_mean", "ratio", "mean token ratio"),
    Metric("ratio/token_min", "ratio", "smallest token ratio of the step"),
    Metric("ratio/token_max", "ratio", "largest token ratio of the step"),
    Metric(
        "ratio/token_log_var",
        "nats^2",
        "mean over responses of the variance of their token log-ratios",
    ),
    Metric(
        "ratio/ess_token",
        "share",
        "effective sample size of the token ratios, (sum w)^2 / (n sum w^2)",
    ),
    Metric("ratio/ess_sequence", "share", "effective sample size of the sequence ratios s"),
    Metric(
        "ratio/floor_sequence_abs",
        "nats",
        "mean |log s| in the step's first mini-batch, where the policy is the old policy: rounding alone",
    ),
    Metric(
        "ratio/floor_outside",
        SEQUENCE,
        "share outside the clip range there: clipped by rounding alone",
    ),
    Metric(
        "ratio/floor_of_range",
        "share",
        "floor_sequence_abs as a share of the narrower side of the clip range (objectives that clip s); above 0.1 the "
        "clipped share measures rounding",
    ),
    # divergence, entropy
    Metric("kl/old_k1", "nats", "mean over tokens of log pi_old - log pi (can be negative)"),
    Metric("kl/old_k3", "nats", "mean over tokens of r - 1 - log r, r = pi/pi_old"),
    Metric("kl/ref_k1", "nats", "mean over tokens of log pi_old - log pi_ref (can be negative)"),
    Metric("kl/ref_k3", "nats", "k3 estimate of KL(pi_old || pi_ref)"),
    Metric(
        "kl/ref",
        "nats",
        "the same with the KL term's own estimator and bounds: what its coefficient follows",
    ),
    Metric("kl/coef", "reward/nat", "coefficient of the KL term in this step", "last"),
    Metric("kl/loss", "reward", "the KL term's share of the loss: mean over the step's updates"),
    # the gap between engine and trainer; l = the trainer's old log-prob - the engine's, of the
    # sampled tokens
    Metric("mismatch/k1", "nats", "mean over tokens of -l (can be negative)"),
    Metric("mismatch/k3", "nats", "mean over tokens of exp(l) - 1 - l"),
    Metric("mismatch/logp_abs", "nats", "mean |l|"),
    Metric("mismatch/logp_abs_max", "nats", "largest |l| of the step"),
    Metric(
        "mismatch/beyond_2",
        TOKEN,
        "tokens with |l| > log 2: the probabilities differ by more than a factor of 2",
    ),
    Metric("mismatch/sequence_log_abs", "nats", "mean |log s|, s = exp(mean l) of a response"),
    Metric("mismatch/sequence_min", "ratio", "smallest s of the step"),
    Metric("mismatch/sequence_max", "ratio", "largest s of the step"),
    Metric(
        "mismatch/after_sync",
        "nats",
        "mean min(|l|, 1) of a few tokens sampled after the weights were handed over",
    ),
    Metric(
        "mismatch/weight_token_*",
        "weight",
        "pi_old/mu of tokens before truncation: mean, max, effective sample size",
    ),
    Metric(
        "mismatch/weight_sequence_*",
        "weight",
        "the same, product over the response, token-weighted",
    ),
    Metric(
        "mismatch/weight_geometric_*",
        "weight",
        "the same, geometric mean over the response, token-weighted",
    ),
    Metric(
        "mismatch/corrected_mean",
        "weight",
        "mean weight that the correction puts on the loss of a token",
    ),
    Metric("mismatch/masked", TOKEN, "tokens that the correction leaves out of the loss"),
    Metric(
        "value/error",
        "reward^2",
        "mean squared error of the critic's values, over the step's updates",
    ),
    Metric("value/clipped", TOKEN, "values further than value_clip from those at the step's start"),
    Metric(
        "value/explained_variance",
        "share",
        "1 - var(R - V) / var(R) at the step's start: 1 is a perfect critic",
    ),
    Metric("policy/entropy", "nats", "mean over response tokens of the policy's entropy"),
    Metric(
        "policy/entropy_coef",
        "weight",
        "coefficient of the entropy bonus that acted, mean over the step's updates",
    ),
    # optimisation
    Metric("optim/loss", "reward", "the step's loss: mean over its optimizer steps"),
    Metric(
        "optim/grad_norm",
        "norm",
        "mean over the step's updates of the gradient norm before clipping",
    ),
    Metric(
        "optim/grad_norm_max",
        "norm",
        "largest gradient norm of the step's updates, before clipping",
        "max",
    ),
    Metric("optim/lr", "learning rate", "learning rate of the step's last update", "last"),
    Metric("optim/updates", "updates", "optimizer updates so far", "last"),
    Metric(
        "optim/skipped",
        "updates",
        "updates of the step that were left out: their gradient was not finite",
        "max",
    ),
    Metric(
        "optim/missing_updates",
        "updates",
        "updates of the step that were left out: too few groups could be graded to make every mini-batch",
        "max",
    ),
    # the monitor
    Metric("monitor/warnings", "warnings", "early warnings in force after the step"),
    Metric(
        "monitor/fallen",
        "0 or 1",
        "whether the smoothed reward has been below 0.7 x its peak for 20 steps",
        "max",
    ),
    # responses
    Metric("length/mean", "tokens", "mean response length, the end-of-sequence token included"),
    Metric("length/p95", "tokens", "95th percentile of the response length"),
    Metric("length/limit", "tokens", "largest number of response tokens in this step", "last"),
    Metric("length/truncated", SEQUENCE, "responses that hit the token limit"),
    Metric(
        "length/repetition",
        "share",
        "mean over responses of the share of their 4-grams that occurred before in them",
    ),
    # episodes of several turns, with an environment
    Metric("episode/turns", "turns", "mean over episodes of the number of the policy's turns"),
    Metric("episode/turns_max", "turns", "largest number of the policy's turns in an episode"),
    Metric(
        "episode/environment_tokens",
        TOKEN,
        "tokens after the prompts that the environments wrote: context, never trained on",
    ),
    Metric(
        "episode/finish_*",
        "share of episodes",
        "episodes that ended so: stop (the environment ended it), length (token limit), turns (turn limit), context "
        "(the model has no more room), environment (it failed; such an episode counts here alone)",
    ),
    Metric(
        "episode/reward_turns_*",
        "reward",
        "mean reward of the episodes in which the policy had so many turns; over_8 are all with more",
    ),
    Metric(
        "episode/*",
        "per episode",
        "an environment's measure of this name, summed over an episode: mean over the episodes that have it. Those "
        "with an observation have escaped (special tokens in observations that became text) and cut (observations that "
        "were too long), those that were played twice have replay_differs (whether the environment answered otherwise)",
    ),
    # expert routing, compared with that of the old policy at the step's start, or when it sampled
    Metric(
        "routing/consistency",
        "share of experts",
        "routing consistency: old experts that the router still chooses",
    ),
    Metric("routing/consistency_layer_*", "share of experts", "the same, for one MoE layer"),
    Metric(
        "routing/consistency_minibatch_*",
        "share of experts",
        "the same, in mini-batch n of the step",
    ),
    Metric(
        "routing/consistency_after_step",
        "share of experts",
        "after the step's last update, on a sample",
    ),
    Metric(
        "routing/changed_any_layer",
        TOKEN,
        "response tokens of which at least one layer's experts changed",
    ),
    Metric(
        "routing/engine_agreement",
        "share of experts",
        "the engine's experts that the trainer's router chooses too",
    ),
    Metric("routing/engine_agreement_layer_*", "share of experts", "the same, for one MoE layer"),
    Metric(
        "routing/engine_changed_any_layer",
        TOKEN,
        "response tokens with another expert in at least one layer",
    ),
    Metric(
        "routing/load_entropy",
        "share",
        "entropy of expert loads / log(number of experts), mean over layers",
    ),
    Metric("routing/load_max", "ratio", "largest load of an expert / mean load, mean over layers"),
    Metric(
        "routing/unused_experts", "share of experts", "experts that no response token was sent to"
    ),
    Metric(
        "routing/balance",
        "ratio",
        "auxiliary loss before its coefficient: E x sum of load x probability; 1 if balanced",
    ),
    # how old the responses are
    Metric(
        "staleness/mean",
        "rollout batches",
        "age of the weights that sampled, mean over tokens; 0 on policy",
    ),
    Metric("staleness/max", "rollout batches", "age of the oldest token's weights"),
    Metric(
        "staleness/segments",
        "segments",
        "mean over responses of the policies that sampled parts of them",
    ),
    Metric(
        "staleness/in_flight",
        "responses",
        "responses that are to be continued under the next policy",
    ),
    # cost
    Metric(
        "compute/tokens",
        "tokens",
        "tokens generated so far (of responses that were cut: once they have ended)",
        "last",
    ),
    Metric(
        "compute/dropped_tokens",
        "tokens",
        "tokens of this step that dynamic sampling generated and dropped",
    ),
    Metric(
        "compute/flops",
        "FLOPs",
        "so far: 2 per active parameter and generated or scored token, 6 per trained token (4 with LoRA); left out "
        "where the active parameters cannot be told",
        "last",
    ),
    Metric(
        "compute/seconds", "s", "wall-clock training seconds so far, evaluation left out", "last"
    ),
    Metric("time/rollout_s", "s", "seconds of the step spent in generation"),
    Metric(
        "time/score_s",
        "s",
        "seconds spent waiting for verifiers (sampling hides the rest) and other ranks' responses",
    ),
    Metric("time/environment_s", "s", "seconds of the generation spent waiting for environments"),
    Metric("time/behaviour_s", "s", "seconds spent in log-probs under the weights that sampled"),
    Metric(
        "time/waited_s",
        "s",
        "seconds that the trainer waited for its batch: all of the above unless they overlap",
    ),
    Metric(
        "time/sync_s",
        "s",
        "seconds spent in handing over the weights, and in the check that they arrived",
    ),
    Metric(
        "time/train_s", "s", "seconds of the step spent in old log-probs, updates and diagnostics"
    ),
    Metric(
        "time/old_logprobs_s",
        "s",
        "seconds of these spent before the updates: old and reference log-probs",
    ),
    Metric(
        "time/diagnostics_s",
        "s",
        "seconds of these spent in metrics, the pass after the last update included",
    ),
    Metric("time/monitor_s", "s", "seconds spent in the monitor's scores"),
    Metric("time/eval_s", "s", "seconds spent in held-out evaluation after the step"),
    Metric(
        "time/checkpoint_s",
        "s",
        "seconds that the previous checkpoint kept the training waiting; it is written beside it",
    ),
    Metric("throughput/rollout_tokens", "tokens/s", "generated tokens per second of generation"),
    Metric("throughput/train_tokens", "tokens/s", "trained tokens per second of training"),
    Metric(
        "custom/*",
        "",
        f"a metric of the user's own; {CUSTOM} in the run directory has its unit and meaning",
    ),
]


def lookup(name: str) -> Metric:
    """Return the definition of a metric: its own, else its family's. Raises KeyError if the
    registry has neither.
    """
    for metric in METRICS:
        if metric.name == name:
            return metric
    for metric in METRICS:
        if "*" in metric.name and fnmatchcase(name, metric.name):
            return metric
    raise KeyError(
        f"metric {name!r} is not in gspo/tracking/metrics.py; give it a name, a unit and a meaning there"
    )


def custom_metrics(folder: Path) -> dict[str, Metric]:
    """Return the metrics of the user's own that a run directory defines; none if it has no
    custom_metrics.json.

    For example, {"custom/answers": {"unit": "share of responses", "meaning": "responses with an
    answer"}}. Entries of another form are left out, and long texts are cut. Raises OSError or
    ValueError if the file cannot be read."""
    try:
        entries = read_json(folder / CUSTOM)
    except FileNotFoundError:
        return {}
    found = {}
    for name, entry in entries.items():
        unit, meaning = (
            (entry.get(key) for key in ("unit", "meaning"))
            if isinstance(entry, dict)
            else (None, None)
        )
        if name.startswith("custom/") and isinstance(unit, str) and isinstance(meaning, str):
            found[name] = Metric(name, unit[:100], meaning[:1000])
    return found


# What the metrics that begin with a word have in common: the headings of docs/metrics.md.
FAMILIES = {
    "step": "The step axis",
    "reward": "Rewards",
    "verdict": "Verdicts",
    "group": "Groups",
    "advantage": "Advantages",
    "filter": "What was left out",
    "eval": "Held-out evaluation",
    "clip": "Clipping",
    "ratio": "Importance ratios",
    "kl": "Divergence from the old policy and from the reference",
    "mismatch": "The gap between trainer and engine",
    "value": "The critic",
    "policy": "The policy",
    "optim": "Optimization",
    "monitor": "The monitor",
    "length": "Response lengths",
    "episode": "Episodes of several turns",
    "routing": "Expert routing",
    "staleness": "The age of responses",
    "compute": "Compute so far",
    "time": "Time",
    "throughput": "Throughput",
    "custom": "Metrics of your own",
}
PAGE_HEAD = """\
# Metrics

Written by `python -m gspo.tracking.metrics > docs/metrics.md` from the registry `gspo/tracking/metrics.py`; do not edit
this page by hand. [monitoring.md](monitoring.md#the-first-metrics-to-look-at) lists the first metrics to look at.

For example, `reward/mean` is the mean reward of a step's responses. A `*` in a name stands for any text: `reward/*` is
a metric for each task, as in `reward/math`. Averages over a step are weighted by tokens or responses, over all
mini-batches of the step. The last column is the entry of W&B's run summary beside the last value: the mean over the
last ten batches (recent), the largest value (max), or nothing more (last)."""


def page() -> str:
    """docs/metrics.md: the whole registry as Markdown, a table for each family in the order of
    FAMILIES.
    """
    lines = [PAGE_HEAD]
    for family, title in FAMILIES.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| metric | unit | meaning | summary |",
            "|---|---|---|---|",
        ]
        for metric in METRICS:
            if metric.name.partition("/")[0] == family:
                meaning = metric.meaning.replace("|", r"\|")
                lines.append(f"| `{metric.name}` | {metric.unit} | {meaning} | {metric.summary} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")

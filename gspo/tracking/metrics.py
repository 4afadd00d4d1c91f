"""The registry of metrics: the name, unit and meaning of every metric.

The tracker refuses a metric that the registry lacks. Dashboards, figures and documentation read the
registry. This command writes the page of the documentation:

    python -m gspo.tracking.metrics > docs/metrics.md

A name with `*` stands for a family: `reward/*` has one member per task. Each metric is computed by
a tested function of gspo.train.diagnostics, gspo.evaluation.evaluate or the trainer. Averages over
a step are weighted by tokens or responses, over all mini-batches of the step.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gspo.io.untrusted import read_json

# the file of a run directory that defines the user's own metrics
CUSTOM = "custom_metrics.json"


@dataclass(frozen=True)
class Metric:
    """The definition of a metric, or of a family of metrics.

    W&B's summary of a run always has the metric's last value. With `summary` "recent" it also has
    the mean over the last ten batches, with "max" the largest value, with "last" nothing more."""

    name: str
    unit: str
    meaning: str
    summary: str = "recent"


TOKEN = "share of tokens"
SEQUENCE = "share of responses"
HELD_OUT_MEANS = "eval/*/avg@*"

METRICS = [
    Metric(
        "step",
        "rollout batches",
        "the step axis: row s describes rollout batch s, and row 0 the start",
        "last",
    ),
    # rewards and verdicts
    Metric(
        "reward/mean",
        "reward",
        "mean over the step's responses, also those that dynamic sampling dropped",
    ),
    Metric(
        "reward/*/mean",
        "reward",
        "mean of one of several named rewards (reward.weights), before its weight",
    ),
    Metric("reward/*", "reward", "mean reward of one task's responses"),
    Metric(
        "verdict/*",
        SEQUENCE,
        "responses with this verdict (task_verdict). The rarest of more than 20 verdicts of a "
        "task are task_other",
    ),
    Metric(
        "group/zero_variance",
        "share of groups",
        "groups whose responses all have the same reward: no signal for estimators that compare "
        "rewards within a group, but for turn_normalized, gdpo, the zero tail of otb, and with "
        "reward.overlong_cache or kl=reward, which add to the rewards afterwards",
    ),
    Metric(
        "group/steps_without_signal",
        "rollout batches",
        "batches in a row, up to this one, whose advantages are all 0",
        "max",
    ),
    Metric(
        "group/all_correct",
        "share of groups",
        "groups in which every response has reward 1 (or 1 in each of its named rewards)",
    ),
    Metric(
        "reward/overlong_penalty",
        "reward",
        "mean soft overlong penalty (0 or negative)",
    ),
    Metric("advantage/mean", "advantage", "mean over response tokens, after whitening and clip"),
    Metric("advantage/std", "advantage", "standard deviation over response tokens"),
    Metric("advantage/abs_max", "advantage", "largest absolute advantage of the step"),
    Metric(
        "advantage/score_norm",
        "sum of squares",
        "advantage=otb: mean over responses of sum_t ||e_y - pi_t||^2, the squared score at the "
        "logits; times the square of the weight with a correction, as in verl",
    ),
    Metric(
        "advantage/square",
        "squared advantage",
        "advantage=otb: mean over responses of the squared mean advantage",
    ),
    Metric(
        "advantage/power",
        "squared gradient at the logits",
        "advantage=otb: mean over responses of A^2 sum_t w_t, with verl's name total_power. It has "
        "another unit than optim/grad_norm, so their difference is no variance",
    ),
    Metric(
        "filter/zero_variance",
        "groups",
        "groups dropped by dynamic sampling: all rewards were equal",
    ),
    Metric("filter/surplus", "groups", "groups dropped by dynamic sampling: the batch was full"),
    Metric(
        "filter/filled",
        "groups",
        "groups without signal that were trained on: no refill round was left",
    ),
    Metric("filter/refill_rounds", "rounds", "further sampling rounds of dynamic sampling"),
    Metric(
        "filter/prompt_too_long",
        "problems",
        "problems replaced: the prompt exceeds max_prompt_tokens, or leaves no room for the "
        "response",
    ),
    Metric(
        "filter/ungraded",
        "responses",
        "responses left out: their verifier failed twice, or their environment failed",
    ),
    Metric(
        "filter/truncated",
        SEQUENCE,
        "responses left out of the loss: they were truncated",
    ),
    # held-out evaluation
    Metric(
        HELD_OUT_MEANS, "reward", "mean reward over k samples per problem of a held-out set", "max"
    ),
    Metric("eval/*/stderr", "reward", "standard error of avg@k over problems", "last"),
    Metric(
        "eval/*/pass@*",
        "share of problems",
        "problems solved by at least one of k samples",
        "max",
    ),
    Metric(
        "eval/*/maj@*",
        "share of problems",
        "problems whose most frequent answer of k is right",
        "max",
    ),
    Metric("eval/*/truncated", SEQUENCE, "held-out responses that hit the token limit", "last"),
    Metric("eval/*/tokens", "tokens", "mean length of held-out responses", "last"),
    Metric(
        "eval/*/ungraded",
        "responses",
        "held-out responses that could not be graded. No other metric counts them",
        "last",
    ),
    Metric(
        "eval/*/prompt_too_long",
        "problems",
        "held-out problems left out: prompt and response exceed the model's positions",
        "last",
    ),
    Metric(
        "eval/elo",
        "Elo points",
        "rating that best explains the solved problems of the rated set (MAP, normal prior, "
        "mean 1500, standard deviation 700)",
        "max",
    ),
    Metric(
        "eval/elo_stderr",
        "Elo points",
        "standard error of the rating, from the posterior's curvature",
        "last",
    ),
    Metric(
        "eval/*/episode_*",
        "per episode",
        "the same as episode/*, over held-out episodes (for example episode_turns)",
        "last",
    ),
    # Clipping. Active: the clip removed the gradient, which depends on the advantage's sign.
    # Outside: the ratio left the clip range.
    Metric(
        "clip/token_active", TOKEN, "tokens whose gradient the clip removed (Fig 2 of the paper)"
    ),
    Metric("clip/token_outside", TOKEN, "tokens whose ratio lies outside the clip range"),
    Metric(
        "clip/sequence_active",
        SEQUENCE,
        "mean over responses of the share of clipped tokens",
    ),
    Metric(
        "clip/sequence_outside",
        SEQUENCE,
        "mean over responses of the share of tokens outside the range",
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
        "tokens whose gradient the dual clip removed (also in token_active)",
    ),
    Metric(
        "clip/weight",
        "weight",
        "mean over tokens of the factor on A grad log pi after clipping (1 on policy, the length "
        "with LUSPO)",
    ),
    Metric(
        "clip/weight_length_*",
        "weight",
        "mean weight of the responses with more than N/2 and at most N tokens (objective=vespo, "
        "whose weight depends on the length)",
    ),
    Metric(
        "clip/token_active_minibatch_*",
        TOKEN,
        "token_active in mini-batch n (0 in the first if its ratios are 1)",
    ),
    Metric("clip/token_outside_minibatch_*", TOKEN, "token_outside in mini-batch n"),
    Metric(
        "clip/log_ratio_bounded",
        TOKEN,
        "tokens whose log-ratio left the numerical bound: they have no gradient, but with "
        "cispo, p3o and vespo",
    ),
    # importance ratios pi / pi_old
    Metric("ratio/sequence_mean", "ratio", "mean over responses of s = exp(mean log-ratio)"),
    Metric("ratio/sequence_min", "ratio", "smallest s of the step"),
    Metric("ratio/sequence_max", "ratio", "largest s of the step"),
    Metric(
        "ratio/sequence_log_abs",
        "nats",
        "mean |log s|, the quantity that GSPO's clip range bounds",
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
        "ratio/ess_group",
        "share",
        "effective sample size of the groups: of the mean s of each group's responses",
    ),
    Metric(
        "ratio/ess_token_used",
        "share",
        "effective sample size of the weights that the gradient has (clip/weight times the "
        "correction), over tokens: after truncation. It may exceed ess_token, because a bound "
        "makes weights alike; a weight of 0 lowers it",
    ),
    Metric(
        "ratio/ess_sequence_used",
        "share",
        "the same of the responses, whose weight is the mean over their tokens",
    ),
    Metric("ratio/ess_group_used", "share", "the same of the groups, by their mean response"),
    Metric(
        "ratio/floor_sequence_abs",
        "nats",
        "mean |log s| in the step's first mini-batch. The policy is the old policy there, so "
        "it is rounding, or with policy.old_logprobs=engine the engine's mismatch",
    ),
    Metric(
        "ratio/floor_outside",
        SEQUENCE,
        "responses that this rounding or mismatch alone puts outside the clip range, in the first "
        "mini-batch. For objectives with a ratio per token: the mean over responses of their share "
        "of tokens outside",
    ),
    Metric(
        "ratio/floor_of_range",
        "share",
        "floor_sequence_abs over the narrower side of the clip range (objectives that clip s). "
        "Above 0.1 the clipped share measures rounding",
    ),
    # divergence, entropy
    Metric("kl/old_k1", "nats", "mean over tokens of log pi_old - log pi (can be negative)"),
    Metric("kl/old_k3", "nats", "mean over tokens of r - 1 - log r, r = pi/pi_old"),
    Metric("kl/ref_k1", "nats", "mean over tokens of log pi_old - log pi_ref (can be negative)"),
    Metric("kl/ref_k3", "nats", "k3 estimate of KL(pi_old || pi_ref)"),
    Metric(
        "kl/ref",
        "nats",
        "KL(pi_old || pi_ref) with the KL term's own estimator and bounds. The coefficient "
        "follows it",
    ),
    Metric("kl/coef", "reward/nat", "coefficient of the KL term", "last"),
    Metric("kl/loss", "reward", "the KL term of the loss, mean over updates"),
    # The gap between engine and trainer. l is the trainer's old log-prob of a sampled token minus
    # the engine's log-prob of it.
    Metric(
        "mismatch/k1",
        "nats",
        "mean over tokens of -l (can be negative), l = trainer's old log-prob - engine's",
    ),
    Metric("mismatch/k3", "nats", "mean over tokens of exp(l) - 1 - l"),
    Metric("mismatch/logp_abs", "nats", "mean |l|"),
    Metric("mismatch/logp_abs_max", "nats", "largest |l| of the step"),
    Metric(
        "mismatch/beyond_2",
        TOKEN,
        "tokens with |l| > log 2: probabilities differ by more than a factor of 2",
    ),
    Metric("mismatch/sequence_log_abs", "nats", "mean |log s|, s = exp(mean l) of a response"),
    Metric("mismatch/sequence_min", "ratio", "smallest s of the step"),
    Metric("mismatch/sequence_max", "ratio", "largest s of the step"),
    Metric(
        "mismatch/after_sync",
        "nats",
        "mean min(|l|, 1) of a few tokens sampled after the weights reached the engine",
    ),
    # The hand-over of weights, on recorded tokens. x and y are the changes of the trainer's and of
    # the engine's log-prob of a token since the previous load of weights.
    Metric(
        "mismatch/sync_slope",
        "share",
        "share of the last update that reached the engine, sum(x y) / sum(x^2): x and y are the "
        "changes of the trainer's and of the engine's log-prob of a recorded token. 1: all "
        "weights arrived, 0: none",
    ),
    Metric("mismatch/sync_slope_stderr", "share", "standard error of sync_slope"),
    Metric(
        "mismatch/sync_residual",
        "share",
        "mean |y - x| / mean |x| of the recorded tokens (y, x: sync_slope). A stale tensor shows "
        "here first if engine and trainer compute in float32",
    ),
    Metric(
        "mismatch/weight_token_*",
        "weight",
        "token weights pi_old/mu before truncation (mu: the engine's policy): mean, max, "
        "effective sample size",
    ),
    Metric(
        "mismatch/weight_sequence_*",
        "weight",
        "the same, product of a response's token weights, averaged over tokens",
    ),
    Metric(
        "mismatch/weight_geometric_*",
        "weight",
        "the same, geometric mean of a response's token weights, averaged over tokens",
    ),
    Metric(
        "mismatch/ess_token",
        "share",
        "with a correction that acts before the updates: effective sample size of the weights "
        "pi_old/mu over tokens, before truncation",
    ),
    Metric("mismatch/ess_sequence", "share", "the same of the responses' mean weights"),
    Metric("mismatch/ess_group", "share", "the same of the groups, by their mean response"),
    Metric(
        "mismatch/ess_token_used",
        "share",
        "effective sample size of the correction's weights, after truncation, over tokens",
    ),
    Metric("mismatch/ess_sequence_used", "share", "the same of the responses' mean weights"),
    Metric("mismatch/ess_group_used", "share", "the same of the groups, by their mean response"),
    Metric(
        "mismatch/corrected_mean",
        "weight",
        "mean weight of a token's loss by the correction, but for m2po",
    ),
    Metric(
        "mismatch/masked",
        TOKEN,
        "tokens that the correction leaves out of the loss. With rollout.keep_mask, of the tokens "
        "with more than one kept token",
    ),
    Metric(
        "mismatch/sequence_masked",
        SEQUENCE,
        "responses that the correction leaves out entirely. Corrections that act in the updates "
        "(opsm, rho, m2po) are measured over updates, the others once per step",
    ),
    Metric(
        "value/error",
        "reward^2",
        "mean squared error of the critic's values, over updates",
    ),
    Metric(
        "value/clipped",
        TOKEN,
        "tokens whose value moved by more than value_clip since the step's start",
    ),
    Metric(
        "value/explained_variance",
        "share",
        "1 - var(R - V) / var(R) at the step's start (1: a perfect critic)",
    ),
    Metric(
        "policy/entropy",
        "nats",
        "the policy's entropy, mean over response tokens (with rollout.keep_mask, of the softmax "
        "over the kept tokens, which is lower)",
    ),
    Metric(
        "policy/entropy_coef",
        "weight",
        "coefficient of the entropy bonus, mean over updates",
    ),
    # optimisation
    Metric("optim/loss", "reward", "the loss, mean over updates"),
    Metric(
        "optim/grad_norm",
        "norm",
        "gradient norm before clipping, mean over updates",
    ),
    Metric(
        "optim/grad_norm_max",
        "norm",
        "largest gradient norm before clipping",
        "max",
    ),
    Metric(
        "optim/gradient_signal",
        "squared gradient",
        "g_1 . g_2 of the gradients of two halves of the batch, every tracking.snr_every steps: an "
        "unbiased estimate of |G|^2, which may be negative",
    ),
    Metric(
        "optim/gradient_noise",
        "squared gradient",
        "|g_1 - g_2|^2 / 4: an unbiased estimate of the variance of the batch's gradient",
    ),
    Metric(
        "optim/snr",
        "ratio",
        "gradient_signal / gradient_noise of the step; over several steps divide the means",
    ),
    Metric("optim/snr_cosine", "cosine", "cosine of the gradients of two halves of the batch"),
    Metric("optim/lr", "learning rate", "learning rate of the step's last update", "last"),
    Metric("optim/updates", "updates", "optimizer updates so far", "last"),
    Metric(
        "optim/skipped",
        "updates",
        "updates left out: the gradient was not finite",
        "max",
    ),
    Metric(
        "optim/missing_updates",
        "updates",
        "updates left out: too few groups could be graded to fill every mini-batch",
        "max",
    ),
    # the monitor
    Metric("monitor/warnings", "warnings", "early warnings in force"),
    Metric(
        "monitor/fallen",
        "0 or 1",
        "whether the smoothed reward has been below 0.7 x its peak for 20 steps",
        "max",
    ),
    # responses
    Metric(
        "information/mi",
        "nats per token",
        "RAGEN-2's proxy of the mutual information of prompts and responses, every "
        "tracking.information_every steps: 0 if responses do not depend on their prompts",
    ),
    Metric(
        "information/mi_sequence",
        "nats per response",
        "the same of whole responses: at most information/bound, which a few tokens reach",
    ),
    Metric("information/bound", "nats", "log of the number of prompts that were compared", "last"),
    Metric("information/matched", "nats per token", "mean log-prob under the own prompt"),
    Metric(
        "information/marginal",
        "nats per token",
        "mean log of the mean probability over the prompts, of mean log-probs per token",
    ),
    Metric("information/matched_sequence", "nats per response", "the same of whole responses"),
    Metric("information/marginal_sequence", "nats per response", "the same of whole responses"),
    Metric(
        "information/retrieval@*",
        SEQUENCE,
        "responses whose own prompt is among the k under which they are most probable",
    ),
    Metric("information/chance@*", SEQUENCE, "the same by chance", "last"),
    Metric("length/mean", "tokens", "mean response length, the end-of-sequence token included"),
    Metric("length/p95", "tokens", "95th percentile of the response length"),
    Metric("length/limit", "tokens", "the limit of response tokens at this step", "last"),
    Metric("length/truncated", SEQUENCE, "responses that hit the token limit"),
    Metric(
        "length/repetition",
        "share",
        "a response's 4-grams that occurred in it before, mean over responses",
    ),
    # the tokens that top_p, top_k and min_p keep, with rollout.keep_mask
    Metric(
        "sampling/kept_mean",
        "tokens",
        "tokens that could be drawn at a position, mean over positions with excluded tokens",
    ),
    Metric("sampling/kept_max", "tokens", "the same, at the position with the most", "max"),
    Metric(
        "sampling/kept_one",
        TOKEN,
        "positions at which a single token could be drawn: its log-prob is 0, its ratio is 1, and "
        "it has no gradient. Clip fractions, mismatch/beyond_2 and mismatch/masked leave these "
        "tokens out",
    ),
    # episodes of several turns, with an environment
    Metric("episode/turns", "turns", "the policy's turns, mean over episodes"),
    Metric("episode/turns_max", "turns", "the policy's turns, largest number"),
    Metric(
        "episode/environment_tokens",
        TOKEN,
        "tokens after the prompts that environments wrote (never trained on)",
    ),
    Metric(
        "episode/finish_*",
        "share of episodes",
        "episodes with this end: stop (by the environment), length (token limit), turns (turn "
        "limit), context (full), environment (it failed, no other metric counts the episode)",
    ),
    Metric(
        "episode/reward_turns_*",
        "reward",
        "mean reward of episodes with n turns of the policy (over_8: more than 8)",
    ),
    Metric(
        "episode/*",
        "per episode",
        "an environment's measure of this name, summed over an episode, mean over the episodes "
        "that have it. Episodes with an observation have escaped (special tokens in "
        "observations that became text) and cut (observations that were too long). Episodes "
        "that were played twice have replay_differs (the environment answered differently)",
    ),
    # expert routing, compared with the old policy's at the step's start or during sampling
    Metric(
        "routing/consistency",
        "share of experts",
        "the old policy's experts that the router still chooses",
    ),
    Metric("routing/consistency_layer_*", "share of experts", "the same, for one MoE layer"),
    Metric(
        "routing/consistency_minibatch_*",
        "share of experts",
        "the same, in mini-batch n",
    ),
    Metric(
        "routing/consistency_after_step",
        "share of experts",
        "the same after the step's last update, on a sample",
    ),
    Metric(
        "routing/changed_any_layer",
        TOKEN,
        "response tokens whose experts changed in at least one layer",
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
        "response tokens whose experts differ from the engine's in at least one layer",
    ),
    Metric(
        "routing/load_entropy",
        "share",
        "entropy of expert loads / log(number of experts), mean over layers",
    ),
    Metric("routing/load_max", "ratio", "largest load of an expert / mean load, mean over layers"),
    Metric("routing/unused_experts", "share of experts", "experts without a response token"),
    Metric(
        "routing/balance",
        "ratio",
        "auxiliary loss before its coefficient: E x sum of load x probability (1 if balanced)",
    ),
    # how old the responses are
    Metric(
        "staleness/mean",
        "rollout batches",
        "age of the weights that sampled a token, mean (0 on policy)",
    ),
    Metric("staleness/max", "rollout batches", "age of the oldest token's weights"),
    Metric(
        "staleness/segments",
        "segments",
        "policies that sampled parts of a response, mean over responses",
    ),
    Metric(
        "staleness/in_flight",
        "responses",
        "responses that the next policy will continue",
    ),
    # cost
    Metric(
        "compute/tokens",
        "tokens",
        "tokens generated so far (a response continued by another policy counts at its end)",
        "last",
    ),
    Metric(
        "compute/dropped_tokens",
        "tokens",
        "generated and not trained on in this step: dropped by dynamic sampling, or ungraded",
    ),
    Metric(
        "compute/flops",
        "FLOPs",
        "so far: 2 per active parameter and generated or scored token, 6 per trained token (4 "
        "with LoRA), and attention. Missing if the number of active parameters is unknown",
        "last",
    ),
    Metric(
        "compute/seconds",
        "s",
        "sampling and training so far: waited_s + train_s of all steps, without evaluations and "
        "checkpoints",
        "last",
    ),
    Metric("time/rollout_s", "s", "generation of responses"),
    Metric(
        "time/score_s",
        "s",
        "waiting for verifiers and for other ranks' responses (the rest of the grading runs "
        "during sampling)",
    ),
    Metric("time/environment_s", "s", "of the generation: waiting for environments"),
    Metric(
        "time/behaviour_s",
        "s",
        "log-probs under the weights that sampled",
    ),
    Metric(
        "time/waited_s",
        "s",
        "the trainer's wait for its batch: rollout_s + score_s + behaviour_s + sync_s unless "
        "sampling overlaps with training",
    ),
    Metric(
        "time/sync_s",
        "s",
        "sending the weights to the engine and checking their arrival",
    ),
    Metric("time/train_s", "s", "old log-probs, updates and diagnostics"),
    Metric(
        "time/old_logprobs_s",
        "s",
        "of train_s: old and reference log-probs, before the updates",
    ),
    Metric(
        "time/diagnostics_s",
        "s",
        "of train_s: metrics, including the pass after the last update",
    ),
    Metric("time/monitor_s", "s", "the monitor's scores"),
    Metric("time/eval_s", "s", "held-out evaluation after the step"),
    Metric(
        "time/checkpoint_s",
        "s",
        "waiting for the previous checkpoint (written in the background)",
    ),
    Metric("time/record_s", "s", "recording the step for `gspo replay`; its passes are in train_s"),
    Metric("throughput/rollout_tokens", "tokens/s", "generated tokens per second of generation"),
    Metric("throughput/train_tokens", "tokens/s", "trained tokens per second of training"),
    Metric(
        "custom/*",
        "",
        f"a metric of the user's own, with unit and meaning in {CUSTOM} of the run directory",
    ),
]


def lookup(name: str) -> Metric:
    """Return the definition of a metric, or else of its family.

    Raises KeyError if the registry has neither."""
    for metric in METRICS:
        if metric.name == name:
            return metric
    for metric in METRICS:
        if "*" in metric.name and fnmatchcase(name, metric.name):
            return metric
    raise KeyError(
        f"metric {name!r} is not in gspo/tracking/metrics.py; give it a name, a unit and a meaning "
        "there"
    )


def stderr_of(held_out_mean: str) -> str:
    """Return the metric with the standard error of a held-out mean.

    >>> stderr_of("eval/math/avg@4")
    'eval/math/stderr'
    """
    return f"{held_out_mean.rpartition('/')[0]}/stderr"


def custom_metrics(folder: Path) -> dict[str, Metric]:
    """Return the user's own metrics, which custom_metrics.json of the run directory defines.

    For example, {"custom/answers": {"unit": "share of responses", "meaning": "responses with an
    answer"}}. The result is empty if the file does not exist. Entries of another form are left out,
    and long texts are cut. Raises OSError or ValueError if the file cannot be read."""
    try:
        entries = read_json(folder / CUSTOM)
    except FileNotFoundError:
        return {}
    metrics = {}
    for name, entry in entries.items():
        if not name.startswith("custom/") or not isinstance(entry, dict):
            continue
        unit = entry.get("unit")
        meaning = entry.get("meaning")
        if isinstance(unit, str) and isinstance(meaning, str):
            metrics[name] = Metric(name, unit[:100], meaning[:1000])
    return metrics


# The headings of docs/metrics.md, by the first word of the metrics' names.
FAMILIES = {
    "step": "Step, time and compute",
    "time": "Step, time and compute",
    "throughput": "Step, time and compute",
    "compute": "Step, time and compute",
    "reward": "Rewards and advantages",
    "verdict": "Rewards and advantages",
    "group": "Rewards and advantages",
    "advantage": "Rewards and advantages",
    "filter": "Groups and responses left out",
    "eval": "Held-out evaluation",
    "clip": "Clipping",
    "ratio": "Importance ratios",
    "kl": "Divergence from the old policy and from the reference",
    "mismatch": "The gap between trainer and engine",
    "staleness": "The gap between trainer and engine",
    "optim": "Optimization",
    "policy": "Optimization",
    "value": "Optimization",
    "monitor": "Optimization",
    "information": "Responses and episodes",
    "length": "Responses and episodes",
    "episode": "Responses and episodes",
    "sampling": "Responses and episodes",
    "routing": "Expert routing",
    "custom": "Metrics of your own",
}
PAGE_HEAD = """\
# Metrics

```sh
gspo figure curves runs/STUDY metrics=[reward/mean,clip/token_active,routing/consistency]
```

[Monitoring](monitoring.md#the-first-metrics-to-look-at) lists the first metrics to look at. The
registry `gspo/tracking/metrics.py` writes this page: `python -m gspo.tracking.metrics`.

A `*` stands for any text: `reward/*` is a metric per task, for example `reward/math`. Averages over
a step are weighted by tokens or responses, over all its mini-batches. W&B's run summary has every
metric's last value and the mean over the last ten batches. Exceptions are marked: the largest value
instead of that mean (max), or the last value alone (last)."""


def page() -> str:
    """Return docs/metrics.md, a Markdown table of metrics for each heading of FAMILIES."""
    lines = [PAGE_HEAD]
    for title in dict.fromkeys(FAMILIES.values()):
        families = [family for family in FAMILIES if FAMILIES[family] == title]
        lines += ["", f"## {title}", "", "| metric | unit | meaning |", "|---|---|---|"]
        for family in families:
            for metric in METRICS:
                if metric.name.partition("/")[0] == family:
                    lines.append(_row(metric))
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    """Return the metric's row of the table."""
    meaning = metric.meaning.replace("|", r"\|")
    if metric.summary != "recent":
        meaning += f" ({metric.summary})"
    return f"| `{metric.name}` | {metric.unit} | {meaning} |"


if __name__ == "__main__":
    print(page(), end="")

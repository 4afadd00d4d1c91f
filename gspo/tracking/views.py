"""Arranges the registry's metrics as views: pages of panels that each answer a question.

W&B's saved views (dashboard.py) follow this arrangement. Titles, units and descriptions come from
the registry. Every metric of the registry is on a panel, or in LEFT_OUT with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from gspo.tracking.metrics import METRICS, Metric, lookup

STEP = "step"
# GRPO with and without replay are two arms of the paper
GROUP_BY = ("objective.name", "policy.routing_replay")


@dataclass(frozen=True)
class Panel:
    """Curves in the same axes.

    `metrics` are names in the registry. The name of a family has its `*`."""

    metrics: tuple[str, ...]
    x: str = STEP
    log: bool = False  # whether the y axis is logarithmic

    def entries(self) -> list[Metric]:
        """Return the definitions of the metrics.

        Raises KeyError if the registry lacks a metric. The name of a family's member is not in the
        registry."""
        by_name = {metric.name: metric for metric in METRICS}
        return [by_name[name] for name in self.metrics]

    def title(self) -> str:
        """Return the metrics' names with a common prefix once, and the x axis unless it is step."""
        head, slash, _ = self.metrics[0].partition("/")
        prefix = head + slash
        if not all(name.startswith(prefix) for name in self.metrics):
            prefix = ""
        names = prefix + ", ".join(name.removeprefix(prefix) for name in self.metrics)
        return names if self.x == STEP else f"{names} against {self.x}"

    def unit(self) -> str:
        """Return the unit of the first metric."""
        return self.entries()[0].unit

    def description(self) -> str:
        """Return a line for each metric: name [unit]: meaning."""
        return "\n".join(
            f"{metric.name} [{metric.unit}]: {metric.meaning}" for metric in self.entries()
        )


@dataclass(frozen=True)
class View:
    """A page: sections of panels that answer a question.

    With `only` it shows only runs with this tag. The tags of a run are its objective, its replay
    and its model."""

    name: str
    sections: tuple[tuple[str, tuple[Panel, ...]], ...]
    only: str = ""
    by: str = ""  # the setting that runs are grouped by, if the question requires a certain setting

    def panels(self) -> list[Panel]:
        """Return the panels of all sections."""
        return [panel for _, panels in self.sections for panel in panels]


def _panel(names: str, x: str = STEP, log: bool = False) -> Panel:
    """Make a panel from names in short form: "clip/: a b" stands for "clip/a" and "clip/b"."""
    prefix, _, rest = names.rpartition(": ")
    return Panel(tuple(prefix + name for name in rest.split()), x, log)


def _against(names: str) -> tuple[Panel, ...]:
    """Return panels of the same metrics against each of the three measures of cost."""
    return tuple(_panel(names, x=x) for x in ("compute/tokens", "compute/flops", "compute/seconds"))


VIEWS = (
    # Does the reward keep rising, is the gradient norm in a reasonable range, do the ratios
    # stay near 1?
    View(
        "Stability",
        (
            ("Reward", (
                _panel("reward/mean"), _panel("reward/*"), _panel("reward/*/mean"),
                _panel("verdict/*"),
                _panel("group/: zero_variance all_correct"), _panel("reward/overlong_penalty"),
                _panel("group/steps_without_signal"),
            )),
            ("Collapse monitor", (_panel("monitor/warnings"), _panel("monitor/fallen"))),
            ("Policy and gradient", (
                _panel("policy/entropy"), _panel("policy/entropy_coef"),
                _panel("optim/: grad_norm grad_norm_max", log=True),
                _panel("optim/: gradient_signal gradient_noise", log=True), _panel("optim/snr"),
                _panel("optim/snr_cosine"), _panel("optim/: skipped missing_updates"),
                _panel("optim/loss"), _panel("optim/lr"),
                _panel("advantage/: mean std abs_max"),
                _panel("advantage/power", log=True), _panel("advantage/square", log=True),
                _panel("advantage/score_norm", log=True),
            )),
            ("Ratios", (
                _panel("ratio/: sequence_min sequence_mean sequence_max"),
                _panel("ratio/sequence_log_abs", log=True),
                _panel("ratio/: token_min token_mean token_max", log=True),
                _panel("ratio/token_log_var", log=True),
                _panel("ratio/: ess_token ess_sequence ess_group"),
                _panel("ratio/: ess_token_used ess_sequence_used ess_group_used"),
                _panel("ratio/floor_sequence_abs", log=True), _panel("ratio/floor_outside"),
                _panel("ratio/floor_of_range", log=True),
            )),
            ("Divergence", (
                _panel("kl/: old_k1 old_k3"), _panel("kl/: ref_k1 ref_k3 ref"), _panel("kl/coef"),
                _panel("kl/loss"),
            )),
            ("Responses", (
                _panel("length/: mean p95 limit"), _panel("length/truncated"),
                _panel("length/repetition"),
            )),
            ("Sampling mask", (
                _panel("sampling/: kept_mean kept_max", log=True), _panel("sampling/kept_one"),
            )),
            ("Prompts and responses", (
                _panel("information/mi"), _panel("information/: matched marginal"),
                _panel("information/: mi_sequence matched_sequence marginal_sequence"),
                _panel("information/bound"), _panel("information/retrieval@*"),
                _panel("information/chance@*"),
            )),
            ("Critic", (
                _panel("value/error"), _panel("value/clipped"), _panel("value/explained_variance"),
            )),
            ("Metrics of your own", (_panel("custom/*"),)),
        ),
    ),
    # How much of the gradient does the clip remove, of which sign, in which mini-batch?
    View(
        "Clipping",
        (
            ("Tokens", (
                _panel("clip/: token_active token_outside", log=True),
                _panel("clip/: token_active_positive token_active_negative", log=True),
                _panel("clip/: token_outside_positive token_outside_negative", log=True),
                _panel("clip/token_dual"), _panel("clip/log_ratio_bounded"), _panel("clip/weight"),
                _panel("clip/weight_length_*"),
            )),
            ("Responses", (
                _panel("clip/: sequence_active sequence_outside", log=True),
                _panel("clip/: sequence_active_positive sequence_active_negative", log=True),
                _panel("clip/: sequence_outside_positive sequence_outside_negative", log=True),
            )),
            ("By mini-batch", (
                _panel("clip/token_active_minibatch_*"), _panel("clip/token_outside_minibatch_*"),
            )),
        ),
    ),
    # Do the experts stay the same across an update, and between the engine and the trainer?
    View(
        "Routing",
        (
            ("Consistency", (
                _panel("routing/: consistency consistency_after_step"),
                _panel("routing/consistency_layer_*"),
                _panel("routing/consistency_minibatch_*"), _panel("routing/changed_any_layer"),
            )),
            ("Loads of the experts", (
                _panel("routing/load_entropy"), _panel("routing/load_max"),
                _panel("routing/unused_experts"),
                _panel("routing/balance"),
            )),
            ("Engine", (
                _panel("routing/engine_agreement"), _panel("routing/engine_agreement_layer_*"),
                _panel("routing/engine_changed_any_layer"),
            )),
        ),
    ),
    # What does replaying the old experts change in GRPO, the paper's case? Grouped by
    # policy.routing_replay.
    View(
        "Routing Replay",
        (
            ("With and without", (
                _panel("reward/mean"), _panel("routing/consistency"),
                _panel("routing/engine_agreement"),
                _panel("optim/grad_norm", log=True), _panel("clip/token_active", log=True),
                _panel("mismatch/k3", log=True), _panel("eval/*/avg@*"),
            )),
        ),
        only="grpo",
        by="policy.routing_replay",
    ),
    # How far are the engine's likelihoods and the weights that sampled from those being
    # trained?
    View(
        "Mismatch",
        (
            ("Tokens", (
                _panel("mismatch/: k1 k3"), _panel("mismatch/logp_abs", log=True),
                _panel("mismatch/logp_abs_max", log=True), _panel("mismatch/beyond_2"),
                _panel("mismatch/after_sync", log=True),
                _panel("mismatch/: sync_slope sync_slope_stderr sync_residual"),
            )),
            ("Responses", (
                _panel("mismatch/sequence_log_abs", log=True),
                _panel("mismatch/: sequence_min sequence_max"),
            )),
            ("Correction", (
                _panel("mismatch/weight_token_*"), _panel("mismatch/weight_sequence_*"),
                _panel("mismatch/weight_geometric_*"), _panel("mismatch/corrected_mean"),
                _panel("mismatch/: ess_token ess_sequence ess_group"),
                _panel("mismatch/: ess_token_used ess_sequence_used ess_group_used"),
                _panel("mismatch/masked"), _panel("mismatch/sequence_masked"),
            )),
            ("Staleness", (
                _panel("staleness/: mean max"), _panel("staleness/segments"),
                _panel("staleness/in_flight"),
            )),
        ),
    ),
    # How many turns do episodes take, why do they end, and what do the environments measure?
    View(
        "Episodes",
        (
            ("Turns", (
                _panel("episode/: turns turns_max"), _panel("episode/reward_turns_*"),
                _panel("episode/finish_*"),
                _panel("episode/environment_tokens"),
            )),
            ("The environments' measures", (_panel("episode/*"),)),
        ),
    ),
    # What do held-out problems say?
    View(
        "Evaluation",
        (
            ("Scores", (
                _panel("eval/*/avg@*"), _panel("eval/*/pass@*"), _panel("eval/*/maj@*"),
                _panel("eval/*/stderr"),
                _panel("eval/elo"), _panel("eval/elo_stderr"),
            )),
            ("Responses", (
                _panel("eval/*/tokens"), _panel("eval/*/truncated"), _panel("eval/*/ungraded"),
                _panel("eval/*/prompt_too_long"),
            )),
            ("Episodes", (_panel("eval/*/episode_*"),)),
        ),
    ),
    # What does a level of reward cost in tokens, in FLOPs, in time, and where does the time
    # go?
    View(
        "Efficiency",
        (
            ("Reward", _against("reward/mean")),
            ("Held-out scores", _against("eval/*/avg@*")),
            ("Cost", (
                _panel("compute/tokens"), _panel("compute/flops"), _panel("compute/seconds"),
            )),
            ("Speed", (
                _panel("throughput/: rollout_tokens train_tokens"), _panel("optim/updates"),
            )),
            ("Time of a step", (
                _panel("time/: rollout_s environment_s score_s behaviour_s waited_s"),
                _panel("time/: train_s old_logprobs_s diagnostics_s"),
                _panel("time/: sync_s monitor_s checkpoint_s eval_s record_s"),
            )),
            ("Dropped and refilled", (
                _panel("compute/dropped_tokens"), _panel("filter/: zero_variance surplus filled"),
                _panel("filter/refill_rounds"), _panel("filter/prompt_too_long"),
                _panel("filter/ungraded"),
                _panel("filter/truncated"),
            )),
        ),
    ),
)  # fmt: skip

LEFT_OUT = {STEP: "the x axis of every panel that names no other x axis"}


def names_on_panels(views: tuple[View, ...]) -> list[str]:
    """Return the metrics of the views' panels, with the x axes."""
    return [name for view in views for panel in view.panels() for name in (*panel.metrics, panel.x)]


def unplaced() -> list[str]:
    """Return the metrics of the registry that are neither on a panel nor in LEFT_OUT.

    The list should be empty."""
    placed = {*names_on_panels(VIEWS), *LEFT_OUT}
    return [metric.name for metric in METRICS if metric.name not in placed]


def unknown(names: list[str]) -> list[str]:
    """Return the names that the registry lacks."""
    return [name for name in names if not any(fnmatchcase(name, m.name) for m in METRICS)]


def recorded(views: tuple[View, ...], names: set[str]) -> tuple[tuple[View, ...], list[str]]:
    """Return the views restricted to recorded metrics, and the names of the views' other metrics.

    `names` are the recorded metrics. Empty panels, sections and views are left out. Raises KeyError
    for a name that the registry lacks."""
    recorded_names = {lookup(name).name for name in names if name != STEP} | {STEP}
    missing = [name for name in dict.fromkeys(names_on_panels(views)) if name not in recorded_names]
    restricted_views = []
    for view in views:
        sections = []
        for title, panels in view.sections:
            recorded_panels = []
            for panel in panels:
                metrics = tuple(name for name in panel.metrics if name in recorded_names)
                if metrics and panel.x in recorded_names:
                    recorded_panels.append(replace(panel, metrics=metrics))
            if recorded_panels:
                sections.append((title, tuple(recorded_panels)))
        if sections:
            restricted_views.append(replace(view, sections=tuple(sections)))
    return tuple(restricted_views), missing

"""Arranges the registry's metrics as views: pages of panels that each answer a question.

W&B's saved views (dashboard.py) follow this arrangement. Titles, units and descriptions come from
the registry. Every metric of the registry is on a panel, or in LEFT_OUT with a reason.
"""

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


def _panel(text: str) -> Panel:
    """Return the panel that a text describes: `[log ][PREFIX: ]NAME NAME ...[ against X]`.

    "log clip/: a b against compute/tokens" has the curves clip/a and clip/b over compute/tokens,
    with a logarithmic y axis."""
    names, _, x = text.removeprefix("log ").partition(" against ")
    prefix, _, rest = names.rpartition(": ")
    return Panel(tuple(prefix + name for name in rest.split()), x or STEP, text.startswith("log "))


def _view(name: str, sections: dict[str, tuple[str, ...]], only: str = "", by: str = "") -> View:
    """Return the view of sections whose panels are texts."""
    panels = tuple((title, tuple(map(_panel, texts))) for title, texts in sections.items())
    return View(name, panels, only, by)


VIEWS = (
    # Does the reward keep rising, is the gradient norm in a reasonable range, do the ratios
    # stay near 1?
    _view(
        "Stability",
        {
            "Reward": (
                "reward/mean",
                "reward/*",
                "reward/*/mean",
                "verdict/*",
                "group/: zero_variance all_correct",
                "reward/overlong_penalty",
                "group/steps_without_signal",
            ),
            "Collapse monitor": ("monitor/warnings", "monitor/fallen"),
            "Policy and gradient": (
                "policy/entropy",
                "policy/entropy_coef",
                "log optim/: grad_norm grad_norm_max",
                "log optim/: gradient_signal gradient_noise",
                "optim/snr",
                "optim/snr_cosine",
                "optim/: skipped missing_updates",
                "optim/loss",
                "optim/lr",
                "advantage/: mean std abs_max",
                "log advantage/power",
                "log advantage/square",
                "log advantage/score_norm",
            ),
            "Ratios": (
                "ratio/: sequence_min sequence_mean sequence_max",
                "log ratio/sequence_log_abs",
                "log ratio/: token_min token_mean token_max",
                "log ratio/token_log_var",
                "ratio/: ess_token ess_sequence ess_group",
                "ratio/: ess_token_used ess_sequence_used ess_group_used",
                "log ratio/floor_sequence_abs",
                "ratio/floor_outside",
                "log ratio/floor_of_range",
            ),
            "Divergence": (
                "kl/: old_k1 old_k3",
                "kl/: ref_k1 ref_k3 ref",
                "kl/coef",
                "kl/loss",
            ),
            "Responses": (
                "length/: mean p95 limit",
                "length/truncated",
                "length/repetition",
            ),
            "Sampling mask": (
                "log sampling/: kept_mean kept_max",
                "sampling/kept_one",
            ),
            "Prompts and responses": (
                "information/mi",
                "information/: matched marginal",
                "information/: mi_sequence matched_sequence marginal_sequence",
                "information/bound",
                "information/retrieval@*",
                "information/chance@*",
            ),
            "Critic": (
                "value/error",
                "value/clipped",
                "value/explained_variance",
            ),
            "Metrics of your own": ("custom/*",),
        },
    ),
    # How much of the gradient does the clip remove, of which sign, in which mini-batch?
    _view(
        "Clipping",
        {
            "Tokens": (
                "log clip/: token_active token_outside",
                "log clip/: token_active_positive token_active_negative",
                "log clip/: token_outside_positive token_outside_negative",
                "clip/token_dual",
                "clip/log_ratio_bounded",
                "clip/weight",
                "clip/weight_length_*",
            ),
            "Responses": (
                "log clip/: sequence_active sequence_outside",
                "log clip/: sequence_active_positive sequence_active_negative",
                "log clip/: sequence_outside_positive sequence_outside_negative",
            ),
            "By mini-batch": (
                "clip/token_active_minibatch_*",
                "clip/token_outside_minibatch_*",
            ),
        },
    ),
    # Do the experts stay the same across an update, and between the engine and the trainer?
    _view(
        "Routing",
        {
            "Consistency": (
                "routing/: consistency consistency_after_step",
                "routing/consistency_layer_*",
                "routing/consistency_minibatch_*",
                "routing/changed_any_layer",
            ),
            "Loads of the experts": (
                "routing/load_entropy",
                "routing/load_max",
                "routing/unused_experts",
                "routing/balance",
            ),
            "Engine": (
                "routing/engine_agreement",
                "routing/engine_agreement_layer_*",
                "routing/engine_changed_any_layer",
            ),
        },
    ),
    # What does replaying the old experts change in GRPO, the paper's case? Grouped by
    # policy.routing_replay.
    _view(
        "Routing Replay",
        {
            "With and without": (
                "reward/mean",
                "routing/consistency",
                "routing/engine_agreement",
                "log optim/grad_norm",
                "log clip/token_active",
                "log mismatch/k3",
                "eval/*/avg@*",
            ),
        },
        only="grpo",
        by="policy.routing_replay",
    ),
    # How far are the engine's likelihoods and the weights that sampled from those being
    # trained?
    _view(
        "Mismatch",
        {
            "Tokens": (
                "mismatch/: k1 k3",
                "log mismatch/logp_abs",
                "log mismatch/logp_abs_max",
                "mismatch/beyond_2",
                "log mismatch/after_sync",
                "mismatch/: sync_slope sync_slope_stderr sync_residual",
            ),
            "Responses": (
                "log mismatch/sequence_log_abs",
                "mismatch/: sequence_min sequence_max",
            ),
            "Correction": (
                "mismatch/weight_token_*",
                "mismatch/weight_sequence_*",
                "mismatch/weight_geometric_*",
                "mismatch/corrected_mean",
                "mismatch/: ess_token ess_sequence ess_group",
                "mismatch/: ess_token_used ess_sequence_used ess_group_used",
                "mismatch/masked",
                "mismatch/sequence_masked",
            ),
            "Staleness": (
                "staleness/: mean max",
                "staleness/segments",
                "staleness/in_flight",
            ),
        },
    ),
    # How many turns do episodes take, why do they end, and what do the environments measure?
    _view(
        "Episodes",
        {
            "Turns": (
                "episode/: turns turns_max",
                "episode/reward_turns_*",
                "episode/finish_*",
                "episode/environment_tokens",
            ),
            "The environments' measures": ("episode/*",),
        },
    ),
    # What do held-out problems say?
    _view(
        "Evaluation",
        {
            "Scores": (
                "eval/*/avg@*",
                "eval/*/pass@*",
                "eval/*/maj@*",
                "eval/*/stderr",
                "eval/elo",
                "eval/elo_stderr",
            ),
            "Responses": (
                "eval/*/tokens",
                "eval/*/truncated",
                "eval/*/ungraded",
                "eval/*/prompt_too_long",
            ),
            "Episodes": ("eval/*/episode_*",),
        },
    ),
    # What does a level of reward cost in tokens, in FLOPs, in time, and where does the time
    # go?
    _view(
        "Efficiency",
        {
            "Reward": (
                "reward/mean against compute/tokens",
                "reward/mean against compute/flops",
                "reward/mean against compute/seconds",
            ),
            "Held-out scores": (
                "eval/*/avg@* against compute/tokens",
                "eval/*/avg@* against compute/flops",
                "eval/*/avg@* against compute/seconds",
            ),
            "Cost": (
                "compute/tokens",
                "compute/flops",
                "compute/seconds",
            ),
            "Speed": (
                "throughput/: rollout_tokens train_tokens",
                "optim/updates",
            ),
            "Time of a step": (
                "time/: rollout_s environment_s score_s behaviour_s waited_s",
                "time/: train_s old_logprobs_s diagnostics_s",
                "time/: sync_s monitor_s checkpoint_s eval_s record_s",
            ),
            "Dropped and refilled": (
                "compute/dropped_tokens",
                "filter/: zero_variance surplus filled",
                "filter/refill_rounds",
                "filter/prompt_too_long",
                "filter/ungraded",
                "filter/truncated",
            ),
        },
    ),
)

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

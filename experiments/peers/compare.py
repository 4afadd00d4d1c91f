"""Compares one entry with our own code: the differences, the tolerance that belongs to it, the
verdict.

Tolerances, |ours - peer's| <= atol + rtol |peer's|, in float64:

    the same formula                                     rtol 1e-10, atol 1e-12
    the peer's denominators hold 1e-8, ours do not       rtol 3e-8, atol 2e-9 (gradients 2e-10);
                                                         where terms of the loss cancel that can be
                                                         too little: then as the same formula, with
                                                         the 1e-8 put into ours
    log-ratios of about 12 nats and more                 rtol 3e-8, atol 1e-12 for the latter;
                                                         ROLL's mean log-ratio has the 1e-8 in the
                                                         exponent: rtol 1e-6
    float32 inside the peer                              the entry's rtol and atol, else 1e-4 and
                                                         1e-6 (float32 of a log-prob)
    clip counters                                        rtol 3e-8 where the peer's token count
                                                         holds 1e-8, else exact

Differences on the page are divided by max(1, |peer's value|).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from peers.clips import counters
from peers.credit import CREDIT
from peers.credit_2026 import CREDIT_2026
from peers.hugging import HUGGING_LOSSES
from peers.losses import LOSSES
from peers.off_policy import OFF_POLICY_LOSSES, OFF_POLICY_OTHERS
from peers.options import Options, Untranslated
from peers.others import OTHERS
from peers.recipe import LARGE_EXPONENT, PolicyLoss, by_sequence, described, evaluate
from peers.result import Ours
from peers.roll import ROLL_LOSSES
from peers.vectors import Entry

POLICY_LOSSES = {**LOSSES, **HUGGING_LOSSES, **ROLL_LOSSES, **OFF_POLICY_LOSSES}
OTHER_VALUES = {**OTHERS, **OFF_POLICY_OTHERS}
UNREAD = "options that were not read: "
ALL = torch.tensor(True)
OK, OUT, STATED, UNTRANSLATED = "ok", "OUT OF TOLERANCE", "stated difference", "not translated"


@dataclass(frozen=True)
class Tolerance:
    """The relative and the absolute tolerance of one value."""

    rtol: float = 1e-10
    atol: float = 1e-12
    atol_grad: float = 1e-12

    def __str__(self) -> str:
        return f"rtol {self.rtol:.0e}, atol {self.atol:.0e}" + (
            f" (gradient {self.atol_grad:.0e})" if self.atol_grad != self.atol else ""
        )


@dataclass
class Comparison:
    """One row of the page's list. A difference is None where the entry has no such value."""

    entry: Entry
    verdict: str
    ours: Ours | None = None
    tolerance: Tolerance | None = None
    loss: float | None = None
    grad: float | None = None
    outputs: float | None = None
    metrics: float | None = None
    # difference of loss and gradient with the peer's 1e-8 put into ours
    epsilon: float | None = None
    remarks: list[str] = field(default_factory=list)


def translated(entry: Entry) -> Ours:
    """Return our side of the entry. Raises Untranslated, or whatever a value that fits no
    translation causes.
    """
    options, key = Options(entry), (entry.peer, entry.function)
    if key in POLICY_LOSSES:
        ours = policy_loss(POLICY_LOSSES[key](options, entry), entry)
    elif key in CREDIT or key in OTHER_VALUES or key in CREDIT_2026:
        ours = {**CREDIT, **OTHER_VALUES, **CREDIT_2026}[key](options, entry)
    else:
        raise Untranslated(f"no translation of {entry.peer}'s {entry.function}")
    unread = options.unread()
    if unread:
        ours.notes.append(UNREAD + ", ".join(unread))
    return ours


def policy_loss(peer: PolicyLoss, entry: Entry) -> Ours:
    evaluation, row = evaluate(peer, entry), peer.row
    exact = None if peer.epsilon is None else evaluate(peer, entry, peer.epsilon)
    if evaluation.outputs.dual_BT is not None and bool(
        (evaluation.outputs.dual_BT & entry.mask_BT).any()
    ):
        row += ", dual clip"
    if peer.kl is not None:
        row += " + KL"
    said = [described(peer.objective), described(peer.aggregation)]
    said += [described(extra) for extra in (peer.kl, peer.correction) if extra is not None]
    return Ours(
        section="Policy losses",
        row=row,
        setting=" · ".join(said),
        loss=evaluation.loss,
        grad_BT=evaluation.grad_BT,
        outputs=peer.outputs(evaluation, entry) if peer.outputs else {},
        metrics=counters(peer, evaluation, entry),
        epsilon=peer.epsilon is not None,
        epsilon_loss=None if exact is None else exact.loss,
        epsilon_grad_BT=None if exact is None else exact.grad_BT,
        exponent=evaluation.exponent,
        sequence_exponent=by_sequence(peer.objective) or peer.spread,
        stated=evaluation.beyond,
        notes=list(peer.notes),
    )


def compare(entry: Entry) -> Comparison:
    """Compare one entry. It never raises for one that cannot be translated: the verdict and the
    remark then say why.
    """
    try:
        ours = translated(entry)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        reason = (
            str(error) if isinstance(error, Untranslated) else f"{type(error).__name__}: {error}"
        )
        return Comparison(entry, UNTRANSLATED, remarks=[reason.replace("\n", " ")])
    result = Comparison(entry, OK, ours, tolerance_of(entry, ours), remarks=list(ours.notes))
    pairs = pairs_of(entry, ours)
    left = sorted(set(entry.outputs) - {pair.name for pair in pairs})
    if left:
        result.remarks.append(f"outputs that our code does not produce: {', '.join(left)}")
    if entry.precision:
        result.remarks.append("float32 inside the peer")
    judge(result, pairs, within=all([check(pair, result) for pair in pairs]))
    return result


def check(pair: Pair, result: Comparison) -> bool:
    """Return whether a value is within its tolerance where the peer's is finite, and note the
    difference in the result."""
    if pair.ours.shape != pair.expected.shape:
        result.remarks.append(
            f"{pair.name} has shape {list(pair.expected.shape)}, ours {list(pair.ours.shape)}"
        )
        return False
    numeric = pair.numeric
    setattr(
        result,
        pair.kind,
        largest(getattr(result, pair.kind), relative(pair.ours, pair.expected)[numeric]),
    )
    if pair.exact is not None:
        result.epsilon = largest(result.epsilon, relative(pair.exact, pair.expected)[numeric])
    if bool((close(pair, result) | ~numeric).all()):
        return True
    if pair.exact is not None and bool((exactly(pair, result) | ~numeric).all()):
        result.remarks.append(
            f"{pair.name}: within the tolerance with the peer's 1e-8 in our denominators only"
        )
        return True
    result.remarks.append(f"{pair.name} differs")
    return False


def judge(result: Comparison, pairs: list[Pair], within: bool) -> None:
    """Set verdict and remarks. Our values must be finite. A stated reason excuses a difference but
    does not replace a check."""
    same_shape = [pair for pair in pairs if pair.ours.shape == pair.expected.shape]
    sound = all((pair.ours.isfinite() | ~pair.where).all() for pair in same_shape)
    finite = all((pair.numeric == pair.where).all() for pair in same_shape)
    unread = any(note.startswith(UNREAD) for note in result.ours.notes)
    if not pairs:
        result.verdict = UNTRANSLATED
        result.remarks.append("the entry has no value that our code produces")
    elif not sound:
        result.verdict = OUT
        result.remarks.append("ours is not finite")
    elif not finite:
        result.verdict = STATED
        result.remarks.append("the peer returns NaN or infinity; ours is finite")
    elif not within and result.ours.stated:
        result.verdict = STATED
        result.remarks.append(result.ours.stated)
    elif not within:
        result.verdict = UNTRANSLATED if unread else OUT


@dataclass
class Pair:
    """A value that both sides have."""

    name: str
    kind: str  # the field of Comparison that takes its difference
    expected: Tensor
    ours: Tensor
    where: Tensor
    slack: Tensor | float = 0.0
    exact: Tensor | None = None  # our value with the peer's 1e-8

    @property
    def numeric(self) -> Tensor:
        """The mask of the positions that are compared: those where the peer gives a finite number."""
        return self.where & self.expected.isfinite()


def pairs_of(entry: Entry, ours: Ours) -> list[Pair]:
    pairs = []
    if entry.loss is not None and ours.loss is not None:
        exact = None if ours.epsilon_loss is None else number(ours.epsilon_loss)
        pairs.append(Pair("loss", "loss", number(entry.loss), number(ours.loss), ALL, exact=exact))
    if entry.grad_BT is not None and ours.grad_BT is not None:
        where_BT = torch.ones_like(entry.grad_BT, dtype=torch.bool)
        pairs.append(
            Pair(
                "gradient",
                "grad",
                entry.grad_BT,
                ours.grad_BT,
                where_BT,
                exact=ours.epsilon_grad_BT,
            )
        )
    for name, values in ours.outputs.items():
        if name in entry.outputs:
            expected = entry.outputs[name]
            where = (
                torch.ones_like(expected, dtype=torch.bool)
                if values.where is None
                else values.where
            )
            slack = 0.0 if values.slack is None else values.slack
            pairs.append(Pair(name, "outputs", expected, values.value, where, slack))
    for name, value in ours.metrics.items():
        if name in entry.metrics:
            pairs.append(Pair(name, "metrics", number(entry.metrics[name]), number(value), ALL))
    return pairs


def tolerance_of(entry: Entry, ours: Ours) -> Tolerance:
    if entry.precision:
        named = re.search(r"rtol (\S+)", entry.precision)
        return Tolerance(float(named[1].rstrip(".,;)")) if named else 1e-4, 1e-6, 1e-6)
    large = ours.exponent >= LARGE_EXPONENT
    if ours.epsilon:
        if large:
            return Tolerance(1e-6 if entry.peer == "ROLL" and ours.sequence_exponent else 3e-8)
        return Tolerance(3e-8, 2e-9, 2e-10)
    return Tolerance()


def close(pair: Pair, result: Comparison) -> Tensor:
    """Return whether ours is within the tolerance, elementwise; NaN is not."""
    tolerance = (
        counter_tolerance(result.entry, result.ours) if pair.kind == "metrics" else result.tolerance
    )
    atol = tolerance.atol_grad if pair.kind == "grad" else tolerance.atol
    return (
        pair.ours - pair.expected
    ).abs() <= atol + pair.slack + tolerance.rtol * pair.expected.abs()


def exactly(pair: Pair, result: Comparison) -> Tensor:
    """Return the same with the peer's 1e-8 put into ours, by the tolerance of the same formula."""
    same = tolerance_of(result.entry, replace(result.ours, epsilon=False))
    return (pair.exact - pair.expected).abs() <= same.atol + same.rtol * pair.expected.abs()


def counter_tolerance(entry: Entry, ours: Ours) -> Tolerance:
    if entry.peer == "RAGEN":  # shares are means in float32 there
        return Tolerance(1e-10, 1e-6)
    if entry.peer == "ms-swift" and entry.mask_BT.shape[1] == 1:  # float32 there
        return Tolerance(1e-6)
    return Tolerance(3e-8 if ours.epsilon or entry.peer in ("verl", "ROLL", "CTPO") else 1e-12)


def relative(ours: Tensor, expected: Tensor) -> Tensor:
    return (ours - expected).abs() / expected.abs().clamp(min=1)


def largest(so_far: float | None, differences: Tensor) -> float:
    new = float(differences.max()) if differences.numel() else math.nan
    if so_far is None or math.isnan(so_far):
        return new
    return so_far if math.isnan(new) else max(so_far, new)


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)

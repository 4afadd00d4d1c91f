"""What must hold of every objective, whoever wrote it: `gspo check-objective` tells it in
words.

Each check calls the objective on random responses of unequal length, in float64, at several spreads
of the log-ratios, and returns a Finding. Shape suffixes: B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Aggregation, Totals
from gspo.algorithm.objectives import LossInputs, LossOutputs, Objective

# standard deviations of the log-ratios, in nats: within GSPO's clip range to beyond GRPO's
SPREADS = (1e-3, 0.05, 0.5)
BATCH, WIDTH = 10, 8  # responses, and the most tokens of one
STEP = 1e-6  # nats, of the difference quotients
MEAN = Aggregation("seq-mean-token-mean")
FIELDS = ("logp_BT", "old_logp_BT", "adv_BT", "engine_logp_BT", "ref_logp_BT")


@dataclass(frozen=True)
class Finding:
    """Tells whether an invariance holds, in words that name what was seen."""

    name: str
    holds: bool
    text: str


def check_objective(objective: Objective) -> list[Finding]:
    """Return what each check finds; after a failure of the first, which is about shapes, the others
    are left out.
    """
    first = outputs_fit(objective)
    return [first, *(check(objective) for check in CHECKS)] if first.holds else [first]


# ---------------------------------------------------------------------------------------------------------
# inputs
def random_inputs(seed: int, spread: float) -> LossInputs:
    """Make log-probs, advantages and a mask of random responses; one has no advantage and one has a
    hole in its mask, as responses of several turns have."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old_BT = -1 - 3 * torch.rand(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    lengths_B = torch.randint(1, WIDTH + 1, (BATCH, 1), generator=generator)
    mask_BT = torch.arange(WIDTH) < lengths_B
    mask_BT[0] = torch.tensor([True, False, False] + [True] * (WIDTH - 3))
    adv_BT = normal(BATCH, 1).expand(BATCH, WIDTH).clone()
    adv_BT[1] = 0
    return LossInputs(
        logp_BT=(old_BT + spread * normal(BATCH, WIDTH)).clamp(max=-0.01).requires_grad_(),
        old_logp_BT=old_BT,
        adv_BT=adv_BT,
        mask_BT=mask_BT,
        engine_logp_BT=old_BT + 0.1 * spread * normal(BATCH, WIDTH),
        ref_logp_BT=old_BT + normal(BATCH, WIDTH),
    )


def all_inputs() -> Iterator[LossInputs]:
    """Yield the inputs that a check tries, one for each spread of the log-ratios."""
    for seed, spread in enumerate(SPREADS):
        yield random_inputs(seed, spread)


def changed(inputs: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    """Return inputs with every number, and the mask, changed by a function; the log-probs have
    gradients of their own."""
    new = {name: change(getattr(inputs, name).detach()) for name in (*FIELDS, "mask_BT")}
    new["logp_BT"] = new["logp_BT"].clone().requires_grad_()
    return replace(inputs, **new)


def with_padding(inputs: LossInputs, value: float) -> LossInputs:
    """Return inputs that hold a value wherever the mask is False."""
    mask_BT = inputs.mask_BT
    padded = changed(
        inputs, lambda x: x if x.dtype == torch.bool else torch.where(mask_BT, x, value)
    )
    return replace(padded, mask_BT=mask_BT)


def gradient(
    objective: Objective, inputs: LossInputs, totals: Totals | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient with respect to the log-probs [B, T]."""
    totals = totals or Totals.of(inputs.mask_BT)
    loss = MEAN(objective(inputs).loss_BT, inputs.mask_BT, totals)
    if not loss.requires_grad:
        return loss, torch.zeros_like(inputs.logp_BT)
    (found_BT,) = torch.autograd.grad(loss, inputs.logp_BT, allow_unused=True)
    return loss.detach(), torch.zeros_like(inputs.logp_BT) if found_BT is None else found_BT


def apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the size of the second; infinite
    for NaN.
    """
    difference = float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))
    return difference if difference == difference else float("inf")


# ---------------------------------------------------------------------------------------------------------
# checks
def outputs_fit(objective: Objective) -> Finding:
    """Outputs have the shapes and types that LossOutputs says."""
    name = "outputs"
    for inputs in all_inputs():
        outputs = objective(inputs)
        if not isinstance(outputs, LossOutputs):
            return Finding(
                name, False, f"calling it gave {type(outputs).__name__}, not LossOutputs"
            )
        for field in ("loss_BT", "weight_BT", "active_BT", "outside_BT", "bounded_BT"):
            value, is_mask = getattr(outputs, field), field not in ("loss_BT", "weight_BT")
            try:
                fits = value.broadcast_to(inputs.mask_BT.shape) is not None
            except (AttributeError, RuntimeError):
                fits = False
            if not fits or (value.dtype == torch.bool) != is_mask:
                kind = "a mask (bool)" if is_mask else "numbers"
                return Finding(name, False, f"{field} must be {kind} of shape [B, T] or [B, 1]")
        if tuple(outputs.loss_BT.shape) != tuple(inputs.mask_BT.shape):
            return Finding(
                name, False, f"loss_BT has the shape {tuple(outputs.loss_BT.shape)}, not [B, T]"
            )
        if outputs.weight_BT.requires_grad:
            return Finding(
                name, False, "weight_BT has a gradient: it is a measurement, call detach()"
            )
    return Finding(name, True, "a loss for every token, and clip masks that fit it")


def masked_tokens_do_nothing(objective: Objective) -> Finding:
    """What stands where the mask is False changes neither loss nor gradient."""
    name = "masking"
    for inputs in all_inputs():
        loss, gradient_BT = gradient(objective, inputs)
        other, other_BT = gradient(objective, with_padding(inputs, -7.0))
        if bool(gradient_BT[~inputs.mask_BT].any()):
            return Finding(name, False, "tokens outside the mask have a gradient")
        if apart(loss, other) > 1e-12 or apart(other_BT, gradient_BT) > 1e-12:
            text = f"other values outside the mask change the loss from {loss:.6g} to {other:.6g}"
            return Finding(
                name, False, f"{text}; use torch.where with inputs.mask_BT, or masked_mean"
            )
    return Finding(name, True, "what stands outside the mask changes neither loss nor gradient")


def nan_in_padding_stays_there(objective: Objective) -> Finding:
    """NaN and infinity where the mask is False reach neither loss nor gradient."""
    name = "NaN in padding"
    for inputs in all_inputs():
        expected, expected_BT = gradient(objective, inputs)
        for value in (float("nan"), float("inf"), float("-inf")):
            loss, found_BT = gradient(objective, with_padding(inputs, value))
            if apart(loss, expected) > 1e-12 or apart(found_BT, expected_BT) > 1e-12:
                where = "the loss" if apart(loss, expected) > 1e-12 else "the gradient"
                return Finding(
                    name,
                    False,
                    f"{value} outside the mask reaches {where}: select with torch.where before",
                )
    return Finding(name, True, "NaN and infinity outside the mask reach neither loss nor gradient")


def cut_of_the_batch_does_not_matter(objective: Objective) -> Finding:
    """Micro-batches of any size, wider padding and another order of the responses give the same
    loss and gradient.
    """
    name = "cut of the batch"
    for inputs in all_inputs():
        totals = Totals.of(inputs.mask_BT)
        loss, gradient_BT = gradient(objective, inputs)
        parts = [
            gradient(objective, changed(inputs, lambda x, rows=rows: x[rows]), totals)
            for rows in torch.arange(BATCH).split(3)
        ]
        cut = torch.stack([part for part, _ in parts]).sum()
        cut_BT = torch.cat([part_BT for _, part_BT in parts])
        if apart(cut, loss) > 1e-10 or apart(cut_BT, gradient_BT) > 1e-10:
            return Finding(
                name,
                False,
                "micro-batches give another loss or gradient: a response reads its neighbours",
            )
        order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(0))
        _, other_BT = gradient(objective, changed(inputs, lambda x, order=order: x[order]))
        if apart(other_BT, gradient_BT[order]) > 1e-10:
            return Finding(name, False, "another order of the responses gives another gradient")
        wide = changed(inputs, lambda x: torch.cat([x, torch.zeros_like(x[:, :2])], dim=1))
        if apart(gradient(objective, wide)[1][:, :WIDTH], gradient_BT) > 1e-10:
            return Finding(
                name, False, "wider padding gives another gradient: count tokens by inputs.mask_BT"
            )
    return Finding(
        name, True, "micro-batches, order of responses and width of the padding change nothing"
    )


def no_advantage_no_gradient(objective: Objective) -> Finding:
    """Responses without advantage have no gradient, unless the class says needs_every_row."""
    name = "no advantage, no gradient"
    for inputs in all_inputs():
        _, gradient_BT = gradient(objective, inputs)
        if bool(gradient_BT[1].any()):
            if objective.needs_every_row:
                return Finding(
                    name, True, "it has a gradient without advantage, and says needs_every_row"
                )
            text = "a response whose advantages are 0 has a gradient, and the trainer leaves such responses out"
            return Finding(name, False, f"{text}; set the class attribute needs_every_row = True")
    return Finding(name, True, "a response whose advantages are 0 has no gradient")


def on_policy_it_is_reinforce(objective: Objective) -> Finding:
    """Check that where all ratios are 1 the gradient is that of -A log pi, times a positive factor."""
    name = "gradient on policy"
    inputs = random_inputs(0, 0.0)
    inputs = changed(replace(inputs, engine_logp_BT=inputs.old_logp_BT), lambda x: x)
    _, gradient_BT = gradient(objective, inputs)
    count_B1 = inputs.mask_BT.sum(-1, keepdim=True)
    expected_BT = torch.where(inputs.mask_BT, -inputs.adv_BT / count_B1 / BATCH, 0.0)
    counted_BT = inputs.mask_BT & (inputs.adv_BT != 0)
    factor = (gradient_BT / expected_BT)[counted_BT]
    low, high = float(factor.min()), float(factor.max())
    if apart(gradient_BT, expected_BT) < 1e-10:
        return Finding(name, True, "where all ratios are 1 it is that of REINFORCE, -A grad log pi")
    if low > 0 and bool(torch.isfinite(factor).all()):
        text = f"where all ratios are 1 it is that of REINFORCE times {low:.4g}"
        return Finding(
            name,
            True,
            text + (f" to {high:.4g}, by response or token" if high > low * (1 + 1e-9) else ""),
        )
    text = f"where all ratios are 1, tokens have {low:.4g} to {high:.4g} times the gradient of REINFORCE"
    return Finding(name, False, f"{text}: it does not follow the advantage")


def gradient_is_that_of_the_loss(objective: Objective) -> Finding:
    """Difference quotients of the loss equal its gradient, with what the formula detaches held
    fixed.
    """
    name, worst = "finite differences", 0.0
    for inputs in all_inputs():
        _, gradient_BT = gradient(objective, inputs)
        with held_detached(objective, inputs) as loss_at:
            quotient_BT, smooth_BT = torch.zeros_like(gradient_BT), torch.ones_like(inputs.mask_BT)
            for b, t in inputs.mask_BT.nonzero().tolist():
                step_BT = torch.zeros_like(gradient_BT)
                step_BT[b, t] = STEP
                (up, up_active), (down, down_active) = loss_at(step_BT), loss_at(-step_BT)
                quotient_BT[b, t] = (up - down) / (2 * STEP)
                # else a clip begins between the two
                smooth_BT[b, t] = torch.equal(up_active, down_active)
        worst = max(worst, apart(quotient_BT[smooth_BT], gradient_BT[smooth_BT]))
    text = f"the gradient is that of the loss, to {worst:.0e}, with what the formula detaches held fixed"
    if worst > 1e-5:
        text = f"the gradient is not that of the loss: difference quotients are off by {worst:.2g} of its size"
    return Finding(name, worst <= 1e-5, text)


@contextmanager
def held_detached(
    objective: Objective, inputs: LossInputs
) -> Generator[Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Within this context, a function gives loss and clip mask at shifted log-probs, and `detach`
    in the objective gives what it gave at the unshifted ones: a stop-gradient then is a constant,
    as in the papers."""
    held: list[Tensor] = []
    plain = torch.Tensor.detach

    def record(tensor: Tensor) -> Tensor:
        held.append(plain(tensor))
        return held[-1]

    with mock.patch.object(torch.Tensor, "detach", record), torch.no_grad():
        objective(inputs)

    def loss_at(shift_BT: Tensor) -> tuple[Tensor, Tensor]:
        again = iter(held)
        moved = replace(inputs, logp_BT=plain(inputs.logp_BT) + shift_BT)
        with mock.patch.object(torch.Tensor, "detach", lambda tensor: next(again)), torch.no_grad():
            outputs = objective(moved)
        return MEAN(outputs.loss_BT, inputs.mask_BT, Totals.of(inputs.mask_BT)), outputs.active_BT

    yield loss_at


def clipped_tokens_have_no_gradient(objective: Objective) -> Finding:
    """The clip mask `active` and the factor `weight`, which metrics show, tell what the gradient
    does.
    """
    name = "clip metrics"
    for inputs in all_inputs():
        _, gradient_BT = gradient(objective, inputs)
        outputs, mask_BT = objective(inputs), inputs.mask_BT
        active_BT = (outputs.active_BT & mask_BT).broadcast_to(mask_BT.shape)
        if bool(gradient_BT[active_BT].any()):
            return Finding(name, False, "tokens that active_BT calls clipped have a gradient")
        told_BT = -outputs.weight_BT * inputs.adv_BT / mask_BT.sum(-1, keepdim=True) / BATCH
        difference = apart(torch.where(mask_BT, told_BT, 0.0), gradient_BT)
        if difference > 1e-9 and not objective.needs_every_row:
            return Finding(
                name,
                False,
                f"weight_BT is not the factor of A grad log pi: off by {difference:.2g}",
            )
    return Finding(name, True, "active_BT and weight_BT tell what the gradient does")


CHECKS = (
    masked_tokens_do_nothing,
    nan_in_padding_stays_there,
    cut_of_the_batch_does_not_matter,
    no_advantage_no_gradient,
    on_policy_it_is_reinforce,
    gradient_is_that_of_the_loss,
    clipped_tokens_have_no_gradient,
)

"""Invariances that every objective must satisfy, ours or a user's (`gspo check-objective`).

Each check calls the objective on random responses of unequal length, in float64. It uses several
spreads of the log-ratios and returns a CheckResult.

Shape suffixes: B responses, T response tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gspo.algorithm.aggregation import Totals
from gspo.algorithm.invariance_inputs import (
    AGGREGATION,
    BATCH_SIZE,
    FIELDS,
    MAX_RESPONSE_TOKENS,
    all_inputs,
    changed,
    gradient,
    on_policy_inputs,
    relative_error,
    with_padding,
)
from gspo.algorithm.objectives import LossInputs, LossOutputs, Objective
from gspo.algorithm.objectives.base import log_ratio
from gspo.data.masked import masked_mean

STEP = 1e-6  # nats, of the finite differences


@dataclass(frozen=True)
class CheckResult:
    """The result of a check: its name, whether the invariance holds, and a sentence for users."""

    name: str
    holds: bool
    text: str


def check_objective(objective: Objective) -> list[CheckResult]:
    """Return the results of all checks.

    If the shapes are wrong, or if two calls differ, only the results up to this one are returned.
    """
    shapes = outputs_fit(objective)
    if not shapes.holds:
        return [shapes]
    repeated = calls_repeat(objective)
    if not repeated.holds:
        return [shapes, repeated]
    return [shapes, repeated, *(check(objective) for check in CHECKS)]


# --------------------------------------------------------------------------------------------------
# checks
def outputs_fit(objective: Objective) -> CheckResult:
    """Check that the outputs have the shapes and dtypes of LossOutputs."""
    name = "outputs"
    for inputs in all_inputs(objective):
        outputs = objective(inputs)
        if not isinstance(outputs, LossOutputs):
            return CheckResult(
                name, False, f"calling it gave {type(outputs).__name__}, not LossOutputs"
            )
        for field in ("loss_BT", "weight_BT", "is_clipped_BT", "outside_BT", "bounded_BT"):
            value = getattr(outputs, field)
            is_mask = field not in ("loss_BT", "weight_BT")
            try:
                fits = value.broadcast_to(inputs.mask_BT.shape) is not None
            except (AttributeError, RuntimeError):
                fits = False
            if not fits or (value.dtype == torch.bool) != is_mask:
                kind = "a mask (bool)" if is_mask else "numbers"
                return CheckResult(name, False, f"{field} must be {kind} of shape [B, T] or [B, 1]")
        if outputs.loss_BT.dtype != inputs.logp_BT.dtype:
            return CheckResult(
                name,
                False,
                f"loss_BT is {outputs.loss_BT.dtype} for log-probs in {inputs.logp_BT.dtype}: "
                "compute in the precision of the inputs",
            )
        if tuple(outputs.loss_BT.shape) != tuple(inputs.mask_BT.shape):
            return CheckResult(
                name, False, f"loss_BT has the shape {tuple(outputs.loss_BT.shape)}, not [B, T]"
            )
        if outputs.weight_BT.requires_grad:
            return CheckResult(
                name, False, "weight_BT has a gradient: it is a measurement, call detach()"
            )
    return CheckResult(name, True, "a loss for every token, and clip masks that fit it")


def calls_repeat(objective: Objective) -> CheckResult:
    """Check that two calls give the same loss, and that a call leaves its inputs as they are."""
    name = "repeated calls"
    for inputs in all_inputs(objective):
        before = changed(inputs, torch.clone)
        first_loss, first_BT = gradient(objective, inputs)
        for field in (*FIELDS, "mask_BT"):
            if not torch.equal(getattr(inputs, field), getattr(before, field)):
                return CheckResult(name, False, f"a call changes its input {field}: copy it first")
        second_loss, second_BT = gradient(objective, inputs)
        if not torch.equal(first_loss, second_loss) or not torch.equal(first_BT, second_BT):
            return CheckResult(
                name,
                False,
                "two calls with the same inputs differ: draw no random numbers, and keep no state",
            )
    return CheckResult(name, True, "two calls give the same loss, and leave the inputs unchanged")


def masked_tokens_do_nothing(objective: Objective) -> CheckResult:
    """Check that values outside the mask change neither loss nor gradient."""
    name = "masking"
    for inputs in all_inputs(objective):
        loss, gradient_BT = gradient(objective, inputs)
        padded_loss, padded_BT = gradient(objective, with_padding(inputs, -7.0))
        if bool(gradient_BT[~inputs.mask_BT].any()):
            return CheckResult(name, False, "tokens outside the mask have a gradient")
        loss_error = relative_error(loss, padded_loss)
        if loss_error > 1e-12 or relative_error(padded_BT, gradient_BT) > 1e-12:
            text = (
                "other values outside the mask change the loss "
                f"from {loss:.6g} to {padded_loss:.6g}"
            )
            return CheckResult(
                name, False, f"{text}; use torch.where with inputs.mask_BT, or masked_mean"
            )
    return CheckResult(name, True, "values outside the mask change neither loss nor gradient")


def nan_in_padding_stays_there(objective: Objective) -> CheckResult:
    """Check that NaN and infinity outside the mask reach neither loss nor gradient."""
    name = "NaN in padding"
    for inputs in all_inputs(objective):
        expected, expected_BT = gradient(objective, inputs)
        for value in (float("nan"), float("inf"), float("-inf")):
            loss, gradient_BT = gradient(objective, with_padding(inputs, value))
            reached = ""
            if relative_error(loss, expected) > 1e-12:
                reached = "the loss"
            elif relative_error(gradient_BT, expected_BT) > 1e-12:
                reached = "the gradient"
            if reached:
                return CheckResult(
                    name,
                    False,
                    f"{value} outside the mask reaches {reached}: select with torch.where before",
                )
    return CheckResult(
        name, True, "NaN and infinity outside the mask reach neither loss nor gradient"
    )


def cut_of_the_batch_does_not_matter(objective: Objective) -> CheckResult:
    """Check that micro-batches, order of the responses and width of the padding change nothing."""
    name = "cut of the batch"
    for inputs in all_inputs(objective):
        totals = Totals.of(inputs.mask_BT)
        loss, gradient_BT = gradient(objective, inputs)
        parts = [
            gradient(objective, changed(inputs, lambda x, rows=rows: x[rows]), totals)
            for rows in torch.arange(BATCH_SIZE).split(3)
        ]
        parts_loss = torch.stack([part_loss for part_loss, _ in parts]).sum()
        parts_BT = torch.cat([part_BT for _, part_BT in parts])
        loss_error = relative_error(parts_loss, loss)
        if loss_error > 1e-10 or relative_error(parts_BT, gradient_BT) > 1e-10:
            return CheckResult(
                name,
                False,
                "micro-batches give another loss or gradient: a response reads its neighbours",
            )
        order = torch.randperm(BATCH_SIZE, generator=torch.Generator().manual_seed(0))
        _, permuted_BT = gradient(objective, changed(inputs, lambda x, order=order: x[order]))
        if relative_error(permuted_BT, gradient_BT[order]) > 1e-10:
            return CheckResult(name, False, "another order of the responses gives another gradient")
        wide = changed(inputs, lambda x: torch.cat([x, torch.zeros_like(x[:, :2])], dim=1))
        _, wide_BT = gradient(objective, wide)
        if relative_error(wide_BT[:, :MAX_RESPONSE_TOKENS], gradient_BT) > 1e-10:
            return CheckResult(
                name, False, "wider padding gives another gradient: count tokens by inputs.mask_BT"
            )
    return CheckResult(
        name, True, "micro-batches, order of responses and width of the padding change nothing"
    )


def no_advantage_no_gradient(objective: Objective) -> CheckResult:
    """Check that advantages of 0 give no gradient, unless the class says needs_every_row."""
    name = "no advantage, no gradient"
    for inputs in all_inputs(objective):
        _, gradient_BT = gradient(objective, inputs)
        if bool(gradient_BT[1].any()):
            if objective.needs_every_row:
                return CheckResult(
                    name, True, "it has a gradient without advantage, and says needs_every_row"
                )
            return CheckResult(
                name,
                False,
                "a response whose advantages are 0 has a gradient, "
                "and the trainer leaves such responses out; "
                "set the class attribute needs_every_row = True",
            )
    return CheckResult(name, True, "a response whose advantages are 0 has no gradient")


def on_policy_it_is_reinforce(objective: Objective) -> CheckResult:
    """Check that at ratios of 1 the gradient is REINFORCE's, times a positive factor.

    The advantages differ from token to token, if the objective permits it."""
    name = "gradient on policy"
    inputs = on_policy_inputs()
    has_joint_ratio = objective.sequence_level or objective.joint_ratio
    if not has_joint_ratio or objective.token_advantages:
        generator = torch.Generator().manual_seed(1)
        adv_BT = torch.randn(inputs.adv_BT.shape, generator=generator, dtype=torch.float64)
        inputs = replace(inputs, adv_BT=adv_BT)
    inputs = replace(inputs, statistic=objective.statistic(inputs))
    _, gradient_BT = gradient(objective, inputs)
    count_B1 = inputs.mask_BT.sum(-1, keepdim=True)
    expected_BT = torch.where(inputs.mask_BT, -inputs.adv_BT / count_B1 / BATCH_SIZE, 0.0)
    has_gradient_BT = inputs.mask_BT & (inputs.adv_BT != 0)
    factor = (gradient_BT / expected_BT)[has_gradient_BT]
    low = float(factor.min())
    high = float(factor.max())
    if relative_error(gradient_BT, expected_BT) < 1e-10:
        return CheckResult(
            name, True, "if all ratios are 1, the gradient is REINFORCE's, -A grad log pi"
        )
    if low > 0 and bool(torch.isfinite(factor).all()):
        text = f"if all ratios are 1, the gradient is REINFORCE's times {low:.4g}"
        if high > low * (1 + 1e-9):
            text += f" to {high:.4g}, by response or token"
        return CheckResult(name, True, text)
    return CheckResult(
        name,
        False,
        f"if all ratios are 1, tokens have {low:.4g} to {high:.4g} times REINFORCE's gradient: "
        "it does not follow the token's advantage. A loss that needs one advantage for all tokens of "
        "a response says so by the class attribute sequence_level = True",
    )


def ratio_is_to_the_declared_policy(objective: Objective) -> CheckResult:
    """Check that the loss depends on the log-probs that `ratio_to` names.

    They are shifted by several sizes, because a hard mask changes at few ratios."""
    name = "ratio_to"
    read = set()
    for inputs in all_inputs(objective):
        loss, gradient_BT = gradient(objective, inputs)
        for policy, field in (("old", "old_logp_BT"), ("engine", "engine_logp_BT")):
            for shift in (-0.01, 0.01, -0.3, 0.3, -3.0, 3.0):
                shifted_BT = getattr(inputs, field) + shift
                moved = changed(replace(inputs, **{field: shifted_BT}), torch.clone)
                moved = replace(moved, statistic=objective.statistic(moved))
                moved_loss, moved_BT = gradient(objective, moved)
                if not torch.equal(moved_loss, loss) or not torch.equal(moved_BT, gradient_BT):
                    read.add(policy)
    declared = objective.ratio_to
    if declared == "none" and read:
        policy = min(read)
        return CheckResult(
            name, False, f"the loss depends on {policy}_logp_BT: set ratio_to = {policy!r}"
        )
    if declared != "none" and declared not in read:
        policy = min(read, default="none")
        return CheckResult(
            name,
            False,
            f"the loss does not depend on {declared}_logp_BT: set the class attribute "
            f"ratio_to = {policy!r}",
        )
    others = " and ".join(f"{policy}_logp_BT" for policy in sorted(read))
    return CheckResult(name, True, f"ratio_to={declared!r}: the loss reads {others or 'neither'}")


def extreme_ratios_are_finite(objective: Objective) -> CheckResult:
    """Check that ratios of exp(1000) and exp(-1000) give a finite loss and gradient."""
    name = "extreme ratios"
    for inputs in all_inputs(objective):
        for shift in (1000.0, -1000.0):
            # of half of the tokens: log pi falls, or the log-probs that it is compared with
            moved_BT = torch.zeros_like(inputs.adv_BT)
            moved_BT[:, ::2] = -1000.0
            fields = ("logp_BT",) if shift < 0 else ("old_logp_BT", "engine_logp_BT")
            moved = {field: getattr(inputs, field).detach() + moved_BT for field in fields}
            extreme = changed(replace(inputs, **moved), torch.clone)
            extreme = replace(extreme, statistic=objective.statistic(extreme))
            loss, gradient_BT = gradient(objective, extreme)
            if not torch.isfinite(loss) or not bool(torch.isfinite(gradient_BT).all()):
                return CheckResult(
                    name,
                    False,
                    f"log-ratios of {shift:g} nats give an infinite or undefined loss or gradient: "
                    "bound them before exp, as RatioObjective.bounded_exp does",
                )
    return CheckResult(name, True, "log-ratios of +-1000 nats give a finite loss and gradient")


class RecordDetach(TorchFunctionMode):
    """A mode that records the result of every `detach` inside it."""

    def __init__(self):
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach:
            self.results.append(result)
        return result


class ReplayDetach(TorchFunctionMode):
    """A mode in which `detach` returns recorded results instead, in their order."""

    def __init__(self, results: list[Tensor]):
        super().__init__()
        self.results = iter(results)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.detach:
            return next(self.results)
        return func(*args, **(kwargs or {}))


def loss_at(
    objective: Objective, inputs: LossInputs, shift_BT: Tensor, detached: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the loss and the clip mask at shifted log-probs.

    `detach` returns the tensors `detached`, in their order."""
    shifted = replace(inputs, logp_BT=inputs.logp_BT.detach() + shift_BT)
    with torch.no_grad(), ReplayDetach(detached):
        outputs = objective(shifted)
    loss = AGGREGATION(outputs.loss_BT, inputs.mask_BT, Totals.of(inputs.mask_BT))
    return loss, outputs.is_clipped_BT


def gradient_fits_the_loss(objective: Objective) -> CheckResult:
    """Check that finite differences of the loss equal its gradient.

    A stop-gradient is a constant in the papers' formulas. So at shifted log-probs, `detach` returns
    the values that it returned without the shift.
    """
    largest_error = 0.0
    for inputs in all_inputs(objective):
        _, gradient_BT = gradient(objective, inputs)
        with torch.no_grad(), RecordDetach() as recorded:
            objective(inputs)
        quotient_BT = torch.zeros_like(gradient_BT)
        smooth_BT = torch.ones_like(inputs.mask_BT)
        for b, t in inputs.mask_BT.nonzero().tolist():
            step_BT = torch.zeros_like(gradient_BT)
            step_BT[b, t] = STEP
            loss_up, clipped_up_BT = loss_at(objective, inputs, step_BT, recorded.results)
            loss_down, clipped_down_BT = loss_at(objective, inputs, -step_BT, recorded.results)
            quotient_BT[b, t] = (loss_up - loss_down) / (2 * STEP)
            # False: a clip begins between the two
            smooth_BT[b, t] = torch.equal(clipped_up_BT, clipped_down_BT)
        error = relative_error(quotient_BT[smooth_BT], gradient_BT[smooth_BT])
        largest_error = max(largest_error, error)
    if largest_error > 1e-5:
        text = (
            "the gradient does not fit the loss: finite differences of the loss are off by "
            f"{largest_error:.2g}, relative to the largest gradient. Only results of `detach` "
            "are held constant, so write a stop-gradient as x.detach(), not as x.data or with "
            "torch.no_grad()"
        )
    else:
        text = (
            f"finite differences of the loss equal its gradient, to {largest_error:.0e}, "
            "with all detached tensors held constant"
        )
    return CheckResult("finite differences", largest_error <= 1e-5, text)


def clipped_tokens_have_no_gradient(objective: Objective) -> CheckResult:
    """Check that `is_clipped_BT` and `weight_BT`, which metrics show, describe the gradient.

    On which side of 1 a loss should clip is its author's choice, so the result only says it."""
    name = "clip metrics"
    sides: set[str] = set()
    for inputs in all_inputs(objective):
        _, gradient_BT = gradient(objective, inputs, penalty=False)
        outputs = objective(inputs)
        has_penalty = outputs.penalty_BT is not None
        mask_BT = inputs.mask_BT
        is_clipped_BT = (outputs.is_clipped_BT & mask_BT).broadcast_to(mask_BT.shape)
        if bool(gradient_BT[is_clipped_BT].any()):
            return CheckResult(
                name, False, "tokens that is_clipped_BT calls clipped have a gradient"
            )
        sides |= clip_sides(objective, inputs, is_clipped_BT)
        is_counted_BT = outputs.is_clipped_BT | outputs.bounded_BT
        is_missing_BT = mask_BT & (inputs.adv_BT != 0) & (gradient_BT == 0) & ~is_counted_BT
        if bool(is_missing_BT.any()):
            return CheckResult(
                name,
                False,
                f"{int(is_missing_BT.sum())} of {int(mask_BT.sum())} tokens have no gradient, and "
                "is_clipped_BT does not say so",
            )
        count_B1 = mask_BT.sum(-1, keepdim=True)
        expected_BT = -outputs.weight_BT * inputs.adv_BT / count_B1 / BATCH_SIZE
        error = relative_error(torch.where(mask_BT, expected_BT, 0.0), gradient_BT)
        # Without penalty_BT, an objective with needs_every_row does not say which part of its
        # gradient belongs to A, so weight_BT cannot be checked.
        if error > 1e-9 and (has_penalty or not objective.needs_every_row):
            return CheckResult(
                name,
                False,
                f"weight_BT is not the factor of A grad log pi: off by {error:.2g}",
            )
    inputs = on_policy_inputs()
    outputs = objective(replace(inputs, statistic=objective.statistic(inputs)))
    for field in ("is_clipped_BT", "outside_BT"):
        if bool((getattr(outputs, field) & inputs.mask_BT).any()):
            return CheckResult(name, False, f"if all ratios are 1, {field} is True somewhere")
    text = "is_clipped_BT and weight_BT describe the gradient"
    return CheckResult(name, True, f"{text}; it clips {' and '.join(sorted(sides)) or 'nothing'}")


def clip_sides(objective: Objective, inputs: LossInputs, is_clipped_BT: Tensor) -> set[str]:
    """Return for which signs of the advantage A ratios above 1, and below 1, are clipped."""
    denominator_BT = inputs.old_logp_BT
    if objective.ratio_to == "engine" and inputs.engine_logp_BT is not None:
        denominator_BT = inputs.engine_logp_BT
    log_BT = log_ratio(inputs.logp_BT.detach(), denominator_BT, inputs.mask_BT)
    if objective.sequence_level:
        log_BT = masked_mean(log_BT, inputs.mask_BT).unsqueeze(-1).expand_as(log_BT)
    sides = set()
    for sign, has_sign_BT in (("A > 0", inputs.adv_BT > 0), ("A < 0", inputs.adv_BT < 0)):
        for side, is_there_BT in (("above 1", log_BT > 0), ("below 1", log_BT < 0)):
            if bool((is_clipped_BT & has_sign_BT & is_there_BT).any()):
                sides.add(f"{sign} at ratios {side}")
    return sides


CHECKS = (
    masked_tokens_do_nothing,
    nan_in_padding_stays_there,
    cut_of_the_batch_does_not_matter,
    no_advantage_no_gradient,
    on_policy_it_is_reinforce,
    ratio_is_to_the_declared_policy,
    extreme_ratios_are_finite,
    gradient_fits_the_loss,
    clipped_tokens_have_no_gradient,
)

"""Measures every so many steps how much signal a batch has, before its updates.

    tracking.information_every   how much the responses tell of their prompts (RAGEN-2's proxy of
                                 the mutual information, gspo.algorithm.mutual_information)
    tracking.snr_every           signal and noise of the gradient, by the two halves of the batch

Both are off by default, because they cost passes. They change no other number of a run: no weight,
no gradient, and no random number that the run draws.

Shape suffixes: B responses, T response tokens, R scored responses, P prompts, N selected rows.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo.algorithm.aggregation import Totals
from gspo.algorithm.mutual_information import prompt_information
from gspo.data.batch import TrainBatch
from gspo.data.pack import pack
from gspo.data.samples import Response, ScoredResponse
from gspo.data.seeding import permutation
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.model.sharding.dtensors import device_mesh, full_tensor
from gspo.train.accumulator import MetricAccumulator
from gspo.train.loss_terms import PolicyTerm, TermInputs
from gspo.train.measured_pass import reduce_minibatch
from gspo.train.old_policy import OldPolicyPass


@dataclass
class SignalProbe:
    """The steps at which signals are measured, and the sizes of the measurement.

    information_every     0: never
    information_prompts   prompts of a step that are compared, at most
    information_samples   responses of each prompt that are scored, under all of these prompts
    snr_every             0: never
    """

    information_every: int = 0
    information_prompts: int = 16
    information_samples: int = 2
    snr_every: int = 0

    def measures_information(self, step: int) -> bool:
        """Return whether the mutual information is due at a step."""
        return bool(self.information_every) and step % self.information_every == 0

    def measures_snr(self, step: int) -> bool:
        """Return whether the gradient's signal and noise are due at a step."""
        return bool(self.snr_every) and step % self.snr_every == 0

    def information(
        self,
        policy: Policy,
        groups: list[list[ScoredResponse]],
        micro_batch_size: int,
        ranks: Ranks,
        accumulator: MetricAccumulator,
    ) -> None:
        """Measure how much the first groups' responses tell of their prompts.

        All tokens that the policy wrote are scored. RAGEN scores those between the think tags. With
        fewer than two different prompts nothing is measured.
        """
        cross = cross_log_probs(
            policy,
            groups,
            prompts=self.information_prompts,
            samples=self.information_samples,
            micro_batch_size=micro_batch_size,
            ranks=ranks,
        )
        if cross is None:
            return
        mean_RP, sum_RP, own_R = cross
        identity_P = torch.arange(mean_RP.shape[1])
        for name, value in prompt_information(mean_RP, sum_RP, own_R, identity_P).items():
            accumulator.mean(f"information/{name}", value)


def cross_log_probs(
    policy: Policy,
    groups: list[list[ScoredResponse]],
    *,
    prompts: int,
    samples: int,
    micro_batch_size: int,
    ranks: Ranks,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return log-probs of responses under every prompt: mean per token and sum, and own prompts.

    Shapes [R, P], [R, P] and [R], float64 and int64. Equal prompts count once. Responses that are
    too long for the model behind the longest prompt are left out. Returns None for fewer than two
    prompts, or if no response is left.

    The log-probs are of the whole vocabulary, with rollout.keep_mask too. The kept tokens depend on
    the own prompt, so a softmax over them would carry information about that prompt."""
    ids: dict[tuple[int, ...], int] = {}
    chosen: list[tuple[int, list[ScoredResponse]]] = []
    for group in groups:
        prompt = tuple(group[0].prompt_ids)
        if prompt in ids or len(ids) < prompts:
            own = ids.setdefault(prompt, len(ids))
            chosen.append((own, group[:samples]))
    longest_prompt = max(map(len, ids))
    rows: list[Response] = []
    own_prompts: list[int] = []
    for own, group in chosen:
        for response in group:
            length = longest_prompt + len(response.token_ids)
            if policy.positions and length > policy.positions:
                continue
            own_prompts.append(own)
            for prompt in ids:
                row = replace(response, prompt_ids=list(prompt), experts=None, kept=None)
                rows.append(row)
    if len(ids) < 2 or not rows:
        return None
    batch = pack(rows, policy.pad_id)
    local_rows_N = torch.arange(len(batch))[ranks.rank :: ranks.world_size]
    logp_BT = policy.score(batch, micro_batch_size, local_rows_N).logp_BT
    logp_BT = ranks.all_reduce(logp_BT)
    sum_B = torch.where(batch.mask_BT, logp_BT.double(), 0.0).sum(-1)
    mean_B = sum_B / batch.mask_BT.sum(-1)
    shape = (len(own_prompts), len(ids))
    return mean_B.view(shape), sum_B.view(shape), torch.tensor(own_prompts)


@dataclass
class HalfInputs:
    """The facts about a half of the batch that the losses of its micro-batches need."""

    totals: Totals
    statistic: Tensor | None  # Objective.statistic
    starts_at_old: bool  # whether the ratios are exactly 1


def measure_snr(
    old_policy: OldPolicyPass,
    term: PolicyTerm,
    batch: TrainBatch,
    *,
    starts_at_old: bool,
    micro_batch_size: int,
    local_rows_N: Tensor,
    position: tuple[int, int],
    ranks: Ranks,
    accumulator: MetricAccumulator,
) -> None:
    """Measure signal and noise of the policy term's gradient over the batch.

    Each half has whole groups, drawn at random by `position` (seed, step), and is treated like a
    mini-batch. With `starts_at_old` the ratios are exactly 1. The objective is copied, because a
    user's objective may have a state. The parameters have no gradients afterwards. All ranks must
    call this.
    """
    policy = old_policy.policy
    halves = random_halves(batch.prompts_B, *position)
    if halves is None:
        return
    term = copy.deepcopy(term)
    parameters = policy.parameters()
    random_state = torch.get_rng_state()
    gradients: list[list[Tensor]] = []
    for is_in_half_B in halves:
        rows_N = is_in_half_B.nonzero().squeeze(-1)
        # the step's own metrics have no part in it
        half = reduce_minibatch(batch.rows(rows_N), term.correction, MetricAccumulator())
        is_local_B = torch.isin(rows_N, local_rows_N)
        statistic = old_policy.statistic(term.objective, half, is_local_B, ranks, starts_at_old)
        inputs = HalfInputs(Totals.of(half.mask_BT), statistic, starts_at_old)
        add_gradient(policy, term, half, is_local_B, inputs, micro_batch_size)
        ranks.all_reduce_gradients(parameters)
        gradient = []
        for parameter in parameters:
            zeros = torch.zeros_like(parameter)
            gradient.append(zeros if parameter.grad is None else parameter.grad)
            parameter.grad = None
        gradients.append(gradient)
    torch.set_rng_state(random_state)
    for name, value in signal_and_noise(*gradients).items():
        accumulator.mean(f"optim/{name}", value)


def add_gradient(
    policy: Policy,
    term: PolicyTerm,
    batch: TrainBatch,
    is_local_B: Tensor,
    half: HalfInputs,
    micro_batch_size: int,
) -> None:
    """Add the gradient of the policy term on the local rows of a half to the parameters' gradients.

    `batch` has all rows of the half."""
    local = batch.rows(is_local_B).split(micro_batch_size) if is_local_B.any() else []
    micros = [micro for micro in local if term.needs_every_row or micro.adv_BT.any()]
    with policy.cached_casts():
        for i, _ in policy.lockstep([True] * len(micros)):
            if i is None:
                policy.idle(batch, needs_gradient=True)
                continue
            micro = micros[i]
            on_device = micro.to(policy.device)
            output = policy.forward(micro, entropy=False)
            if half.starts_at_old:
                on_device = on_device.with_old_results(
                    output.logp_BT.detach(), on_device.experts_BSLK
                )
            inputs = TermInputs(output, on_device, half.totals, 1, MetricAccumulator())
            inputs.statistic = half.statistic
            loss = term(inputs)
            if loss.requires_grad:
                loss.backward()
            else:
                # with sharded weights, the backward pass of another rank needs all ranks
                output.logp_BT.backward(torch.zeros_like(output.logp_BT))


def random_halves(prompts_B: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor] | None:
    """Mark the rows of two halves of whole groups, bool [B] each, None for fewer than two groups.

    An odd group is in the second half."""
    distinct = prompts_B.unique()
    if len(distinct) < 2:
        return None
    order = torch.from_numpy(permutation(len(distinct), seed, "snr", step))
    first_B = torch.isin(prompts_B, distinct[order[: len(distinct) // 2]])
    return first_B, ~first_B


def signal_and_noise(first: list[Tensor], second: list[Tensor]) -> dict[str, float]:
    """Return signal and noise of the whole batch's gradient, from the gradients of its halves.

    The halves' gradients g_1 and g_2 are independent estimates of the gradient G. The batch's is
    their mean, whose covariance has the trace tr(S). Both estimates are unbiased, so the signal can
    be negative (McCandlish et al., arXiv:1812.06162, Appendix A):

        gradient_signal   g_1 . g_2               estimates |G|^2
        gradient_noise    |g_1 - g_2|^2 / 4       estimates tr(S)
        snr               signal / noise
        snr_cosine        g_1 . g_2 / (|g_1| |g_2|)

    Over several steps, divide the mean signal by the mean noise. A ratio or a cosine without
    denominator is left out. If gradients are sharded, all ranks must call this.
    """
    dot, square_1, square_2 = products(first, second)
    noise = max(0.0, square_1 + square_2 - 2 * dot) / 4
    numbers = {"gradient_signal": dot, "gradient_noise": noise}
    if noise > 0:
        numbers["snr"] = dot / noise
    if square_1 > 0 and square_2 > 0:
        numbers["snr_cosine"] = dot / (square_1 * square_2) ** 0.5
    return numbers


def products(first: list[Tensor], second: list[Tensor]) -> list[float]:
    """Return the sums of a b, of a^2 and of b^2 over the elements a and b of two lists of tensors.

    Each element of a sharded tensor counts once, however many ranks hold a copy of it."""
    # Sums over a rank's share can be added before they are exchanged, if the meshes are the same.
    sums_of_mesh: dict[Any, list[Tensor]] = {}
    for a, b in zip(first, second, strict=True):
        a64 = a.double()
        b64 = b.double()
        sums = [(a64 * b64).sum(), a64.square().sum(), b64.square().sum()]
        mesh = device_mesh(a)
        if mesh in sums_of_mesh:
            sums = [total + x for total, x in zip(sums_of_mesh[mesh], sums, strict=True)]
        sums_of_mesh[mesh] = sums
    totals = [0.0, 0.0, 0.0]
    for sums in sums_of_mesh.values():
        numbers = torch.stack([full_tensor(x) for x in sums]).tolist()
        totals = [total + x for total, x in zip(totals, numbers, strict=True)]
    return totals

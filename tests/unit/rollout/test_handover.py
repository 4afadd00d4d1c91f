"""The check of hand-overs: a stale tensor is told at once, complete weights pass."""

import math

import pytest
import torch

from builders import problems, small_policy
from gspo.data.samples import Response
from gspo.model.sharding.dtensors import local_tensor
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.sources.handover import (
    HandoverCheck,
    logprob_change,
    rounded_to_bfloat16,
    sequence_gap,
)
from ranked import ranked
from trainers import gap_trainer, steps
from vllm_engines import spread_policy

RATE = 1e-3  # of an update: log-probs change by far less than the tolerance of check_engine


class CopyingEngine(LocalEngine):
    """An engine in float32 with tensors of its own."""

    def __init__(self, policy, dtype=torch.float32):
        super().__init__(policy, dtype=dtype)
        if self.shares_weights:
            self.shares_weights = False
            self.sampler = policy.copy(torch.float32)


def rollout(engine) -> list[list[Response]]:
    return engine.generate(SamplingRequest(problems(), 8, Sampling(1.0, 16), (1, "test")))


def update(policy, seed: int, rate: float = RATE) -> None:
    """Add the same to the weights as an optimizer does whose gradients are random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(rate * torch.randn(parameter.shape, generator=generator).sign())


def recorded(dtype=torch.float32) -> tuple[CopyingEngine, HandoverCheck]:
    engine = CopyingEngine(small_policy(), dtype)
    check = HandoverCheck(engine, "nothing" if dtype == torch.float32 else "bfloat16")
    check.record(rollout(engine))
    return engine, check


def hand_over(engine, stale: tuple[str, ...] = (), expert: int | None = None) -> None:
    """Load the policy's weights, but for tensors whose name has one of these words in it."""
    own = dict(engine.sampler.named_tensors())
    tensors = []
    for name, tensor in engine.policy.named_tensors():
        if any(word in name for word in stale):
            old = own[name].clone()
            if expert is not None:
                old, tensor = tensor.clone(), old
                old[expert] = tensor[expert]
            tensor = old
        tensors.append((name, tensor))
    engine.load_weights(tensors)


def test_by_hand():
    x = torch.tensor([1.0, 2.0, -1.0, 0.0]).double()
    sequences = torch.tensor([0, 0, 1, 1])
    whole = logprob_change(x, x, sequences)
    assert (whole.slope, whole.slope_stderr, whole.trainer_change, whole.residual) == (1, 0, 1, 0)
    none = logprob_change(x, torch.zeros(4).double(), sequences)
    assert (none.slope, none.slope_stderr, none.residual) == (0, 0, 1)
    # slope 1 + (1*1 + 2*0 - 1*1)/6 = 1; sums of x * (y - x) by sequence: 1 and -1
    noisy = logprob_change(x, x + torch.tensor([1.0, 0.0, 1.0, 0.0]), sequences)
    assert noisy.slope == 1 and noisy.slope_stderr == pytest.approx(2 / 6)
    assert noisy.residual == 0.5
    y = x + torch.tensor([1.0, 3.0, 0.0, 0.0])
    assert sequence_gap(x, y, sequences, 0.0) == 0 and sequence_gap(x, y, sequences, 1.0) == 2
    for odd in (float("nan"), float("inf"), float("-inf")):
        assert math.isnan(sequence_gap(torch.full_like(x, odd), y, sequences, 0.5))


def test_rounding_restores_every_bit():
    model = torch.nn.Linear(50, 40)
    with torch.no_grad():
        # halfway between two numbers of bfloat16, infinite, not a number, the largest, the smallest
        special = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, math.inf, -math.inf, math.nan]
        special += [3.4028234e38, 1e-45, 0.0, -0.0]
        model.weight[0, : len(special)] = torch.tensor(special)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError), rounded_to_bfloat16(model):
        for parameter in model.parameters():
            rounded = parameter.detach()[1:]
            assert torch.equal(rounded, rounded.bfloat16().float())
        assert torch.equal(model.bias.detach(), before[1].bfloat16().float())
        raise KeyError
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().view(torch.int32), old.view(torch.int32))


@pytest.mark.parametrize(
    ("stale", "expert"),
    [
        (("embed_tokens", "lm_head"), None),
        (("layers.1.self_attn",), None),
        (("layers.1.self_attn.k_proj",), None),
        (("layers.1.mlp.experts",), None),
        (("layers.1.mlp.experts",), 3),
        (("",), None),
    ],
    ids=str,
)
def test_a_stale_tensor_is_told_at_its_sync(stale, expert):
    engine, check = recorded()
    for step in (1, 2):
        update(engine.policy, step)
        hand_over(engine)
        metrics = check.check(step)
        assert metrics["mismatch/sync_slope"] == pytest.approx(1, abs=1e-3)
        assert metrics["mismatch/sync_residual"] < 1e-2
    update(engine.policy, 3)
    hand_over(engine, stale, expert)
    with pytest.raises(RuntimeError, match="after step 3 the engine has not got all"):
        check.check(3)


@pytest.mark.slow
def test_in_bfloat16_half_an_update_is_told_and_a_whole_one_passes():
    for stale in (("",), ("layers.0", "layers.1", "embed_tokens", "lm_head")):
        engine, check = recorded(torch.bfloat16)
        for step in (1, 2, 3):
            update(engine.policy, step, 2e-2)
            hand_over(engine)
            metrics = check.check(step)
            distance = abs(metrics["mismatch/sync_slope"] - 1)
            assert distance < max(0.2, 4 * metrics["mismatch/sync_slope_stderr"])
        update(engine.policy, 4, 2e-2)
        hand_over(engine, stale)
        with pytest.raises(RuntimeError, match="after step 4 the engine has not got all"):
            check.check(4)


def test_an_update_that_rounding_removes_is_no_fault():
    """Weights of a bfloat16 checkpoint, changed by less than half of the distance to a neighbour."""
    engine = CopyingEngine(small_policy(), torch.bfloat16)
    with torch.no_grad():
        for parameter in engine.policy.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    hand_over(engine)
    check = HandoverCheck(engine, "bfloat16")
    check.record(rollout(engine))
    with torch.no_grad():
        for parameter in engine.policy.model.parameters():
            parameter.mul_(1 + 2.0**-12)
    hand_over(engine)
    assert check.check(1) == {}, "rounded as the engine's, the weights have not changed"


@pytest.mark.parametrize("engine_rounding", ["nothing", "bfloat16", "otherwise"])
def test_nan_is_an_error_and_an_engine_that_cannot_score_is_left_alone(
    engine_rounding, monkeypatch
):
    engine = CopyingEngine(small_policy())
    check = HandoverCheck(engine, engine_rounding)
    groups = rollout(engine)
    assert check.check(0) == {}, "nothing is recorded yet"
    check.record(groups)
    scored = engine.logprobs_of

    def broken(prompts, responses):
        rows = scored(prompts, responses)
        rows[-1][-1] = math.nan
        return rows

    update(engine.policy, 1)
    hand_over(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "logprobs_of", broken)
        with pytest.raises(RuntimeError, match="a log-prob is not finite"):
            check.check(1)
    monkeypatch.setattr(engine, "logprobs_of", lambda *_: None)
    silent = HandoverCheck(engine, engine_rounding)
    silent.record(groups)
    assert silent.check(1) == {}
    sharing = LocalEngine(engine.policy)
    shared = HandoverCheck(sharing, engine_rounding)
    shared.record(groups)
    assert shared.check(1) == {}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"staleness": 1}, {"staleness": 1, "overlap": True}], ids=str)
def test_a_trainer_reports_the_share_and_samples_the_same_responses(more, monkeypatch):
    with_check = steps(gap_trainer(lr=1e-2, dtype="bfloat16", **more), 3)
    assert "mismatch/sync_slope" not in with_check[0]
    for metrics in with_check[-1:]:
        assert 0.5 < metrics["mismatch/sync_slope"] < 1.5
        assert metrics["mismatch/sync_slope_stderr"] < 0.2
    monkeypatch.setattr(HandoverCheck, "record", lambda *_: None)
    without = steps(gap_trainer(lr=1e-2, dtype="bfloat16", **more), 3)
    for ours, others in zip(with_check, without, strict=True):
        changing = {name for name in ours if name.startswith(("time/", "throughput/", "compute/s"))}
        new = {name for name in ours if name.startswith("mismatch/sync_")}
        assert ours.keys() - new == others.keys()
        for name in others.keys() - changing:
            assert ours[name] == others[name] or math.isnan(ours[name]), name


@pytest.mark.distributed
def test_two_ranks_with_shards_hear_of_the_stale_engine_of_one():
    def told(ranks):
        policy = spread_policy(ranks)
        before = [local_tensor(p.detach()).clone() for p in policy.model.parameters()]
        engine = LocalEngine(policy, dtype=torch.bfloat16, ranks=ranks)
        check = HandoverCheck(engine, "bfloat16")
        check.record(ranks.unshard(rollout(engine)))
        for p, old in zip(policy.model.parameters(), before, strict=True):
            assert torch.equal(local_tensor(p.detach()), old), "every bit is restored"
        slopes = []
        for step in (1, 2):
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.05)
            tensors = [(name, tensor.clone()) for name, tensor in policy.named_tensors()]
            if step == 1 or ranks.rank == 0:
                engine.load_weights(tensors)
            try:
                slopes.append(check.check(step)["mismatch/sync_slope"])
            except RuntimeError as error:
                slopes.append(str(error))
        return slopes

    first, second = ranked(2, told)
    assert first == second
    assert 0.8 < first[0] < 1.2 and "after step 2 the engine has not got all" in first[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": "x"}, "no valid prompts"),
        ({"prompts": [[1.5]]}, "no valid prompts"),
        ({"responses": [[10**9]]}, "no valid responses"),
        ({"responses": [[]]}, "no valid responses"),
        ({"responses": [[1]] * 33}, "no valid responses"),
        ({"responses": [[1], [1]]}, "prompts without responses"),
        ({"metrics": None}, "no metrics"),
    ],
)
def test_a_state_of_another_checkpoint_is_refused(change, message):
    check = HandoverCheck(LocalEngine(small_policy(), dtype=torch.bfloat16), "bfloat16")
    state = {"prompts": [[1]], "responses": [[2]], "metrics": {}}
    with pytest.raises(ValueError, match=message):
        check.load_state(state | change)
    check.load_state(state)
    check.load_state({})
    assert check.state() == state and check.check(1) == {}

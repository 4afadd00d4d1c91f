"""The ways to multiply tokens by their experts' matrices: each against a loop in float64, and which
is chosen where.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from builders import batch_of, sample, small_policy
from gspo.model.forward import experts, grouped

EXPERTS, TOP_K, WIDTH, INNER = 6, 2, 8, 12


def layer() -> SimpleNamespace:
    up = torch.randn(EXPERTS, 2 * INNER, WIDTH, requires_grad=True)
    down = torch.randn(EXPERTS, WIDTH, INNER, requires_grad=True)
    return SimpleNamespace(num_experts=EXPERTS, gate_up_proj=up, down_proj=down)


def loop(own, h, weights, chosen) -> torch.Tensor:
    """Token by token, expert by expert."""
    rows = []
    for n in range(len(h)):
        total = torch.zeros(WIDTH, dtype=h.dtype)
        for k in range(TOP_K):
            gate, up = (own.gate_up_proj[chosen[n, k]] @ h[n]).chunk(2)
            total = total + weights[n, k] * (own.down_proj[chosen[n, k]] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def routes(kind: str, tokens: int) -> torch.Tensor:
    """Experts of each token: drawn; or all tokens to the same two, so that the others have none."""
    if kind == "two experts have all":
        return torch.tensor([4, 1]).expand(tokens, 2).contiguous()
    return torch.rand(tokens, EXPERTS).topk(TOP_K).indices


@pytest.mark.parametrize("way", ["grouped", "blocks", "all"])
@pytest.mark.parametrize("kind", ["drawn", "two experts have all"])
@pytest.mark.parametrize("tokens", [1, 3, 150])
def test_each_way_is_the_loop_in_float64_forward_and_backward(monkeypatch, way, kind, tokens):
    monkeypatch.setattr(experts, "choose_method", lambda *_: way)
    torch.manual_seed(tokens)
    own, h = layer(), torch.randn(tokens, WIDTH, requires_grad=True)
    weights, chosen = torch.rand(tokens, TOP_K, requires_grad=True), routes(kind, tokens)
    slopes = torch.randn(tokens, WIDTH)
    inputs = [h, weights, own.gate_up_proj, own.down_proj]
    out = experts.run_experts(own, h, weights, chosen)
    gradients = torch.autograd.grad((out * slopes).sum(), inputs)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_own = SimpleNamespace(gate_up_proj=exact[2], down_proj=exact[3])
    expected = loop(exact_own, exact[0], exact[1], chosen)
    expected_gradients = torch.autograd.grad(
        (expected * slopes.double()).sum(), exact, allow_unused=True
    )
    for ours, theirs in zip(
        [out.detach(), *gradients], [expected.detach(), *expected_gradients], strict=True
    ):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6 * scale)
    with torch.no_grad():
        torch.testing.assert_close(
            experts.run_experts(own, h, weights, chosen), out, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("way", ["blocks", "all"])
def test_no_number_is_read_from_the_device_without_the_grouped_kernel(monkeypatch, way):
    monkeypatch.setattr(experts, "choose_method", lambda *_: way)
    own, h, chosen = layer(), torch.randn(40, WIDTH, requires_grad=True), routes("drawn", 40)
    names = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function._schema.name)
            return function(*args, **(kwargs or {}))

    with Names():
        experts.run_experts(own, h, torch.rand(40, TOP_K), chosen).sum().backward()
    assert names and not names & {
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::bincount",
        "aten::_grouped_mm",
    }
    monkeypatch.setattr(torch.Tensor, "tolist", None)  # it reads without an operation
    experts.run_experts(own, h, torch.rand(40, TOP_K), chosen).sum().backward()


@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 33, 0], [16, 16, 16], [1, 0, 100], [17, 31, 47]])
def test_blocks_hold_every_row_once_and_one_expert_each(counts):
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    rows = sum(counts)
    blocks = grouped.into_blocks(ends, rows)
    assert blocks.slots_R.unique().numel() == rows
    assert len(blocks.experts_B) == grouped.block_count(rows, len(counts), blocks.size)
    expert_of_row = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    assert torch.equal(blocks.experts_B[blocks.slots_R // blocks.size], expert_of_row)


def test_the_way_is_the_cheapest_that_does_not_wait():
    def way(capability, dtype, tokens=4096, experts=32, top_k=4, aligned=True):
        return grouped.choose_gpu_method(capability, dtype, aligned, tokens, experts, top_k)

    bf16, fp32 = torch.bfloat16, torch.float32
    for fast in ((9, 0), (10, 0), (10, 3)):
        assert way(fast, bf16) == "grouped"
        assert way(fast, fp32) == "blocks"
        assert way(fast, bf16, aligned=False) == "blocks"
    for slow in ((8, 0), (8, 9), (12, 0)):
        assert way(slow, bf16) == "blocks"
    # 64 tokens: 64 x 32 = 2048 rows against 256 + 32 x 16 + (16 + 32) x 64 = 3840
    assert way((8, 0), bf16, tokens=64) == "all"
    # 256 tokens: 8192 rows against 1024 + 32 x 32 + (32 + 32) x 64 = 6144
    assert way((8, 0), bf16, tokens=256) == "blocks"
    # few experts, of which half take part: 4 N rows against 2 N to 4 N and the copies
    assert way((9, 0), fp32, tokens=512, experts=4, top_k=2) == "all"
    # a CPU's own
    assert grouped.choose_method(torch.zeros(9, 8), [torch.zeros(2, 4, 8)], 1) == "grouped"


def gradients_of_two_passes(policy, batch, keeping) -> tuple[list[torch.Tensor], int]:
    """The gradients that two micro-batches leave in bfloat16, and how often experts were rounded."""
    shapes = {p.shape for name, p in policy.model.named_parameters() if ".experts." in name}
    count = 0

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal count
            if (
                function is torch.ops.aten._to_copy.default
                and (kwargs or {}).get("dtype") == torch.bfloat16
            ):
                count += args[0].shape in shapes
            return function(*args, **(kwargs or {}))

    with Casts(), keeping():
        for micro in batch.split(2)[:2]:
            output = policy.forward(micro)
            (output.logp_BT * micro.mask_BT).sum().backward()
    gradients = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
    policy.model.zero_grad()
    return gradients, count


def test_casts_that_are_kept_change_no_bit_and_are_made_once():
    policy = small_policy()
    policy.precision = torch.bfloat16
    batch = batch_of(policy, sample(policy))
    layers = policy.routing.layers
    kept, few = gradients_of_two_passes(policy, batch, policy.cached_casts)
    plain, many = gradients_of_two_passes(policy, batch, nullcontext)
    assert (few, many) == (2 * layers, 4 * layers)  # gate-and-up and down, per layer
    assert len(kept) == len(plain) and all(
        torch.equal(a, b) for a, b in zip(kept, plain, strict=True)
    )
    # there memory matters more: forward and recomputation round for themselves
    policy.network.checkpointing = True
    kept, many = gradients_of_two_passes(policy, batch, policy.cached_casts)
    assert many == 8 * layers and all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


def test_a_kept_cast_gives_its_gradient_to_the_weight_and_is_made_anew_after_a_change():
    weight = torch.nn.Parameter(torch.ones(3))
    casts = grouped.CastCache()
    first = casts(weight, torch.bfloat16)
    assert casts(weight, torch.bfloat16).data_ptr() == first.data_ptr()
    (first * 2).sum().backward()
    assert weight.grad.dtype == torch.float32 and torch.equal(weight.grad, torch.full((3,), 2.0))
    with torch.no_grad():
        weight.mul_(3)
    assert torch.equal(casts(weight, torch.bfloat16), weight.bfloat16())
    assert casts(weight, torch.float32) is weight


def test_an_update_leaves_no_cast_behind():
    """PyTorch's fused AdamW changes weights without counting it, so no cast may outlive the
    micro-batches.
    """
    policy = small_policy()
    policy.precision = torch.bfloat16
    batch = batch_of(policy, sample(policy)).rows(torch.tensor([0, 1]))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.05, fused=True)
    with policy.cached_casts():
        policy.forward(batch).logp_BT.sum().backward()
    optimizer.step()
    assert policy.network._casts is None
    with policy.cached_casts():
        kept = policy.forward(batch).logp_BT
    assert torch.equal(kept, policy.forward(batch).logp_BT)

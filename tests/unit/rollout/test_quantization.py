"""An engine whose weights are rounded: by hand, what is rounded, and how far its likelihoods are
then off.
"""

import pytest
import torch

from architectures import small_model
from builders import batch_of, perturb, problems, small_policy
from composing import settings
from gspo.model.policy import Policy
from gspo.model.settings import TinyDense
from gspo.model.tokenizer import character_tokenizer
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.quantization import MAX_NUMBER, quantize, quantized
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.settings import QUANTIZATIONS
from moe_families import MOE_FAMILIES
from refusals import refuses


def test_by_hand():
    four = torch.tensor([[6.0, -3.1, 0.2, 0.3, -5.1, 0.0], [0.6, 0.06, -0.04, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[6.0, -3.0, 0.0, 0.5, -6.0, 0.0], [0.6, 0.05, -0.05, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(quantized(four, "fp4_e2m1"), expected)
    eight = torch.tensor([[448.0, 1.0, 1.06, 1.07, -0.5, 2.0**-9, 2.0**-11]])
    torch.testing.assert_close(
        quantized(eight, "fp8_e4m3"), torch.tensor([[448.0, 1.0, 1.0, 1.125, -0.5, 2.0**-9, 0.0]])
    )
    torch.testing.assert_close(
        quantized(eight / 448, "fp8_e4m3") * 448, quantized(eight, "fp8_e4m3")
    )
    small = torch.tensor([[3.0, -3.0, 1.6, -1.4, 0.4, 0.0]])
    torch.testing.assert_close(
        quantized(small, "int3"), torch.tensor([[3.0, -3.0, 2.0, -1.0, 0.0, 0.0]])
    )
    torch.testing.assert_close(
        quantized(small, "int2"), torch.tensor([[3.0, -3.0, 1.0, -1.0, 1.0, 1.0]])
    )
    torch.testing.assert_close(
        quantized(small * 7 / 3, "int4"), torch.tensor([[7.0, -7.0, 4.0, -3.0, 1.0, 0.0]])
    )
    assert not quantized(torch.zeros(2, 3), "fp8_e5m2").any(), "a row of zeros has no scale"


@pytest.mark.parametrize(("kind", "bits"), [("fp8_e4m3", 3), ("fp8_e5m2", 2)])
def test_the_error_is_half_a_unit_of_the_last_bit_and_rounding_again_changes_nothing(kind, bits):
    weight = torch.randn(7, 16, 40, generator=torch.Generator().manual_seed(1))
    near = quantized(weight, kind)
    assert (
        (near - weight).abs()
        <= weight.abs() * 2.0 ** -(bits + 1) + weight.abs().amax(-1, keepdim=True) / 2**14
    ).all()
    assert ((near - weight).abs() > weight.abs() * 2.0 ** -(bits + 3)).float().mean() > 0.3, (
        "it is that coarse"
    )
    torch.testing.assert_close(quantized(near, kind), near, atol=0, rtol=1e-6)
    torch.testing.assert_close(near.abs().amax(-1), weight.abs().amax(-1))


@pytest.mark.parametrize("model", [None, TinyDense(hidden=32, layers=2, heads=2, width=48)])
def test_matrices_of_layers_are_rounded_in_the_engine_alone_after_every_sync(model):
    policy = small_policy(model)
    engine = LocalEngine(policy, quantization="fp8_e4m3")
    for _ in range(2):
        held = dict(engine.sampler.model.named_parameters())
        for name, weight in policy.model.named_parameters():
            layer = ".layers." in name and weight.ndim >= 2 and not name.endswith("mlp.gate.weight")
            expected = quantized(weight, "fp8_e4m3") if layer else weight
            assert torch.equal(held[name], expected), name
            assert torch.equal(held[name], weight) != layer, name
        perturb(policy, 0.1)
        engine.load_weights(policy.named_tensors())


def test_the_coarser_the_format_the_further_off_are_the_likelihoods():
    policy, off = small_policy(), {}
    for kind in ("none", *MAX_NUMBER):
        engine = LocalEngine(policy, dtype=torch.float32, quantization=kind)
        groups = engine.generate(SamplingRequest(problems(), 4, Sampling(1.0, 12), (1, "dose")))
        batch = batch_of(policy, [r for group in groups for r in group])
        difference = (batch.engine_logp_BT - batch.old_logp_BT).abs()[batch.mask_BT]
        off[kind] = float(difference.mean())
    assert (
        off["none"]
        < 1e-5
        < off["fp8_e4m3"]
        < off["fp8_e5m2"]
        < off["fp4_e2m1"]
        < off["int3"]
        < off["int2"]
    )
    assert off["int4"] < off["int3"]


def test_a_scale_is_of_an_output_row_in_every_layout():
    """GPT-2 stores [in, out]. Its positions are embeddings, which stay as they are."""
    policy = Policy(small_model("gpt2"), character_tokenizer())
    twin = policy.copy()
    quantize(twin, "int3")
    weight = policy.model.transformer.h[0].attn.c_attn.weight
    rounded = twin.model.transformer.h[0].attn.c_attn.weight
    assert weight.shape[1] == 3 * weight.shape[0]
    torch.testing.assert_close(rounded, quantized(weight.T, "int3").T)
    assert not torch.equal(rounded, quantized(weight, "int3"))
    for name in ("wte", "wpe"):
        kept = getattr(policy.model.transformer, name).weight
        assert torch.equal(getattr(twin.model.transformer, name).weight, kept)
    experts_of_gpt_oss = small_policy(MOE_FAMILIES["gpt_oss"])
    twin = experts_of_gpt_oss.copy()
    quantize(twin, "int3")
    experts = experts_of_gpt_oss.model.model.layers[0].mlp.experts
    rounded_experts = twin.model.model.layers[0].mlp.experts
    expected = quantized(experts.down_proj.mT, "int3").mT
    torch.testing.assert_close(rounded_experts.down_proj, expected)
    assert torch.equal(rounded_experts.down_proj_bias, experts.down_proj_bias)


def test_a_copy_that_was_rounded_is_no_longer_the_policy():
    policy = small_policy()
    twin = policy.copy()
    quantize(twin, "fp4_e2m1")
    assert (
        LocalEngine(policy).shares_weights
        and not LocalEngine(policy, quantization="fp4_e2m1").shares_weights
    )
    head = policy.model.get_output_embeddings().weight
    assert torch.equal(head, twin.model.get_output_embeddings().weight)


def test_refusals():
    with refuses("rollout.quantization", "int8", "choose one of none, fp8_e4m3,"):
        settings("rollout.quantization=int8")
    with refuses("rollout.quantization", "fp8_e4m3", "is read by rollout=local alone"):
        settings("rollout=vllm", "rollout.quantization=fp8_e4m3")


def test_the_settings_name_every_format():
    assert ("none", *MAX_NUMBER) == QUANTIZATIONS

"""Decoding with tensors of fixed shapes, as on a GPU: the responses of the growing cache. Recording
needs a GPU.
"""

import numpy as np
import pytest
import torch

from builders import perturb, problems, small_policy
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.model.forward.variable_lengths import by_formula
from gspo.model.settings import LoraSettings, TinyDense
from gspo.rollout.engines import cached_attention, local, static_decode
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.engines.static_decode import StaticDecoder

DENSE = TinyDense(hidden=32, layers=2, heads=2, width=32)


def adapted():
    policy = small_policy(DENSE)
    policy.adapt(LoraSettings(rank=4), 1)
    perturb(policy, 0.05)
    return policy


POLICIES = {
    "dense": lambda: small_policy(DENSE),
    "MoE": small_policy,
    "bfloat16": lambda: small_policy().copy(torch.bfloat16),
    "LoRA": adapted,
}


def gap(policy, responses) -> float:
    """The mean absolute difference of the engine's log-probs to the trainer's."""
    batch = pack(responses, policy.tokenizer.pad_token_id)
    scored = policy.score(batch, 8).logp_BT
    return float((scored - batch.engine_logp_BT).abs()[batch.mask_BT].mean())


class StaticEngine(LocalEngine):
    """An engine that decodes as on a GPU, without recording, and keeps its decoders."""

    def __init__(self, policy, **options):
        super().__init__(policy, **options)
        self.decoders = []

    def _decoder(self, rows):
        max_tokens = max(row.limit for row in rows)
        self.decoders.append(StaticDecoder(self.sampler.network, max_tokens, records=False))
        return self.decoders[-1]


PLAIN, WITH_RULES = Sampling(1.0, 40), Sampling(0.7, 20, top_p=0.9, stop=("7", "+"))
CASES = [
    ("dense", WITH_RULES),
    ("MoE", PLAIN),
    ("MoE", WITH_RULES),
    ("bfloat16", PLAIN),
    ("LoRA", PLAIN),
]


@pytest.mark.parametrize(("name", "sampling"), CASES)
def test_responses_are_those_of_the_growing_cache(monkeypatch, name, sampling):
    """Also with prompts of unequal lengths, rows that end at different tokens, and several windows."""
    policy = POLICIES[name]()
    monkeypatch.setattr(static_decode, "WINDOW", 16)
    growing_engine = LocalEngine(policy, dtype=policy.model.dtype)
    engine = StaticEngine(policy, dtype=policy.model.dtype)
    record = policy.routing.layers > 0
    plain = growing_engine.generate(
        SamplingRequest(problems(), 4, sampling, (1, "s"), record_experts=record)
    )
    fixed = engine.generate(
        SamplingRequest(problems(), 4, sampling, (1, "s"), record_experts=record)
    )
    (decoder,) = engine.decoders
    assert decoder.window > 16
    pairs = list(zip((r for g in plain for r in g), (r for g in fixed for r in g), strict=True))
    assert len({a.length for a, _ in pairs}) > 2, "rows end at different tokens"
    # a last bit may draw another token, after which responses part
    if policy.model.dtype == torch.bfloat16:
        growing, static_cache = (
            gap(policy, [a for a, _ in pairs]),
            gap(policy, [b for _, b in pairs]),
        )
        assert 0 < static_cache < 2 * growing
        return
    for a, b in pairs:
        assert (a.token_ids, a.finish_reason, a.text) == (b.token_ids, b.finish_reason, b.text)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
        assert not record or (a.experts == b.experts).mean() > 0.99


def attention_by_formula(q_RHD, keys_RSJD, values_RSJD, filled):
    """What FlashAttention computes: each row's query over as many columns as the row's count says."""
    rows, columns = keys_RSJD.shape[:2]
    assert filled.query_ends.tolist() == list(range(rows + 1))
    assert filled.key_ends.tolist() == [row * columns for row in range(rows + 1)]
    counts = filled.counts_R.tolist()
    assert max(counts) <= columns
    keys, values = (
        torch.cat([x[r, :count] for r, count in enumerate(counts)])
        for x in (keys_RSJD, values_RSJD)
    )
    return by_formula(q_RHD, keys, values, tuple((1, count) for count in counts))


@pytest.mark.parametrize("name", ["dense", "MoE"])
def test_counts_of_filled_columns_take_the_place_of_a_mask(monkeypatch, name):
    """With the formula in the place of FlashAttention. Columns that are not filled hold NaN."""
    policy = POLICIES[name]()
    plain = LocalEngine(policy).generate(SamplingRequest(problems(), 4, WITH_RULES, (1, "c")))
    engine = StaticEngine(policy)
    monkeypatch.setattr(static_decode, "flash_attention_works", lambda *sizes: True)
    monkeypatch.setattr(static_decode, "flash_attention", attention_by_formula)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        counted = engine.generate(SamplingRequest(problems(), 4, WITH_RULES, (1, "c")))
    finally:
        torch.use_deterministic_algorithms(False)
    (decoder,) = engine.decoders
    assert decoder.window == decoder.capacity, "no window bounds what attention reads"
    responses, others = ([r for group in groups for r in group] for groups in (plain, counted))
    assert len({r.length for r in responses}) > 2
    assert [r.token_ids for r in responses] == [r.token_ids for r in others]


def test_attention_by_counts_is_tried_before_it_is_used(monkeypatch):
    """A CPU has no such operator. A kernel that reads too many columns or mixes rows up is found
    out.
    """
    cpu = torch.device("cpu")
    assert not cached_attention.flash_attention_works(cpu, torch.bfloat16, 4, 2, 16)
    assert "refuses counts of keys" in cached_attention.why_not(cpu, torch.bfloat16, 4, 2, 16)
    monkeypatch.setattr(cached_attention, "flash_attention", attention_by_formula)
    assert cached_attention.why_not(cpu, torch.bfloat16, 4, 2, 16) == ""

    def reads_too_much(q, keys, values, filled):
        filled.counts_R.add_(1)
        return attention_by_formula(q, keys, values, filled)

    monkeypatch.setattr(cached_attention, "flash_attention", reads_too_much)
    assert "is off by" in cached_attention.why_not(cpu, torch.bfloat16, 4, 2, 16)


def test_nothing_that_is_captured_is_replaced_from_token_to_token():
    """A graph reads and writes the tensors that it was recorded with."""
    policy = small_policy()
    with policy.network.frozen(copy_experts=True), torch.no_grad():
        decoder = StaticDecoder(policy.network, 12, records=False)
        decoder.prefill([[5, 6, 7], [8, 9]], 2)
        decoder.step(torch.tensor([3, 4, 5, 6]))

        def places():
            counts = decoder.filled_columns
            tensors = [
                *decoder.keys,
                *decoder.values,
                decoder.lengths_R,
                decoder.begins_R,
                decoder.columns_S,
            ]
            tensors += [counts.counts_R, counts.query_ends, counts.key_ends]
            return [
                x.data_ptr() for x in [*tensors, decoder.tokens_R, policy.network._rotation_table]
            ]

        before = places()
        for token in range(10):
            decoder.step(torch.full((4,), token))
        assert places() == before
        assert (
            decoder.lengths_R.tolist()
            == decoder.filled_columns.counts_R.tolist()
            == [14, 14, 13, 13]
        )


def test_what_the_cache_held_before_does_not_show(monkeypatch):
    """Memory that was never written may hold NaN."""
    policy = small_policy(DENSE)
    plain = LocalEngine(policy).generate(
        SamplingRequest(problems(), 2, Sampling(1.0, 12), (1, "n"))
    )
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        fixed = StaticEngine(policy).generate(
            SamplingRequest(problems(), 2, Sampling(1.0, 12), (1, "n"))
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert [r.token_ids for g in plain for r in g] == [r.token_ids for g in fixed for r in g]


def test_an_engine_decodes_so_on_a_gpu_unless_told_otherwise(monkeypatch):
    policy = small_policy(DENSE)
    rows = [local.Row(Problem("math", 0, "", ""), 0, [5], 0, limit) for limit in (3, 9)]
    assert type(LocalEngine(policy)._decoder(rows)) is local.NetworkDecoder
    monkeypatch.setattr(local, "runs_ahead", lambda device: True)
    decoder = LocalEngine(policy)._decoder(rows)
    assert isinstance(decoder, StaticDecoder) and decoder.extra_columns == 9 and not decoder.records
    assert type(LocalEngine(policy, cuda_graphs=False)._decoder(rows)) is local.NetworkDecoder


def test_where_recording_fails_tokens_are_computed_and_a_line_says_why(monkeypatch, capsys):
    """This build of PyTorch has no CUDA graphs."""
    policy = small_policy(DENSE)
    monkeypatch.setattr(static_decode, "_reported", set())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def refuses():
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuses)
    decoders = [StaticDecoder(policy.network, 6, records=records) for records in (False, True)]
    with policy.network.frozen(copy_experts=True), torch.no_grad():
        for decoder in decoders:
            decoder.prefill([[5, 6], [7]], 1)
        for token in range(5):
            logits = [decoder.step(torch.full((2,), token))[0] for decoder in decoders]
            assert torch.equal(*logits)
    assert not decoders[1].records
    said = capsys.readouterr().err
    assert (
        said.count(
            "warning: decoding without CUDA graphs, which is slower: operation not permitted"
        )
        == 1
    )

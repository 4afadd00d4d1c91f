"""The in-process engine's kept tokens and log-probs: against plain rules, against the trainer, in
cut responses, in episodes and in a checkpoint.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from builders import problems, small_policy
from games import Echoes
from gspo.data.kept_tokens import KeptTokens
from gspo.data.pack import pack
from gspo.rollout.engines.kept_recorder import KeptRecorder
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.engines.vllm_kept import MAX_TIES, kept_of
from gspo.rollout.episodes.sampling import play
from gspo.rollout.settings import RolloutSettings
from gspo.rollout.sources.base import PendingRollouts
from gspo.rollout.sources.behaviour_logprobs import BehaviourLogprobs
from gspo.rollout.sources.off_policy import make_source
from gspo.rollout.sources.pending import load_pending, save_pending
from gspo.rollout.sources.problem_sampler import Uniform
from trainers import FirstCharacter

RULES = [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"min_p": 0.02, "top_k": 9, "top_p": 0.9}]


def generate(engine, sampling, group_size=3, key=(1, "kept")):
    groups = engine.generate(SamplingRequest(problems(), group_size, sampling, key))
    return [r for group in groups for r in group]


def plain_rules(p: np.ndarray, top_p=1.0, top_k=0, min_p=0.0) -> set[int]:
    """The rules as a person would write them: one token after the other."""
    kept = [i for i in range(len(p)) if p[i] >= min_p * p.max()]
    kept.sort(key=lambda i: (-p[i], i))
    if top_k:
        border = p[kept[min(top_k, len(kept)) - 1]]
        kept = [i for i in kept if p[i] >= border]
    total = sum(p[i] for i in kept)
    chosen = []
    reached = 0.0
    for i in kept:
        if reached >= top_p * total:
            break
        chosen.append(i)
        reached += p[i]
    return set(chosen)


def lists_of(response) -> list[list[int]]:
    kept = response.kept
    return [ids.tolist() for ids in np.split(kept.ids, kept.counts.cumsum()[:-1])]


@pytest.mark.parametrize("rules", RULES)
def test_the_engines_kept_tokens_are_those_of_plain_rules(rules):
    policy = small_policy()
    policy.temperature = 0.9
    vocabulary = policy.model.config.vocab_size
    responses = generate(LocalEngine(policy), Sampling(0.9, 12, keep_mask=True, **rules))
    compared = 0
    for r in responses:
        ids = torch.tensor([r.prompt_ids + r.token_ids])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, len(r.prompt_ids) - 1 : -1].double() / 0.9
        for kept, p in zip(lists_of(r), logits.softmax(-1).numpy(), strict=True):
            # probabilities round otherwise here, so a token on the border may differ
            bounds = {
                name: [value * (1 - 1e-5), value * (1 + 1e-5)] if name != "top_k" else [value]
                for name, value in rules.items()
            }
            candidates = [{}]
            for name, values in bounds.items():
                candidates = [c | {name: value} for c in candidates for value in values]
            expected = [plain_rules(p, **candidate) for candidate in candidates]
            assert set(kept or range(vocabulary)) in expected
            compared += len(kept) > 1
    assert compared > 20


@pytest.mark.parametrize("rules", RULES)
def test_the_on_policy_ratio_is_exactly_one(rules):
    """The trainer's log-prob over the kept tokens is the engine's, and the tokens are those of a
    run without keep_mask. With the whole distribution the ratio is the mass of the kept tokens."""
    policy = small_policy()
    policy.temperature = 0.9
    engine = LocalEngine(policy)
    responses = generate(engine, Sampling(0.9, 12, keep_mask=True, **rules))
    without = generate(engine, Sampling(0.9, 12, **rules))
    assert [r.token_ids for r in responses] == [r.token_ids for r in without]
    assert all(r.kept is None for r in without)
    batch = pack(responses, policy.pad_id)
    mask_BT = batch.mask_BT
    log_ratio = (policy.score(batch, 4).logp_BT - batch.engine_logp_BT)[mask_BT]
    assert log_ratio.abs().max() < 2e-5
    whole = policy.score(replace(batch, kept=None), 4).logp_BT
    mass = (whole - batch.engine_logp_BT)[mask_BT].exp()
    assert mass.max() < 1 + 1e-4 and mass.mean() < 0.97
    np.testing.assert_allclose(
        pack(without, policy.pad_id).engine_logp_BT[mask_BT], whole[mask_BT], atol=2e-5
    )


def test_without_rules_nothing_changes_to_the_bit():
    engine = LocalEngine(small_policy())
    a, b = (generate(engine, Sampling(1.0, 12, keep_mask=keep)) for keep in (False, True))
    assert [(r.token_ids, r.logprobs.tolist()) for r in a] == [
        (r.token_ids, r.logprobs.tolist()) for r in b
    ]
    assert all(r.kept is None for r in b)
    # a rule that excludes no token lists none, and leaves the log-probs their bits
    every = generate(engine, Sampling(1.0, 12, keep_mask=True, top_k=10_000))
    assert [r.logprobs.tolist() for r in every] == [r.logprobs.tolist() for r in a]
    assert all((r.kept.counts == 0).all() and not len(r.kept.ids) for r in every)


def test_ties_at_the_border_are_all_kept():
    """Token 1 and 2 are equally likely, and the second largest."""
    recorder = KeptRecorder(num_rows=2, max_tokens=3)
    masks = torch.tensor([[[1, 1, 1, 0]], [[1, 1, 1, 1]], [[0, 1, 0, 0]]], dtype=torch.bool)
    for t, kept_RV in enumerate(masks):
        recorder.add(t, torch.tensor([1]), kept_RV)
    (kept,) = recorder.take([1], [2])
    assert kept.counts.tolist() == [3, 0] and kept.ids.tolist() == [0, 1, 2]
    policy = small_policy()
    with torch.no_grad():
        policy.model.lm_head.weight[7] = policy.model.lm_head.weight[3]
    for r in generate(LocalEngine(policy), Sampling(1.0, 12, top_k=3, keep_mask=True)):
        for ids in lists_of(r):
            assert (3 in ids) == (7 in ids) and 3 <= len(ids) <= 4


def test_rows_that_end_early_get_their_own_lists():
    """Rows are dropped at different times, and fed further tokens until then."""
    policy = small_policy()
    sampling = Sampling(1.0, 24, top_k=4, keep_mask=True, stop=("7", "+", "a", "e"))
    together = generate(LocalEngine(policy), sampling)
    alone = generate(LocalEngine(policy, batch_rows=3), sampling)
    assert len({len(r.token_ids) for r in together}) > 3
    for a, b in zip(together, alone, strict=True):
        assert lists_of(a) == lists_of(b) and not a.kept.fault(a.token_ids)


CUT = {
    "prompts_per_step": 4,
    "group_size": 3,
    "max_new_tokens": 12,
    "token_budget": 4,
    "in_flight": 8,
    "top_p": 0.8,
    "keep_mask": True,
}


@pytest.mark.slow
def test_cut_responses_keep_the_lists_of_every_segment_and_a_checkpoint_all_of_them(tmp_path):
    policy = small_policy()
    source = make_source(
        LocalEngine(policy),
        FirstCharacter(),
        RolloutSettings(**CUT),
        Uniform(),
        1,
        BehaviourLogprobs(policy, 8),
    )
    whole = LocalEngine(policy)
    for step in range(1, 4):
        for r in source.next(step).responses:
            expected = whole.generate(
                SamplingRequest(
                    [r.problem], 3, Sampling(1.0, 12, top_p=0.8, keep_mask=True), (1, "rollout")
                )
            )[0][r.sample]
            assert r.token_ids == expected.token_ids and lists_of(r) == lists_of(expected)
            # the log-probs under the weights that sampled are over the kept tokens too
            np.testing.assert_allclose(r.old_logprobs, r.logprobs, atol=2e-5)
    pending = source.pending()
    assert pending.groups
    save_pending(pending, tmp_path)
    task = FirstCharacter()
    read = load_pending(tmp_path, lambda index: task.problem(1, "train", index))
    pairs = zip(pending.groups, read.groups, strict=True)
    for (_, group), (_, read_group) in pairs:
        for a, b in zip(group, read_group, strict=True):
            assert a.kept.ids.dtype == b.kept.ids.dtype and lists_of(a) == lists_of(b)
            assert a.kept.counts.tolist() == b.kept.counts.tolist()
    save_pending(PendingRollouts(), tmp_path / "none")


def test_episodes_list_the_policys_tokens_alone():
    policy = small_policy()
    sampling = Sampling(1.0, 24, top_k=5, keep_mask=True, stop=tuple("aeiouxXG59|"))
    request = SamplingRequest(
        [Echoes().problem(1, "train", i) for i in range(3)], 3, sampling, (1,)
    )
    responses = [r for group in play(LocalEngine(policy), Echoes(), request) for r in group]
    batch = pack(responses, policy.pad_id)
    holes = batch.attention_BS[:, batch.prompt_width :] & ~batch.mask_BT
    assert holes.any() and (batch.kept.counts_BT[holes] == 0).all()
    assert (batch.kept.counts_BT[batch.mask_BT] == 5).float().mean() > 0.9
    scored = policy.score(batch, 4).logp_BT
    difference = (scored - batch.engine_logp_BT)[batch.mask_BT].abs()
    assert difference.max() < 2e-5


def test_the_kept_tokens_of_vllm():
    assert kept_of([[3, 1], [2]], 2, 100).ids.tolist() == [3, 1, 2]
    assert kept_of([[3, 1, 2], [2]], 9, 3).counts.tolist() == [0, 1], "the whole vocabulary"
    with pytest.raises(RuntimeError, match=r"rollout\.top_k=2, because many are equally likely"):
        kept_of([list(range(2 + MAX_TIES))], 2, 100)
    empty = kept_of([], 2, 100)
    assert isinstance(empty, KeptTokens) and len(empty) == 0

"""The kept tokens that vLLM returns, from a real engine and a real server on the CPU, against the
trainer's own distribution. `make test-vllm` runs it.
"""

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from builders import problems
from gspo.data.pack import pack
from gspo.io.errors import SettingError
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.engines.vllm import VLLMEngine
from gspo.rollout.engines.vllm_server import VLLMServerEngine
from gspo.rollout.vllm_settings import VLLMRollout, VLLMServerRollout
from served import free_url, served
from vllm_engines import SERVER, whole_policy

pytestmark = pytest.mark.vllm

RULES = {"top_k": 8, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8, "keep_mask": True}
SAMPLING = Sampling(0.8, 16, keep_mask=True, top_k=8, top_p=0.9, min_p=0.02)


def check_kept(engine, groups) -> None:
    """The lists are those of the in-process engine's rules at the same prefixes, and the trainer's
    softmax over them gives vLLM's log-probs."""
    policy = engine.policy
    responses = [r for group in groups for r in group]
    assert sum(len(r.token_ids) for r in responses) > 60
    same = 0
    positions = 0
    for r in responses:
        assert not r.kept.fault(r.token_ids)
        for t, (kept, token) in enumerate(zip(lists_of(r), r.token_ids, strict=True)):
            assert token in kept and len(kept) <= 9
            if t == 0:  # the prompt is the only prefix that both engines surely share
                again = LocalEngine(policy).generate(
                    SamplingRequest([r.problem], 1, SAMPLING, (r.sample, "again"))
                )
                same += set(lists_of(again[0][0])[0]) == set(kept)
                positions += 1
    # a token on the border may be in one list alone, because vLLM's sums round otherwise
    assert same >= positions - 1
    batch = pack(responses, policy.pad_id)
    assert (batch.kept.counts_BT[batch.mask_BT] > 1).float().mean() > 0.3
    ratio = (policy.score(batch, 8).logp_BT - batch.engine_logp_BT)[batch.mask_BT].exp()
    np.testing.assert_allclose(ratio.numpy(), 1.0, atol=1e-4)


def lists_of(response) -> list[list[int]]:
    kept = response.kept
    return [ids.tolist() for ids in np.split(kept.ids, kept.counts.cumsum()[:-1])]


def policy_at_temperature():
    policy = whole_policy()
    policy.temperature = 0.8
    return policy


def test_an_engine_returns_the_kept_tokens():
    engine = VLLMEngine(policy_at_temperature(), VLLMRollout(**RULES, batch_rows=8))
    try:
        request = SamplingRequest(problems(), 3, SAMPLING, (1, "kept"))
        check_kept(engine, engine.generate(request))
        check_kept(engine, [group for groups in engine.stream(request) for group in groups])
        # evaluations of the same engine have rules of their own, and need no lists
        plain = SamplingRequest(problems(), 1, Sampling(0.6, 8, top_p=0.9), (1, "plain"))
        assert all(r.kept is None for group in engine.generate(plain) for r in group)
    finally:
        engine.close()


def test_a_server_returns_the_kept_tokens(tmp_path):
    url = free_url()
    words = [f"rollout.{name}={value}" for name, value in RULES.items()]
    with served(tmp_path, url, *SERVER, *words):
        engine = VLLMServerEngine(policy_at_temperature(), VLLMServerRollout(url=url, **RULES))
        try:
            request = SamplingRequest(problems(), 3, SAMPLING, (1, "kept"))
            check_kept(engine, engine.generate(request))
        finally:
            engine.close()
        more = VLLMServerRollout(url=url, **RULES | {"top_k": 9})
        with pytest.raises(SettingError, match="was not started for so many kept tokens"):
            VLLMServerEngine(policy_at_temperature(), more)

"""Several ranks with vLLM: one each, or one that neighbours share. Real vLLM on the CPU. `make
test-vllm` runs it.
"""

import os

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from daily import daily_but
from gspo.rollout.engines import vllm_base
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.vllm import VLLMEngine
from ranked import ranked
from vllm_engines import (
    GREEDY,
    SECONDS,
    of_one_process,
    sampled,
    settings,
    spread_policy,
    story,
    update,
    whole_policy,
)

pytestmark = pytest.mark.vllm

CASES = {  # whether the weights are spread, how many ranks share a vLLM, whether it records experts
    "spread": (True, 1, True),  # test_vllm_runs.py has a vLLM for each rank with whole weights
    "whole, shared": (False, 2, False),
    "spread, shared": (True, 2, True),
}


@pytest.mark.parametrize("case", daily_but(CASES, "spread, shared"))
def test_two_ranks_sample_what_one_process_does(case):
    spread, together, routes = CASES[case]

    def told(ranks):
        vllm_base.PIECE_BYTES = 20_000  # the weights come in many pieces, layers in several
        launched = {
            "RANK": ranks.rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": ranks.rank,
            "MASTER_PORT": 1,
        }
        os.environ |= {name: str(value) for name, value in launched.items()}
        policy = spread_policy(ranks) if spread else whole_policy()
        chosen = settings(tensor_parallel_size=together, routes=routes)
        engine = VLLMEngine(policy, chosen, ranks)
        try:
            assert bool(engine.host) == (ranks.rank % together == 0)
            return story(engine, routes)
        finally:
            engine.close()

    one = of_one_process()
    assert one[0] != one[2] != one[4], "the weights change what is sampled"
    assert len({str(tokens) for tokens in one[1]}) > 15, "each response has a seed of its own"
    assert len({str(tokens) for tokens in one[-1]}) > 10, "episodes too"
    for found in ranked(2, told, SECONDS):
        assert found == one


def test_the_greedy_tokens_are_the_policys_own():
    """The reference of the comparison above is itself compared."""
    policy = whole_policy()
    for step in range(3):
        if step:
            update(policy)
        assert [
            r.token_ids for r in sampled(LocalEngine(policy), GREEDY, False)
        ] == of_one_process()[2 * step]


@pytest.mark.daily
def test_all_ranks_hear_the_same_when_the_engine_that_they_share_ends():
    """test_vllm_runs.py kills the one of a rank that has its own."""

    def hear(ranks):
        engine = VLLMEngine(whole_policy(), settings(tensor_parallel_size=2), ranks)
        said = []
        try:
            if ranks.rank == 0:
                engine.host.process.kill()
            for call in (
                lambda: sampled(engine, GREEDY, False),
                lambda: engine.load_weights(engine.policy.named_tensors()),
            ):
                with pytest.raises(EngineEnded) as caught:
                    call()
                said.append(str(caught.value))
        finally:
            engine.close()
        return said

    first, second = ranked(2, hear, SECONDS)
    assert first == second and first[0] == first[1]
    assert "vLLM's process of rank 0 (process " in first[0] and "was killed by SIGKILL" in first[0]


def test_vllms_process_does_not_take_itself_for_a_rank(monkeypatch):
    from gspo.rollout.engines.vllm_environment import own_environment

    launcher = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "TORCHELASTIC_RUN_ID": "x",
        "MINE": "kept",
    }
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    there = own_environment(["3", "5"])
    assert not {"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & set(there)
    assert (there["MASTER_ADDR"], there["GLOO_SOCKET_IFNAME"], there["MINE"]) == (
        "127.0.0.1",
        "lo",
        "kept",
    )
    assert there["CUDA_VISIBLE_DEVICES"] == "3,5" and os.environ["RANK"] == "1"

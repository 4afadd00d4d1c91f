"""One vLLM server and two trainer ranks: a real server on the CPU. `make test-vllm` runs it."""

import os
import signal

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from builders import problems
from gspo.model.policy import Policy
from gspo.model.settings import TinyMoE
from gspo.rollout.engines import vllm_base
from gspo.rollout.engines.engine_process import EngineEnded
from gspo.rollout.engines.requests import SamplingRequest
from gspo.rollout.engines.vllm_server import VLLMServerEngine
from gspo.rollout.vllm_settings import VLLMServerRollout
from ranked import ranked
from refusals import refuses
from served import free_url, served
from vllm_engines import (
    GREEDY,
    SAMPLED,
    SECONDS,
    SERVER,
    of_one_process,
    sampled,
    spread_policy,
    story,
    whole_policy,
)

pytestmark = pytest.mark.vllm
WORDS = [*SERVER, "rollout.routes=true"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    url = free_url()
    with served(tmp_path_factory.mktemp("server"), url, *WORDS) as process:
        yield url, process


def settings(url: str, **changed) -> VLLMServerRollout:
    return VLLMServerRollout(**{"url": url, "routes": True, "batch_rows": 8} | changed)


@pytest.mark.daily
@pytest.mark.parametrize("spread", [False, True], ids=["whole", "spread"])
def test_two_ranks_sample_what_one_process_does(server, spread):
    url, _ = server

    def told(ranks):
        vllm_base.PIECE_BYTES = 20_000  # the weights come in many pieces
        engine = VLLMServerEngine(
            spread_policy(ranks) if spread else whole_policy(), settings(url), ranks
        )
        assert bool(engine.folder) == (ranks.rank == 0)
        try:
            return story(engine, experts=True)
        finally:
            engine.close()

    one = of_one_process()
    for found in ranked(2, told, SECONDS):
        assert found == one


def test_a_stream_is_what_is_generated(server):
    engine = VLLMServerEngine(whole_policy(), settings(server[0], batch_rows=2))
    try:
        for sampling in (GREEDY, SAMPLED):
            expected = [
                [r.token_ids for r in group]
                for group in engine.generate(SamplingRequest(problems(), 3, sampling, (1, "x")))
            ]
            groups = [
                group
                for new in engine.stream(SamplingRequest(problems(), 3, sampling, (1, "x")))
                for group in new
            ]
            groups.sort(key=lambda group: group[0].problem.index)
            assert [[r.token_ids for r in group] for group in groups] == expected
        broken_off = engine.stream(SamplingRequest(problems(), 3, SAMPLED, (1, "x")))
        next(broken_off)
    finally:
        engine.close()
    # what was broken off is in nobody's way
    later = VLLMServerEngine(whole_policy(), settings(server[0]))
    assert sampled(later, GREEDY, True)
    later.close()


def test_what_does_not_fit_is_one_line(server):
    url, policy = server[0], whole_policy()
    engine = VLLMServerEngine(policy, settings(url))
    other = Policy(*TinyMoE(hidden=64, layers=3, heads=2).make())
    nowhere = free_url()
    try:
        for chosen, wanted, refusal in [
            (
                policy,
                settings(url),
                ("rollout.url", url, "another trainer uses this server"),
            ),
            (
                other,
                settings(url),
                ("rollout.url", url, "has another model: model.layers.0."),
            ),
            (
                policy,
                settings(url, routes=False),
                ("rollout.routes", False, "was started with True"),
            ),
            (
                policy,
                settings(url, dtype="bfloat16"),
                ("rollout.dtype", "bfloat16", "was started with float32"),
            ),
            (
                policy,
                settings(url, top_p=0.9),
                ("rollout.url", url, "was started without rollout.top_p, top_k or min_p"),
            ),
            (
                policy,
                settings(url, max_model_len=300),
                ("rollout.max_model_len", 300, "was started with 256"),
            ),
            (
                policy,
                settings(nowhere),
                ("rollout.url", nowhere, "refused; start one with `gspo serve`"),
            ),
        ]:
            with refuses(*refusal):
                VLLMServerEngine(chosen, wanted)
        assert sampled(engine, GREEDY, True), "the first trainer goes on"
    finally:
        engine.close()
    VLLMServerEngine(policy, settings(url)).close()  # a later one may use it


def test_all_ranks_hear_the_same_when_the_server_ends(tmp_path):
    """The last thing that is asked of a server of its own."""
    url = free_url()
    with served(tmp_path, url, *WORDS) as process:
        pid = process.pid

        def hear(ranks):
            engine = VLLMServerEngine(whole_policy(), settings(url), ranks)
            ranks.all_gather(None)
            if ranks.rank == 0:
                os.killpg(pid, signal.SIGKILL)
            ranks.all_gather(None)
            with pytest.raises(EngineEnded) as caught:
                sampled(engine, GREEDY, True)
            engine.close()
            return str(caught.value)

        first, second = ranked(2, hear, SECONDS)
        assert first == second and first.startswith(f"the vLLM server at {url} does not answer: ")

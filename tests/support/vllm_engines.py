"""What is asked of an engine outside the trainer's process, with one rank or several, be it vLLM or
its server.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from builders import problems, small_policy
from games import Echo, Echoes
from gspo.data.batch import NOT_RECORDED
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import Response
from gspo.distributed.ranks import Ranks
from gspo.model.policy import Policy
from gspo.model.settings import TinyMoE
from gspo.model.sharding.fsdp import Shards
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from gspo.rollout.engines.route_checks import check_routes
from gspo.rollout.engines.vllm import VLLMEngine
from gspo.rollout.episodes.sampling import play
from gspo.rollout.sources.behaviour_logprobs import check_engine
from gspo.rollout.sources.handover import HandoverCheck
from gspo.rollout.vllm_settings import VLLMRollout

SECONDS = 500  # two engines start on a busy machine
MODEL = TinyMoE(hidden=64, layers=2, heads=2, experts=8, experts_per_token=2, expert_width=16)
# The words of `gspo serve` for a server of this model.
SERVER = [
    "model=tiny_moe", f"model.hidden={MODEL.hidden}", f"model.layers={MODEL.layers}", f"model.heads={MODEL.heads}",
    f"model.experts={MODEL.experts}", f"model.experts_per_token={MODEL.experts_per_token}",
    f"model.expert_width={MODEL.expert_width}",
    "rollout.max_model_len=256", "rollout.kv_cache_gib=0.25", "rollout.batch_rows=16",
]  # fmt: skip
GREEDY, SAMPLED = Sampling(0.0, 20), Sampling(1.0, 20)
STOPS = tuple("eiuyxXGK59|")  # no letters of <pad> or <bos>, in which vLLM must not look


def whole_policy() -> Policy:
    return small_policy(MODEL)


def spread_policy(ranks: Ranks) -> Policy:
    policy = whole_policy()
    shards = Shards(ranks, ranks.world_size, "cpu")
    shards.shard_model(policy.model, torch.float32)
    return Policy(policy.model, policy.tokenizer, shards=shards)


@torch.no_grad()
def update(policy: Policy) -> None:
    """Change the weights in the same way whether they are spread or not."""
    for parameter in policy.model.parameters():
        parameter.mul_(1.2)


def gap(policy: Policy, responses: list[Response], temperature: float = 1.0) -> float:
    """Mean |log-prob of the engine - that of the policy| of the sampled tokens."""
    policy.temperature = temperature
    batch = pack(responses, policy.tokenizer.pad_token_id)
    difference = (batch.engine_logp_BT - policy.score(batch, 32).logp_BT).abs()
    policy.temperature = 1.0
    return difference[batch.mask_BT].mean().item()


def agreement(policy: Policy, responses: list[Response]) -> float:
    """Share of positions and layers at which engine and policy choose the same set of experts."""
    batch = pack(responses, policy.tokenizer.pad_token_id)
    theirs, own = batch.engine_experts_BSLK, policy.score(batch, 32).experts_BSLK
    known_BS = theirs[:, :, 0, 0] != NOT_RECORDED
    assert known_BS.sum() == sum(len(r.prompt_ids) + len(r.token_ids) - 1 for r in responses)
    return (theirs.sort(-1).values == own.sort(-1).values).all(-1)[known_BS].float().mean().item()


def settings(**changed) -> VLLMRollout:
    return VLLMRollout(**{"kv_cache_gib": 0.25, "batch_rows": 8, "max_model_len": 256} | changed)


def sampled(engine, sampling: Sampling, experts: bool) -> list[Response]:
    """The responses to problems that the ranks share out unevenly."""
    ranks = engine.ranks
    own = ranks.shard(problems())
    groups = engine.generate(SamplingRequest(own, 4, sampling, (1, "test"), record_experts=experts))
    return [r for group in ranks.unshard(groups) for r in group]


class Uneven(Echoes):
    """Every second episode ends with its first turn; with two ranks they are those of rank 0."""

    def environment(self, problem: Problem, position: tuple[int | str, ...]) -> Echo:
        return Echo(1 + 2 * (problem.index % 2), position)


def played(engine, experts: bool) -> list[Response]:
    """Episodes that the ranks share out: rank 0 has more chunks of them, rank 1 more turns."""
    task, ranks = Uneven(), engine.ranks
    own = ranks.shard([task.problem(0, "train", i) for i in range(5)])
    with letters_end_turns(engine.policy):
        groups = play(
            engine,
            task,
            SamplingRequest(own, 4, Sampling(1.0, 40), (1, "test"), record_experts=experts),
        )
    return [r for group in ranks.unshard(groups) for r in group]


@contextmanager
def letters_end_turns(policy: Policy) -> Iterator[None]:
    """Within: some letters are stop tokens of the policy, so that its turns are short. With experts
    vLLM knows no stop strings."""
    before = policy.stop_ids
    policy.stop_ids = before | set(policy.tokenizer.convert_tokens_to_ids(list(STOPS)))
    try:
        yield
    finally:
        policy.stop_ids = before


def story(engine, experts: bool = False) -> list[list[list[int]]]:
    """Tokens before and after the weights change, and those of episodes at the end; each time
    engine and policy are compared."""
    found = []
    handover = HandoverCheck(engine, "nothing")
    for step in range(3):
        if step:
            update(engine.policy)
            engine.load_weights(engine.policy.named_tensors())
            assert 0.999 < handover.check(step)["mismatch/sync_slope"] < 1.001
        assert check_engine(engine, problems()[:2], 1e-5, step) is not None
        for sampling in (GREEDY, SAMPLED):
            responses = sampled(engine, sampling, experts)
            handover.record([[r] for r in responses])
            found.append([r.token_ids for r in responses])
            if experts:
                check_routes(responses, MODEL.layers, MODEL.experts_per_token, MODEL.experts)
    episodes = played(engine, experts)
    if experts:
        check_routes(episodes, MODEL.layers, MODEL.experts_per_token, MODEL.experts)
    return [*found, [r.token_ids for r in episodes]]


@cache
def of_one_process() -> list[list[list[int]]]:
    engine = VLLMEngine(whole_policy(), settings())
    try:
        return story(engine)
    finally:
        engine.close()

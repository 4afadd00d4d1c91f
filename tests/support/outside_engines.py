"""What is asked of an engine outside the trainer's process, with one rank or several, be it vLLM or its server."""

from functools import cache

import torch

from builders import problems, small_policy
from gspo.core.ranks import Ranks
from gspo.core.types import Response
from gspo.model.loading import TinyMoE
from gspo.model.policy import Policy
from gspo.model.sharding import Shards
from gspo.rollout.requests import Sampling
from gspo.rollout.route_checks import check_routes
from gspo.rollout.sampler_logprobs import check_engine
from gspo.rollout.settings import VLLMRollout
from gspo.rollout.vllm import VLLMEngine

SECONDS = 500  # two engines start on a busy machine
MODEL = TinyMoE(hidden=64, layers=2, heads=2, experts=8, experts_per_token=2, expert_width=16)
GREEDY, SAMPLED = Sampling(0.0, 20), Sampling(1.0, 20)


def whole_policy() -> Policy:
    return small_policy(MODEL)


def spread_policy(ranks: Ranks) -> Policy:
    policy = whole_policy()
    shards = Shards(ranks, ranks.count, "cpu")
    shards.spread(policy.model, torch.float32)
    return Policy(policy.model, policy.tokenizer, shards=shards)


@torch.no_grad()
def update(policy: Policy) -> None:
    """Change the weights in the same way whether they are spread or not."""
    for parameter in policy.model.parameters():
        parameter.mul_(1.2)


def settings(**changed) -> VLLMRollout:
    return VLLMRollout(**{"kv_cache_gib": 0.25, "batch_rows": 8, "max_model_len": 256} | changed)


def sampled(engine, sampling: Sampling, experts: bool) -> list[Response]:
    """The responses to problems that the ranks share out unevenly."""
    ranks = engine.ranks
    own = ranks.own(problems())
    groups = engine.generate(own, 4, sampling, (1, "test"), record_experts=experts)
    return [r for group in ranks.merged(groups) for r in group]


def story(engine, experts: bool = False) -> list[list[list[int]]]:
    """Tokens before and after the weights change; each time engine and policy are compared."""
    found = []
    for step in range(3):
        if step:
            update(engine.policy)
            engine.load_weights(engine.policy.named_tensors())
        assert check_engine(engine, problems()[:2], 1e-5, step) is not None
        for sampling in (GREEDY, SAMPLED):
            responses = sampled(engine, sampling, experts)
            found.append([r.token_ids for r in responses])
            if experts:
                check_routes(responses, MODEL.layers, MODEL.experts_per_token, MODEL.experts)
    return found


@cache
def of_one_process() -> list[list[list[int]]]:
    engine = VLLMEngine(whole_policy(), settings())
    try:
        return story(engine)
    finally:
        engine.close()

"""Small real models, problems and batches."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gspo.data.batch import TrainBatch
from gspo.data.pack import pack
from gspo.data.problems import Problem
from gspo.data.samples import Response
from gspo.model.policy import Policy
from gspo.model.settings import TinyMoE
from gspo.model.sharding.dtensors import full_tensor
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest

PROMPTS = ["7+5=?", "3-8+9-2=?", "4+4+4+4+4+4=?", "#add 3, times 2\ndef f(x):\n", "9-1=?"]


def small_policy(model=None) -> Policy:
    """A random model whose logits are far enough apart that greedy choices and routes are not ties."""
    model = model or TinyMoE(
        hidden=32, layers=3, heads=2, experts=8, experts_per_token=2, expert_width=16
    )
    network, tokenizer = model.make()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25, generator=g)
    return Policy(network, tokenizer)


def perturb(policy: Policy, scale: float, seed: int = 3) -> None:
    """Change the weights, as an update would."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=g))


def problems() -> list[Problem]:
    return [Problem("math", i, prompt, "0") for i, prompt in enumerate(PROMPTS)]


def sample(policy: Policy, group_size: int = 3, tokens: int = 12, **options) -> list[Response]:
    groups = LocalEngine(policy).generate(
        SamplingRequest(problems(), group_size, Sampling(1.0, tokens), (1, "test"), **options)
    )
    return [r for group in groups for r in group]


def batch_of(policy: Policy, responses: list[Response]) -> TrainBatch:
    g = torch.Generator().manual_seed(2)
    batch = pack(responses, policy.tokenizer.pad_token_id)
    adv_BT = torch.zeros(batch.mask_BT.shape) + torch.randn(len(responses), 1, generator=g)
    scored = policy.score(batch, micro_batch_size=4)
    return batch.with_old_policy(scored.logp_BT, scored.experts_BSLK).with_advantages(adv_BT)


def fed(batch: TrainBatch) -> torch.Tensor:
    """The real positions but each row's last: those that predict something, and so are computed."""
    following = torch.nn.functional.pad(batch.attention_BS[:, 1:], (0, 1), value=False)
    return batch.attention_BS & following


@contextmanager
def recorded_gradients() -> Iterator[list[list[torch.Tensor]]]:
    """Within: the gradients that every optimizer is given, whole, one list of tensors per update."""
    kept: list[list[torch.Tensor]] = []

    def keep(optimizer: torch.optim.Optimizer, *_) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kept.append([full_tensor(p.grad).clone() for p in parameters if p.grad is not None])

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


# AdamW whose step is a smooth function of the gradient, lr g / (|g| + 1). At the usual eps the
# first step is lr times the sign of g, so that a gradient that is zero but for rounding moves its
# weight by lr either way, on every CPU anew.
SMOOTH = {"lr": 0.03, "eps": 1.0}


def assert_same_sums(ours: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """Gradients, or what depends on them smoothly, that are sums of the same float32 numbers in
    another order.

    Each of some thousand additions rounds by 6e-8 of what has been summed so far, which may be a few
    times the sum: 5e-4 of the tensor's largest entry leaves room for all of them on one side.
    """
    assert len(ours) == len(others)
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b, atol=5e-4 * float(b.abs().max()) + 1e-9, rtol=0)

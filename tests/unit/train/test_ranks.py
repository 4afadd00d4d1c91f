"""Several ranks train as one process does: the same tokens, the same gradients up to rounding, the
same metrics.
"""

from functools import partial

import pytest
import torch

from builders import SMOOTH, recorded_gradients
from daily import daily_but
from gspo.algorithm.advantages import GAE, GroupNormalized, ReinforcePP
from gspo.algorithm.aggregation import Aggregation
from gspo.algorithm.corrections import TIS
from gspo.algorithm.kl import KLInLoss, KLInReward
from gspo.algorithm.masks import M2PO
from gspo.algorithm.objectives import DAPO, GRPO, GSPO, P3O, PPO
from gspo.algorithm.reward_shaping import RewardShaping
from gspo.distributed.ranks import Ranks, buckets
from gspo.model.policy import Policy
from gspo.model.settings import TinyDense
from gspo.rollout.settings import RolloutSettings
from gspo.train.signal_probe import SignalProbe
from ranked import ranked
from trainers import gap_trainer, trainer

DENSE = TinyDense(hidden=32, layers=2, heads=2, width=48)
MEAN = Aggregation("seq-mean-token-mean")
FEW = RolloutSettings(prompts_per_step=5, group_size=4, max_new_tokens=10)
KEPT = RolloutSettings(
    prompts_per_step=8, group_size=4, max_new_tokens=10, top_p=0.8, keep_mask=True
)
CASES = {  # how the trainer is made, and on how many ranks
    "gspo": (partial(trainer, GSPO(), **SMOOTH), 2),
    "grpo, three ranks": (partial(trainer, GRPO(), **SMOOTH), 3),
    "more ranks than a mini-batch has groups": (
        partial(trainer, GSPO(), rollout=FEW, minibatches=5, **SMOOTH),
        3,
    ),
    "dense": (partial(trainer, GSPO(), model=DENSE, **SMOOTH), 2),
    "two epochs, token mean": (
        partial(trainer, DAPO(), epochs=2, aggregation=Aggregation("token-mean"), **SMOOTH),
        2,
    ),
    "kept tokens": (
        partial(
            trainer,
            GRPO(),
            rollout=KEPT,
            parts={"kl": KLInLoss(coef=0.2, aggregation=MEAN)},
            entropy_coef=0.1,
            **SMOOTH,
        ),
        2,
    ),
    "old pass skipped": (partial(trainer, GSPO(), old_pass="auto", **SMOOTH), 2),
    "r2": (partial(trainer, GRPO(), replay="r2", **SMOOTH), 2),
    "r3": (partial(gap_trainer, GRPO(), replay="r3", staleness=1, **SMOOTH), 2),
    "load balance": (partial(trainer, GSPO(), router_aux_loss_coef=0.1, **SMOOTH), 3),
    "entropy held": (
        partial(
            trainer, GSPO(), entropy_coef=0.3, entropy_target=99.0, entropy_coef_delta=0.1, **SMOOTH
        ),
        3,
    ),
    "kl in the loss": (
        partial(
            trainer,
            GRPO(),
            parts={"kl": KLInLoss(coef=0.2, target=1e-6, horizon=64, aggregation=MEAN)},
            **SMOOTH,
        ),
        2,
    ),
    "kl in the reward": (partial(trainer, PPO(), parts={"kl": KLInReward(coef=0.2)}, **SMOOTH), 2),
    "critic": (partial(trainer, PPO(), parts={"advantage": GAE()}, **SMOOTH), 2),
    "whitened": (partial(trainer, GRPO(), parts={"advantage": ReinforcePP()}, **SMOOTH), 2),
    "std of the batch, running rewards": (
        partial(
            trainer,
            GSPO(),
            parts={
                "advantage": GroupNormalized(std="batch"),
                "reward": RewardShaping("running", "running"),
            },
            **SMOOTH,
        ),
        2,
    ),
    "correction": (
        partial(
            gap_trainer, GRPO(), parts={"correction": TIS(normalize=True)}, staleness=1, **SMOOTH
        ),
        2,
    ),
    "m2po": (
        partial(
            gap_trainer,
            GRPO(),
            parts={"correction": M2PO(threshold=1e-6)},
            staleness=1,
            **SMOOTH,
        ),
        2,
    ),
    "p3o": (partial(trainer, P3O(), **SMOOTH), 3),
    "truncated rows masked": (partial(trainer, GSPO(), mask_truncated=True, **SMOOTH), 2),
    "dynamic sampling": (
        partial(
            trainer,
            GRPO(),
            rollout=RolloutSettings(
                prompts_per_step=8, group_size=4, max_new_tokens=10, refill_rounds=2
            ),
            **SMOOTH,
        ),
        2,
    ),
    "stale, as the sampler had them": (
        partial(gap_trainer, GSPO(), old="behaviour", staleness=1, **SMOOTH),
        2,
    ),
    "stale, beside the training": (
        partial(gap_trainer, GSPO(), staleness=1, overlap=True, **SMOOTH),
        2,
    ),
    "partial rollouts": (
        partial(gap_trainer, GRPO(), old="behaviour", token_budget=4, in_flight=12, **SMOOTH),
        2,
    ),
}


def trained(make, ranks: Ranks, another: Ranks, steps: int = 2) -> tuple[list, list, list]:
    """The responses' tokens and rewards, the gradients before they are clipped, and the metrics of
    a few steps.
    """
    t = make(ranks=ranks, engine_ranks=another, max_grad_norm=1e9)
    tokens, metrics = [], []
    with recorded_gradients() as gradients:
        for step in range(1, steps + 1):
            rollout = t.source.next(step)
            tokens.append([(r.token_ids, r.score.reward) for r in rollout.responses])
            metrics.append(t.train_step(step, rollout))
    t.source.close()
    return tokens, gradients, [timeless(row) for row in metrics]


def timeless(metrics: dict) -> dict:
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("time/", "throughput/", "compute/s"))
    }


def is_of_sync(name: str) -> bool:
    return name == "mismatch/after_sync" or name.startswith("mismatch/sync_")


def check_alike(
    one: tuple[list, list, list], several: list[tuple[list, list, list]], copied: bool
) -> None:
    """What several ranks did is what one process did. `copied` says that the ranks' engines have a
    copy of the weights, so that they measure it too."""
    tokens, gradients, metrics = one
    largest = max(float(g.abs().max()) for update in gradients for g in update)
    assert largest > 1e-3
    for other_tokens, other_gradients, other_metrics in several:
        assert other_tokens == tokens
        assert len(other_gradients) == len(gradients) > 4
        for one, other in zip(gradients, other_gradients, strict=True):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(b, a, atol=5e-6 * max(largest, 1.0), rtol=0)
        for one, other in zip(metrics, other_metrics, strict=True):
            new = {name for name in set(other) - set(one) if not copied or not is_of_sync(name)}
            assert not new and set(one) <= set(other)
            for name, value in one.items():
                if not name.startswith("ratio/floor_"):  # rounding, which is each process's own
                    assert other[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    first, *others = several
    for other in others:
        for a, b in zip(first[1], other[1], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), (
                "the ranks' own weights would part"
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    daily_but(
        CASES,
        "grpo, three ranks",
        "more ranks than a mini-batch has groups",
        "r3",
        "kl in the reward",
        "dynamic sampling",
        "partial rollouts",
        "p3o",
    ),
)
def test_ranks_train_as_one_process_does(case):
    make, count = CASES[case]
    one = trained(make, Ranks(), Ranks())
    check_alike(
        one, ranked(count, lambda ranks: trained(make, ranks, ranks.new_group())), copied=False
    )


def spread_over(ranks: Ranks, size: int, experts: int = 1, **settings):
    """What spreads a policy's weights, `size` ranks to a copy and the experts dealt to `experts` of
    them.
    """
    from gspo.model.sharding.fsdp import Shards

    def spread(policy: Policy) -> Policy:
        shards = Shards(ranks, size, "cpu", experts)
        shards.shard_model(policy.model, settings.get("precision", torch.float32))
        return Policy(policy.model, policy.tokenizer, policy.temperature, shards=shards, **settings)

    return spread


def of_case(case: str) -> partial:
    return CASES[case][0]


SPREAD = (
    {case: (make, count, count, {}) for case, (make, count) in CASES.items()}
    | {
        "two copies": (of_case("gspo"), 4, 2, {}),
        "two copies, some ranks idle": (
            of_case("more ranks than a mini-batch has groups"),
            4,
            2,
            {},
        ),
        "two copies, critic": (of_case("critic"), 4, 2, {}),
        "two copies, kl in the loss": (of_case("kl in the loss"), 4, 2, {}),
        "one copy on each rank": (of_case("gspo"), 2, 1, {}),
        "four ranks, r2": (of_case("r2"), 4, 4, {}),
        "layers computed again, r2": (of_case("r2"), 2, 2, {"checkpointing": True}),
        "layers computed again, load balance": (
            of_case("load balance"),
            3,
            3,
            {"checkpointing": True},
        ),
        "experts dealt to two": (of_case("gspo"), 2, 2, {"experts": 2}),
        "experts dealt to two, r3": (of_case("r3"), 2, 2, {"experts": 2}),
        "experts dealt to two of four, r2": (of_case("r2"), 4, 4, {"experts": 2}),
        "experts dealt to two, some ranks idle": (
            of_case("more ranks than a mini-batch has groups"),
            4,
            4,
            {"experts": 2},
        ),
        "experts dealt to four, layers computed again, load balance": (
            of_case("load balance"),
            4,
            4,
            {"experts": 4, "checkpointing": True},
        ),
        "experts dealt to two, two copies, kl in the loss": (
            of_case("kl in the loss"),
            4,
            2,
            {"experts": 2},
        ),
        "experts dealt to two, critic": (of_case("critic"), 2, 2, {"experts": 2}),
    }
)  # how the trainer is made, on how many ranks, how many of them hold a copy, and settings of the policy
ROUNDED = {  # the case, settings of the policy, and the updates whose gradients are compared
    "dense": ("dense", {}, None),
    "moe": ("gspo", {}, None),
    "moe, layers computed again": ("gspo", {"checkpointing": True}, None),
    # An expert multiplies the tokens of both ranks at once, and their gradients are rounded
    # together. Adam turns the rounding of a small gradient into a whole step, and after two updates
    # the gradients have little in common. The first gradient alone tells right from wrong.
    "moe, experts dealt": ("gspo", {"experts": 2}, 1),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    daily_but(
        SPREAD,
        "gspo",
        "more ranks than a mini-batch has groups",
        "r3",
        "kl in the reward",
        "critic",
        "dynamic sampling",
        "stale, beside the training",
        "partial rollouts",
        "two copies, some ranks idle",
        "four ranks, r2",
        "layers computed again, load balance",
        "experts dealt to two, r3",
        "experts dealt to two of four, r2",
        "experts dealt to two, critic",
    ),
)
def test_ranks_that_share_out_the_weights_train_as_one_process_does(case):
    make, count, size, settings = SPREAD[case]
    if "old_pass" in make.keywords:  # an engine with a copy of the weights cannot spare that pass
        make = partial(make, old_pass="always")
    one = trained(make, Ranks(), Ranks())
    check_alike(
        one, ranked(count, lambda ranks: trained_spread(make, ranks, size, **settings)), copied=True
    )


def trained_spread(make, ranks: Ranks, size: int, **settings) -> tuple[list, list, list]:
    return trained(
        partial(make, spread=spread_over(ranks, size, **settings)), ranks, ranks.new_group()
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", daily_but(ROUNDED, "moe, layers computed again", "moe, experts dealt")
)
def test_spread_weights_are_multiplied_in_bfloat16_by_our_own_forward(case):
    """As many ranks with the whole model each give the same numbers. Another number of ranks does
    not: it forms other micro-batches, whose rounding in bfloat16 is wider than GSPO's clip range.
    """
    name, settings, updates = ROUNDED[case]
    make = partial(of_case(name), old_pass="always")

    def rounded(ranks, **where):
        def again(policy: Policy) -> Policy:
            checkpointing = settings.get("checkpointing", False)
            return Policy(
                policy.model,
                policy.tokenizer,
                precision=torch.bfloat16,
                checkpointing=checkpointing,
            )

        policy = (
            spread_over(ranks, ranks.world_size, precision=torch.bfloat16, **settings)
            if where["spread"]
            else again
        )
        t = partial(make, spread=policy)
        return trained(t, ranks, ranks.new_group(), 1), t().policy.network is not None

    for spread, alone in zip(
        ranked(2, partial(rounded, spread=True)),
        ranked(2, partial(rounded, spread=False)),
        strict=True,
    ):
        (tokens, gradients, _), own = spread
        assert own and tokens == alone[0][0]
        assert len(gradients) == len(alone[0][1]) > 1
        for a, b in list(zip(gradients, alone[0][1], strict=True))[:updates]:
            for one, other in zip(a, b, strict=True):
                if updates is None:
                    atol = 5e-6 * max(1.0, float(other.abs().max()))
                    torch.testing.assert_close(one, other, atol=atol, rtol=0)
                else:  # bfloat16 rounds to 8 bits: by .4 % of a number, in each of three layers
                    assert (one - other).norm() < 0.03 * other.norm()


def probed(make, ranks: Ranks, engine_ranks: Ranks) -> dict[str, float]:
    """Return what the probe measures of a step that has old responses."""
    t = make(ranks=ranks, engine_ranks=engine_ranks, max_grad_norm=1e9)
    t.probe = SignalProbe(information_every=2, snr_every=2)
    t.train_step(1, t.source.next(1))
    metrics = t.train_step(2, t.source.next(2))
    t.source.close()
    assert metrics["optim/gradient_noise"] > 0
    names = [*SIGNALS, *(name for name in metrics if name.startswith("information/"))]
    # with M2PO a half has no gradient, and the cosine is left out
    return {name: metrics[name] for name in names if name in metrics}


SIGNALS = ("optim/gradient_signal", "optim/gradient_noise", "optim/snr", "optim/snr_cosine")


@pytest.mark.slow
@pytest.mark.parametrize("case", daily_but(["p3o", "m2po", "gspo"], "p3o"))
def test_ranks_measure_the_signal_of_one_process(case):
    make = of_case(case)
    one = probed(make, Ranks(), Ranks())
    for other in ranked(2, lambda ranks: probed(make, ranks, ranks.new_group())):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-6)


PROBED = ["gspo", "two copies, some ranks idle", "experts dealt to two, two copies, kl in the loss"]


@pytest.mark.distributed
@pytest.mark.parametrize("case", PROBED)
def test_ranks_that_share_out_the_weights_measure_the_signal_of_one_process(case):
    """Weights that several ranks hold count once, and a rank without responses takes part."""
    make, count, size, settings = SPREAD[case]
    one = probed(make, Ranks(), Ranks())

    def spread(ranks):
        policy = spread_over(ranks, size, **settings)
        return probed(partial(make, spread=policy), ranks, ranks.new_group())

    for other in ranked(count, spread):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_totals_of_one_rank_alone_would_be_noticed():
    """The negative control: where each rank divides by the counts of its own rows, gradients are
    those of no batch.
    """
    make, count = CASES["gspo"]
    _, gradients, _ = trained(make, Ranks(), Ranks(), 1)

    def with_own_totals(**options):
        t = make(**options)
        update = t.update
        t.update = lambda batch, own_B, *rest: update(batch.rows(own_B), own_B[own_B], *rest)
        return t

    other = ranked(count, lambda ranks: trained(with_own_totals, ranks, ranks.new_group(), 1))[0][1]
    one = torch.cat([g.flatten() for g in gradients[0]])
    assert torch.cat([g.flatten() for g in other[0]]).norm() > 1.5 * one.norm()


# ------------------------------------------------------------------------------------------------------------
# parts
def test_what_is_dealt_comes_back_in_its_order():
    def deal(ranks):
        items = [f"item {i}" for i in range(5)]
        own = ranks.shard(items)
        return (
            list(own),
            ranks.unshard(own),
            ranks.unshard([]),
            ranks.any(ranks.rank == 1),
            ranks.any(False),
        )

    found = ranked(3, deal)
    items = [f"item {i}" for i in range(5)]
    assert [own for own, *_ in found] == [["item 0", "item 3"], ["item 1", "item 4"], ["item 2"]]
    assert all(rest == [items, [], True, False] for _, *rest in found)
    assert Ranks().unshard(Ranks().shard(items)) == items


def test_gradients_are_added_and_untouched_parameters_stay_without():
    def add(ranks):
        parameters = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3)]
        parameters[0].grad = torch.full((2, 3), float(ranks.rank + 1))
        if ranks.rank == 1:  # only this rank's rows met it
            parameters[1].grad = torch.ones(2, 3)
        ranks.all_reduce_gradients(parameters)
        return [None if p.grad is None else p.grad.unique().tolist() for p in parameters]

    assert ranked(2, add) == [[[3.0], [1.0], None]] * 2


def test_buckets_hold_one_dtype_and_no_more_than_their_size():
    small, half, large = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(9)
    cut = buckets([small, small, small, half, large, small], max_numel=8)
    assert [[len(t) for t in bucket] for bucket in cut] == [[4, 4], [4], [4], [9], [4]] and cut[2][
        0
    ] is half

"""What `gspo plan` says of a run: numbers worked out by hand, and of a large model as others have
measured it.
"""

import sys
from unittest.mock import ANY, patch

import pytest
import torch

from gspo.cli import plan as command
from gspo.cli.plan import composed_settings, lines_of, with_options
from gspo.planning.hardware import GB, RESERVE, hardware
from gspo.planning.memory import measure
from gspo.planning.models import config_of
from gspo.planning.plan import ACTIVATIONS, MAX_TEMPLATE_TOKENS, advice, plan
from gspo.planning.records import record_bytes
from gspo.planning.scaling import efficiency, smallest, strong, weak
from gspo.planning.times import TO_EXPERTS
from recorded_measurements import measurement, record, recorded
from refusals import refuses

H100 = hardware("h100")
SMALL = ["task=math", "model=tiny_dense", "rollout.prompts_per_step=8", "rollout.group_size=4"]
WIDE = [
    *SMALL, "model.layers=2", "model.hidden=512", "rollout.max_new_tokens=8", "trainer.micro_batch_size=1",
]  # fmt: skip
LARGE = [
    "task=math", "model=hf", "model.path=Qwen/Qwen3-30B-A3B", "policy.precision=bfloat16", "policy.checkpointing=true",
    "trainer.micro_batch_size=1", "rollout.dtype=bfloat16", "rollout.batch_rows=16",
    "rollout.prompts_per_step=512", "rollout.group_size=16", "rollout.max_new_tokens=7680", "parallel.mode=shard",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def recorded_measurements():
    """Plans differ in what they make of the measurements, so these are read from a file."""
    with patch("gspo.planning.plan.measure", measurement):
        yield
    record()


def planned(*words, gpu=H100, prompt=0):
    return plan(composed_settings([*words]), gpu, prompt)


def test_what_one_gpu_holds_is_what_one_works_out_by_hand():
    made = planned(*SMALL, "rollout.max_new_tokens=80", prompt=20)
    weights = 4 * sum(p.numel() for p in made.settings.model.make()[0].parameters())
    update = made.phases["update"]
    assert (
        update["weights"] == update["gradients"] == weights
        and update["AdamW's moments"] == 2 * weights
    )
    assert "reference policy" not in update and "engine" not in update and not made.traffic
    coarse = planned(
        *SMALL, "rollout.max_new_tokens=80", "optim.name=adamw_8bit", prompt=20
    ).phases["update"]
    assert coarse["AdamW's moments"] == pytest.approx(weights / 2 * (1 + 4 / 256)), (
        "a byte for each, a scale for 256"
    )
    config = made.settings.model.make()[0].config
    of_a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert made.phases["rollout"]["keys and values"] == 32 * (20 + 80) * of_a_token
    assert made.fits and advice(made) == [
        f"1 GPU: fits, {made.peak[1] / GB:.0f} GB of 80 in the phase `{made.peak[0]}`."
    ]


def test_an_episode_holds_what_the_environment_writes_too_as_far_as_there_are_positions():
    words = [
        "task=guessing",
        *SMALL[1:],
        "rollout.max_new_tokens=80",
        "task.turns=5",
        "task.observation_tokens=10",
    ]
    config = planned(*words, prompt=20).settings.model.make()[0].config
    of_a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    cached = planned(*words, prompt=20).phases["rollout"]["keys and values"]
    assert cached == 2 * 32 * (20 + 80 + 4 * (10 + MAX_TEMPLATE_TOKENS)) * of_a_token, (
        "in the cache, and taken out between turns"
    )
    most = planned(*words[:-1], "task.observation_tokens=100000", prompt=20).phases["rollout"][
        "keys and values"
    ]
    assert most == 2 * 32 * config.max_position_embeddings * of_a_token


def test_what_an_environment_writes_is_no_sampling_step():
    words = ["task=guessing", *SMALL[1:], "rollout.max_new_tokens=80", "task.observation_tokens=10"]
    one_turn = planned(*words, "task.turns=1", prompt=20)
    five_turns = planned(*words, "task.turns=5", prompt=20)
    names = ("rollout: kernels launched", "rollout: arithmetic")
    launches, arithmetic = ([p.times[name] for p in (one_turn, five_turns)] for name in names)
    assert launches[0] == launches[1], "80 tokens are sampled in both"
    written = 4 * (10 + MAX_TEMPLATE_TOKENS)
    assert arithmetic[1] / arithmetic[0] == pytest.approx((80 + written + 5) / (80 + 5)), (
        "the prompt of 20 tokens, once for the group of four"
    )


def test_float32_sampling_is_slower_and_a_rank_samples_whole_groups():
    words = [*SMALL, "rollout.max_new_tokens=80"]
    times = [
        planned(*words, f"rollout.dtype={t}", prompt=20).times for t in ("float32", "bfloat16")
    ]
    assert times[0]["rollout: arithmetic"] == pytest.approx(8 * times[1]["rollout: arithmetic"])
    spread = [*words, "parallel.mode=replicate", "rollout.batch_rows=64"]
    uneven = planned(*spread, "rollout.prompts_per_step=12", "parallel.ranks=8", prompt=20)
    assert uneven.engine.rows == 8 and uneven.work.scored == 6, "two groups of four on one rank"


@pytest.mark.slow
def test_what_settings_add():
    plain = planned(*SMALL)
    kl = planned(*SMALL, "kl=loss", "kl.coef=0.01")
    assert kl.phases["update"]["reference policy"] == kl.phases["update"]["weights"]
    rounded = planned(*SMALL, "rollout.dtype=bfloat16")
    assert rounded.phases["update"]["engine"] == plain.phases["update"]["weights"] / 2, (
        "a copy to sample with"
    )
    assert (
        rounded.phases["rollout"]["keys and values"]
        == plain.phases["rollout"]["keys and values"] / 2
    )
    again = planned(*SMALL, "policy.checkpointing=true")
    assert again.phases["update"][ACTIVATIONS] < plain.phases["update"][ACTIVATIONS]
    assert again.times["update: arithmetic"] == pytest.approx(
        4 / 3 * plain.times["update: arithmetic"]
    )
    epochs = planned(*SMALL, "trainer.epochs=3")
    assert epochs.times["update: arithmetic"] == pytest.approx(
        3 * plain.times["update: arithmetic"]
    )
    few = planned(*SMALL, "trainer.minibatches=8", "trainer.micro_batch_size=32")
    assert few.work.rows == 4 and few.work.scored == 32, "a mini-batch has four responses"
    assert few.phases["update"][ACTIVATIONS] < plain.phases["update"][ACTIVATIONS]
    assert plain.times["old log-probs: arithmetic"] == 0, "the engine has just computed them"
    for needs in ("policy.precision=bfloat16", "rollout.staleness=1", "policy.old_pass=always"):
        assert planned(*SMALL, needs).times["old log-probs: arithmetic"] > 0, needs
    critic = planned(*SMALL, "objective=grpo", "advantage=gae")
    assert critic.times["old log-probs: arithmetic"] > 0, "values are computed with them"
    beside = planned(*SMALL, "rollout.staleness=1", "rollout.overlap=true").phases
    assert (
        beside["update"]["engine"]
        > beside["rollout"]["engine's weights"]
        == beside["update"]["weights"]
    )
    copies = beside["rollout"]["copies to sample from"]
    assert copies == beside["update"]["weights"], "of the batch that waits to be sampled"
    rounded = planned(
        *SMALL, "rollout.staleness=2", "rollout.overlap=true", "rollout.dtype=bfloat16"
    ).phases
    assert rounded["rollout"]["copies to sample from"] == 3 * copies
    assert "copies to sample from" not in plain.phases["rollout"]
    share = planned(*SMALL, "rollout=vllm", "rollout.gpu_memory=0.25")
    assert share.phases["update"]["engine"] == 0.25 * 80 * GB
    assert "engine" not in planned(*SMALL, "rollout=vllm", "rollout.sleep=true").phases["update"]
    elsewhere = planned(*SMALL, "rollout=vllm_server")
    assert not [name for held in elsewhere.phases.values() for name in held if "engine" in name]
    assert elsewhere.times["old log-probs: arithmetic"] > 0


@pytest.mark.slow
def test_with_an_adapter_gradients_and_moments_are_its_own_and_the_reference_takes_nothing():
    dense, kl = planned(*SMALL), ("kl=loss", "kl.coef=0.01")
    made = planned(*SMALL, *kl, "policy.lora.rank=4")
    model = made.settings.model.make()[0]
    weights = 4 * sum(p.numel() for p in model.parameters())
    adapted = {name: p for name, p in model.named_parameters() if "proj" in name}
    adapter = sum(4 * 4 * sum(p.shape) for p in adapted.values())
    update, rollout = made.phases["update"], made.phases["rollout"]
    assert update["weights"] == weights + adapter
    assert update["gradients"] == adapter and update["AdamW's moments"] == 2 * adapter
    assert "reference policy" not in update and "engine" not in update
    assert rollout["engine's weights"] == 4 * sum(p.numel() for p in adapted.values()), (
        "merged while it samples"
    )
    assert made.times["update: arithmetic"] == pytest.approx(
        2 / 3 * dense.times["update: arithmetic"]
    )
    without_reference = planned(*SMALL, "policy.lora.rank=4")
    assert without_reference.times["old log-probs: arithmetic"] == 0, (
        "the engine has just computed them"
    )
    ranks = planned(*SMALL, "policy.lora.rank=4", "parallel.mode=replicate", "parallel.ranks=2")
    assert list(ranks.traffic.values()) == [2.0 * 4 * adapter], (
        "the adapter's gradients, in each of four updates"
    )


@pytest.mark.slow
def test_what_ranks_exchange():
    """All-reduce sends gradients twice; FSDP gathers weights in each pass and adds gradients in
    each that learns.
    """
    words = [
        *SMALL,
        "trainer.minibatches=2",
        "trainer.micro_batch_size=4",
        "policy.old_pass=always",
    ]
    copies = planned(*words, "parallel.mode=replicate", "parallel.ranks=4")
    weights = copies.phases["update"]["weights"]
    assert copies.traffic == {"gradients between copies": 2 * 2 * weights}, "two updates"
    shards = planned(*words, "parallel.mode=shard", "parallel.ranks=4")
    assert shards.phases["update"]["weights"] == pytest.approx(weights / 4, rel=0.02)
    assert shards.traffic["gradients"] == pytest.approx(2 * weights, rel=0.02), (
        "two micro-batches of four learn"
    )
    assert shards.traffic["weights gathered to score"] == pytest.approx(2 * weights, rel=0.02)
    assert shards.traffic["weights gathered to learn"] == pytest.approx(2 * 2 * weights, rel=0.1), (
        "there and back"
    )
    machine = hardware("h100,per_machine=2")
    hybrid = planned(
        *words, "parallel.mode=shard", "parallel.ranks=4", "parallel.shard_size=2", gpu=machine
    )
    across = planned(*words, "parallel.mode=shard", "parallel.ranks=4", gpu=machine)
    assert hybrid.times["exchange between GPUs"] < across.times["exchange between GPUs"] / 2, (
        "gathered in a machine"
    )
    assert hybrid.phases["update"]["weights"] == pytest.approx(weights / 2, rel=0.02)


@pytest.mark.slow
def test_tokens_travel_where_experts_are_dealt():
    """A layer sends every token to its K experts and back; in the backward pass the gradients go
    the same way.
    """
    words = [
        "task=math", "model=tiny_moe", "rollout.prompts_per_step=8", "rollout.group_size=4", "trainer.minibatches=2",
        "trainer.micro_batch_size=4", "policy.old_pass=always", "parallel.mode=shard", "parallel.ranks=4",
    ]  # fmt: skip
    gathered, dealt = planned(*words, prompt=20), planned(*words, "parallel.experts=2", prompt=20)
    config = dealt.settings.model.make()[0].config
    tokens = 4 * dealt.work.response + 20  # the four responses of a micro-batch share a prompt
    once = 4 * tokens * config.num_experts_per_tok * config.hidden_size * config.num_hidden_layers
    assert dealt.traffic[TO_EXPERTS] == pytest.approx((2 * 4 + 2 * 2) * once, rel=0.03), (
        "two micro-batches learn, two are scored"
    )
    experts = 4 * sum(
        p.numel() for n, p in dealt.settings.model.make()[0].named_parameters() if ".experts." in n
    )
    saved = gathered.traffic["gradients"] - dealt.traffic["gradients"]
    assert saved == pytest.approx(2 * experts / 2, rel=0.03), (
        "an expert's gradients are reduced by those that have it"
    )
    assert dealt.phases["update"]["weights"] == pytest.approx(
        gathered.phases["update"]["weights"], rel=0.02
    )


@pytest.mark.slow
def test_an_advice_is_tried_before_it_is_given():
    words = [
        *SMALL,
        "model.layers=2",
        "model.hidden=256",
        "rollout.max_new_tokens=400",
        "trainer.micro_batch_size=32",
    ]
    whole = planned(*words)
    update = whole.phases["update"]
    fixed = sum(update.values()) - update[ACTIVATIONS]
    tight = hardware(f"h100,memory={(fixed + 0.3 * update[ACTIVATIONS]) / GB + RESERVE}")
    made = planned(*words, gpu=tight)
    assert not made.fits
    first, last = advice(made)
    assert first.startswith("1 GPU: does not fit,") and last.startswith(
        "It fits with policy.checkpointing=true"
    )
    changed = last.removeprefix("It fits with ").partition(":")[0].split()
    assert planned(*words, *changed, gpu=tight).fits
    words = WIDE
    weights = planned(*words, prompt=8).phases["update"]["weights"]
    small = hardware(f"h100,memory={3.0 * weights / GB + RESERVE}")
    line = advice(planned(*words, gpu=small, prompt=8))[1]
    changed = line.removeprefix("It fits with ").partition(":")[0].split()
    assert {"parallel.mode=shard", "rollout.dtype=bfloat16"} <= set(changed)
    assert planned(*words, *changed, gpu=small, prompt=8).fits
    hopeless, least = (
        hardware("h100,memory=5.000001"),
        ["policy.checkpointing=true", "rollout.batch_rows=4"],
    )
    assert advice(planned(*words, gpu=hopeless))[1].startswith(
        "It does not fit with rollout.batch_rows=8"
    )
    assert advice(planned(*words, *least, gpu=hopeless))[1].startswith("There is no setting")


@pytest.mark.slow
def test_no_advice_is_a_setting_that_another_setting_forbids():
    words = [*WIDE, "policy.checkpointing=true"]
    weights = planned(*words, prompt=8).phases["update"]["weights"]
    # weights, gradients and moments take four times the weights, and one GPU is not sharded
    small = hardware(f"h100,memory={4.1 * weights / GB + RESERVE}")
    line = advice(planned(*words, "parallel.mode=replicate", gpu=small, prompt=8))[1]
    assert line.startswith("It fits with parallel.mode=shard parallel.ranks=4")
    small = hardware(f"h100,memory={3.0 * weights / GB + RESERVE}")
    words += ["rollout=vllm", "rollout.gpu_memory=0.005"]
    line = advice(planned(*words, gpu=small, prompt=8))[1]
    assert line.startswith("It fits with rollout.sleep=true parallel.mode=shard parallel.ranks=8")
    line = advice(planned(*words, "rollout.own_process=false", gpu=small, prompt=8))[1]
    assert line.startswith("It does not fit with rollout.sleep=true either")


@pytest.mark.slow
def test_a_share_for_vllm_that_does_not_fit_is_lowered_to_one_that_does():
    words = [
        *SMALL,
        "model.hidden=512",
        "rollout=vllm",
        "rollout.sleep=true",
        "rollout.max_new_tokens=80",
    ]
    held = planned(*words).phases["rollout"]
    trainers = sum(held.values()) - held["engine's weights"] - held["keys and values"]
    # the trainer leaves half of it
    card = hardware(f"h100,memory={(trainers / 0.5 + RESERVE * GB / 0.5) / GB}")
    made = planned(*words, "rollout.gpu_memory=0.8", gpu=card)
    first, last = advice(made)
    assert "does not fit" in first and last.startswith("It fits with rollout.gpu_memory=0.5:")
    assert planned(*words, "rollout.gpu_memory=0.5", gpu=card).fits


@pytest.mark.slow
def test_experts_are_dealt_where_gathering_them_takes_too_much():
    words = [
        "task=math", "model=tiny_moe", "model.hidden=256", "model.experts=32", "model.expert_width=512",
        "model.layers=2", "rollout.max_new_tokens=8", "trainer.micro_batch_size=1", "policy.checkpointing=true",
        "rollout.dtype=bfloat16", "rollout.prompts_per_step=4", "parallel.mode=shard", "parallel.ranks=2",
    ]  # fmt: skip
    gathered, dealt = (
        planned(*words, *more, prompt=8).peak[1] for more in ([], ["parallel.experts=2"])
    )
    assert dealt < gathered
    between = hardware(f"h100,memory={(0.3 * gathered + 0.7 * dealt) / GB}")
    assert advice(planned(*words, prompt=8, gpu=between))[1].startswith(
        "It fits with parallel.experts=2:"
    )


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            ["parallel.ranks=4"],
            ("parallel.ranks", 4, "or replicate"),
        ),
        (
            ["parallel.mode=shard", "parallel.ranks=4", "parallel.shard_size=3"],
            ("parallel.shard_size", 3, "does not divide"),
        ),
        (
            ["parallel.mode=shard", "parallel.ranks=4", "parallel.experts=3"],
            ("parallel.experts", 3, "does not divide the 4 processes"),
        ),
        (["parallel.mode=shard"], ("parallel.mode", "shard", "set the number of GPUs")),
        (
            [
                "parallel.mode=shard",
                "parallel.ranks=4",
                "rollout=vllm",
                "rollout.tensor_parallel_size=3",
            ],
            ("rollout.tensor_parallel_size", 3, "does not divide the 4 processes"),
        ),
        (
            [
                "parallel.mode=replicate",
                "parallel.ranks=8",
                "rollout=vllm",
                "rollout.tensor_parallel_size=8",
            ],
            ("rollout.tensor_parallel_size", 8, "does not divide the model's"),
        ),
        (
            ["parallel.mode=shard", "parallel.ranks=64"],
            ("rollout.prompts_per_step", 32, "is less than the 64 processes"),
        ),
        (
            ["rollout.max_new_tokens=2000"],
            ("rollout.max_new_tokens", 2000, "exceeds the model's 2048 positions"),
        ),
        (
            ["rollout=vllm", "rollout.gpu_memory=1e-6"],
            ("rollout.gpu_memory", 1e-06, "holds no response beside the"),
        ),
        (["model=hf", "model.path=/nowhere/at/all"], ("model.path", "/nowhere/at/all")),
    ],
)
def test_what_cannot_be_planned_is_one_line(words, refusal):
    with refuses(*refusal):
        planned(*SMALL[:1], *words)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("h10", ("hardware", "h10")),
        ("h100,memry=3", ("hardware", "h100,memry=3", "there is no memry; a GPU has")),
        ("h100,memory=lots", ("hardware", "h100,memory=lots", "memory=lots must be a number")),
        ("h100,memory=-1", ("hardware", ANY, "must be a number above 0")),
        ("h100,network=nan", ("hardware", ANY, "must be a number above 0")),
    ],
)
def test_unknown_hardware_is_refused(words, refusal):
    with refuses(*refusal):
        hardware(words)


@pytest.mark.slow
def test_the_command_prints_the_plan_and_its_code_says_whether_it_fits(monkeypatch, capsys):
    options = command.Options(hardware="l40s", prompt_tokens=7)
    words = ["task=math", "hardware=l40s", "prompt_tokens=7"]
    assert with_options(words) == (options, ["task=math"])
    for gpu, code in (("h100", 0), ("h100,memory=5.0001", 1)):
        monkeypatch.setattr(
            sys,
            "argv",
            ["plan", *SMALL, "parallel.mode=shard", "parallel.ranks=8", f"hardware={gpu}"],
        )
        with pytest.raises(SystemExit) as ended:
            command.print_plan()
        assert ended.value.code == code
    printed = capsys.readouterr().out
    for part in (
        "memory of a GPU in GB",
        "  rollout",
        "  update",
        "exchange of a GPU",
        "a step takes",
        "8 GPUs: fits",
    ):
        assert part in printed, part
    for words in (["--hardwear", "h100"], ["--hardware=h100"], ["hardwear=h100"]):
        with pytest.raises(ValueError, match="hardware="):
            with_options(words)
    for words in (["--prompt", "7"], ["prompt_tokns=7"]):
        with pytest.raises(ValueError, match="prompt_tokens="):
            with_options(words)


SHARDS = [
    *SMALL,
    "parallel.mode=shard",
    "parallel.ranks=2",
    "rollout.max_new_tokens=80",
    "rollout.batch_rows=4",
]


@pytest.mark.slow
def test_a_step_that_grows_with_the_gpus_takes_as_long_and_one_that_is_shared_out_less():
    """Every rank samples the responses to one prompt, and then to two; what is exchanged does not
    shrink with ranks.
    """
    settings = composed_settings(SHARDS)
    shared_points = strong(settings, [2, 4, 8], H100, 20)
    shared = [point.plan for point in shared_points]
    assert [plan.settings.rollout.prompts_per_step for plan in shared] == [8, 8, 8]
    seconds = [plan.step_seconds for plan in shared]
    assert seconds[0] > seconds[1] > seconds[2] > seconds[0] / 4
    assert efficiency(shared[0], shared[0]) == 1
    assert efficiency(shared[2], shared[0]) == pytest.approx(seconds[0] / seconds[2] / 4)
    grown = [point.plan for point in weak(settings, shared_points, H100, 20)]
    assert [plan.settings.rollout.prompts_per_step for plan in grown] == [8, 16, 32]
    seconds = [plan.step_seconds for plan in grown]
    assert seconds[2] == pytest.approx(seconds[0], rel=0.05), "all within one machine"
    assert efficiency(grown[2], grown[0]) == pytest.approx(seconds[0] / seconds[2])
    rollouts = [plan.times["rollout: weights and cache read"] for plan in grown]
    assert rollouts == pytest.approx(rollouts[:1] * 3)


@pytest.mark.slow
def test_gpus_that_hold_no_run_are_no_base_and_a_plan_that_is_refused_says_why():
    points = strong(composed_settings(SHARDS), [2, 8, 16], H100, 20)
    assert (
        points[2].plan is None
        and "prompts_per_step=8: is less than the 16 processes" in points[2].refused
    )
    sizes = [p.plan.peak[1] / GB for p in points[:2]]
    assert sizes[1] < sizes[0]
    tight = hardware(f"h100,memory={(sizes[0] + sizes[1]) / 2}")
    points = strong(composed_settings(SHARDS), [2, 8, 16], tight, 20)
    assert smallest(points) is points[1].plan and [
        bool(p.plan and p.plan.fits) for p in points
    ] == [False, True, False]
    assert efficiency(points[0].plan, points[1].plan) is None
    assert efficiency(points[1].plan, points[1].plan) == 1
    grown = weak(composed_settings(SHARDS), points, tight, 20)
    assert [p.plan.settings.rollout.prompts_per_step for p in grown] == [2, 8, 16], (
        "as many a GPU as the eight have"
    )
    hopeless = hardware("h100,memory=5.000001")
    assert (
        weak(
            composed_settings(SHARDS),
            strong(composed_settings(SHARDS), [2], hopeless, 20),
            hopeless,
            20,
        )
        == []
    )
    # the weak run of 8 GPUs has 32 prompts, of a query set of 24
    query_set = composed_settings([*SHARDS, "rollout.query_set=24"])
    refused = weak(query_set, strong(query_set, [2, 8], H100, 20), H100, 20)
    assert refused[1].plan is None and refused[1].refused.startswith("rollout.query_set=24: ")
    with pytest.raises(ValueError, match="less than the 16 processes"):
        strong(composed_settings(SHARDS), [16, 32], H100, 0)


def test_experts_that_are_spread_over_more_ranks_than_there_are_are_gathered_with_padding():
    """FSDP2 cuts a tensor along its first dimension, of experts, and pads it to a multiple of the
    ranks.
    """
    words = [
        "task=math",
        "model=tiny_moe",
        "rollout.prompts_per_step=32",
        "rollout.group_size=4",
        "parallel.mode=shard",
    ]
    experts = composed_settings(words[:2]).model.experts
    few, many = (
        planned(*words, f"parallel.ranks={ranks}").measured.all_gathered
        for ranks in (experts, 2 * experts)
    )
    assert many > 1.5 * few


@pytest.mark.slow
def test_several_numbers_of_gpus_are_a_table(monkeypatch, capsys):
    def ended(*words) -> int:
        monkeypatch.setattr(sys, "argv", ["plan", *SHARDS, *words])
        with pytest.raises(SystemExit) as end:
            command.print_plan()
        return end.value.code

    assert ended("parallel.ranks=8,4,16", "prompt_tokens=20") == 0
    same, grown = capsys.readouterr().out.split("weak scaling: 8 responses a step for each GPU")
    rows = [
        [line.split() for line in part.splitlines() if line.strip()[:1].isdigit()]
        for part in (same, grown)
    ]
    assert [row[:2] for row in rows[0]] == [
        ["4", "32"],
        ["8", "32"],
        ["16", "rollout.prompts_per_step=8:"],
    ]
    assert [row[:2] for row in rows[1]] == [["4", "32"], ["8", "64"], ["16", "128"]]
    assert (
        "100%" in rows[0][0]
        and "strong scaling: 32 responses a step of up to 20 + 80 tokens" in same
    )
    assert ended("parallel.ranks=2,4", "hardware=h100,memory=5.0001") == 1
    printed = capsys.readouterr().out
    assert printed.count("does not fit") == 2 and "weak scaling" not in printed
    for wrong in ("2,", "2,x", "0,2"):
        monkeypatch.setattr(sys, "argv", ["plan", *SHARDS, f"parallel.ranks={wrong}"])
        with refuses("parallel.ranks", wrong, "must be a number of GPUs"):
            command.print_plan()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "idle", "peak"), [(8, 45.8, 72.0), (16, 22.9, 41.5), (64, 5.7, 18.6)]
)
def test_a_30b_moe_takes_what_others_measured(ranks, idle, peak):
    """Numbers of a prototype over FSDP2 by torch's own MemTracker: GB, micro-batches of 8,192
    tokens, checkpointing.
    """
    made = planned(*LARGE, f"parallel.ranks={ranks}", prompt=512)
    assert made.measured.parameters == pytest.approx(30.53e9, rel=1e-3)
    update = made.phases["update"]
    assert (update["weights"] + update["AdamW's moments"]) / GB == pytest.approx(idle, abs=0.1)
    assert update["engine"] == pytest.approx(2 * 30.53e9, rel=1e-3), (
        "a copy to sample with, which they do not count"
    )
    assert (sum(update.values()) - update["engine"]) / GB == pytest.approx(peak, rel=0.04)
    assert "reference" not in str(update) and torch.bfloat16 == made.work.precision
    of_pass = made.measured.all_gathered / GB, made.measured.reduced / GB
    assert of_pass == pytest.approx((121, 122), rel=0.06), (
        "gathered twice in bfloat16, reduced in float32"
    )
    assert "exchange between GPUs" in "\n".join(lines_of(made))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        SMALL,
        [*SMALL, "policy.lora.rank=4", "parallel.mode=replicate", "parallel.ranks=2"],
        ["task=math", "model=tiny_moe", "parallel.mode=shard", "parallel.ranks=4"],
    ],
    ids=["one GPU", "adapter", "sharded experts"],
)
def test_a_recorded_measurement_is_what_is_measured(words):
    with patch("gspo.planning.plan.measure", measure):
        measured = planned(*words).measured
    assert measured in recorded().values()
    assert planned(*words).measured == measured


def test_the_size_of_records_is_said():
    made = planned(*LARGE, "parallel.ranks=64", "steps=100", "tracking.record_last=5")
    choices = 48 * 8
    response = (2 + 12) + (12 + 1) + choices + (4 + 2 * choices)
    by_hand = 8192 * (7680 * response + made.work.prompt * (4 + 2 * choices))
    assert made.record_bytes == by_hand
    (line,) = [line for line in lines_of(made) if "record of a step" in line]
    assert f"up to {by_hand / GB:.2g} GB, the last 5 together {5 * by_hand / GB:.2g}" in line
    assert "record_experts=false" in line
    made.settings.tracking.record_experts = False
    without = record_bytes(made.settings, config_of(made.settings.model), made.work)
    assert without == 8192 * (7680 * 31 + made.work.prompt * 4)
    assert planned(*SMALL).record_bytes == 0


def test_otb_takes_a_pass_under_the_old_policy_and_records_its_sums():
    """The engine's log-probs could stand for the others, but it has no sum_v pi_v^2."""
    words = [*SMALL, "objective=gspo_token", "tracking.record_last=1"]
    other = planned(*words, "advantage=group_mean")
    otb = planned(*words, "advantage=otb")
    assert other.times["old log-probs: arithmetic"] == 0 < otb.times["old log-probs: arithmetic"]
    tokens = 8 * 4 * otb.work.response
    assert otb.record_bytes - other.record_bytes == 4 * tokens


def test_measurements_of_signals_take_passes_and_a_second_gradient():
    words = [*SMALL, "rollout.max_new_tokens=80", "trainer.micro_batch_size=4"]
    plain = planned(*words, prompt=20)
    snr = planned(*words, "tracking.snr_every=2", prompt=20)
    minibatches = plain.settings.trainer.minibatches
    learning = minibatches * -(-32 // minibatches // 4)
    name = "update: arithmetic"  # two halves of 16 responses, at every second step
    assert snr.times[name] / plain.times[name] == pytest.approx(1 + 2 * 4 / 2 / learning)
    assert snr.phases["update"] == plain.phases["update"]
    half = sum(snr.phases["gradient SNR"].values()) - sum(snr.phases["update"].values())
    assert half == plain.measured.trained and "gradient SNR" not in plain.phases
    assert snr.peak[0] == "gradient SNR"
    name = "old log-probs: arithmetic"
    information = planned(*words, "tracking.information_every=4", prompt=20)
    after = planned(*words, "tracking.record_every=4", "tracking.record_after=true", prompt=20)
    one_pass = planned(*words, "advantage=otb", "objective=gspo_token", prompt=20).times[name] / 8
    # 8 prompts, 2 responses of each, under each prompt: 128 responses
    assert information.times[name] - plain.times[name] == pytest.approx(32 / 4 * one_pass)
    assert after.times[name] - plain.times[name] == pytest.approx(8 / 4 * one_pass)


def test_no_more_records_are_counted_than_there_are_steps():
    words = ["steps=100", "tracking.record_last=500", "tracking.record_every=1000"]
    made = planned(*SMALL, *words)
    (line,) = [line for line in lines_of(made) if "record of a step" in line]
    assert "the last 100 together" in line and "of all" not in line

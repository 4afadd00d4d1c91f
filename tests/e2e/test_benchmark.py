"""The benchmark: its workloads' models, its arithmetic, and one real measurement from the command
line.
"""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

import forked
from builders import problems
from daily import daily_but
from gspo.config.commands import BenchmarkCommand
from gspo.distributed.ranks import DistributedRanks, Ranks
from gspo.model.policy import Policy
from gspo.model.tokenizer import character_tokenizer
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.requests import Sampling, SamplingRequest
from ranked import ranked
from refusals import refuses
from speed.exchanges import PHASES, Exchanges
from speed.peer import Pairs
from speed.processes import cases, scaling_table, side_by_side
from speed.workload import TINY, WORKLOADS, EvenText, Shape, made
from trainers import trainer

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [120, 250])
def test_responses_of_a_random_model_end_after_about_the_length_that_was_asked_for(tokens):
    shape = Shape(hidden=32, layers=2, heads=2, key_value_heads=2, width=16, mean_length=tokens)
    policy = Policy(made(shape), character_tokenizer())
    groups = LocalEngine(policy).generate(
        SamplingRequest(problems(), 40, Sampling(1.0, 12 * tokens), (1, "lengths"))
    )
    lengths = torch.tensor([float(len(r.token_ids)) for group in groups for r in group])
    assert 0.6 * tokens < lengths.mean() < 1.6 * tokens
    assert lengths.std() > 0.5 * tokens, "ends come by chance, as a geometric distribution's"


def test_the_random_models_are_known_to_our_own_forward_and_the_same_everywhere():
    a, b = made(TINY), made(TINY)
    assert Policy(a, character_tokenizer()).network
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_random_text_earns_a_reward_half_of_the_time():
    texts = [f"{i * 7919 % 1000}x{i}" for i in range(400)]
    problem = problems()[0]
    rewards = [
        score.reward for score in EvenText().score([(problem, text, True) for text in texts])
    ]
    assert 0.4 < sum(rewards) / len(rewards) < 0.6
    assert [
        s.verdict for s in EvenText().score([(problem, "ab", True), (problem, "aa", True)])
    ] == ["odd", "even"]


def test_sizes_can_be_changed_and_unknown_ones_are_refused():
    changed = WORKLOADS["long"].resized({"hidden": 128, "prompts": 4})
    assert (changed.shape.hidden, changed.prompts, changed.new_tokens) == (128, 4, 512)
    assert "rollout.prompts_per_step=4" in changed.overrides()
    for workload, key in (("long", "depth"), ("tiny", "hidden")):
        with pytest.raises(ValueError, match=f"size.{key}=3"):
            WORKLOADS[workload].resized({key: 3})
    with pytest.raises(ValueError, match=r"size.hiden=3: .*the nearest is size.hidden"):
        WORKLOADS["long"].resized({"hiden": 3})


def test_ratios_are_pair_by_pair_and_their_median_is_shown():
    def record(total):
        return {
            "total_s": total,
            "rollout_s": total / 4,
            "train_s": total / 2,
            "peak_memory_mib": 100.0,
            "tokens": 10,
        }

    rounds = [
        {"trl": record(t), "like for like": record(1.0), "best": record(0.5)}
        for t in (2.0, 8.0, 3.0)
    ]
    pairs = Pairs(rounds)
    assert pairs.ratios("like for like", "total_s") == [2.0, 8.0, 3.0]
    assert "TRL / ours, best, total_s: median 6.00 (min 4.00, max 16.00)" in pairs.table()


def test_nested_settings_become_a_command_line():
    nested = BenchmarkCommand(set={"a": {"b": {"c": 1}, "d": "x"}, "e": 2.5})
    assert nested.overrides() == ["a.b.c=1", "a.d=x", "e=2.5"]


@pytest.mark.slow
@pytest.mark.daily
def test_the_command_measures_and_writes(tmp_path):
    sizes = [
        "size.prompts=4",
        "size.group_size=4",
        "size.new_tokens=12",
        "size.hidden=16",
        "size.layers=1",
    ]
    command = [
        sys.executable,
        str(ROOT / "experiments" / "benchmark.py"),
        "workload=long",
        "batches=2",
        *sizes,
    ]
    out = tmp_path / "x.json"
    done = forked.run([*command, f"out={out}", f"runs={tmp_path}"])
    assert done.returncode == 0, done.stderr
    for phase in ("rollout", "update", "diagnostics", "tracking", "of matmul peak", "peak memory"):
        assert phase in done.stdout
    record = json.loads(out.read_text())
    assert (
        len(record["batches"]) == 2 and record["sequences"] == 16 and 16 <= record["tokens"] <= 192
    )
    phases = ("rollout", "scoring", "old_logprobs", "update", "diagnostics", "tracking")
    parts = [record["batches"][0][f"{phase}_s"] for phase in phases]
    assert 0.8 < sum(parts) / record["batches"][0]["total_s"] <= 1.0 + 1e-6
    assert record["own_forward"] and record["matmul_gflops"] > 0.1
    gpu = [*command[:2], "peer=trl", "workload=gpu"]
    refused = forked.run(gpu, cwd=tmp_path)
    assert refused.returncode == 2 and "workload=gpu" in refused.stderr


class CountedGathers(DistributedRanks):
    """Counts the values that are gathered, each of which takes two exchanges of gloo: its size, and
    itself.
    """

    gathers = 0

    def all_gather(self, value):
        self.gathers += 1
        return super().all_gather(value)


def step_in_exchanges(ranks: Ranks, mode: str) -> dict:
    """A step whose exchanges are timed and which torch's profiler watches; before it a step
    without.
    """
    from gspo.model.sharding.fsdp import Shards

    def spread(policy: Policy) -> Policy:
        shards = Shards(ranks, ranks.world_size, "cpu")
        shards.shard_model(policy.model, torch.float32)
        return Policy(policy.model, policy.tokenizer, policy.temperature, shards=shards)

    ranks = CountedGathers()
    t = trainer(spread=spread if mode == "shard" else None, ranks=ranks)
    t.train_step(1, t.source.next(1))
    exchanges = Exchanges()
    ranks.gathers = 0
    with (
        exchanges.timed(t),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        t.train_step(2, t.source.next(2))
    gathers, noted = ranks.gathers, exchanges.taken()
    t.train_step(3, t.source.next(3))
    t.source.close()
    names = [event.name for event in profile.events() if event.name.startswith("gloo:")]
    return noted | {"gathers": gathers, "gloo": names, "later": exchanges.taken()["exchanges"]}


@pytest.mark.distributed
@pytest.mark.parametrize("mode", daily_but(["replicate", "shard"], "shard"))
def test_no_exchange_of_a_step_is_missed_and_afterwards_none_is_timed(mode):
    for noted in ranked(2, lambda ranks: step_in_exchanges(ranks, mode)):
        barriers = noted["gloo"].count("gloo:barrier")
        assert barriers == noted["exchanges"] > 5
        assert len(noted["gloo"]) - barriers == noted["exchanges"] + noted["gathers"]
        assert all(
            noted[f"{phase}_exchanging_s"] > 0
            for phase in PHASES
            if phase != "handover" or mode == "shard"
        )
        assert noted["later"] == 0


def late_step(ranks: Ranks) -> dict[str, float]:
    """What a rank notes of a step to which the last rank comes late, after its rollout."""
    t = trainer(ranks=ranks)
    exchanges = Exchanges()
    with exchanges.timed(t):
        rollout = t.source.next(1)
        time.sleep(0.8 * ranks.rank)
        t.train_step(1, rollout)
    t.source.close()
    return exchanges.taken()


@pytest.mark.distributed
def test_waiting_for_a_late_rank_is_told_apart_from_exchanging():
    early, late = ranked(2, late_step)
    assert early["old_logprobs_waiting_s"] > 0.5
    assert late["old_logprobs_waiting_s"] < early["old_logprobs_waiting_s"] / 2
    assert early["old_logprobs_exchanging_s"] < early["old_logprobs_waiting_s"]


def measured(tokens: float, total: float, waiting: float = -1.0) -> dict:
    """A record of which each phase takes a quarter of the time, and of it these seconds of waiting."""
    phases = ("next", "old_logprobs", "update", "handover")
    record = {"tokens": tokens, "sequences": 8, "total_s": total} | {
        f"{phase}_s": total / 4 for phase in phases
    }
    if waiting >= 0:
        record |= {
            f"{phase}_{kind}_s": waiting for phase in PHASES for kind in ("waiting", "exchanging")
        }
        record["exchanges"] = 7
    return record


def test_scaling_is_told_in_the_tokens_of_the_same_round():
    """Two processes take half the time in the first round and as long in the second: 2 and 1 times
    the tokens.
    """
    labels = [case.label for case in cases(2)]
    assert labels[0] == "1 process, 1 thread" and len(set(labels)) == 7
    rounds = [
        {label: measured(100 * case.times, total, 0.1 if case.mode != "none" else -1.0) for label, case, total in all_}
        for all_ in ([(c.label, c, 4.0 if c.label == labels[0] else 2.0) for c in cases(2)],
                     [(c.label, c, 2.0) for c in cases(2)])
    ]  # fmt: skip
    lines = scaling_table(rounds, 2).splitlines()
    row = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in lines[10:]
        if line
    }
    assert row["2 processes, shard, 2 x prompts"][:2] == ["20.0% + 20.0%"] * 2, "of half a second"
    gains = [line.split("|") for line in lines if "(" in line]
    assert [cells[1].strip() for cells in gains] == labels[1:]
    assert gains[2][6].strip() == "1.50 (1.00-2.00)" and gains[2][7].strip() == "75%"
    assert gains[4][6].strip() == "3.00 (2.00-4.00)", "twice the prompts"
    of_step = row["2 processes, replicate"][4]
    assert of_step == "25.0% + 25.0%", "five phases of .1 s in 2 s"


def test_runs_side_by_side_are_summed():
    both = side_by_side([measured(100, 4.0), measured(120, 2.0)])
    assert (both["tokens"], both["sequences"], both["total_s"], both["next_s"]) == (
        220,
        16,
        3.0,
        0.75,
    )


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"scaling": 1}, ("scaling", 1, "set scaling=2")),
        ({"scaling": 2, "threads": 2}, ("scaling", 2, "chooses threads")),
        ({"scaling": 2, "peer": "trl"}, ("scaling", 2, "chooses")),
        (
            {"scaling": 2, "set": {"parallel": {"mode": "shard"}}},
            ("scaling", 2, "set.parallel itself"),
        ),
    ],
)
def test_what_scaling_does_not_go_with_is_refused(settings, refusal):
    with refuses(*refusal):
        BenchmarkCommand(**settings)


@pytest.mark.daily
def test_one_command_measures_one_process_beside_two(tmp_path):
    sizes = [
        "size.prompts=4",
        "size.group_size=4",
        "size.new_tokens=12",
        "size.hidden=16",
        "size.layers=1",
    ]
    command = [
        sys.executable,
        str(ROOT / "experiments" / "benchmark.py"),
        "workload=long",
        "scaling=2",
        *sizes,
    ]
    out = tmp_path / "x.json"
    done = forked.run(
        [*command, "batches=1", "rounds=1", f"out={out}", f"runs={tmp_path}"], seconds=600
    )
    assert done.returncode == 0, done.stderr
    assert "waiting + exchanging" in done.stdout
    (found,) = json.loads(out.read_text())["rounds"]
    assert list(found) == [case.label for case in cases(2)]
    one, threads, apart, copies, shards, more_copies, more_shards = found.values()
    assert (
        one["tokens"]
        == threads["tokens"]
        == copies["tokens"]
        == shards["tokens"]
        == apart["tokens"] / 2
    )
    assert more_copies["tokens"] == more_shards["tokens"] > one["tokens"]
    assert (one["threads"], threads["threads"], copies["threads"]) == (1, 2, 1)
    assert "ranks" not in one and (copies["ranks"], shards["mode"]) == (2, "shard")
    assert (
        shards["handover_s"] > 0 == copies["handover_s"]
        and shards["exchanges"] > copies["exchanges"] > 5
    )
    assert all(record["old_logprobs_flops"] for record in found.values()), "all make the old pass"
    for count, word, remedy in (
        (8, "size.prompts=4", "set size.prompts=8 or more"),
        (2, "set.rollout.prompts_per_step=8", "set size.prompts=N instead"),
    ):
        refused = forked.run([*command[:3], f"scaling={count}", word], cwd=tmp_path)
        assert refused.returncode == 2 and remedy in refused.stderr, refused.stderr

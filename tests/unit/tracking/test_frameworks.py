"""gspo/tracking/frameworks: the tables, which framework a run is of, and our rows of its records."""

import math
from pathlib import Path

import pytest

from foreign_logs import (
    OTHER_ROWS,
    ms_swift_line,
    prime_rl_rows,
    slime_rows,
    trl_row,
    verl_row,
    write_lines,
)
from gspo.cli import report
from gspo.tracking.foreign_report import foreign_page, warnings, write_foreign_page
from gspo.tracking.frameworks.known import TABLES, definition, find_table, table_of
from gspo.tracking.frameworks.page import page
from gspo.tracking.frameworks.table import ANY, OTHER, RELATIONS, filled, match
from gspo.tracking.frameworks.translate import Log, translate
from gspo.tracking.metrics import lookup
from pages import Page
from recorded_runs import HEALTHY, write


def run(records, kind="rows", **said):
    config = said.pop("config", {})
    planned = said.pop("planned", 0)
    log = Log(Path("log"), kind, [dict(record) for record in records], config, planned=planned)
    return translate(log, **said)


# ------------------------------------------------------------------------------------------------
# tables
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_every_entry_is_a_relation_to_a_registered_metric(table):
    for entry in table.entries:
        assert entry.relation in RELATIONS, entry
        assert bool(entry.ours) == (entry.relation != OTHER), entry
        assert entry.note or entry.relation in ("same", "scaled"), f"{entry} needs a note"
        if entry.ours and entry.ours != ANY:
            stars = entry.theirs.count("*")
            lookup(filled(entry.ours, ("x",) * stars))
            assert entry.ours.count("*") <= stars
        is_scaled = (entry.factor, entry.offset, entry.is_log) != (1.0, 0.0, False)
        assert is_scaled == (entry.relation == "scaled"), entry


def test_patterns():
    assert match("val-core/*/acc/mean@*", "val-core/aime/24/acc/mean@8") == ("aime/24", "8")
    assert match("reward", "rewards") is None and match("reward", "reward") == ()
    assert table_of("ms-swift") is TABLES["ms_swift"]
    assert definition("trl/grad_norm").meaning.startswith("TRL: norm before clipping")
    with pytest.raises(ValueError, match="choose one of trl, ms_swift"):
        table_of("tril")
    with pytest.raises(KeyError):
        definition("custom/x")


# ------------------------------------------------------------------------------------------------
# which framework
RECORDS = {
    "trl": trl_row(1),
    "verl": {"step": 1} | verl_row(1),
    "prime_rl": {name: v for row in prime_rl_rows(1) for name, v in row.items()},
    "slime": {name: v for row in slime_rows(0) for name, v in row.items()},
    "ms_swift": ms_swift_line(1),
} | OTHER_ROWS


@pytest.mark.parametrize("framework", TABLES)
def test_the_names_of_a_record_prove_one_framework(framework):
    names = set(RECORDS[framework])
    assert find_table(names).name == framework
    # W&B and TensorBoard put train/ before the names of TRL
    if framework in ("trl", "ms_swift"):
        prefixed = {f"train/{name}" for name in names}
        assert find_table(prefixed).name == framework


def test_names_of_two_frameworks_or_of_none_are_asked_about():
    both = set(RECORDS["verl"]) | set(RECORDS["skyrl"])
    with pytest.raises(ValueError, match="set framework=verl or framework=skyrl"):
        find_table(both)
    with pytest.raises(ValueError, match=r"its names \(2: mine, reward"):
        find_table({"mine", "reward"})
    assert find_table(both, "verl").name == "verl"


# ------------------------------------------------------------------------------------------------
# frameworks
def test_trl():
    records = [trl_row(step) for step in (10, 20, 30)]
    records.insert(2, {"eval_reward": 0.6, "eval_clip_ratio/low_mean": 0.0, "step": 20})
    records.append({"train_runtime": 60.0, "epoch": 0.3, "step": 30})
    trl = run(records, planned=40)
    assert [row["step"] for row in trl.rows] == [10, 20, 30]
    assert trl.rows[1]["reward/mean"] == 0.52 and trl.rows[1]["eval/held_out/avg@k"] == 0.6
    assert trl.rows[0]["group/zero_variance"] == 0.25 and trl.rows[0]["length/truncated"] == 0.125
    assert trl.batches_per_row == 10 and trl.planned == 40 and trl.counts_updates
    # clipping is under our name only with the objective
    assert trl.rows[0]["trl/clip_ratio/region_mean"] == 0.01
    assert not any(name.startswith("clip/") for name in trl.rows[0])
    assert "trl/eval_clip_ratio/low_mean" not in {name for row in trl.rows for name in row}
    assert any("absent" in note and "eval_clip_ratio" in note for note in trl.notes)
    assert run(records, objective="grpo").rows[0]["clip/token_active"] == 0.01
    assert run(records, objective="gspo").rows[0]["clip/sequence_active"] == 0.01
    assert "optim/grad_norm" not in trl.rows[0], "of the row's last update alone"
    assert trl.differing().keys() >= {"kl/ref_k3", "trl/grad_norm"}
    assert "reward/mean" not in trl.differing()


def test_updates_of_a_batch_are_averaged():
    records = [trl_row(step, reward=float(step)) for step in range(1, 9)]
    for record in records[1::2]:
        del record["reward"]  # TRL has a reward only in rows with a generation
    trl = run(records, updates_per_batch=4)
    assert [row["step"] for row in trl.rows] == [1, 2]
    assert trl.rows[0]["reward/mean"] == 2.0 and trl.rows[1]["reward/mean"] == 6.0
    assert not trl.counts_updates and trl.batches_per_row == 1
    config = {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
    assert run(records, config=config).updates_per_batch == 4
    assert run(records, config=config | {"steps_per_generation": None}).updates_per_batch == 0
    assert run(records, config=config | {"steps_per_generation": 3}).updates_per_batch == 3


def test_the_largest_gradient_norm_of_a_batchs_updates_is_kept():
    """The mean of 15 and three norms of 1 is 4.5, and hides a spike; without NaN it hides NaN."""
    norms = dict.fromkeys(range(1, 201), 1.0)
    spiked = norms | {101: 15.0}
    trl = run([trl_row(step, grad_norm=n) for step, n in spiked.items()], updates_per_batch=4)
    assert trl.rows[25]["optim/grad_norm_max"] == 15.0 and trl.rows[25]["trl/grad_norm"] == 4.5
    assert "largest of the norms" in trl.differing()["optim/grad_norm_max"]
    assert [event.signal for event in warnings(trl, trl.table) if event.kind == "warning"] == [
        "grad_spike"
    ]
    assert "rows with ten times the usual norm: 1" in foreign_page(trl)
    damaged = norms | {50: math.nan, 51: math.nan, 80: math.inf}
    trl = run([trl_row(step, grad_norm=n) for step, n in damaged.items()], updates_per_batch=4)
    page_of_damaged = foreign_page(trl)
    assert "range? No (by optim/grad_norm_max" in page_of_damaged
    assert "not finite: 2)" in page_of_damaged, "of 50 batches, two have such updates"
    # slime's mean of the updates is our optim/grad_norm, and the largest is ours too
    slime = run([row for rollout in range(3) for row in slime_rows(rollout)], updates_per_batch=2)
    assert slime.rows[0]["optim/grad_norm"] == 1.5 and slime.rows[0]["optim/grad_norm_max"] == 2.0
    assert "optim/grad_norm_max" not in run([trl_row(1), trl_row(2)]).rows[0]


def test_a_switched_off_kl_has_no_coefficient():
    actor = "actor_rollout_ref.actor"
    config = {f"{actor}.kl_loss_coef": 0.001, f"{actor}.use_kl_loss": False}
    records = [{"step": 1} | verl_row(1)]
    assert run(records, config=config).settings["kl.coef"] == 0
    config[f"{actor}.use_kl_loss"] = True
    assert run(records, config=config).settings["kl.coef"] == 0.001


def test_a_name_with_and_without_a_trackers_prefix_counts_once():
    records = [
        {"train/global_step": 1, "train/reward": 0.5, "reward": 9.0, "train/kl": 0.1},
        {"train/global_step": 2, "reward": 9.0, "train/reward": 0.6, "train/kl": 0.1},
    ]
    trl = run(records, framework="trl")
    assert [row["reward/mean"] for row in trl.rows] == [0.5, 0.6]
    assert trl.dropped["numbers whose name stands in a record with and without a tracker's prefix"]


def test_a_framework_that_the_names_disprove_is_noted():
    (note,) = [n for n in run([trl_row(1)], framework="verl").notes if "its names are those" in n]
    assert note == "its names are those of TRL, and framework=verl is set"
    assert not any("names are those" in n for n in run([trl_row(1)], framework="trl").notes)


def test_a_sum_of_two_metrics_of_which_a_row_has_one_is_noted_as_absent():
    records = [{"step": step} | verl_row(step) for step in range(1, 6)]
    for record in records[3:]:
        del record["actor/pg_clipfrac_lower"]
    records[0]["actor/pg_clipfrac_lower"] = 0.01
    verl = run(records, objective="GRPO")
    assert verl.objective == "grpo" and verl.rows[0]["clip/token_active"] == pytest.approx(0.03)
    assert "clip/token_active" not in verl.rows[4]
    assert any(note.startswith("absent: 2 numbers of actor/pg_clipfrac,") for note in verl.notes)


def test_trl_configuration():
    config = {"seed": 7, "learning_rate": 1e-6, "importance_sampling_level": "sequence"}
    trl = run([trl_row(1)], config=config)
    assert trl.objective == "gspo" and trl.settings == {"seed": 7, "optim.lr": 1e-6}


def test_verl():
    records = [{"step": 0, "val-core/math/acc/mean@8": 0.1}]
    records += [{"step": step} | verl_row(step) for step in (1, 2)]
    verl = run(records, objective="gspo")
    row = verl.rows[1]
    assert [row["step"] for row in verl.rows] == [0, 1, 2]
    assert verl.rows[0]["eval/math/avg@8"] == 0.1
    assert row["clip/token_active"] == 0.02 and row["optim/grad_norm"] == 0.25
    assert row["mismatch/sequence_min"] == pytest.approx(0.5)
    assert row["routing/load_max"] == 1.5 and row["mismatch/k3"] == 3e-4
    # the padded width, no share of truncated responses
    assert "length/truncated" not in row
    assert row["verl/response_length/clip_ratio"] == 0.0078125
    # with gspo the dual clip is not computed; with grpo it is 0, and part of the active clip
    assert not any("lower" in name or "dual" in name for name in row)
    for record in records[1:]:
        record["actor/pg_clipfrac_lower"] = 0.01
    row = run(records, objective="grpo").rows[1]
    assert row["clip/token_active"] == pytest.approx(0.03) and row["clip/token_dual"] == 0.01
    assert "verl/actor/pg_clipfrac" in run(records).rows[1]
    assert "verl/actor/pg_clipfrac" in run(records, objective="sapo").rows[1]
    for record in records[1:]:
        record["actor/pg_clipfrac"] = 0.0
    assert "verl/actor/pg_clipfrac" not in run(records, objective="sapo").rows[1]


def test_prime_rl_rows_of_two_writers_are_joined_and_told_apart():
    first = prime_rl_rows(1)
    second = prime_rl_rows(2)
    # the trainer lags behind: its rows of step 1 come after the orchestrator's of step 2
    records = [first[0], second[0], *first[1:], *second[1:]]
    prime = run(records)
    row = prime.rows[0]
    assert len(prime.rows) == 2 and not prime.dropped
    assert row["reward/mean"] == 0.4 and row["length/truncated"] == 0.1
    assert row["prime_rl/orchestrator/time/step"] == 60.0
    assert row["prime_rl/trainer/time/step"] == 20.0
    assert row["routing/load_max"] == 1.5 and row["eval/aime_solver/avg@4"] == 0.2
    assert "mismatch/k3" not in row, "drift and gap in one"
    # two agents: neither is the mean of all
    two = [*records, {"step": 1, "train/agg/all/judge/reward/mean": 0.9}]
    row = run(two).rows[0]
    assert row["reward/solver"] == 0.4 and row["reward/judge"] == 0.9 and "reward/mean" not in row
    lost = run([*records, {"step": 1, "time/step": 1.0}])
    assert lost.dropped["numbers whose writer cannot be told"] == 1


def test_the_probes_metrics_are_ours_and_count_before_others():
    probed = {
        "gspo/clip/token_active": 0.25,
        "gspo/routing/consistency": 0.875,
        "gspo/ratio/token_min": 0.5,
    }
    # the numbers of a rollout batch stand in the row of its last update
    records = [trl_row(1), trl_row(2, **probed), trl_row(3), trl_row(4, **probed)]
    trl = run(records, objective="grpo", updates_per_batch=2)
    assert [row["clip/token_active"] for row in trl.rows] == [0.25, 0.25]
    assert [row["routing/consistency"] for row in trl.rows] == [0.875, 0.875]
    assert trl.rows[0]["trl/clip_ratio/region_mean"] == 0.01
    assert not {"clip/token_active", "routing/consistency"} & trl.differing().keys()
    assert trl.differing()["trl/clip_ratio/region_mean"].startswith("gspo/clip/token_active counts")
    assert "consistent? It cannot be judged" not in foreign_page(trl)
    assert "consistency (gspo.probe can add it)." in foreign_page(run([trl_row(1)]))
    assert "gspo.probe" not in foreign_page(run([{"step": 1} | verl_row(1)]))
    named = run([trl_row(1, **{"gspo/of/nothing": 1.0, "gspo/*": 2.0})])
    assert {"trl/gspo/of/nothing", "trl/gspo/*"} <= named.rows[0].keys()
    assert {"trl/gspo/of/nothing", "trl/gspo/*"} <= set(named.unknown())


def test_shares_of_equal_groups_are_added_only_if_both_are_logged():
    nemo = OTHER_ROWS["nemo_rl"] | {"train/baseline_reward/pct_0": 25.0, "step": 1}
    nemo.pop("train/baseline_reward/pct_1", None)
    assert "group/zero_variance" not in run([nemo]).rows[0]
    both = run([nemo | {"train/baseline_reward/pct_1": 50.0}])
    assert both.rows[0]["group/zero_variance"] == 0.75
    assert both.relations["group/zero_variance"].formula() == (
        "0.01 (x + train/baseline_reward/pct_1)"
    )
    row = {"step": 1, "train/agg/all/solver/reward/mean": 0.4, "progress/total_problems": 8}
    row |= {"train/agg/all/solver/solved_none": 0.25, "train/agg/all/solver/solved_all": 0.125}
    assert run([row]).rows[0]["group/zero_variance"] == 0.375


def test_nemo_rl_sums_over_the_updates_of_a_batch_and_writes_minus_one_for_no_ratio():
    sums = {"train/probs_ratio": 8.001, "train/gen_kl_error": 0.016}
    records = []
    for step in range(1, 31):
        ratio = -1.0 if step % 2 else 0.75
        ratios = {"train/probs_ratio_min": ratio, "train/probs_ratio_max": ratio + (step + 1) % 2}
        records.append(OTHER_ROWS["nemo_rl"] | sums | ratios | {"step": step})
    nemo = run(records, objective="grpo")
    assert nemo.rows[0]["nemo_rl/train/probs_ratio"] == 8.001
    assert nemo.rows[0]["nemo_rl/train/gen_kl_error"] == 0.016
    assert not {"ratio/token_mean", "mismatch/k3", "ratio/token_min"} & nemo.rows[0].keys()
    assert nemo.rows[1]["ratio/token_min"] == 0.75 and nemo.rows[1]["ratio/token_max"] == 1.75
    assert "absent: 15 numbers of train/probs_ratio_min, because -1 means none" in nemo.notes
    assert not warnings(nemo, nemo.table), "the numbers are those of a healthy run"
    unknown = run(records).rows
    assert "nemo_rl/train/probs_ratio_min" not in unknown[0]
    assert unknown[1]["nemo_rl/train/probs_ratio_min"] == 0.75


def test_the_kl_of_trls_other_trainers_is_another_one():
    # AsyncGRPO: to the sampler
    synchronous = trl_row(1)
    asynchronous = trl_row(1, ratio=1.01, **{"sample/staleness_mean": 1.0})
    row = run([asynchronous], objective="grpo").rows[0]
    assert row["trl/kl"] == 0.001 and row["trl/clip_ratio/region_mean"] == 0.01
    assert not {"kl/ref_k3", "clip/token_active"} & row.keys()
    assert not run([asynchronous]).unknown()
    assert definition("trl/kl").meaning.startswith("TRL: AsyncGRPO: k3 of the current policy to th")
    # RLOO: k1 of the old policy, and a ratio per response
    rloo = run([synchronous], config={"normalize_advantages": False, "num_iterations": 1})
    assert rloo.objective == "rloo" and rloo.rows[0]["kl/ref_k1"] == 0.001
    assert rloo.rows[0]["clip/sequence_active"] == 0.01 and "kl/ref_k3" not in rloo.rows[0]
    unknown = run([synchronous])
    assert unknown.rows[0]["kl/ref_k3"] == 0.001 and "RLOO" in unknown.differing()["kl/ref_k3"]


@pytest.mark.parametrize(
    ("loss_type", "level", "objective", "clipped"),
    [
        ("luspo", "sequence", "luspo", "clip/sequence_active"),
        ("luspo", "token", "luspo, ratios of tokens", "trl/clip_ratio/region_mean"),
        ("vespo", "token", "vespo", "trl/clip_ratio/region_mean"),
        ("grpo", "sequence", "gspo", "clip/sequence_active"),
        ("dr_grpo", "token", "drgrpo", "clip/token_active"),
    ],
)
def test_the_objective_of_a_loss_type(loss_type, level, objective, clipped):
    config = {"loss_type": loss_type, "importance_sampling_level": level}
    trl = run([trl_row(1)], config=config)
    assert trl.objective == objective and trl.rows[0][clipped] == 0.01
    assert not any("the objective is not logged" in note for note in trl.notes)


def test_the_updates_of_slime_follow_from_its_batch_sizes():
    records = [row for rollout in range(3) for row in slime_rows(rollout, updates=4)]
    sizes = {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 64}
    slime = run(records, config=sizes | {"num_steps_per_rollout": None})
    assert slime.updates_per_batch == 4 and [row["step"] for row in slime.rows] == [1, 2, 3]
    assert slime.rows[2]["optim/grad_norm"] == 2.5, "mean of 1, 2, 3, 4"
    # the other setting counts first; what does not divide tells nothing
    assert run(records, config=sizes | {"num_steps_per_rollout": 2}).updates_per_batch == 2
    assert run(records, config=sizes | {"global_batch_size": 60}).updates_per_batch == 0


def test_trackers_call_eval_reward_eval_slash_reward():
    row = {f"train/{name}": value for name, value in trl_row(1).items() if name != "step"}
    run_of_tracker = run([row | {"train/global_step": 1, "eval/reward": 0.25}])
    assert run_of_tracker.rows[0]["eval/held_out/avg@k"] == 0.25
    assert not run_of_tracker.unknown()


def test_slime_has_three_axes():
    records = [row for rollout in range(3) for row in slime_rows(rollout)]
    slime = run(records, config={"num_steps_per_rollout": 2, "advantage_estimator": "gspo"})
    assert [row["step"] for row in slime.rows] == [1, 2, 3]
    row = slime.rows[2]
    assert row["reward/mean"] == 0.5 and row["optim/grad_norm"] == 1.5
    assert row["slime/rollout/rewards"] == 0.0 and row["time/rollout_s"] == 30.0
    assert slime.objective == "gspo"


def test_slime_in_tensorboards_events():
    records = []
    for rollout in range(2):
        for row in slime_rows(rollout):
            step = int(row.get("train/step", row.get("rollout/step", 0)))
            records += [{"step": step, name: value} for name, value in row.items()]
    slime = run(records, updates_per_batch=2)
    assert [row["step"] for row in slime.rows] == [1, 2] and not slime.dropped
    assert slime.rows[1]["optim/grad_norm"] == 1.5 and slime.rows[1]["reward/mean"] == 0.5


def test_ms_swift():
    records = [ms_swift_line(step) for step in (10, 20)]
    for record, step in zip(records, (10, 20), strict=True):
        record["global_step/max_steps"] = step
    records.append({"eval_reward": 0.3, "global_step/max_steps": 20, "memory(GiB)": 1.0})
    swift = run(records)
    row = swift.rows[1]
    assert row["mismatch/k3"] == 1e-3 and row["policy/entropy"] == 0.4
    assert "ms_swift/clip_ratio/region_mean" in row
    assert run(records, objective="gspo").rows[1]["clip/token_active"] == 0.01
    assert swift.batches_per_row == 10 and not swift.dropped


def test_the_other_frameworks():
    rows = {name: run([record]).rows[0] for name, record in OTHER_ROWS.items()}
    assert rows["roll"]["step"] == 1, "ROLL counts from 0"
    assert rows["roll"]["kl/old_k1"] == -0.01, "the opposite sign"
    assert "length/truncated" not in rows["roll"], "a count, not a share"
    assert rows["openrlhf"]["clip/token_active"] == 0.02
    assert rows["openrlhf"]["length/truncated"] == 0.1
    assert "optim/grad_norm" not in rows["openrlhf"]
    assert rows["nemo_rl"]["group/all_correct"] == 0.25
    assert not any(name.startswith("clip/") for name in rows["nemo_rl"])
    assert rows["skyrl"]["length/mean"] == 50.0 and "clip/token_active" not in rows["skyrl"]
    assert all(row["reward/mean"] == 0.5 for row in rows.values())


# ------------------------------------------------------------------------------------------------
# bad input
def test_a_resumed_run_replaces_the_rows_after_its_checkpoint():
    first = [trl_row(step, reward=0.1) for step in range(1, 11)]
    second = [trl_row(step, reward=0.9) for step in range(6, 9)]
    trl = run(first + second)
    assert [row["step"] for row in trl.rows] == list(range(1, 9)), "rows 9 and 10 were undone"
    assert [row["reward/mean"] for row in trl.rows] == [0.1] * 5 + [0.9] * 3
    assert any("go back to 6" in note and "5 earlier rows" in note for note in trl.notes)


def test_two_runs_in_one_file():
    first = [trl_row(step, reward=0.1) for step in range(1, 11)]
    second = [trl_row(step, reward=0.9) for step in range(1, 4)]
    trl = run(first + second)
    assert [row["reward/mean"] for row in trl.rows] == [0.9] * 3
    assert any("begin again at 1" in note and "10 earlier rows" in note for note in trl.notes)
    later = [trl_row(step, reward=0.1) for step in range(5, 11)]
    assert [row["step"] for row in run(later + second).rows] == [1, 2, 3]
    with pytest.raises(ValueError, match="go back more than 20 times"):
        run([trl_row(step, reward=step + 10 * i) for i in range(30) for step in (1, 2)])


def test_a_run_that_was_restarted_often_is_read():
    # 23 starts of 12 steps, each 10 steps after the last
    records = []
    for start in range(23):
        steps = range(10 * start + 1, 10 * start + 13)
        records += [{"step": step} | verl_row(step, **{"actor/lr": start}) for step in steps]
    verl = run(records)
    assert [row["step"] for row in verl.rows] == list(range(1, 233))
    assert [verl.rows[step - 1]["optim/lr"] for step in (10, 11, 221, 232)] == [0, 1, 22, 22]
    (said,) = [note for note in verl.notes if "in all" in note]
    assert "go back 22 times in all: it holds a run that was restarted so often, or sev" in said
    assert sum("as those of a resumed run do" in note for note in verl.notes) == 5
    # with slime's two axes
    records = []
    for start in range(23):
        for rollout in range(5 * start, 5 * start + 6):
            records += slime_rows(rollout)
    slime = run(records, updates_per_batch=2)
    assert [row["step"] for row in slime.rows] == list(range(1, 117))


def test_two_runs_whose_records_alternate_are_told():
    def alternating(ahead):
        records = []
        for step in range(1, 60):
            records += [trl_row(step + ahead, reward=0.1), trl_row(step, reward=0.9)]
        return records

    with pytest.raises(ValueError, match="go back more than 20 times"):
        run(alternating(ahead=1))
    # steps 2 to 59 of the second come after steps that are later than theirs
    assert any(note.startswith("58 records have an earlier") for note in run(alternating(99)).notes)
    same_steps = [trl_row(step, reward=r) for step in range(1, 40) for r in (0.1, 0.9)]
    assert run(same_steps).dropped == {
        "records that contradict an earlier record of the same step": 39
    }


def test_records_of_one_step_that_contradict_each_other_are_not_merged():
    records = [trl_row(1), {"step": 1, "reward": 0.9}, trl_row(2)]
    trl = run(records)
    assert trl.rows[0]["reward/mean"] == 0.501
    assert trl.dropped == {"records that contradict an earlier record of the same step": 1}
    # nothing of such a record joins the row
    records = [{"step": 1, "reward": 0.1, "completions/mean_length": 5.0}]
    records += [{"step": 1, "reward": 0.9, "kl": 0.3}, {"step": 1, "reward": 0.1, "entropy": 0.5}]
    trl = run(records)
    assert trl.rows == [{"step": 1, "reward/mean": 0.1, "length/mean": 5.0, "policy/entropy": 0.5}]
    assert trl.dropped == {"records that contradict an earlier record of the same step": 1}
    assert any("(the first: reward of step 1 is 0.1 and 0.9)" in note for note in trl.notes)


def test_numbers_that_are_not_finite_are_kept_as_nan_and_counted():
    records = [trl_row(1), trl_row(2, reward=math.nan, kl=math.inf), trl_row(3, kl=None)]
    trl = run(records)
    assert math.isnan(trl.rows[1]["reward/mean"]) and math.isnan(trl.rows[1]["kl/ref_k3"])
    assert trl.dropped == {
        "numbers that are not finite (NaN in the rows, left out of means over updates)": 3
    }


def test_rows_without_a_reward_do_not_make_the_others_means():
    records = [trl_row(step) for step in range(1, 13)]
    for record in records[1::2]:
        del record["reward"]  # 2 updates of a batch, each with a row
    trl = run(records)
    assert trl.batches_per_row == 1 and not any("is the mean over" in note for note in trl.notes)
    assert any("6 of 12 rows of training have a reward" in note for note in trl.notes)
    # evaluations between the rows do not count either
    records = [trl_row(step) for step in (10, 20, 30)]
    records[1:1] = [{"eval_reward": 0.1, "step": step} for step in (12, 14, 16, 18)]
    assert run(records).batches_per_row == 10


def test_a_console_that_starts_anew_begins_with_its_evaluation():
    def console(reward):
        rows = [{"step": 0, "val-core/math/acc/mean@8": reward}]
        return rows + [{"step": step} | verl_row(step) for step in (1, 2)]

    first = console(0.1)
    first[2]["val-core/math/acc/mean@8"] = 0.3
    verl = run(first + console(0.2))
    assert verl.rows[0]["eval/math/avg@8"] == 0.2 and not verl.dropped
    assert "eval/math/avg@8" not in verl.rows[2]
    assert any("begin again at 0" in note for note in verl.notes)


def test_a_lost_head_and_a_gap_are_told():
    resumed = run([{"step": step} | verl_row(step) for step in range(60, 70)])
    assert "lost: it has no row of batches 1, 2, 3, ... (59 in all)" in resumed.notes
    assert "lost: it has no row of batches 1, 2, 3" in foreign_page(resumed)
    gap = run([{"step": step} | verl_row(step) for step in (1, 2, 5)])
    assert "lost: it has no row of batches 3, 4" in gap.notes
    # rows that are means have none between
    assert not any("lost" in note for note in run([trl_row(10), trl_row(20)]).notes)


def test_a_row_is_the_mean_over_batches_once_the_updates_of_a_batch_are_known():
    records = [trl_row(step) for step in range(20, 100, 20)]
    said = "a row is the mean over {}, also of extremes"
    assert said.format("20 steps") in run(records).notes
    assert said.format("5 rollout batches") in run(records, updates_per_batch=4).notes


def test_an_objective_that_no_line_of_the_table_has_is_told():
    (note,) = [note for note in run([trl_row(1)], objective="gspoo").notes if "gspoo" in note]
    assert "the clipped shares keep the framework's name" in note and "gspo" in note


@pytest.mark.parametrize(
    ("framework", "names"),
    [
        # in W&B and TensorBoard; transformers 5 and TRL 1.16
        ("trl", ("eval/reward", "eval/entropy", "eval/clip_ratio/low_mean", "train/train_loss")),
        ("trl", ("policy_loss", "entropy_coef", "tools/call_frequency", "vespo/phi_seq_mean")),
        # real logs of verl: DAPO's trainer and the KL in the reward
        ("verl", ("num_turns/mean", "train/num_gen_batches", "actor/reward_kl_penalty")),
        ("verl", ("actor/lr(1e-4)", "critic/kl", "critic/kl_coeff", "mfu/actor", "timing/adv")),
        # NeMo-RL's own loss_functions.py
        ("nemo_rl", ("train/js_divergence_error", "train/loss", "train/is_oob_ratio")),
        ("slime", ("passrate/pass@2", "multi_turn/multi_turn_metric/round_number_mean")),
        ("skyrl", ("timing/generate", "loss/avg_final_rewards", "policy/raw_grad_norm")),
    ],
)
def test_names_of_real_logs_are_in_the_tables(framework, names):
    table = TABLES[framework]
    assert not [name for name in names if table.entry(table.bare(name))[0] is None]


def test_what_is_left_out_is_counted():
    records = [trl_row(1), {"reward": 1.0}, {"step": 2, "profiling/Time taken": 1.0}]
    records += [{"step": -1, "reward": 1.0}, {"step": 2.5, "reward": 1.0}]
    records.append(trl_row(3, note="text", flag=True))
    trl = run(records)
    assert [row["step"] for row in trl.rows] == [1, 3]
    assert trl.dropped == {
        "records without a step": 3,
        "records without a metric of training": 1,
    }
    assert any("no numbers: flag, note" in note for note in trl.notes)


def test_unknown_names_of_a_new_version_are_kept_and_named():
    trl = run([trl_row(1, **{"clip_ratio/new_mean": 0.1, "brand_new": 2.0})])
    assert trl.unknown() == ["trl/brand_new", "trl/clip_ratio/new_mean"]
    assert trl.rows[0]["trl/brand_new"] == 2.0
    assert any("2 names are not in the table of TRL" in note for note in trl.notes)


def test_nothing_readable_is_an_error_with_the_counts():
    with pytest.raises(ValueError, match="without a record"):
        run([])
    with pytest.raises(ValueError, match=r"read as a row of TRL .*2 records without a st"):
        run([{"reward": 1.0, "completions/mean_length": 2.0}] * 2)
    with pytest.raises(ValueError, match="choose one of"):
        run([trl_row(1)], framework="other")


def test_the_page_of_definitions_is_what_the_tables_give():
    file = Path(__file__).parents[3] / "docs" / "other_frameworks_tables.md"
    hint = (
        "write it anew: python -m gspo.tracking.frameworks.page > docs/other_frameworks_tables.md"
    )
    assert file.read_text(encoding="utf-8") == page(), hint


# ------------------------------------------------------------------------------------------------
# the report
def test_the_page_of_a_run_before_its_first_batch_and_with_a_long_path(tmp_path):
    log = Log(Path("x" * 250, "y" * 250, "trainer_state.json"), "rows", [trl_row(0)])
    page_file = write_foreign_page(translate(log), tmp_path)
    assert page_file.name.endswith("y-trainer_state.json.html")
    assert "no rollout batch has a finite one" in page_file.read_text()
    second = write_foreign_page(translate(log), tmp_path, taken={page_file})
    assert second.name.endswith("-2.html") and page_file.exists()


def test_a_row_of_many_steps_counts_as_many_in_text_and_picture():
    rewards = [0.1 * min(step, 6) for step in range(15)] + [0.05] * 5
    records = [trl_row(10 * step + 10, reward=reward) for step, reward in enumerate(rewards)]
    trl = run(records)
    html = foreign_page(trl)
    assert trl.batches_per_row == 10 and "it collapsed at step 160" in html
    assert "collapsed, step 160" in html, "the picture says the same"
    # steps that are far apart take no time
    far = [trl_row(step) for step in range(0, 1_000_001, 90_000)]
    assert "Does the reward keep rising" in foreign_page(run(far))


def test_the_report_of_a_collapsed_run_of_verl(tmp_path):
    rewards = [0.2 + 0.6 * min(step, 30) / 30 for step in range(40)] + [0.05] * 50
    records = []
    for step, reward in enumerate(rewards, start=1):
        changes = {"critic/score/mean": reward, "actor/grad_norm": 9.0 if step == 60 else 0.25}
        records.append({"step": step} | verl_row(step, **changes))
    verl = run(records, objective="gspo")
    html = write_foreign_page(verl, tmp_path).read_text()
    words = " ".join(" ".join(Page(html).words).split())
    assert "a run of verl, read from rows, objective gspo, seed not logged" in words
    assert "rising? No: it collapsed at step 4" in words
    assert "by optim/grad_norm: median 0.25, largest 9; rows with ten times the usual" in words
    assert "activation stay consistent? It cannot be judged: verl logs no routing" in words
    assert "grad_spike is 1.56, above 1" in words and "fallen" in words
    assert "ratio/ess_token verl logs no metric of this definition" in words
    assert "clip/token_active reweighted actor/pg_clipfrac" in words
    assert "verl/response_length/clip_ratio another definition" in words
    assert "mismatch/sequence_min scaled rollout_corr/log_ppl_diff_max: exp(-x)" in words
    # without the objective, the clipped share is not judged
    words = " ".join(Page(foreign_page(run(records))).words)
    assert "the objective is not logged: set objective=" in words


def test_a_page_says_that_an_objective_gives_a_number_another_meaning():
    words = " ".join(Page(foreign_page(run([trl_row(1)], objective="gspo"))).words)
    assert "clip_ratio/region_mean has another definition with objective=gspo" in words


def test_openrlhf_of_older_versions_and_with_gspo():
    old = {"train/global_step": 1, "train/reward": 0.5, "train/response_length": 9.0}
    old |= {"train/policy_loss": 0.1, "train/actor_lr": 1e-6}
    row = run([old]).rows[0]
    assert row["reward/mean"] == 0.5 and row["length/mean"] == 9.0
    config = {"policy_loss_type": "gspo"}
    gspo = run([OTHER_ROWS["openrlhf"]], config=config)
    assert gspo.objective == "gspo" and gspo.rows[0]["clip/token_active"] == 0.02
    assert not any("objective" in note for note in run([OTHER_ROWS["openrlhf"]]).notes)


def test_skyrls_clipped_share_by_its_objective():
    def row(kind, **changes):
        config = {"trainer.algorithm.policy_loss_type": kind}
        return run([OTHER_ROWS["skyrl"] | changes], config=config).rows[0]

    assert row("gspo")["clip/token_active"] == 0.02, "a mean over tokens, as verl's"
    assert row("regular")["clip/token_active"] == row("dual_clip")["clip/token_active"] == 0.02
    # CISPO counts ratios outside the range, of which no gradient is removed
    records = [OTHER_ROWS["skyrl"] | {"policy/loss_metrics/clip_ratio": 0.9}]
    for objective in ("cispo", "clip_cov", ""):
        skyrl = run(records, objective=objective)
        assert skyrl.rows[0]["skyrl/policy/loss_metrics/clip_ratio"] == 0.9
        assert any("the clipped shares keep the framework's name" in note for note in skyrl.notes)
    names = row("sapo", **{"policy/loss_metrics/clip_ratio": 0.0}).keys()
    assert not any("clip" in name for name in names)


def test_the_report_of_a_short_run_with_means_over_steps():
    records = [trl_row(step, grad_norm=math.nan) for step in (10, 20)]
    words = " ".join(Page(foreign_page(run(records))).words)
    assert "Unknown: 2 rows have a reward" in words and "too few rows" in words
    assert "range? It cannot be judged: no row has one" in words
    negative = [trl_row(step, reward=-1.0 - step / 100) for step in range(1, 40)]
    words = " ".join(Page(foreign_page(run(negative))).words)
    assert "collapse rule" in words and "the smoothed reward is never above 0" in words
    fallen = [trl_row(10 * step, reward=1.0 if step < 15 else 0.1) for step in range(1, 40)]
    trl = run(fallen)
    words = " ".join(Page(foreign_page(trl)).words)
    assert "it collapsed at step 150" in words, "the mean of 10 steps counts 10 times"
    assert "has been below 0.7 x its peak for 20 steps" not in words


def test_a_folder_of_runs_stands_for_its_runs(tmp_path, monkeypatch, capsys):
    study = tmp_path / "study"
    runs = [write(study, name, HEALTHY) for name in ("gspo", "grpo")]
    (study / "manifest.jsonl").write_text("{}\n")  # a sweep's own file is no log
    monkeypatch.setattr("sys.argv", ["gspo report", str(study)])
    with pytest.raises(SystemExit) as ended:
        report.write_pages()
    pages = [str(run / "report.html") for run in runs]
    assert not ended.value.code and sorted(capsys.readouterr().out.split()) == sorted(pages)
    assert all(Path(page).is_file() for page in pages)
    monkeypatch.setattr("sys.argv", ["gspo report", str(study), "objective=gspo"])
    with pytest.raises(ValueError, match="objective"):
        report.write_pages()


def test_a_page_that_cannot_be_written_stops_no_other_page(tmp_path, monkeypatch, capsys):
    runs = [write(tmp_path, name, HEALTHY) for name in ("gspo", "grpo")]
    (runs[0] / "report.html").mkdir()
    monkeypatch.setattr("sys.argv", ["gspo report", *map(str, runs)])
    with pytest.raises(SystemExit) as ended:
        report.write_pages()
    assert ended.value.code and (runs[1] / "report.html").is_file()
    monkeypatch.setattr("sys.argv", ["gspo report", str(runs[1]), "out=elsewhere"])
    with pytest.raises(ValueError, match=r"^out=elsewhere: the page of a run is written into"):
        report.write_pages()


def test_the_command(tmp_path, monkeypatch, capsys):
    rows = [{"step": step} | verl_row(step) for step in range(1, 15)]
    logs = tmp_path / "logs"
    logs.mkdir()
    write_lines(logs / "good.jsonl", rows)
    write_lines(logs / "odd.jsonl", [{"step": 1, "mine": 1.0}])
    words = [str(logs), "objective=gspo", f"out={tmp_path / 'pages'}"]
    monkeypatch.setattr("sys.argv", ["gspo report", *words])
    with pytest.raises(SystemExit) as ended:
        report.write_pages()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and "odd.jsonl" in printed.err and "prove no fram" in printed.err
    assert "note: " in printed.err
    assert Path(printed.out.strip()).name.endswith("logs-good.jsonl.html")
    assert Path(printed.out.strip()).is_file()

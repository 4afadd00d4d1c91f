"""Settings: every option file composes, experiments do not leak into objectives, bad input is one
clear line.
"""

import json
import math
import re
import sys
import tempfile
from dataclasses import asdict, fields, is_dataclass, replace
from functools import reduce
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from joblib.externals.loky.process_executor import _RemoteTraceback
from omegaconf import OmegaConf, open_dict

import forked
from commands import ROOT
from composing import CONF, options, settings
from daily import daily_but
from gspo.cli.option_files import register_options
from gspo.config.checks import check, check_training_set
from gspo.config.conversion import to_dataclass
from gspo.config.load import read_settings, resumed_settings, to_settings, write_settings
from gspo.config.remarks import warnings, warnings_after
from gspo.config.settings import (
    CHOICES,
    Settings,
    of_result,
    run_directory,
    same_result,
    settings_hash,
)
from gspo.io.errors import SettingError
from gspo.io.ranges import HASHED_IF_CHANGED, fields_with
from gspo.run.entry_point import explain
from gspo.run.policies import check_positions, open_policy
from gspo.tasks.testbed.function_writing import FunctionWriting
from refusals import refuses

NEEDS = {  # what an option cannot do without
    "hf": ["model.path=some/folder"],
    "gae": ["objective=ppo"],
    "otb": ["objective=gspo_token"],
    "otb_verl_columns": ["objective=gspo_token"],
    "gdpo": ["reward.weights={a:1,b:1}"],
    "gdpo_verl": ["reward.weights={a:1,b:1}"],
    "gdpo_ms_swift": ["reward.weights={a:1,b:1}"],
    "gdpo_nemo": ["reward.weights={a:1,b:1}"],
    "m2po": ["objective=grpo"],
    "turn_normalized": ["objective=gspo_token", "task=guessing"],
    "rows": ["task.reward=gspo.data.seeding:seed_for", "cold_start.steps=0"],
    "vf": ["task.taskset=vf_games", "cold_start.steps=0"],
    "text_game": ["task.id=Blackjack-v1", "cold_start.steps=0"],
    "openenv": ["task.url=http://127.0.0.1:8000", "cold_start.steps=0"],
    "grouped": ["rollout.query_set=128"],
}


@pytest.mark.slow
@pytest.mark.parametrize("group", [*CHOICES, "experiment", "preset", "arm"])
def test_every_option_file_composes_and_every_class_has_one(group):
    for option in options(group):
        result = settings(f"{group}={option}", *NEEDS.get(option, []))
        if group in CHOICES:
            assert type(getattr(result, group)) is CHOICES[group].get(
                option, type(getattr(result, group))
            )
    of_studies = {path.stem for path in (CONF.parent / "sweeps" / group).glob("*.yaml")}
    assert set(CHOICES.get(group, {})) <= set(options(group)) | of_studies


def test_the_help_names_every_option():
    register_options()  # as `gspo train` does
    with initialize_config_dir(str(CONF), version_base="1.3"):
        text = compose("train", return_hydra_config=True).hydra.help.template
    listed = text.split("== Options of each group")[1].split("objective, advantage and task may")[0]
    sections = dict(re.findall(r"^(\w+)  +((?:.+\n)(?:       +.+\n)*)", listed, flags=re.M))
    for group in [*CHOICES, "experiment", "preset", "arm"]:
        in_sweeps = [path.stem for path in (ROOT / "sweeps" / group).glob("*.yaml")]
        assert sections[group].split() == sorted([*options(group), *in_sweeps])


@pytest.mark.slow
def test_paper_clip_ranges_are_what_the_option_files_say():
    ranges = {o: settings(f"objective={o}").objective for o in options("objective")}
    assert (ranges["gspo"].clip_low, ranges["gspo"].clip_high) == (3e-4, 4e-4)
    assert (ranges["gspo_token"].clip_low, ranges["gspo_token"].clip_high) == (3e-4, 4e-4)
    assert (ranges["grpo"].clip_low, ranges["grpo"].clip_high) == (0.2, 0.27)


@pytest.mark.slow
def test_every_experiment_keeps_an_objectives_own_values():
    """Of every objective: the next test says that no file can name a value of one."""
    for objective in ("gspo", "grpo", "sapo"):
        alone = settings(f"objective={objective}").objective
        for experiment in options("experiment"):
            assert (
                settings(f"experiment={experiment}", f"objective={objective}").objective == alone
            ), experiment


def test_no_experiment_preset_arm_or_sweep_carries_a_block_of_a_choice():
    for path in [
        *(CONF / "experiment").glob("*.yaml"),
        *(CONF / "preset").glob("*.yaml"),
        *(CONF / "arm").glob("*.yaml"),
        *(ROOT / "sweeps").glob("*.yaml"),
    ]:
        content = yaml.safe_load(path.read_text())
        blocks = {"objective", "advantage", "kl", "correction"} & set(content)
        assert not blocks, f"{path}: {blocks} would leak onto whichever option is chosen"


def test_a_preset_wins_over_the_experiment_and_the_command_line_over_both():
    preset = settings("experiment=tiny_moe", "preset=drgrpo")
    assert preset.objective.name == "drgrpo" and preset.advantage.name == "group_mean"
    assert preset.optim.lr == 2e-4, "the experiment's, on which the preset is silent"
    assert settings("experiment=tiny_moe", "preset=roll_current").rollout.max_new_tokens == 4096
    mine = settings(
        "preset=verl", "experiment=tiny_moe", "objective=grpo_verl", "trainer.minibatches=2"
    )
    assert (mine.objective.name, mine.trainer.minibatches, mine.trainer.aggregation.rows) == (
        "grpo",
        2,
        "all",
    )


def test_roll_legacy_is_the_option_list_of_rolls_first_gspo_page():
    s = settings("preset=roll_legacy")
    assert (s.rollout.prompts_per_step, s.rollout.group_size) == (64, 8)  # rollout batch 64 x 8
    assert (s.rollout.max_prompt_tokens, s.rollout.max_new_tokens) == (2048, 4096)
    # reinforce
    assert (s.advantage.name, s.advantage.whiten, s.advantage.clip) == ("returns", "tokens", 2.0)
    # seq; pg_clip
    assert (s.objective.name, s.objective.clip_low, s.objective.clip_high) == ("gspo", 0.2, 0.2)
    assert s.objective.dual_clip == pytest.approx(1 + 2 * 0.2)  # dual_clip_loss
    # use_kl_loss; no token-level KL
    assert (s.kl.name, s.kl.coef, s.kl.estimator) == ("loss", 0.001, "k3")
    assert s.trainer.aggregation.mode == s.kl.aggregation.mode == "seq-mean-token-sum"
    assert (s.trainer.epochs, s.reward.clip, s.reward.shift, s.reward.scale) == (
        1,
        10,
        "none",
        "none",
    )


@pytest.mark.slow
def test_presets_of_peers_state_their_conventions():
    expected = {  # objective, clip range, bound, aggregation, rows, eps of the std, KL
        "trl": ("gspo", 3e-4, 4e-4, 80, "seq-mean-token-mean", "all", 1e-4, "none"),
        "trl_grpo": ("grpo", 0.2, 0.2, 80, "token-mean", "nonempty", 1e-4, "none"),
        "verl": ("gspo_token", 3e-4, 4e-4, 10, "seq-mean-token-mean", "all", 1e-6, "none"),
        "verl_grpo": ("grpo", 0.2, 0.2, 20, "token-mean", "nonempty", 1e-6, "none"),
        "ms_swift": ("gspo", 3e-4, 4e-4, 80, "seq-mean-token-mean", "all", 1e-4, "none"),
        "ms_swift_grpo": ("grpo", 0.2, 0.2, 80, "seq-mean-token-mean", "all", 1e-4, "loss"),
        "paper_gspo": ("gspo", 3e-4, 4e-4, 20, "seq-mean-token-mean", "nonempty", 1e-6, "none"),
        "paper_grpo": ("grpo", 0.2, 0.27, 20, "seq-mean-token-mean", "nonempty", 1e-6, "none"),
        "dapo": ("dapo", 0.2, 0.28, 20, "token-mean", "nonempty", 1e-6, "none"),
    }
    for preset, values in expected.items():
        s = settings(f"preset={preset}")
        o, a = s.objective, s.trainer.aggregation
        clip = (o.clip_low, o.clip_high, o.log_ratio_bound)
        assert (o.name, *clip, a.mode, a.rows, s.advantage.eps, s.kl.name) == values, preset
    assert settings("preset=drgrpo").trainer.aggregation.length == 80, "the response limit"
    assert settings("preset=minirl").correction.high == 5.0
    assert settings("preset=paper_grpo").policy.routing_replay == "r2"


def test_every_number_of_a_preset_has_its_source_beside_it():
    for path in [*(CONF / "preset").glob("*.yaml")]:
        for line in path.read_text().splitlines():
            value, _, source = line.partition(": ")[2].partition(" #")
            if value.strip().replace(".", "").replace("e-", "").isdigit():
                assert source, f"{path}: {line}"


@pytest.mark.slow
def test_auto_settles_to_what_the_objectives_paper_uses():
    modes = {
        "dapo": "token-mean",
        "drgrpo": "seq-mean-token-sum-norm",
        "gspo": "seq-mean-token-mean",
    }
    for option, mode in modes.items():
        s = settings(f"objective={option}", "kl=loss", "rollout.extend={5: 120}")
        assert s.trainer.aggregation.mode == s.kl.aggregation.mode == mode
    assert settings("objective=drgrpo", "rollout.extend={5: 120}").trainer.aggregation.length == 120


SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))


def of_sweep(path: Path, *overrides: str):
    return settings(
        f"hydra.searchpath=[file://{CONF}]", *overrides, name=path.stem, folder=path.parent
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_every_sweep_composes(path):
    assert of_sweep(path).on_existing == "resume"


@pytest.mark.slow
@pytest.mark.parametrize("name", daily_but([path.stem for path in SWEEPS], "effect", "arena"))
def test_every_sweep_composes_with_each_of_its_options(name):
    path = ROOT / "sweeps" / f"{name}.yaml"
    swept = yaml.safe_load(path.read_text())["hydra"]["sweeper"]["params"]
    for key, values in swept.items():
        if key.startswith("+") or (CONF / key).is_dir():
            runs = [
                of_sweep(path, f"{key}={value}") for value in values.split(",") if value != "vllm"
            ]
            # vllm composes where vLLM is installed
            assert len({settings_hash(run) for run in runs}) == len(runs), (
                f"{key}: two options are the same"
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["basic", "joblib", "submitit_local", "submitit_slurm", "two_jobs"]
)
def test_a_sweep_file_leaves_the_launcher_to_the_command_line(launcher):
    overrides = [f"hydra.searchpath=[file://{CONF}]", f"hydra/launcher={launcher}"]
    with initialize_config_dir(str(ROOT / "sweeps"), version_base="1.3"):
        composed = compose("learning_rate", overrides=overrides, return_hydra_config=True)
    assert (
        composed.hydra.launcher._target_.endswith("Launcher") and composed.study == "learning_rate"
    )


def test_precedence_is_defaults_experiment_command_line():
    assert settings().optim.lr == 1e-6
    experiment = settings("experiment=tiny_moe")
    assert experiment.optim.lr != 1e-6
    assert settings("experiment=tiny_moe", "optim.lr=0.5").optim.lr == 0.5


BAD = [
    ("rollout.group_size=1", ("rollout.group_size", 1)),
    ("trainer.minibatches=5", ("trainer.minibatches", 5)),
    ("trainer.minibatches=1", ("trainer.minibatches", 1)),
    ("trainer.minibatches=0", ("trainer.minibatches", 0)),
    ("trainer.aggregation.mode=sum", ("trainer.aggregation.mode", "sum")),
    (
        "trainer.aggregation.mode=token-mean",
        ("trainer.aggregation.mode", "token-mean", "weighs responses"),
    ),
    (
        "trainer.aggregation.mode=seq-mean-token-sum objective=gspo_token",
        ("trainer.aggregation.mode", "seq-mean-token-sum", "weighs"),
    ),
    (
        "trainer.aggregation.mode=seq-mean-token-sum objective=luspo",
        ("trainer.aggregation.mode", "seq-mean-token-sum", "with objective=l"),
    ),
    (
        "objective=sapo objective.level=sequence trainer.aggregation.mode=token-mean",
        ("trainer.aggregation.mode", "token-mean", "objective=sapo has one ratio"),
    ),
    ("trainer.aggregation.rows=some", ("trainer.aggregation.rows", "some")),
    (
        "objective=dapo trainer.aggregation.mode=token-mean trainer.aggregation.rows=all",
        ("aggregation.rows", "all", "is not read"),
    ),
    (
        "trainer.aggregation.length=9 trainer.aggregation.mode=seq-mean-token-mean",
        ("aggregation.length", 9, "is not read"),
    ),
    ("objective.dual_clip=0.5", ("objective.dual_clip", 0.5)),
    ("objective=dppo objective.delta=2", ("objective.delta", 2.0)),
    ("objective=dppo correction=tis", ("correction", "tis", "with objective=dppo")),
    ("objective=prime_rl correction=kpop", ("correction", "kpop", "with objective=prime_rl")),
    ("objective=prime_rl correction=m2po", ("correction", "m2po", "with objective=prime_rl")),
    ("objective=prime_rl correction=opsm_slime", ("correction", "opsm", "with objective=prime_rl")),
    ("correction=m2po", ("correction", "m2po", "a ratio is of several tokens")),
    ("objective=ctpo correction=m2po", ("correction", "m2po", "a ratio is of several tokens")),
    ("objective=gspo_turn correction=m2po", ("correction", "m2po", "a ratio is of several")),
    ("objective=vespo correction=tis_ctpo", ("correction", "tis", "token weights become a factor")),
    (
        "objective=vespo correction=tis correction.normalize=true",
        ("correction", "tis", "token weights become a factor"),
    ),
    ("objective=vespo correction=tv", ("correction", "rho", "token weights become a factor")),
    (
        "objective=grpo correction=kpop policy.old_logprobs=engine",
        ("correction", "kpop", "with policy.old_logprobs=engine"),
    ),
    (
        "objective=grpo correction=m2po policy.old_logprobs=engine",
        ("correction", "m2po", "with policy.old_logprobs=engine"),
    ),
    (
        "objective=grpo correction=tv policy.old_logprobs=engine",
        ("correction", "rho", "with policy.old_logprobs=engine"),
    ),
    (
        "objective=prime_rl correction=opsm policy.old_logprobs=engine",
        ("policy.old_logprobs", "engine", "is not read with objective=prime_rl"),
    ),
    ("correction=opsm correction.delta=0", ("correction.delta", 0.0)),
    ("correction=opsm correction.against=nobody", ("correction.against", "nobody")),
    ("correction=kpop correction.high=0", ("correction.high", 0.0)),
    ("objective=grpo correction=m2po correction.threshold=0", ("correction.threshold", 0.0)),
    (
        "correction=tv correction.mask_high=null",
        ("correction.mask_high", None, "nothing is masked"),
    ),
    (
        "correction=rho correction.mask_low=3",
        ("correction.mask_low", 3.0, "must be below correction.mask_high=2"),
    ),
    ("correction=rho correction.low=3", ("correction.low", 3.0, "must be below")),
    (
        "kl=loss kl.weighted=true correction=opsm",
        ("kl.weighted", True, "with correction=opsm"),
    ),
    ("rollout.top_p=.9 correction=opsm", ("correction", "opsm", "use correction=none")),
    ("rollout.top_k=5 objective=prime_rl", ("objective", "prime_rl", "divides by the engine's")),
    ("objective=dro objective.beta=0", ("objective.beta", 0.0)),
    ("objective=vespo objective.lambda_positive=0", ("objective.lambda_positive", 0.0)),
    (
        "correction=icepop policy.old_logprobs=engine",
        ("correction", "icepop", "with policy.old_logprobs=engine"),
    ),
    ("correction=tis correction.level=word", ("correction.level", "word")),
    ("correction=tis correction.high=0", ("correction.high", 0.0)),
    ("advantage=gae", ("objective", "gspo", "has one advantage per response,")),
    ("advantage=otb", ("objective", "gspo", "has one advantage per response,")),
    (
        "advantage=otb objective=gspo_token policy.old_logprobs=engine",
        ("policy.old_logprobs", "engine", "must be of the same policy"),
    ),
    ("advantage=maxrl reward.clip=1", ("reward.clip", 1.0, "the verifier's own rewards")),
    ("advantage=nsr reward.overlong_cache=4", ("reward.overlong_cache", 4, "advantage=nsr")),
    ("advantage=maxrl kl=reward", ("kl", "reward", "with advantage=maxrl")),
    ("advantage=maxrl rollout.group_size=1", ("rollout.group_size", 1, "nothing to compare")),
    ("advantage=gdpo", ("reward.weights", {}, "at least two named rewards")),
    (
        "advantage=gdpo reward.weights={a:1}",
        ("reward.weights", {"a": 1.0}, "at least two named rewards"),
    ),
    (
        "advantage=nsr rollout.refill_rounds=2",
        ("rollout.refill_rounds", 2, "drops groups whose rewards are equal"),
    ),
    (
        "task=guessing reward.weights={a:1}",
        ("reward.weights", {"a": 1.0}, "an episode has a single reward"),
    ),
    (
        "task=vf task.taskset=vf_games objective=gspo_token advantage=returns reward.turns=each "
        "reward.weights={a:1,b:1}",
        ("reward.turns", "each", "the named rewards are of whole episodes"),
    ),
    ("advantage=returns kl=reward", ("objective", "gspo", "advantage=returns with kl=reward")),
    (
        "advantage=returns advantage.gamma=0.9",
        ("objective", "gspo", "advantage=returns with kl=none and"),
    ),
    (
        "objective=luspo advantage=reinforce_pp advantage.gamma=0.9",
        ("objective", "luspo", "advantage.gamma=0.9 gives one per"),
    ),
    (
        "objective=dapo trainer.aggregation.rows=all",
        ("aggregation.rows", "all", "is not read by"),
    ),
    ("objective=grpo trainer.aggregation.length=9", ("aggregation.length", 9, "is not read")),
    (
        "kl=loss kl.aggregation.rows=all",
        ("kl.aggregation.rows", "all", "not read with"),
    ),
    (
        "kl=loss kl.estimator=k2 kl.times_ratio=token kl.log_ratio_bound=100",
        ("kl.log_ratio_bound", 100.0),
    ),
    ("kl=loss kl.log_ratio_bound=100", ("kl.log_ratio_bound", 100.0)),
    (
        "advantage=group_mean reward.shift=batch kl=reward",
        ("reward.shift", "batch", "is not read with"),
    ),
    (
        "model=tiny_dense trainer.consistency_sample=9",
        ("trainer.consistency_sample", 9, "is not read with model=tiny_dense"),
    ),
    (
        "task=gsm8k cold_start.steps=5",
        ("cold_start.steps", 5, "has no demonstrations"),
    ),
    ("advantage.std=batch reward.scale=batch", ("reward.scale", "batch", "is not read")),
    (
        "advantage.group_of_one=reward",
        ("advantage.group_of_one", "reward", "is not read with"),
    ),
    (
        "advantage=reinforce_pp advantage.baseline=group rollout.group_size=1",
        ("rollout.group_size", 1, "with advantage.basel"),
    ),
    (
        "kl=loss kl.gradient=k2 kl.times_ratio=token",
        ("kl.times_ratio", "token", "with kl.gradient=k2"),
    ),
    ("advantage.whiten=all", ("advantage.whiten", "all")),
    (
        "advantage=reinforce_pp advantage.baseline=group advantage.gamma=0.9",
        ("advantage.gamma", 0.9, "is not read"),
    ),
    ("advantage.clip=0", ("advantage.clip", 0.0)),
    ("kl=loss kl.coef=0", ("kl.coef", 0.0)),
    ("kl=loss kl.horizon=5", ("kl.horizon", 5.0, "is not read with kl.target=null")),
    ("kl=loss kl.weighted=true", ("kl.weighted", True, "with correction=none")),
    ("kl=loss kl.estimator=k9", ("kl.estimator", "k9")),
    ("monitor.rollbacks=3", ("monitor.rollbacks", 3, "is not read with monitor.action=warn")),
    ("monitor.action=stop monitor.rollback_lr=.1", ("monitor.rollback_lr", 0.1, "action=stop")),
    (
        "parallel.timeout_minutes=5",
        ("parallel.timeout_minutes", 5.0, "is not read with parallel.mode=none"),
    ),
    (
        "cold_start.steps=0 cold_start.seed=3",
        ("cold_start.seed", 3, "is not read with cold_start.steps=0"),
    ),
    (
        "task=rows task.reward=gspo.data.seeding:seed_for task.hub_split=dev",
        ("task.hub_split", "dev", "is not read with task.hub"),
    ),
    ("reward.shift=batch", ("reward.shift", "batch", "is not read with")),
    ("reward.scale=running", ("reward.scale", "running", "is not read with")),
    (
        "objective=dppo policy.old_logprobs=engine",
        ("policy.old_logprobs", "engine", "is not read with objective=dppo"),
    ),
    ("reward.eps=1e-3", ("reward.eps", 0.001, "is not read with reward.scale=none")),
    ("reward.overlong_penalty=2", ("reward.overlong_penalty", 2.0, "is not read")),
    (
        "reward.overlong_cache=80",
        ("reward.overlong_cache", 80, "must be below"),
    ),
    ("reward.shift=everything", ("reward.shift", "everything")),
    ("sampler=grouped", ("sampler", "grouped", "with rollout.query_set=0")),
    ("rollout.refresh_every=5", ("rollout.refresh_every", 5)),
    ("rollout.extend={5:10}", ("rollout.extend", {5: 10})),
    ("model=tiny_dense policy.routing_replay=r2", ("policy.routing_replay", "r2")),
    ("policy.routing_replay=r4", ("policy.routing_replay", "r4")),
    ("policy.precision=float16", ("policy.precision", "float16")),
    ("policy.old_pass=never", ("policy.old_pass", "never")),
    (
        "policy.routing_replay=r3 model=tiny_dense",
        ("policy.routing_replay", "r3", "needs an MoE model"),
    ),
    (
        "rollout.routes=true model=tiny_dense",
        ("rollout.routes", True, "is not read with model=tiny_dense"),
    ),
    ("rollout.routes_floor=.9", ("rollout.routes_floor", 0.9, "is not read with")),
    ("rollout.routes=true rollout.routes_floor=1.5", ("rollout.routes_floor", 1.5)),
    (
        "rollout.sync_tolerance=.1",
        ("rollout.sync_tolerance", 0.1, "is not read with rollout=local in"),
    ),
    ("rollout.dtype=bfloat16 rollout.sync_tolerance=-1", ("rollout.sync_tolerance", -1.0)),
    ("rollout.dtype=float16", ("rollout.dtype", "float16")),
    ("rollout.staleness=-1", ("rollout.staleness", -1)),
    ("rollout.overlap=true", ("rollout.overlap", True, "with rollout.staleness=0")),
    ("rollout.in_flight=64", ("rollout.in_flight", 64, "is not read with")),
    ("rollout.token_budget=20", ("rollout.in_flight", 0, "must exceed")),
    (
        "rollout.token_budget=80 rollout.in_flight=64",
        ("rollout.token_budget", 80, "must be below the longest response"),
    ),
    (
        "rollout.token_budget=20 rollout.in_flight=64 rollout.refill_rounds=1",
        ("rollout.token_budget", 20, "dynamic sampling needs whole"),
    ),
    (
        "rollout.token_budget=20 rollout.in_flight=64 policy.routing_replay=r3",
        ("policy.routing_replay", "r3", "no one record of experts"),
    ),
    (
        "rollout.token_budget=20 rollout.in_flight=64 policy.routing_replay=r2 policy.old_logprobs=engine",
        ("policy.routing_replay", "r2", "with rollout.token_budget=20 and"),
    ),
    (
        "rollout.token_budget=20 rollout.in_flight=96 rollout.query_set=64",
        ("rollout.in_flight", 96, "exceeds"),
    ),
    (
        "policy.routing_replay=r3 trainer.minibatches=1 allow_on_policy=true",
        ("policy.routing_replay", "r3", "changes nothing"),
    ),
    (
        "policy.old_logprobs=behaviour trainer.minibatches=1",
        ("trainer.minibatches", 1, "with policy.old_logprobs=behaviour"),
    ),
    # vLLM would sample at .01 without a word, or refuse the first request
    ("rollout=vllm rollout.temperature=.005", ("rollout.temperature", 0.005, "samples at 0.01 to")),
    ("rollout=vllm_server rollout.temperature=2.5", ("rollout.temperature", 2.5)),
    ("rollout=vllm evaluation.temperature=.005", ("evaluation.temperature", 0.005)),
    ("rollout=vllm rollout.tensor_parallel_size=0", ("rollout.tensor_parallel_size", 0)),
    (
        "rollout=vllm rollout.tensor_parallel_size=2 rollout.own_process=false",
        ("rollout.tensor_parallel_size", 2, "vLLM must run in one process"),
    ),
    ("rollout=vllm rollout.max_model_len=80", ("rollout.max_model_len", 80, "leaves no room")),
    ("rollout=vllm rollout.kv_cache_gib=0", ("rollout.kv_cache_gib", 0.0)),
    ("rollout=vllm rollout.gpu_memory=1", ("rollout.gpu_memory", 1.0)),
    (
        "rollout=vllm_server rollout.url=https://127.0.0.1:8000",
        ("rollout.url", "https://127.0.0.1:8000", "must be http://HOST:PORT"),
    ),
    (
        "rollout=vllm_server rollout.url=http://127.0.0.1:port",
        ("rollout.url", "http://127.0.0.1:port", "must be http://HOST:PORT"),
    ),
    (
        "rollout=vllm_server rollout.quantization=int4",
        ("rollout.quantization", "int4", "is read by rollout=local alone"),
    ),
    (
        "rollout=vllm rollout.sleep=true rollout.staleness=1 rollout.overlap=true",
        ("rollout.sleep", True, "the engine is never idle"),
    ),
    ("policy.old_logprobs=now", ("policy.old_logprobs", "now")),
    ("objective.clip_low=2", ("objective.clip_low", 2.0)),
    ("objective.clip_high=-1", ("objective.clip_high", -1.0)),
    ("optim.lr=-1", ("optim.lr", -1.0)),
    ("optim.name=adam", ("optim.name", "adam")),
    (
        "optim.name=adamw_8bit parallel.mode=shard",
        ("optim.name", "adamw_8bit", "with parallel.mode=shard"),
    ),
    ("trainer.entropy_coef=-.1", ("trainer.entropy_coef", -0.1)),
    (
        "trainer.entropy_coef=.1 trainer.entropy_coef_max=.5",
        ("trainer.entropy_coef_max", 0.5, "is not read with trainer.ent"),
    ),
    (
        "trainer.entropy_target=.2 trainer.entropy_coef=2",
        ("trainer.entropy_coef", 2.0, "must lie between"),
    ),
    ("rollout.temperature=0", ("rollout.temperature", 0.0)),
    ("rollout.max_new_tokens=0", ("rollout.max_new_tokens", 0)),
    ('rollout.stop=[""]', ("rollout.stop", [""], "an empty string")),
    (
        "rollout=vllm rollout.stop=[x] policy.routing_replay=r3",
        ("rollout.stop", ["x"], "with rollout=vllm and rollout.ro"),
    ),
    ("rollout.top_p=0", ("rollout.top_p", 0.0)),
    ("rollout.top_p=1.5", ("rollout.top_p", 1.5)),
    ("rollout.top_k=-1", ("rollout.top_k", -1)),
    ("rollout.min_p=1", ("rollout.min_p", 1.0)),
    (
        "rollout.top_p=.9 correction=tis",
        ("correction", "tis", "use correction=none"),
    ),
    (
        "rollout.min_p=.1 correction=rejection",
        ("correction", "rejection", "but rollout.min_p=0.1 draws tokens"),
    ),
    (
        "rollout.top_k=5 objective=dppo",
        ("objective", "dppo", "divides by the engine's whole"),
    ),
    (
        "rollout=vllm rollout.top_p=.9 rollout.temperature=.8",
        ("rollout.top_p", 0.9, "with rollout.temperature=0.8 and"),
    ),
    ("rollout.keep_mask=true", ("rollout.keep_mask", True, "no token is excluded")),
    (
        "rollout=vllm rollout.top_p=.9 rollout.keep_mask=true",
        ("rollout.keep_mask", True, "only up to rollout.top_k"),
    ),
    (
        "evaluation.temperature=0 evaluation.samples=1 evaluation.top_k=20",
        ("evaluation.top_k", 20, "is not read with eval"),
    ),
    ("evaluation.sets=[nothing]", ("evaluation.sets", ["nothing"])),
    ("cold_start.wrong_step_rate=1", ("cold_start.wrong_step_rate", 1.0)),
    ("steps=0", ("steps", 0)),
    ("optim.beta1=2", ("optim.beta1", 2.0)),
    ("optim.lr=nan", ("optim.lr", math.nan)),
    ("cold_start.micro_batch_size=0", ("cold_start.micro_batch_size", 0)),
    ("evaluation.temperature=-1", ("evaluation.temperature", -1.0)),
    ("objective.name=other", ("objective.name", "other")),
    ("threads=-2", ("threads", -2)),
    ("study=../elsewhere", ("study", "../elsewhere")),
    ("on_existing=delete", ("on_existing", "delete")),
    ("tracking.wandb=maybe", ("tracking.wandb", "maybe")),
    ("model.experts_per_token=99", ("model.experts_per_token", 99)),
    ("task.math.max_operands=1", ("task.math.max_operands", 1)),
    (
        "objective=gspo_token advantage=turn_normalized",
        ("advantage", "turn_normalized", "with task=mixed"),
    ),
    (
        "reward.turns=each objective=gspo_token advantage=gae",
        ("reward.turns", "each", "with task=mixed"),
    ),
    ("reward.turns=some", ("reward.turns", "some")),
    (
        "task=guessing reward.turns=each advantage=returns",
        ("objective", "gspo", "has one advantage per response,"),
    ),
    (
        "task=guessing reward.turns=each advantage=returns objective=gmpo",
        ("objective", "gmpo", "has one advantage per resp"),
    ),
    (
        "task=guessing objective=gspo_token advantage=turn_normalized rollout.refill_rounds=2",
        ("rollout.refill_rounds", 2, "although their turns may differ"),
    ),
    (
        "task=guessing objective=grpo trainer.aggregation.mode=seq-mean-token-sum-norm trainer.aggregation.length=0",
        ("trainer.aggregation.length", 0, "the width of the batch"),
    ),
    (
        "task=guessing kl=loss kl.coef=.1 kl.aggregation.mode=seq-mean-token-sum-norm kl.aggregation.length=0",
        ("kl.aggregation.length", 0, "with task=guessing"),
    ),
    (
        "task=guessing objective=gspo_token advantage=turn_normalized reward.shift=batch",
        ("reward.shift", "batch", "is not read with"),
    ),
    (
        "task=guessing objective=gspo_token advantage=turn_normalized advantage.gamma=.8 reward.scale=batch",
        ("reward.scale", "batch", "is not read with"),
    ),
    (
        "task=guessing advantage=turn_normalized",
        ("objective", "gspo", "has one advantage per response"),
    ),
    (
        "task=guessing reward.turns=each",
        ("reward.turns", "each", "advantage=group_normalized compares"),
    ),
    (
        "task=guessing reward.turns=each objective=gspo_token advantage=reinforce_pp advantage.baseline=group",
        ("reward.turns", "each", "advantage=reinforce_pp and"),
    ),
    (
        "task=guessing reward.turns=each objective=gspo_token advantage=returns reward.scale=batch",
        ("reward.scale", "batch", "it acts on whole responses"),
    ),
    (
        "task=guessing rollout.token_budget=9 rollout.in_flight=99",
        ("rollout.token_budget", 9, "an episode is played to its end"),
    ),
    ("task=python_tool task.turns=1", ("task.turns", 1, "leaves no turn for the answer")),
    ("task=guessing task.step_seconds=0", ("task.step_seconds", 0.0)),
    ("task=guessing task.observation_tokens=0", ("task.observation_tokens", 0)),
]


@pytest.mark.parametrize("overrides, refusal", BAD, ids=[b[0] for b in BAD])
def test_what_cannot_work_is_refused_naming_key_and_value(overrides, refusal):
    with refuses(*refusal):
        settings(*overrides.split())


@pytest.mark.parametrize(
    ("overrides", "typed"),
    [
        ("correction=tv policy.old_logprobs=engine", ("correction", "tv")),
        ("objective=prime_rl correction=opsm_slime", ("correction", "opsm_slime")),
        ("objective=gspo_trl advantage=otb", ("objective", "gspo_trl")),
        ("objective=gspo advantage=otb", ("objective", "gspo")),
    ],
)
def test_a_refusal_names_the_option_as_it_was_typed(overrides, typed):
    """correction=tv is rho with other settings."""
    with refuses(*typed):
        chosen(*overrides.split())


WORDING = [
    (
        "rollout.group_size=1",
        "rollout.group_size=1: leaves advantage=group_normalized nothing to compare with; "
        "use at least 2, or an advantage without group baseline",
    ),
    (
        "kl=loss kl.weighted=true",
        "kl.weighted=true: with correction=none, there are no weights to multiply by",
    ),
    ("policy.precision=float16", "policy.precision=float16: choose one of float32, bfloat16"),
    ("optim.lr=-1", "optim.lr=-1.0: must be a finite number of at least 0"),
]


@pytest.mark.parametrize("overrides, text", WORDING)
def test_a_refusal_is_one_line_of_key_value_problem_and_remedy(overrides, text):
    with pytest.raises(SettingError) as refused:
        settings(*overrides.split())
    assert explain(refused.value) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "kl=reward reward.scale=batch",  # KL is taken off after the scale
        # the batch's std sees what the groups' scales did
        "advantage.std=batch reward.scale=group",
        "advantage.std=batch reward.shift=group",
        # the KL term's ratio is to pi_old
        "objective=dppo kl=loss kl.times_ratio=token policy.old_logprobs=engine",
        # its ratio is to the engine's policy, not to pi_old
        "objective=dppo trainer.minibatches=1",
        "objective=gspo_token advantage=returns advantage.gamma=0.9",
        # OPSM compares the current policy
        "objective=grpo correction=opsm policy.old_logprobs=engine",
        "objective=prime_rl correction=opsm",
        "objective=prime_rl trainer.minibatches=1",
        "objective=vespo correction=opsm",
        "objective=vespo correction=icepop",
        "rollout.top_p=.9 correction=opsm_slime",
        "task=guessing objective=gspo_turn advantage=turn_normalized",
        "task=guessing reward.turns=each objective=gspo_turn advantage=gae",
        "objective=drgrpo trainer.aggregation.length=100",  # mode=auto is Dr.GRPO's, which reads it
        # both of the whole distribution
        "rollout.top_p=.9 rollout.temperature=.8 policy.old_logprobs=engine",
        "rollout=vllm rollout.top_p=.9 evaluation.top_p=.95 evaluation.temperature=.6",
        # both of the kept tokens
        "rollout.top_p=.9 rollout.keep_mask=true correction=tis",
        "rollout.top_p=.9 rollout.keep_mask=true advantage=otb objective=gspo_token",
        "rollout.min_p=.1 rollout.keep_mask=true objective=dppo rollout.temperature=.8",
        "rollout=vllm rollout.top_k=20 rollout.temperature=.8 rollout.keep_mask=true",
        "task=guessing reward.turns=each objective=gspo_token advantage=turn_normalized advantage.gamma=.8",
        "task=guessing objective=gspo_token advantage=turn_normalized advantage.gamma=.8 reward.shift=batch",
        "task=guessing reward.turns=each objective=grpo advantage=returns advantage.gamma=.9",
        "task=python_tool reward.turns=each objective=ppo advantage=gae rollout.staleness=1",
    ],
)
def test_settings_that_do_act_are_not_refused(overrides):
    chosen = settings(*overrides.split())
    assert read_back(chosen) == chosen


def read_back(chosen):
    """Through a run directory's settings.yaml, as a resume reads it."""
    with tempfile.TemporaryDirectory() as folder:
        write_settings(chosen, Path(folder))
        return read_settings(Path(folder))


def test_one_update_per_rollout_is_allowed_when_asked_for():
    assert settings("trainer.minibatches=1", "allow_on_policy=true").allow_on_policy
    assert settings("trainer.minibatches=1", "trainer.epochs=2").trainer.epochs == 2
    assert settings("trainer.minibatches=1", "policy.old_logprobs=engine").trainer.minibatches == 1
    # the trainer in bfloat16 routes otherwise than the engine in float32
    words = ["policy.routing_replay=r3", "trainer.minibatches=1", "policy.precision=bfloat16"]
    assert settings(*words, "allow_on_policy=true").policy.routing_replay == "r3"


def test_the_directory_name_holds_what_results_depend_on_and_nothing_else():
    base = settings("experiment=tiny_moe")
    for same in (
        "steps=7",
        "tracking.wandb=offline",
        "runs=elsewhere",
        "threads=2",
        "on_existing=resume",
    ):
        assert settings_hash(settings("experiment=tiny_moe", same)) == settings_hash(base), same
    for other in (
        "optim.lr=1e-3",
        "seed=2",
        "policy.routing_replay=r2",
        "objective=grpo",
        "task.code_share=0.1",
    ):
        assert settings_hash(settings("experiment=tiny_moe", other)) != settings_hash(base), other
    assert run_directory(base).match(f"runs/tiny_moe/gspo-seed1-{settings_hash(base)}")


# settings that were added after runs had been made and published, each with another value than its
# default
LATER = {
    "optim.name": "adamw_8bit",
    "optim.router_lr_factor": 0.5,
    "optim.decay": "linear",
    "optim.decay_updates": 8,
    "optim.final_lr_factor": 0.5,
    "policy.freeze_router": True,
    "policy.head_dtype": "bfloat16",
    "cold_start.log_normalizer": 25.0,
    "policy.lora": {"rank": 8, "targets": "attention", "alpha": 16},
    "trainer.router_aux_loss_coef": 0.01,
    "trainer.entropy_coef": 0.01,
    "trainer.entropy_target": 0.2,
    "trainer.entropy_coef_delta": 0.01,
    "trainer.entropy_coef_min": 0.01,
    "trainer.entropy_coef_max": 0.5,
    "rollout.quantization": "fp8_e4m3",
    "reward.turns": "each",
    "rollout.stop": ["x"],
    "rollout.top_p": 0.9,
    "rollout.top_k": 20,
    "rollout.min_p": 0.1,
    "rollout.keep_mask": True,
    "evaluation.top_p": 0.95,
    "evaluation.top_k": 20,
    "evaluation.min_p": 0.1,
    "task.code.variables": "x",
    "prompt.thinking": False,
    "prompt.date": "2031-12-24",
    "reward.truncated": -1.0,
    "reward.weights": {"correct": 1.0, "format": 0.5},
    "prompt.control_tokens": True,
    "prompt.special_tokens": False,
}


STARTS = {
    # where a setting can be given at all
    "policy.head_dtype": ["experiment=tiny_moe", "policy.precision=bfloat16"],
    "reward.turns": ["experiment=guessing_moe", "objective=gspo_token", "advantage=returns"],
}
BESIDE = {  # what a setting needs beside it
    "optim.decay": ["optim.decay_updates=8"],
    "optim.decay_updates": ["optim.decay=cosine"],
    "optim.final_lr_factor": ["optim.decay=cosine", "optim.decay_updates=8"],
    "trainer.entropy_coef_delta": ["trainer.entropy_target=0.2"],
    "trainer.entropy_coef_min": ["trainer.entropy_target=0.2", "trainer.entropy_coef=0.1"],
    "trainer.entropy_coef_max": ["trainer.entropy_target=0.2"],
    "rollout.keep_mask": ["rollout.top_p=0.9"],
}


@pytest.mark.parametrize("key", LATER)
def test_a_setting_added_later_changes_the_hash_of_no_run_that_leaves_it_alone(key):
    *groups, name = key.split(".")
    start = STARTS.get(key, ["experiment=tiny_moe"])
    base = settings(*start)
    value = str(LATER[key]).replace("'", "")  # a mapping as Hydra writes it
    changed = settings(*start, f"{key}={value}", *BESIDE.get(key, ()))
    before, after = (reduce(dict.__getitem__, groups, of_result(each)) for each in (base, changed))
    assert name not in before and after[name] == LATER[key]
    assert settings_hash(base) != settings_hash(changed) and groups[0] in same_result(base, changed)


def test_all_settings_added_later_are_tested():
    (fact,) = HASHED_IF_CHANGED
    groups = [
        (f.name, kind)
        for f in fields(Settings)
        for kind in CHOICES.get(f.name, {0: f.default_factory}).values()
    ]
    groups += [("task.code", FunctionWriting)]  # as a part of a mixture
    stated = {
        f"{name}.{key}"
        for name, kind in groups
        if is_dataclass(kind)
        for key in fields_with(kind, fact)
    }
    assert stated == {*LATER, "task.variables"}


def chosen(*overrides: str, name: str = "train", folder: Path = CONF):
    """Settings as the entry point makes them: with Hydra's choices."""
    with initialize_config_dir(str(folder), version_base="1.3"):
        config = compose(name, overrides=list(overrides), return_hydra_config=True)
    choices = config.hydra.runtime.choices
    with open_dict(config):
        del config["hydra"]
    return to_settings(config, choices)


@pytest.mark.slow
def test_the_options_that_were_chosen_are_recorded_and_change_no_result(tmp_path):
    plain, run = settings("experiment=tiny_moe"), chosen("experiment=tiny_moe", "seed=3")
    assert run.options["objective"] == "gspo_tiny" and run.objective.name == "gspo"
    assert (
        run.options["experiment"] == "tiny_moe"
        and "preset" not in run.options
        and "arm" not in run.options
    )
    assert set(run.options) >= set(CHOICES) and not any(
        group.startswith("hydra") for group in run.options
    )
    assert settings_hash(settings("experiment=tiny_moe", "seed=3")) == settings_hash(run)
    assert (
        run_directory(run).name == f"gspo_tiny-seed3-{settings_hash(run)}"
        and run.label() == "gspo_tiny seed 3"
    )
    assert plain.label() == "gspo seed 1" and plain.options == {}
    write_settings(run, tmp_path)
    assert resumed_settings(tmp_path, [f"resume={tmp_path}", "steps=500"]).options == run.options
    with refuses("options", {"objective": "mine"}):
        chosen("experiment=tiny_moe", "+options.objective=mine")
    with refuses("options.objective", "mine", "options"):
        resumed_settings(tmp_path, [f"resume={tmp_path}", "options.objective=mine"])
    replayed = chosen("experiment=micro_moe", "arm=grpo_r2", "preset=drgrpo")
    assert {
        "arm": "grpo_r2",
        "preset": "drgrpo",
        "objective": "grpo",
    }.items() <= replayed.options.items()
    path = f"hydra.searchpath=[file://{CONF}]"
    longer = chosen(path, "+chain=n4", name="response_length", folder=ROOT / "sweeps")
    assert longer.options["chain"] == "n4", "groups of a sweep's own too"


def test_a_run_from_before_options_were_recorded_is_read(tmp_path):
    old = settings("experiment=tiny_moe")
    write_settings(old, tmp_path)
    content = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    del content["options"]
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(content))
    assert read_settings(tmp_path) == old and old.objective_option() == "gspo"


@pytest.mark.slow
def test_settings_survive_the_file(tmp_path):
    for overrides in (
        ("objective=grpo", "model=tiny_dense", "task=math"),
        ("experiment=tiny_moe", "arm=grpo_r2"),
    ):
        written = settings(*overrides)
        write_settings(written, tmp_path)
        assert read_settings(tmp_path) == written


def test_resume_changes_only_what_the_numbers_do_not_depend_on(tmp_path):
    recorded = settings("experiment=tiny_moe", "seed=5")
    write_settings(recorded, tmp_path)
    for override in (
        "checkpoint.keep=1",
        "trainer.micro_batch_size=3",
        "rollout.batch_rows=7",
        "policy.device=cpu",
    ):
        cheaper = resumed_settings(tmp_path, [f"resume={tmp_path}", override])
        assert cheaper != recorded and settings_hash(cheaper) == settings_hash(recorded)
        assert same_result(cheaper, recorded) is None
    changed = resumed_settings(
        tmp_path, [f"resume={tmp_path}", "steps=500", "tracking.wandb=disabled"]
    )
    assert (changed.steps, changed.tracking.wandb, changed.seed) == (500, "disabled", 5)
    for override in ("seed=6", "optim.lr=1", "objective=grpo", "experiment=tiny_moe"):
        key, _, value = override.partition("=")
        with refuses(key, value, "only steps, checkpoint, tracking"):
            resumed_settings(tmp_path, [override])
    with pytest.raises(ValueError, match=r"does not exist"):
        resumed_settings(tmp_path / "nowhere", [])


def test_settings_of_another_version_are_refused_by_name(tmp_path):
    content = OmegaConf.to_container(OmegaConf.create(asdict(settings())))
    content["objective"]["name"] = "ppo9"
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(content))
    with refuses("objective.name", "ppo9"):
        read_settings(tmp_path)


UNREAD = [
    "kl.coef=0.1",
    "objective=reinforce objective.clip_low=0.1",
    "objective=sapo objective.dual_clip=3",
]


@pytest.mark.parametrize("overrides", UNREAD)
def test_an_option_that_the_choice_does_not_have_is_an_unknown_key(overrides):
    with pytest.raises(ConfigCompositionException) as refused:
        settings(*overrides.split())
    assert overrides.split()[-1].split("=")[0].split(".")[1] in explain(refused.value)


UNKNOWN = [  # override, the unknown key, the nearest one
    ("foo=1", "foo", "monitor"),
    ("+foo=1", "foo", "monitor"),
    ("++foo.bar=1", "foo", "monitor"),
    ("optim.lrs=0.1", "optim.lrs", "optim.lr"),
    ("+optim.lrs=0.1", "optim.lrs", "optim.lr"),
    ("+rollout.nucleus=0.9", "rollout.nucleus", "rollout.routes"),
    ("+objective.clips_low=1", "objective.clips_low", "objective.clip_low"),
    (
        "++monitor.thresholds.rewardfall=1",
        "monitor.thresholds.rewardfall",
        "monitor.thresholds.reward_fall",
    ),
    ("+task.math.largst=7", "task.math.largst", "task.math.largest"),
    ("+experimnt=tiny_moe", "experimnt", "experiment"),
]


@pytest.mark.parametrize("override, key, nearest", UNKNOWN)
def test_an_unknown_key_is_refused_with_the_nearest_one_whatever_the_plus(override, key, nearest):
    with pytest.raises((ValueError, ConfigCompositionException)) as refused:
        settings(override)
    said, _, others = explain(refused.value).partition(" (of ")
    assert said == f"{key}: there is no such setting; the nearest is {nearest}"
    assert not others or nearest.rpartition(".")[2] in others, (
        "where it is far, all of its group are named"
    )


@pytest.mark.parametrize(
    "word, nearest",
    [("parralel.mode=none", "parallel.mode"), ("rolout.dtype=bfloat16", "rollout.dtype")],
)
def test_a_mistyped_group_is_not_taken_for_another_framework(monkeypatch, word, nearest):
    monkeypatch.setattr(sys, "argv", ["gspo train", word])
    with pytest.raises(ConfigCompositionException) as refused:
        settings(word)
    key = word.partition("=")[0]
    assert explain(refused.value).startswith(
        f"{key}: there is no such setting; the nearest is {nearest}"
    )


@pytest.mark.parametrize("name", ["evaluate", "sample", "benchmark"])
def test_an_unknown_key_is_refused_by_every_entry_point(name):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(name, overrides=["+run=x"] * (name == "benchmark") + ["+foo=1"])
    with refuses("run" if name == "benchmark" else "foo", problem="the nearest is"):
        to_dataclass(config)


def test_sample_without_a_run_says_that_it_needs_one():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("sample")
    with refuses("run", problem="name a run directory"):
        to_dataclass(config)


@pytest.mark.slow
@pytest.mark.parametrize("text, key", [("foo: 1", "foo"), ("optim: {lrs: 1}", "optim.lrs")])
def test_an_unknown_key_in_a_file_is_refused_with_the_files_name(tmp_path, text, key):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    (tmp_path / "sweep.yaml").write_text(f"defaults: [train, _self_]\n{text}\n")
    with pytest.raises(ConfigCompositionException) as of_preset:
        settings(f"hydra.searchpath=[file://{tmp_path}]", "preset=mine")
    with pytest.raises(ConfigCompositionException) as of_sweep:
        settings(f"hydra.searchpath=[file://{CONF}]", name="sweep", folder=tmp_path)
    said = f"{key}: there is no such setting; the nearest is "
    assert explain(of_preset.value).startswith(f"In 'preset/mine': {said}")
    assert explain(of_sweep.value).startswith(f"In 'sweep': {said}")


def test_mappings_take_new_keys_without_a_plus():
    assert settings("rollout.extend={100: 160}") == settings("+rollout.extend={100: 160}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        command = to_dataclass(
            compose("benchmark", overrides=["size.hidden=32", "set.trainer.micro_batch_size=8"])
        )
    assert command.size == {"hidden": 32} and command.overrides() == ["trainer.micro_batch_size=8"]


@pytest.mark.slow
def test_a_setting_cannot_be_taken_away_and_a_known_one_needs_no_plus():
    with refuses("~steps", problem="give it a value, steps=..."):
        settings("~steps")
    with pytest.raises(ConfigCompositionException) as refused:
        settings("+optim.lr=0.5")
    assert explain(refused.value) == "+optim.lr: this is a setting already; give it without +"
    assert settings("++optim.lr=0.5").optim.lr == 0.5


def test_a_mistyped_option_is_told_the_nearest_one_and_no_names_of_schemas():
    with pytest.raises(ConfigCompositionException) as refused:
        settings("objective=gsop")
    said = explain(refused.value)
    assert said.startswith(
        "objective=gsop: there is no such option; the nearest is gspo (there are cispo, ctpo, "
    )
    assert "_gspo" not in said.replace("paper_gspo", "") and "provider" not in said


@pytest.mark.slow
def test_resume_refuses_unknown_keys_and_takes_a_plus_for_what_it_is(tmp_path):
    write_settings(settings("seed=5"), tmp_path)
    assert resumed_settings(tmp_path, ["+checkpoint.keep=1"]) == resumed_settings(
        tmp_path, ["checkpoint.keep=1"]
    )
    for override in (
        "foo=1",
        "+foo=1",
        "++rollout.top_q=1",
        "+checkpoint.kep=1",
        "tracking.tgs=[a]",
    ):
        key = override.lstrip("+").partition("=")[0]
        with refuses(key, problem="the nearest is"):
            resumed_settings(tmp_path, [f"resume={tmp_path}", override])


def test_resume_reads_values_as_every_command_does(tmp_path):
    write_settings(settings("seed=5", "tracking.entity=us"), tmp_path)
    changed = resumed_settings(tmp_path, ["tracking.entity=", "tracking.project='it\\'s'"])
    assert changed.tracking.entity == "" and changed.tracking.project == "it's"
    changed = resumed_settings(tmp_path, ["tracking.tags=[a,b]", "checkpoint.keep=3"])
    assert changed.tracking.tags == ["a", "b"] and changed.checkpoint.keep == 3
    with refuses("~checkpoint.keep"):
        resumed_settings(tmp_path, ["~checkpoint.keep"])


def test_warnings_name_what_may_not_be_meant():
    assert warnings(settings()) == []
    assert "kl.estimator=k1" in warnings(settings("kl=loss", "kl.estimator=k1"))[0]
    (line,) = warnings(
        settings(
            "advantage=nsr", "objective=reinforce", "allow_on_policy=true", "trainer.minibatches=1"
        )
    )
    assert "advantage=nsr" in line and "objective=reinforce" in line
    decays = ["optim.decay=linear", "optim.decay_updates=30", "optim.warmup_updates=2"]
    assert warnings(settings(*decays, "steps=8")) == []
    (line,) = warnings(settings(*decays, "steps=10"))
    assert line.startswith("optim.decay_updates=30: the learning rate is 0 from update 32 of 40 on")
    assert warnings(settings(*decays, "steps=10", "optim.final_lr_factor=.1")) == []
    (line,) = warnings(settings("optim.warmup_updates=40", "steps=10"))
    assert line.startswith("optim.warmup_updates=40: the run makes 40 updates")
    (line,) = warnings(settings("rollout.top_p=.9", "rollout.top_k=20"))
    assert line.startswith(
        "rollout.top_p=0.9, rollout.top_k=20: tokens are drawn from the truncated distribution"
    )
    metrics = {"clip/token_active": 0.0123, "ratio/sequence_log_abs": 4e-4}
    assert warnings_after(settings("objective=gspo"), metrics) == []
    assert warnings_after(settings("objective=grpo"), metrics) == []
    (line,) = warnings_after(settings("objective=gspo", "objective.clip_high=0.2"), metrics)
    assert "clip_high=0.2" in line and "1.23%" in line, "the measured share"


CLI = [
    ("optim.learning=1", "learning"),
    ("kl.coef=0.001", "kl.coef"),
    (
        "preset=verll",
        "preset=verll: there is no such option; the nearest is verl (there are areal_kpop, ",
    ),
    ("rollout.group_size=1", "rollout.group_size=1"),
    ("resume=no/such/run", "no/such/run"),
    ("policy.device=gpu", "policy.device=gpu: cannot be used here"),
]


@pytest.mark.slow
def test_the_command_line_says_it_in_one_line_and_writes_nothing(tmp_path):
    for i, (override, named) in enumerate(CLI):
        (tmp_path / str(i)).mkdir()
        command = [sys.executable, "-P", "-m", "gspo", "train", *override.split()]
        if not override.startswith("resume"):
            command.append(f"runs={tmp_path / str(i) / 'runs'}")
        done = forked.run(command, cwd=tmp_path / str(i))
        assert done.returncode == 2, done.stderr
        assert done.stdout == "" and done.stderr.startswith("error: ") and named in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert [path for path in (tmp_path / str(i)).rglob("*") if path.is_file()] == []


def test_responses_that_leave_no_room_for_a_prompt_are_refused_before_the_cold_start():
    chosen = settings("experiment=tiny_moe", "rollout.max_new_tokens=4096")
    with refuses("rollout.max_new_tokens", 4096, "in 2048 positions"):
        open_policy(chosen, None, on_cold_start_step=lambda *_: pytest.fail("the cold start began"))


def test_responses_of_a_loaded_model_are_bounded_by_its_positions():
    """README's command for an own model has the sizes of model=hf, which a model of 4,096 positions
    cannot hold.
    """
    chosen = settings("model=hf", "model.path=x", "task=gsm8k")
    assert chosen.rollout.longest_limit == chosen.rollout.max_new_tokens == 4096
    check_positions(chosen, 40960)
    assert chosen.rollout.longest_limit == 4096
    check_positions(chosen, 4096)
    assert (
        chosen.rollout.longest_limit
        == chosen.rollout.limit(1)
        == chosen.rollout.sampling(1).max_new_tokens
        == 2048
    )
    assert chosen.rollout.max_new_tokens == 4096, (
        "what is recorded, and names the run, is what was asked for"
    )
    fixed = settings("model=hf", "model.path=x", "task=gsm8k", "objective=drgrpo")
    with refuses("rollout.max_new_tokens", 4096, "set it to 2048"):
        check_positions(fixed, 4096)
    penalised = settings("model=hf", "model.path=x", "task=gsm8k", "reward.overlong_cache=2048")
    with refuses("rollout.max_new_tokens", 4096, "set it to 2048"):
        check_positions(penalised, 4096)
    growing = settings("model=hf", "model.path=x", "task=gsm8k", "rollout.extend={10: 8192}")
    check_positions(growing, 8192)
    assert [growing.rollout.limit(step) for step in (1, 10)] == [4096, 4096]


@pytest.mark.parametrize(
    ("advantage", "reward"), [("maxrl", "-1"), ("nsr", "-0.5"), ("w_reinforce", "0.5")]
)
def test_a_reward_that_the_advantage_cannot_take_is_refused_before_the_run(advantage, reward):
    with refuses("reward.truncated", float(reward), "leave it out"):
        settings(f"advantage={advantage}", f"reward.truncated={reward}")
    settings(f"advantage={advantage}", "reward.truncated=0")


def test_sizes_follow_the_model_and_are_no_recorded_option():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", overrides=["sizes=tiny"], return_hydra_config=True)
        chosen = composed.hydra.runtime.choices
        with open_dict(composed):
            composed.pop("hydra")
        with refuses("sizes", "tiny", "follows model=tiny_moe"):
            to_settings(composed, chosen)
        chosen["sizes"] = chosen["model"]
        assert "sizes" not in to_settings(composed, chosen).options


def test_a_query_set_larger_than_the_training_set_is_refused(tmp_path):
    for name, first, count in (("test", 0, 3), ("train", 3, 40)):
        rows = [
            {"question": f"{i} apples?", "answer": f"#### {i}"} for i in range(first, first + count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        "task=gsm8k",
        f"task.path={tmp_path}",
        "model=hf",
        "model.path=x",
        "rollout.prompts_per_step=32",
    ]
    with refuses("rollout.query_set", 64, "use at most 40"):
        check_training_set(settings(*options, "rollout.query_set=64"))
    check_training_set(settings(*options, "rollout.query_set=32"))
    check_training_set(settings("rollout.query_set=64"))  # problems are made without end


def test_check_runs_on_plain_dataclasses_too():
    good = settings()
    good.rollout = replace(good.rollout, group_size=1)
    with refuses("rollout.group_size", 1):
        check(good)


def test_what_a_worker_raised_is_told_without_its_traceback():
    error = ConfigCompositionException("In 'experiment/mine': the key is wrong")
    error.__cause__ = _RemoteTraceback('"""\nTraceback (most recent call last):\n  File ...')
    assert explain(error) == "In 'experiment/mine': the key is wrong"

"""The settings of a replay: of a record that anyone may have written, and those that it changes."""

import sys

import pytest

from composing import settings as run_settings
from gspo.cli.replay_settings import changed, of_header
from gspo.data.step_record import Header
from gspo.io.errors import SettingError
from refusals import refuses

EVIL = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"
PATH = "replay_evil:Evil"


@pytest.mark.parametrize(
    "settings",
    [
        {"metrics": {"m": PATH}},
        {"metrics": {"m": {"path": PATH}}},
        {"callbacks": {"c": PATH}},
        {"callbacks": {"c": {"path": PATH}}},
        {"outside": {"objective": {"path": PATH}}},
        {"task": {"name": "math", "class_path": PATH}},
        {"task": {"name": "rows", "reward": PATH}},
        {"model": {"name": PATH}},
        {"objective": {"name": "gspo", "class_path": PATH}},
        {"advantage": {"name": "x", "class_path": PATH}},
        {"kl": {"name": "none", "class_path": PATH}},
        {"reward": {"class_path": PATH}},
    ],
)
def test_no_setting_of_a_record_imports_code(settings, tmp_path, monkeypatch):
    (tmp_path / "replay_evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "replay_evil", raising=False)
    if "reward" in settings:  # these settings have no choices, so the path is not read
        of_header(Header(step=1, settings=settings), trust=False)
    else:
        with pytest.raises(ValueError, match=r"settings besides|allow_outside_code=true"):
            of_header(Header(step=1, settings=settings), trust=False)
    assert not (tmp_path / "imported").exists() and "replay_evil" not in sys.modules


AGGREGATION = "trainer.aggregation"
SEQUENCE_MEANS = "seq-mean-token-mean"
GSM8K = ("model=hf", "model.path=x", "task=gsm8k")


@pytest.mark.parametrize(
    ("run", "replay", "policy", "kl"),
    [
        # a KL term that followed the run's average follows the replay's
        (["objective=grpo", "kl=loss"], ["objective=dapo"], "token-mean", "token-mean"),
        (
            ["objective=grpo", "kl=loss"],
            [f"{AGGREGATION}.mode=token-mean"],
            "token-mean",
            "token-mean",
        ),
        (
            ["objective=grpo", "kl=loss", "kl.aggregation.mode=seq-mean-token-sum"],
            ["objective=dapo"],
            "token-mean",
            "seq-mean-token-sum",
        ),
        (["preset=verl"], ["objective=dapo"], "token-mean", None),
        (["preset=verl"], ["objective=gspo"], SEQUENCE_MEANS, None),
        (["preset=verl"], ["objective=dapo", f"{AGGREGATION}.rows=nonempty"], "token-mean", None),
        (
            ["preset=verl"],
            [f"{AGGREGATION}.mode=token-mean", "allow_length_weighting=true"],
            "token-mean",
            None,
        ),
    ],
)
def test_which_average_a_replay_takes(run, replay, policy, kl):
    settings, _ = changed(run_settings(*GSM8K, *run), replay, complete=True)
    assert settings.trainer.aggregation.mode == policy
    assert kl is None or settings.kl.aggregation.mode == kl


def test_a_new_average_keeps_the_rows_that_it_reads():
    verl = run_settings(*GSM8K, "preset=verl")
    assert verl.trainer.aggregation.rows == "all"
    for word, rows in (("objective=gspo", "all"), ("objective=dapo", "nonempty")):
        settings, _ = changed(verl, [word], complete=True)
        assert settings.trainer.aggregation.rows == rows


@pytest.mark.parametrize(
    ("run", "words", "key"),
    [
        (
            ["objective=ppo", "advantage=gae"],
            ["objective=luspo", f"{AGGREGATION}.mode=token-mean"],
            f"{AGGREGATION}.mode",
        ),
        (["objective=ppo", "advantage=gae"], ["objective=gspo_tiny"], "objective"),
        (["objective=grpo"], ["objective=dppo", "correction=tis"], "correction"),
    ],
)
def test_parts_of_a_loss_that_do_not_fit_are_refused_for_a_record_by_itself_too(run, words, key):
    recorded = run_settings(*GSM8K, *run)
    for complete in (True, False):
        with pytest.raises(SettingError) as refused:
            changed(recorded, words, complete=complete)
        assert refused.value.key == key


def test_a_record_by_itself_keeps_the_average_that_its_run_permitted():
    recorded = run_settings(*GSM8K, "preset=roll_legacy")
    recorded.allow_length_weighting = False  # the header lacks it
    settings, _ = changed(recorded, ["trainer.entropy_coef=0.01"], complete=False)
    assert settings.trainer.entropy_coef == 0.01


def test_a_reward_that_was_given_when_responses_were_graded_cannot_change():
    with refuses("reward.truncated", "-1", "a replay cannot change this"):
        changed(run_settings(*GSM8K), ["reward.truncated=-1"], complete=True)

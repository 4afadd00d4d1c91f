"""Our losses, advantages and weights against golden vectors of nine other frameworks
(tests/data/parity), in float64.

The vectors are what the peers' own functions returned; experiments/peers/compare.py has the
tolerances and why they differ.
"""

import importlib.util
import json
import math
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from gspo.algorithm.aggregation import Aggregation
from peers import compare as comparing
from peers import others
from peers.compare import OK, OUT, STATED, UNTRANSLATED, compare
from peers.recipe import as_given
from peers.table import page
from peers.vectors import load

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "parity"
ENTRIES, UNREADABLE = load(DATA)
COUNTERS = re.compile(r"clip|masked_fraction")  # metrics that our loss outputs must give


@cache
def compared():
    return [compare(entry) for entry in ENTRIES]


def script():
    spec = importlib.util.spec_from_file_location(
        "parity_script", ROOT / "experiments" / "parity.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def find(case: str, key: str):
    (found,) = [e for e in ENTRIES if e.case.startswith(case) and e.key.endswith(key)]
    return found


@pytest.mark.parametrize(
    "index", range(len(ENTRIES)), ids=[f"{e.case[:3]}-{e.key}" for e in ENTRIES]
)
def test_within_the_tolerance(index):
    c, entry = compared()[index], ENTRIES[index]
    assert c.verdict == OK, (c.remarks, c.loss, c.grad, c.outputs, c.metrics)
    # nothing that the entry gives has been left out
    assert (c.loss is None) == (entry.loss is None)
    assert (c.grad is None) == (entry.grad_BT is None)
    assert set(entry.outputs) == set(c.ours.outputs)
    assert {name for name in entry.metrics if COUNTERS.search(name)} <= set(c.ours.metrics)
    # with the peer's 1e-8 in our denominators nothing is left but rounding
    assert c.epsilon is None or c.epsilon < 1e-13


def test_every_vector_is_read_and_translated():
    assert not UNREADABLE
    assert len(ENTRIES) == 339
    assert len({e.case for e in ENTRIES}) == 30
    assert not [c.entry.key for c in compared() if c.verdict == UNTRANSLATED]


def test_the_kept_page_is_what_the_command_prints_now():
    kept = (ROOT / "experiments" / "PARITY.md").read_text()
    now = page("python experiments/parity.py out=experiments/PARITY.md", compared(), UNREADABLE)
    assert without_rounding(kept) == without_rounding(now)
    assert str(ROOT) not in kept


def without_rounding(text: str) -> str:
    """Numbers below 1e-12 are rounding, which differs between machines."""
    return re.sub(
        r"(?<![\w.])(\d\.\de[-+]\d+|0)(?= [|/†]|†)",
        lambda m: "~0" if float(m[1]) < 1e-12 else m[1],
        text,
    )


# -- a wrong translation is seen


def verdict_with(entry, monkeypatch, name, change):
    """The verdict with one field of the peer's translation changed."""
    key = (entry.peer, entry.function)
    original = comparing.POLICY_LOSSES[key]

    def wrong(options, entry):
        peer = original(options, entry)
        return replace(peer, **{name: change(getattr(peer, name))})

    monkeypatch.setitem(comparing.POLICY_LOSSES, key, wrong)
    return compare(entry).verdict


WRONG = {
    "denominator: all rows": ("v05", "PolicyLoss", "aggregation", lambda a: replace(a, rows="all")),
    "denominator: rows with tokens": ("v05", "_compute_loss[loss_type=grpo]", "aggregation",
                                      lambda a: replace(a, rows="nonempty")),
    "no length weight": ("v01", "_compute_loss[loss_type=dapo]", "aggregation",
                         lambda a: Aggregation("seq-mean-token-mean", rows="all")),
    "per response and T": ("v04", "[level=token,loss_agg_mode=seq-mean-token-sum-norm]", "aggregation",
                           lambda a: replace(a, rows="nonempty")),
    "clip": ("v01", "compute_policy_loss_gspo", "objective", lambda o: replace(o, clip_high=o.clip_high * 2)),
    "dual clip": ("v07", "ActorWorker.loss_func[level=seq,pg_clip=0.27]", "objective",
                  lambda o: replace(o, dual_clip=1.4)),
    "exponent bound": ("v06", "compute_policy_loss_gspo", "objective", lambda o: replace(o, log_ratio_bound=20.0)),
    "advantages per token": ("v03", "ppo_actor_loss_fn[clip=0.0003/0.0004]", "advantages", lambda _: as_given),
    "KL coefficient": ("v12", "_compute_loss[loss_type=grpo]", "kl", lambda kl: replace(kl, coef=kl.coef * 1.000001)),
    "KL without the ratio": ("v12", "use_bias_correction_kl=True]", "kl", lambda kl: replace(kl, times_ratio="none")),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_translation_is_out_of_tolerance(wrong, monkeypatch):
    case, key, name, change = WRONG[wrong]
    entry = find(case, key)
    assert compare(entry).verdict == OK
    assert verdict_with(entry, monkeypatch, name, change) == OUT


def test_a_wrong_counter_is_out_of_tolerance():
    entry = find("v05", "PolicyLoss")
    assert (
        compare(replace(entry, metrics={"clip_ratio": entry.metrics["clip_ratio"] + 1e-6})).verdict
        == OUT
    )


def test_a_wrong_kl_bound_is_out_of_tolerance(monkeypatch):
    entry = find("v11", "kl_penalty[k3]")
    monkeypatch.setattr(others, "kl_bounds", lambda peer, name: (20.0, 11.0))
    assert compare(entry).verdict == OUT


# -- options that the kept vectors do not reach, against the peers' formulas written out


def against(entry, options: dict, loss_of, **inputs):
    """(our loss and gradient) - (those of loss_of(logp, old_logp, mask, advantages [B, T])),
    largest absolute value.
    """
    entry = replace(entry, config={**entry.config, **options}, inputs={**entry.inputs, **inputs})
    logp_BT = entry.inputs["logp"].clone().requires_grad_()
    adv = entry.inputs["advantages"]
    adv_BT = (adv if adv.ndim == 2 else adv[:, None]).expand_as(logp_BT)
    loss = loss_of(logp_BT, entry.inputs["old_logp"], entry.mask_BT.double(), adv_BT)
    (grad_BT,) = torch.autograd.grad(loss, logp_BT)
    ours = comparing.translated(entry)
    return max(abs(ours.loss - loss.item()), (ours.grad_BT - grad_BT).abs().max().item())


@pytest.mark.parametrize("delta", [1.05, 1.2, 1.27, 1.3, 4.0])
def test_delta_inside_and_outside_the_band(delta):
    def trl(logp_BT, old_BT, mask_BT, adv_BT):
        ratio_BT = (logp_BT - old_BT).exp()
        loss_BT = -torch.minimum(
            ratio_BT.clamp(max=delta) * adv_BT, ratio_BT.clamp(0.8, 1.27) * adv_BT
        )
        return ((loss_BT * mask_BT).sum(-1) / mask_BT.sum(-1)).mean()

    assert (
        against(
            find("v07", "TRL@1.10.0.dev0/_compute_loss[level=token,delta=4.0]"),
            {"delta": delta},
            trl,
        )
        < 1e-15
    )


@pytest.mark.parametrize("level", ["token", "seq"])
def test_roll_token_mean_with_unmasked_advantages(level):
    def roll(logp_BT, old_BT, mask_BT, adv_BT):
        log_BT = logp_BT - old_BT
        if level == "seq":
            log_BT = ((log_BT * mask_BT).sum(-1) / mask_BT.sum(-1))[:, None].expand_as(log_BT)
        ratio_BT = log_BT.exp()
        loss_BT = -torch.minimum(ratio_BT * adv_BT, ratio_BT.clamp(0.8, 1.27) * adv_BT)
        return loss_BT.sum() / mask_BT.sum()

    entry = find("v04", "ROLL@0.3.0/ActorWorker.loss_func[level=token,loss_agg_mode=token-mean]")
    options = {"importance_sampling": level, "advantages_masked": False}
    assert against(entry, options, roll) < 1e-14
    adv_BT = torch.linspace(-1, 1, entry.mask_BT.numel(), dtype=torch.float64).view(
        entry.mask_BT.shape
    )
    assert against(entry, options, roll, advantages=adv_BT) < 1e-14


def test_trl_gmpo_charges_a_response_without_tokens():
    entry = find("v10", "gmpo._compute_loss")
    mask_BT = entry.mask_BT.clone()
    mask_BT[1] = False

    def gmpo(logp_BT, old_BT, mask_BT, adv_BT):
        log_BT, sign_BT = logp_BT - old_BT, adv_BT.sign()
        log_BT = sign_BT * torch.minimum(sign_BT * log_BT, sign_BT * log_BT.clamp(-0.4, 0.4))
        ratio_B = ((log_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)).exp()
        return -(ratio_B * adv_BT[:, 0]).mean()

    assert against(entry, {}, gmpo, mask=mask_BT) < 1e-15


@pytest.mark.parametrize("nats", [-12.0, -9.0, -3.0, 0.0, 20.0])
def test_the_ess_of_a_response_holds_the_peers_constant_also_for_small_ratios(nats):
    """With all ratios near e^-9, sum w^2 is of the size of the peer's 1e-8. A row has no tokens."""
    entry = find("w12", "calculate_seq_ess")
    shifted = moved(entry, nats)
    mask_BT = entry.mask_BT.clone()
    mask_BT[1] = False
    log_BT = shifted.inputs["logp"] - shifted.inputs["old_logp"]
    ratio_BT = torch.where(mask_BT, log_BT.exp(), 0.0)
    squares_B = ratio_BT.square().sum(-1) + 1e-8
    ess_B = ratio_BT.sum(-1).square() / squares_B / mask_BT.sum(-1).clamp(min=1)
    inputs = {**shifted.inputs, "mask": mask_BT}
    c = compare(replace(shifted, inputs=inputs, outputs={"ess": ess_B}))
    assert c.verdict == OK, c.remarks
    assert c.outputs < 1e-14


# -- what cannot be compared is said


def moved(entry, nats: float):
    """The entry's inputs with the log-ratio of the first response shifted."""
    old_logp = entry.inputs["old_logp"].clone()
    old_logp[0] -= nats
    return replace(entry, inputs={**entry.inputs, "old_logp": old_logp})


def test_a_log_ratio_beyond_our_bound_is_stated():
    c = compare(moved(find("v02", "_compute_loss[loss_type=grpo]"), 300.0))
    assert c.verdict == STATED
    assert any("beyond our bound of 80" in remark for remark in c.remarks)
    # inside: no excuse
    assert compare(moved(find("v02", "compute_policy_loss_gspo"), 5.0)).verdict == OUT


def test_a_peer_that_is_not_finite_is_stated_and_ours_must_be_finite():
    entry = find("v02", "_compute_loss[loss_type=grpo]")
    nothing = compare(replace(entry, loss=math.nan))
    assert nothing.verdict == STATED
    assert nothing.grad < 1e-15  # what is finite has been compared
    advantages = entry.inputs["advantages"] * math.nan
    assert (
        compare(
            replace(entry, loss=math.nan, inputs={**entry.inputs, "advantages": advantages})
        ).verdict
        == OUT
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peer": "nobody"}, "no translation of nobody's _compute_loss"),
        ({"function": "compute_something"}, "no translation of TRL's compute_something"),
        ({"config": {"loss_type": "vespo", "importance_sampling_level": "sequence"}}, "vespo with"),
        ({"config": {"loss_type": "new"}}, "loss_type=new"),
        ({"config": {"loss_type": "grpo", "beta": 0.1}}, "without ref_logp"),
        ({"config": {"loss_type": "grpo", "delta": 0.5}}, "must be a finite number above 0"),
    ],
)
def test_an_unknown_peer_or_option_is_a_visible_row(change, reason):
    entry = replace(find("v02", "_compute_loss[loss_type=grpo]"), **change)
    c = compare(entry)
    assert c.verdict == UNTRANSLATED
    assert reason in " ".join(c.remarks)
    assert f"not translated: `{entry.key}`" in page("command", [c], [])


def test_an_option_that_nothing_reads_is_said():
    entry = find("v02", "_compute_loss[loss_type=grpo]")
    config = {**entry.config, "top_entropy_quantile": 0.2}
    c = compare(replace(entry, config=config))
    assert c.verdict == OK
    assert c.remarks == ["options that were not read: top_entropy_quantile=0.2"]
    assert compare(replace(entry, config=config, loss=entry.loss + 1)).verdict == UNTRANSLATED


def test_broken_files_are_rows_and_a_folder_without_vectors_is_an_error(tmp_path, capsys):
    main = script().main
    for folder, reason in ((tmp_path, "no golden vectors"), (tmp_path / "none", "no such folder")):
        assert main([f"vectors={folder}"]) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"a": 1}')
    assert main([f"vectors={tmp_path}"]) == 2
    assert "broken.json" in capsys.readouterr().err
    case = json.loads((DATA / "v15_kl_controller.json").read_text())
    case["expected"]["no key"] = {}
    case["expected"]["a@1/b"] = {"outputs": {"x": [[1.0], [1.0, 2.0]]}}
    (tmp_path / "case.json").write_text(json.dumps(case))
    assert main([f"vectors={tmp_path}", f"out={tmp_path / 'page.md'}"]) == 0
    text = (tmp_path / "page.md").read_text()
    for name in ("broken.json", "other.json", "no key", "a@1/b"):
        assert re.search(rf"- not read: .*{name}", text), name
    assert capsys.readouterr().out == ""


def test_exit_code_1_if_an_entry_is_out_of_tolerance(tmp_path, capsys):
    case = json.loads((DATA / "v15_kl_controller.json").read_text())
    next(iter(case["expected"].values()))["outputs"]["kl_coef"][3] *= 1.00001
    (tmp_path / "case.json").write_text(json.dumps(case))
    assert script().main([f"vectors={tmp_path}"]) == 1
    assert "1 out of tolerance" in capsys.readouterr().out


@pytest.mark.parametrize(
    "word, message",
    [
        ("vectors", "there is no such option; the nearest is"),
        ("folder=x", "there is no such option; the nearest is"),
        ("--vectors", "options have no dashes; set vectors=..."),
    ],
)
def test_a_mistyped_option_is_one_line(word, message, capsys):
    assert script().main([word]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help(capsys):
    assert script().main(["--help"]) == 0
    assert "vectors=" in capsys.readouterr().out

"""`gspo check`: what it finds, what it says of a broken kernel, of errors, of too little time, of
odd hardware.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gspo.checking import kernels, machine, run, speed, training
from gspo.checking.bench import Bench, Size
from gspo.checking.report import FAIL, OK, SKIP, SLOW, Finding, at_least, at_most
from gspo.checking.run import Check, findings
from gspo.cli import check
from gspo.model.forward.kernels import swiglu

ROOT = Path(__file__).parents[3]
QUICK = ("versions", "devices", "kernels against float64", "precision of the head", "micro-batch cuts",
         "engine against trainer", "Routing Replay", "first use of new shapes", "waits for the GPU",
         "memory against the plan")  # fmt: skip


def bench(seconds: float = 100.0) -> Bench:
    return Bench(torch.device("cpu"), time.monotonic() + seconds)


def called(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gspo check", *words])
    with pytest.raises(SystemExit) as end:
        check.main()
    return end.value.code


def checks(*names: str) -> tuple[Check, ...]:
    return tuple(one for one in run.CHECKS if one.name in names)


def test_the_quick_checks_pass_on_this_machine():
    found = list(findings(bench(), checks(*QUICK)))
    assert [f.line() for f in found if f.status == FAIL] == []
    assert sum(f.status == OK for f in found) > 20
    assert {f.what for f in found if f.status == SKIP} == {
        "waits for the GPU",
        "memory against `gspo plan`",
    }


def test_a_kernel_that_computes_something_else_fails(monkeypatch, capsys):
    monkeypatch.setattr(run, "CHECKS", checks("kernels against float64"))
    monkeypatch.setattr(kernels, "swiglu", lambda h: swiglu(h) * 1.001)
    assert called(monkeypatch, "device=cpu") == 1
    printed = capsys.readouterr().out
    assert "FAIL  gated unit, float32" in printed and "1 failed" in printed


def test_a_kernel_that_reads_what_was_never_written_fails(monkeypatch):
    """New memory is filled with NaN, so that a gap shows whatever was there before."""

    def gap(h):
        out = torch.empty_like(h[:, : h.shape[1] // 2])
        out[:-1] = swiglu(h)[:-1]
        return out

    monkeypatch.setattr(kernels, "swiglu", gap)
    (found,) = [f for f in findings(bench(), checks("kernels against float64")) if f.status == FAIL]
    assert found.what == "gated unit, float32" and found.number == "nan"


def test_an_engine_with_other_weights_than_the_trainer_fails(monkeypatch):
    sampled = training.sampled

    def later(policy, *words, **options):
        responses = sampled(policy, *words, **options)
        with torch.no_grad():
            policy.model.lm_head.weight.mul_(1.01)
        return responses

    monkeypatch.setattr(training, "sampled", later)
    found = [
        f
        for f in training.engine_against_trainer(bench())
        if "float32" in f.what and "trainer" in f.what
    ]
    assert [f.status for f in found] == [FAIL, FAIL]


def broken(bench):
    yield Finding(OK, "first part")
    raise RuntimeError("no kernel image\nis available")


def too_large(bench):
    raise torch.OutOfMemoryError("tried to allocate 90 GiB")
    yield


def fine(bench):
    yield Finding(OK, "fine")


def test_errors_and_full_memory_are_findings_and_the_rest_goes_on(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    some = (Check("a", broken, 0), Check("b", too_large, 0), Check("c", fine, 0))
    found = list(findings(bench(), some))
    assert [f.status for f in found] == [OK, FAIL, FAIL, OK] and emptied == [True]
    assert found[1].number == "RuntimeError: no kernel image" and "in broken" in found[1].detail
    assert "out of memory" in found[2].number and "90 GiB" in found[2].detail


def test_a_check_for_which_no_time_is_left_is_skipped_and_said():
    found = list(findings(bench(5.0), (Check("long", broken, 30), Check("short", fine, 1))))
    assert [f.status for f in found] == [SKIP, OK]
    assert found[0].number == "5 s left" and found[0].bound == "needs 30 s: seconds="


def test_bounds_are_kept_and_nan_is_never_right():
    assert at_most("x", 1.0, 1.0).status == OK and at_most("x", 1.1, 1.0).status == FAIL
    assert (
        at_least("x", 1.0, 1.0).status == OK and at_least("x", 0.9, 1.0, status=SLOW).status == SLOW
    )
    assert (
        at_most("x", float("nan"), 1.0).status == FAIL
        and at_least("x", float("nan"), 1.0).status == FAIL
    )


def test_everything_is_written_for_a_bug_report(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "CHECKS", (Check("a", broken, 0), Check("c", fine, 0)))
    file = tmp_path / "check.json"
    assert called(monkeypatch, "device=cpu", f"json={file}") == 1
    record = json.loads(file.read_text())
    assert [f["status"] for f in record["findings"]] == [OK, FAIL, OK]
    assert "Traceback" in record["findings"][1]["detail"] and record["seconds_by_check"].keys() == {
        "a",
        "c",
    }
    assert {"code", "platform", "python", "torch"} <= record.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device=cuda"], "error: device=cuda: cannot be used here: "),
        (["device=tpu"], "error: device=tpu: cannot be used here: "),
        (["seconds=0"], "error: seconds=0.0: must be a finite number above 0"),
        (["seconds=soon"], "error: seconds=soon: must be a number"),
        (["--seconds", "9"], "error: --seconds: options have no dashes; set seconds=9"),
        (["jsno=x"], "error: jsno=x: there is no such option; the nearest is json="),
        (["json=/dev/null/check.json"], "error: json=/dev/null/check.json: cannot be written: "),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, words, said):
    if words == ["device=cuda"] and torch.cuda.is_available():
        pytest.skip("here is a GPU")
    assert called(monkeypatch, *words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(said) and printed.err.count("\n") == 1 and printed.out == ""


def gpus(
    monkeypatch, *names: str, memory: float = 80e9, capability=(9, 0), bfloat16: bool = True
) -> Bench:
    """A bench that believes in GPUs with these properties, of which only their description is read."""
    properties = SimpleNamespace(
        name=names[0], total_memory=memory, major=capability[0], minor=capability[1]
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    return Bench(torch.device("cuda"), time.monotonic() + 100)


def test_odd_hardware_is_said_in_one_line_each(monkeypatch):
    plain = {f.what: f for f in machine.devices(gpus(monkeypatch, "H100"))}
    assert {f.status for f in plain.values()} == {OK, SKIP}
    assert plain["driver"].number == "not known: there is no nvidia-smi"
    old = gpus(monkeypatch, "GTX 980", memory=4e9, capability=(5, 2), bfloat16=False)
    found = {f.what: f for f in machine.devices(old)}
    assert found["memory"].status == FAIL and found["compute capability"].number == "5.2"
    assert (
        found["compute capability"].status == FAIL
        and found["bfloat16"].status == SLOW
        and not old.bfloat16
    )
    mixed = {f.what: f for f in machine.devices(gpus(monkeypatch, "H100", "A100"))}
    assert mixed["GPUs of different kinds"].number == "A100, H100"


def test_a_driver_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/bin/false")
    monkeypatch.setattr(
        machine.subprocess,
        "run",
        lambda *_, **__: SimpleNamespace(returncode=9, stdout="", stderr=""),
    )
    assert machine.driver().status == SKIP and "NVML" in machine.driver().number


def test_the_bytes_of_a_step_by_hand():
    """Two layers of width 4 and four experts of width 8, two a token: 8 rows touch all of them, one
    row half.
    """
    size = Size("MoE", 4, 2, 2, 1, 2, 8, experts=4, experts_per_token=2, vocabulary=99)
    policy = bench().policy(size)
    head, norms = 99 * 4, 4 + 2 * (4 + 4 + 2 + 2)
    attention, router, experts = 4 * (4 + 2 + 2) + 4 * 4, 4 * 4, 4 * 3 * 4 * 8
    weights = head + norms + 2 * (attention + router + experts)
    cached = 2 * 2 * 1 * 2 * (5 + 10 / 2)
    assert speed.bytes_of_step(policy, size, 8, 10) == 4 * (weights + 8 * cached)
    assert speed.bytes_of_step(policy, size, 1, 10) == 4 * (weights - 2 * experts / 2 + cached)


@pytest.mark.daily
def test_the_whole_check_as_a_user_runs_it(tmp_path):
    """On a machine that is busy something may be slow, and nothing may fail."""
    file = tmp_path / "check.json"
    command = [
        sys.executable,
        "-P",
        "-m",
        "gspo",
        "check",
        "device=cpu",
        f"json={file}",
    ]
    done = subprocess.run(
        [*command, "seconds=1800"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {f["what"]: f for f in json.loads(file.read_text())["findings"]}
    assert found["killed and resumed"]["status"] == OK
    assert found["reward gained by GSPO"]["status"] == OK
    assert not [path for path in tmp_path.iterdir() if path != file], "it leaves nothing behind"

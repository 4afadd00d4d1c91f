"""Whole steps on a simulated second device: the CPU's numbers, no operand left behind, and how
often it is waited for.

tests/support/simulated_device.py says what the device sees, tests/support/second_device.py what is
run on it.
"""

import json
import os
import sys
from pathlib import Path

import pytest

import forked
from second_device import CASES

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tests/support/second_device.py"
# The most waits of a phase, in every case but those of OTHER_WAITS. An update waits once, the pass
# for the old policy once. Decoding asks every eighth token which rows have ended: in nine tokens
# twice, and once more to hand over what it has sampled. The rest of a step reads all metrics
# together.
WAITS = {
    "a decoded token": 3 / 9,
    "pass for the old policy": 1,
    "first mini-batch": 1,
    "a later mini-batch": 1,
    "rest of a step": 1,
}
OTHER_WAITS = {
    ("MoE", "rest of a step"): 2,  # also for the pass that measures routing after the last update
    ("R3", "rest of a step"): 2,
    # once, the recording of tokens by which hand-overs are checked
    ("bfloat16, R2", "a decoded token"): 5 / 9,
    # also for the two checks that the engine has the new weights
    ("bfloat16, R2", "rest of a step"): 7,
    ("critic and KL", "pass for the old policy"): 2,  # also for the reference's pass
    ("episodes", "a decoded token"): 6 / 9,  # for each of two turns
    ("stop strings", "a decoded token"): (9 + 1) / 9,  # they are looked for after every token
    # how many tokens were kept, and then which
    ("kept tokens", "a decoded token"): (2 * 9 + 3) / 9,
    ("MoE", "checkpoint"): 96,  # for every tensor of weights and optimizer
}
# The most operations for a decoded token and layer, drawing included, which on a GPU a CUDA graph
# makes one order but for drawing; and for the first update of two micro-batches and layer.
LAUNCHES = {"dense": (74, 790), "MoE": (84, 860)}
EVERY_CHANGE = ["MoE", "bfloat16, R2"]
ONCE_A_DAY = [case for case in CASES if case not in EVERY_CHANGE]
DETECTED = """
import sys
import threading
sys.path[:0] = [{root!r}, {support!r}]
import torch
import simulated_device as simulated

with simulated.Observer() as observer:
    own = torch.arange(4.0)
    x = own.to(simulated.DEVICE)
    float(own.sum()), own.nonzero(), own[own > 1]
    assert not observer.waits and observer.pageable.total() == 1
    own.pin_memory().to(simulated.DEVICE, non_blocking=True)
    assert observer.pinned == 1 and not observer.waits
    own.pin_memory().to(simulated.DEVICE)
    assert observer.waits.total() == 1, "a copy that is waited for, though it is from pinned memory"
    observer.waits.clear()
    for number, read in enumerate([
        lambda: float(x.sum()), lambda: x.nonzero(), lambda: x[x > 1], lambda: x.tolist(), lambda: x.cpu(),
        lambda: bool((x > 5).any()), lambda: torch.bincount(x.long()), lambda: torch.gpu.current_stream().synchronize(),
    ]):
        read()
        assert observer.waits.total() == number + 1, (number, observer.waits)
    before = observer.waits.total()
    copy, marks = x.to("cpu", non_blocking=True), (x > 1).to("cpu", non_blocking=True)
    assert observer.waits.total() == before and copy.isnan().all() and marks.tolist() == [True, True, False, False]
    torch.gpu.current_stream().synchronize()
    assert torch.equal(copy, own) and torch.equal(marks, own > 1), "complete once it was waited for"
    other = threading.Thread(target=lambda: results.append(float((torch.ones(3, device="gpu") * 2).sum())))
    results, before = [], observer.waits.total()
    other.start()
    other.join()
    assert results == [6.0] and observer.waits.total() == before + 1, "another thread is observed too"
    before = observer.launches.total()
    y = x.view(2, 2).t() * 2 + 1
    assert observer.launches.total() == before + 2, "a view is no launch"
    try:
        x + own
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [EVERY_CHANGE, pytest.param(ONCE_A_DAY, marks=pytest.mark.daily)],
    ids=["every change", "once a day"],
)
def test_a_step_on_the_second_device_is_the_cpus_and_waits_seldom(cases):
    """In a process of its own, as the device cannot be taken away again."""
    command = [sys.executable, str(SCRIPT), "--json", *cases]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = forked.run(command, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert list(found) == list(cases)
    for case, result in found.items():
        check_numbers(case, result)
        assert result["phases"].keys() >= WAITS.keys() or case.startswith("overlap")
        for phase, row in result["phases"].items():
            check_waits(case, phase, row, result)
        if case in LAUNCHES:
            of_token, of_update = LAUNCHES[case]
            assert result["phases"]["a decoded token"]["per_layer"] <= of_token
            assert result["phases"]["first mini-batch"]["per_layer"] <= of_update


def check_numbers(case: str, result: dict) -> None:
    """No operand lies on the wrong device: that would be an error. Sums are those of the CPU but
    for their order.
    """
    assert result["same_tokens"] and result["same_rewards"] and result["updates"] >= 2, case
    bound = 5e-2 if case.startswith("bfloat16") else 2e-6
    assert result["off"] < bound and result["largest_gradient"] > 1e-5, (case, result["off"])
    assert result["resumed"] == (True if case == "MoE" else None), f"{case}: a resumed run differs"
    own, other = result["held_out"]
    assert own == other and bool(own) == (case == "episodes")


def check_waits(case: str, phase: str, row: dict, result: dict) -> None:
    """Numbers are read where a step needs them to go on, and nowhere else. Copies are made from
    pinned memory.
    """
    most = OTHER_WAITS.get((case, phase)) or WAITS[phase]
    assert row["waits"] <= most + 1e-9, (case, phase, result["waits"])
    assert row["pageable"] == 0, (case, phase, result["pageable"])


def test_the_device_sees_waits_copies_and_operands_left_behind():
    script = DETECTED.format(root=str(ROOT), support=str(SCRIPT.parent))
    done = forked.run([sys.executable, "-c", script])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "add with operands of shapes [(4,)] on the CPU, others on the device: "
    )

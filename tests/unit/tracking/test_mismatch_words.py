"""What is said of an engine whose log-probs are not the trainer's."""

import pytest

from composing import settings
from gspo.config.remarks import engine_mismatch
from gspo.tracking.rounding import floor_of_run, mismatch_of_run


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (
            ["rollout.dtype=bfloat16"],
            "rollout.dtype=bfloat16 rounds in the engine: use float32, or correction=tis",
        ),
        (
            ["rollout.quantization=fp8_e4m3"],
            "rollout.quantization=fp8_e4m3 rounds the engine's weights: use none",
        ),
        (
            ["rollout.staleness=2"],
            "responses wait for rollout.staleness=2 steps: lower it, or lower optim.lr",
        ),
        (
            ["rollout=vllm"],
            "the engine does not compute what the model computes: use rollout=local, and report it",
        ),
        ([], "sampling and training compute different log-probs: please report it"),
    ],
)
def test_the_warning_names_the_number_its_bound_and_the_setting(overrides, remedy):
    composed = settings(*overrides)
    assert (
        engine_mismatch(composed, {"mismatch/logp_abs": 0.1}) == engine_mismatch(composed, {}) == []
    )
    (line,) = engine_mismatch(composed, {"mismatch/logp_abs": 3.9})
    assert line.startswith(
        "the engine's log-probs differ from the trainer's by 3.9 nats per token (mismatch/logp_abs"
    )
    assert "at most 0.1 is usual" in line and line.endswith(remedy)


def test_the_report_says_the_mean_over_the_run():
    rows = [
        {"mismatch/logp_abs": 0.1},
        {"mismatch/logp_abs": 0.3},
        {"mismatch/logp_abs": float("nan")},
        {},
    ]
    assert mismatch_of_run(rows).startswith(
        "Over the run, the engine's log-probs differ from the trainer's by 0.2 nats"
    )
    assert mismatch_of_run(rows[:1]) is mismatch_of_run([]) is None


@pytest.mark.parametrize("outside", [{}, {"ratio/floor_outside": None}])
def test_rows_with_half_of_the_rounding_metrics_say_nothing(outside):
    assert floor_of_run([{"ratio/floor_of_range": 0.9} | outside]) is None
    assert "90%" in floor_of_run([{"ratio/floor_of_range": 0.9, "ratio/floor_outside": 0.1}])

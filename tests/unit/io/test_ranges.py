"""Every numeric setting states its range: nan, infinities and what lies outside are refused,
everywhere the same.
"""

import math
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

from composing import settings
from gspo.algorithm.objectives import CISPO, DPPO, GSPO
from gspo.config.commands import BenchmarkCommand, EvaluateCommand, SampleCommand
from gspo.config.conversion import to_dataclass
from gspo.config.schema import schema
from gspo.config.settings import CHOICES, Settings
from gspo.io.ranges import Range, Ranged, choice, cost_only, declared_ranges, fields_with, ranged
from refusals import refuses
from speed.workload import Shape, Workload

TOP = (Settings, EvaluateCommand, SampleCommand, BenchmarkCommand, Shape, Workload)


def classes(kind: type) -> set[type]:
    """A dataclass and those that its fields hold."""
    found = {kind}
    for hint in get_type_hints(kind).values():
        found |= {
            c for part in (hint, *get_args(hint)) if is_dataclass(part) for c in classes(part)
        }
    return found


ALL = {
    c
    for top in (*TOP, *(kind for group in CHOICES.values() for kind in group.values()))
    for c in classes(top)
}


def parts(hint: object) -> set[object]:
    return {hint} | {p for inner in get_args(hint) for p in parts(inner)}


NUMERIC = [
    (kind, field)
    for kind in sorted(ALL, key=lambda c: c.__name__)
    for field in fields(kind)
    if {int, float} & parts(get_type_hints(kind)[field.name])
]


def outside(limits: Range) -> list[float]:
    beyond = [limits.above, limits.below, None if limits.least is None else limits.least - 1]
    return [
        value
        for value in (*beyond, None if limits.most is None else limits.most * 2 + 1)
        if value is not None
    ]


def test_the_walk_meets_what_it_should():
    names = {f"{kind.__name__}.{field.name}" for kind, field in NUMERIC}
    assert {
        "OptimSettings.lr",
        "Thresholds.mismatch",
        "KLInLoss.value_bound",
        "RolloutSettings.extend",
    } <= names
    assert {
        "Mbpp.cpu_seconds",
        "LUSPO.clip_low",
        "TinyDense.layers",
        "SampleCommand.problems",
    } <= names
    assert len(names) > 200, "the numbers of all options"


@pytest.mark.parametrize(
    ("kind", "field"), NUMERIC, ids=lambda x: getattr(x, "__name__", None) or x.name
)
def test_every_number_has_a_range_that_holds_its_default_and_refuses_what_is_outside(kind, field):
    limits = declared_ranges(kind).get(field.name)
    assert limits is not None, (
        f"{kind.__name__}.{field.name}: state its range with gspo.io.ranges.ranged"
    )
    if isinstance(field.default, int | float):
        assert field.default in limits
    others = {
        f.name: 1 for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
    }
    for value in (math.nan, math.inf, -math.inf, *outside(limits)):
        assert value not in limits
        given = {5: value} if field.default_factory is dict else value
        key = f"{kind._key}{field.name}{'.5' if isinstance(given, dict) else ''}"
        with refuses(key, value, "must "):
            kind(**(others | {field.name: given}))


def test_another_default_keeps_the_range_and_another_range_replaces_it():
    assert declared_ranges(GSPO)["clip_low"] == Range(
        above=0, below=1, why="the band starts at 1 - clip_low > 0"
    )
    assert (
        1.0 in declared_ranges(CISPO)["clip_low"] and 1.0 not in declared_ranges(GSPO)["clip_low"]
    )
    assert set(declared_ranges(DPPO)) == {"log_ratio_bound", "delta"}


def test_a_subclass_keeps_the_facts_that_its_base_stated_about_a_field():
    @dataclass
    class Base(Ranged):
        device: str = cost_only("auto")
        rows: int = ranged(8, least=1, cost_only=True)

    @dataclass
    class Other(Base):
        device: str = "cuda"
        rows: int = ranged(4, least=2)

    assert (
        fields_with(Other, "outside_result")
        == fields_with(Other, "changeable_on_resume")
        == ["device", "rows"]
    )
    assert declared_ranges(Other) == {"rows": Range(least=2)}


@pytest.mark.parametrize(
    ("limits", "whole", "optional", "words"),
    [
        (Range(above=0), False, False, "must be a finite number above 0"),
        (Range(least=1), True, True, "must be a whole number of at least 1, or null"),
        (Range(least=0, below=1), False, False, "must lie in [0, 1)"),
        (
            Range(above=0, most=80, why="exp(88) overflows"),
            False,
            False,
            "must lie in (0, 80]: exp(88) overflows",
        ),
        (Range(), False, False, "must be a finite number"),
    ],
)
def test_a_range_in_words(limits, whole, optional, words):
    assert limits.text(whole, optional) == words


NAMED = [  # override, message: the dotted key as the user knows it
    ("optim.lr=inf", "optim.lr=inf: must be a finite number of at least 0"),
    ("advantage.eps=-1", "advantage.eps=-1.0: must be a finite number of at least 0"),
    (
        "monitor.thresholds.mismatch=nan",
        "monitor.thresholds.mismatch=nan: must be a finite number of at least 0",
    ),
    (
        "trainer.aggregation.length=-1",
        "trainer.aggregation.length=-1: must be a whole number of at least 0, or null",
    ),
    ("task.math.largest=2", "task.math.largest=2: must lie in [5, 999]"),
    ("rollout.extend={100:0}", "rollout.extend.100=0: must be a whole number of at least 1"),
    (
        "kl=loss kl.coef=inf",
        "kl.coef=inf: must be a finite number above 0: for no KL term choose kl=none",
    ),
    ("task=reasoning_gym task.config.a=nan", "task.config.a=nan: must be a finite number"),
    ("model.layers=0", "model.layers=0: must be a whole number of at least 1"),
    ("model.heads=0", "model.heads=0: must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("overrides", "message"), NAMED)
def test_the_message_names_the_dotted_key(overrides, message):
    with pytest.raises(ValueError) as refused:
        settings(*overrides.split())
    assert str(refused.value) == message


def test_the_schema_keeps_types_defaults_and_plain_mappings():
    node = schema(Settings)
    assert node.optim.lr == 1e-6 and OmegaConf.get_type(node.optim).__name__ == "OptimSettings"
    assert to_dataclass(schema(BenchmarkCommand)) == BenchmarkCommand()


def test_a_number_that_states_no_range_must_be_finite_all_the_same():
    from dataclasses import dataclass

    @dataclass
    class Loose(Ranged):
        share: float = 0.5
        odds: list[float] = ranged(default_factory=list, above=0)

    assert Loose(odds=[1.0, 2.0]).share == 0.5
    with refuses("share", math.nan, "must be a finite number"):
        Loose(share=math.nan)
    with refuses("odds[1]", -2.0, "must be a finite number above 0"):
        Loose(odds=[1.0, -2.0])


def test_a_choice_is_refused_with_the_values_that_are_allowed():
    @dataclass
    class Base(Ranged, key="optim"):
        decay: str = choice("none", ("none", "linear"))
        judge: str = choice("", ("", "token"))

    @dataclass
    class Other(Base):
        decay: str = "linear"

    assert Base(judge="token") == Base("none", "token") and Other().decay == "linear"
    with refuses("optim.decay", "step", "choose one of none, linear"):
        Other(decay="step")
    with refuses("optim.judge", "x", "choose one of token"):
        Base(judge="x")


def test_a_choice_is_refused_by_its_dotted_key():
    with refuses("kl.aggregation.rows", "some", "choose one of nonempty, all, one"):
        settings("kl=loss", "kl.aggregation.rows=some")

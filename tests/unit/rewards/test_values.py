"""The form in which values travel, and when two of them are equal."""

import contextlib
import json
import math
import random
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from fractions import Fraction

import pytest

from gspo.rewards.sandbox.values import (
    MAX_DEPTH,
    Malformed,
    Unserialisable,
    close,
    decode,
    encode,
    equal,
    require_shallow,
    same_output,
    unpack,
)

INF, NAN = math.inf, math.nan


def sent(value):
    """A value's form as it arrives."""
    form = json.loads(json.dumps(encode(value), allow_nan=False))
    require_shallow(form)
    return form


def same(expected, actual):
    return equal(sent(expected), sent(actual))


def identical(x, y):
    """Equal and of the same types all through; NaN is itself, -0.0 is not 0.0."""
    if type(x) is not type(y):
        return False
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(identical, x, y))
    if isinstance(x, dict):
        return len(x) == len(y) and all(
            identical(a, b) for a, b in zip(x.items(), y.items(), strict=True)
        )
    return repr(x) == repr(y) if isinstance(x, float | complex) else x == y


VALUES = [
    None, True, False, 0, -1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**5000, -(7**9999),
    0.0, -0.0, 1.0, 0.1, 5e-324, 1.7976931348623157e308, INF, -INF, NAN, 1e22, 2.0**70,
    "", "a", "é", "😀", "\0", "\ud800", "\ud83d\ude00", "\n\"\\", "l", "\x7f\u2028", "1",
    b"", b"\0\xff", 1j, complex(NAN, -0.0), complex(INF, 1),
    [], (), {}, set(), frozenset(), [[]], ["l", 1], ["l"], ("d", "k"), {"l": "i"}, {"index": 1, "value": 2},
    {1: "a", "1": "b", None: "c", (1, 2): [3], frozenset({1}): {2}, 1.5: (), b"1": 0}, {True: 1}, {NAN: 1},
    {1, 2.5, "x", None, (1, (2,)), frozenset({frozenset()})}, [1, [2, (3, {4: {5}})]], int, [str, (list,)],
]  # fmt: skip


def test_values_come_back_as_they_were():
    for value in VALUES:
        back = decode(sent(value))
        assert identical(value, back), value
        assert equal(sent(value), sent(back)) and equal(sent(value), sent(value))
    once, again = decode(sent(form := [[1]])), decode(sent(form))
    assert once[0] is not again[0] is not form[0]


def test_different_values_differ():
    for i, x in enumerate(VALUES):
        for y in VALUES[i + 1 :]:
            kinds = {type(x), type(y)}
            if not kinds <= {int, float}:  # numbers: below
                alike = (kinds == {set, frozenset} or kinds == {list, tuple}) and not x and not y
                assert same(x, y) == same(y, x) == alike, (x, y)


class Int(int):
    __eq__ = lambda *_: True  # noqa: E731
    __hash__ = int.__hash__


class Colour(IntEnum):
    RED = 1


class Equal:
    __eq__ = lambda *_: True  # noqa: E731


NOT_PLAIN = [
    Int(1), Colour.RED, Equal(), object(), type("S", (str,), {})("a"),
    type("L", (list,), {})([1]), type("D", (dict,), {})(), type("T", (tuple,), {})(), type("F", (float,), {})(1.0),
    type("int", (), {}), type("Set", (set,), {})(), type("B", (bytes,), {})(), namedtuple("P", "x")(1), bytearray(b"a"),
    memoryview(b"a"), range(3), map(str, []), (x for x in ()), iter([]), {}.keys(), {1: 2}.items(), len, lambda: 1,
    Fraction(1),
    deque([1]), Ellipsis, NotImplemented, Exception(), math, type, object, type("C", (Counter,), {})(), slice(1), print,
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_PLAIN, ids=lambda value: type(value).__name__)
def test_what_is_not_plain_is_refused_wherever_it_is(value):
    for inside in (value, [value], (1, value), {"k": value}, [[[value]]]):
        with pytest.raises(Unserialisable):
            encode(inside)
        assert json.dumps(encode(inside, other=lambda _: ["h", 7]))
    try:
        keyed = {value: 1}
    except TypeError:
        return
    with pytest.raises(Unserialisable):
        encode(keyed)


def test_the_standard_librarys_dicts_are_dicts():
    for value in (Counter("aab"), OrderedDict(a=2, b=1), defaultdict(int, a=2, b=1)):
        assert same({"a": 2, "b": 1}, value) and type(decode(sent(value))) is dict

    class Fake(Counter):
        pass

    with pytest.raises(Unserialisable):
        encode(Fake("a"))


@pytest.mark.slow
def test_huge_and_circular_values_are_refused_soon():
    circle, ring = [], {}
    circle.append(circle)
    ring["me"] = [ring]
    bomb = ["x"]
    for _ in range(60):
        bomb = [bomb, bomb]
    deep = []
    for _ in range(100_000):
        deep = [deep]
    start = time.process_time()
    for value in (
        circle,
        ring,
        bomb,
        deep,
        [[0]] * 10**7,
        "x" * 10**7,
        b"x" * 10**7,
        1 << 10**8,
        {i: i for i in range(10**6)},
    ):
        with pytest.raises(Unserialisable):
            encode(value, 1 << 20)
    assert time.process_time() - start < 5
    while deep:  # freed level by level
        (deep,) = deep
    nested = 1
    for _ in range(MAX_DEPTH):
        nested = [nested]
    assert decode(sent(nested)) == nested
    with pytest.raises(Unserialisable):
        encode([nested])
    assert len(json.dumps(encode(list(range(10**5)), 1 << 20))) < 1 << 20


def nest(levels, innermost, *before):
    for _ in range(levels):
        innermost = [*before, innermost]
    return innermost


HOSTILE = [
    {}, {"a": 1}, ["x"], [], [1], [None], [["l"]], ["i"], ["i", 1], ["i", "x"], ["i", "1", "2"], ["i", ""],
    ["f", "1.0"], ["f", "NaN"],
    ["f", 1.0], ["f", ["inf"]], ["c", 1, 2], ["c", "1"], ["c", "a", "b"], ["c", [], []], ["b", "x"], ["b", "abc"],
    ["b", 5],
    ["u", "ff"], ["u", "x"], ["d", 1], ["d", 1, 2, 3], ["h", 1], ["h", "1"], ["h"], ["y", "object"], ["y", "eval"],
    ["z", {}],
    ["s", ["l"]], ["d", ["d"], 1], ["l", ["x"]], ["l", {}], nest(200, 1, "l"), nest(900, 1, "c"),
    nest(200, 1, "s"), nest(900, 1), ["l", nest(150, 0, "z")],
]  # fmt: skip


@pytest.mark.parametrize("form", HOSTILE, ids=lambda form: str(form)[:20])
def test_nonsense_is_told_from_values(form):
    with pytest.raises(Malformed):
        decode(form)
    for expected in (
        None,
        1,
        1.5,
        "a",
        [1],
        [[1]],
        (),
        {1},
        set(),
        {1: 2},
        {(): 1},
        {frozenset()},
        1j,
        b"a",
    ):
        with contextlib.suppress(Malformed):
            assert not equal(sent(expected), form)


@pytest.mark.slow
def test_random_forms_are_values_or_nonsense():
    rng = random.Random(1)
    leaves = [
        None,
        True,
        0,
        1,
        -1,
        2**70,
        1.5,
        "",
        "a",
        "ff",
        "inf",
        "1.0",
        "int",
        "l",
        "s",
        "d",
        "\ud800",
        {},
        {"a": 1},
    ]

    def draw(depth):
        if depth == 0 or rng.random() < 0.2:
            return rng.choice(leaves)
        parts = [draw(depth - 1) for _ in range(rng.randrange(4))]
        return [rng.choice("ltszdifcbuyhx"), *parts] if rng.random() < 0.9 else parts

    expected = [sent(value) for value in VALUES]
    values = 0
    for _ in range(5000):
        form = draw(4)
        with contextlib.suppress(Malformed):
            decode(form, handle=str)
            values += 1
        for wanted in expected:
            with contextlib.suppress(Malformed):
                assert equal(wanted, form) in (True, False)
    assert values > 500


@pytest.mark.slow
def test_hostile_forms_take_no_time():
    colliding = [(2**61 - 1) * i for i in range(100_000)]  # all with the hash 0
    digits = "f" * 2_000_000
    start = time.process_time()
    assert equal(["s", *colliding], ["s", *colliding]) and equal(
        ["d", *colliding], ["d", *colliding]
    )
    assert (
        equal(["s", *[["t", i] for i in colliding]], ["s", *[["z", i] for i in colliding]]) is False
    )
    assert (
        not equal(1, ["i", digits])
        and equal(["i", digits], ["i", digits])
        and not equal(0.5, ["i", digits])
    )
    assert not equal(["s", 1], ["s", ["i", digits]])
    assert not equal(["c", "1.0", "1.0"], ["c", "9" * 2_000_000, "0." + "1" * 2_000_000])
    assert not equal(1.5, json.loads("1." + "5" * 2_000_000)) and not equal(
        1.5, json.loads("1e999999999")
    )
    with pytest.raises(Malformed):
        require_shallow(nest(900, 1, "l"))
    require_shallow(["l"] * 10**6)
    for bad in (["d", 1, 2, 1, 3], ["d", 1, 2, 1.0, 3]):
        with pytest.raises(Malformed):
            equal(["d", 1, 2, 4, 3], bad)
    assert time.process_time() - start < 5


def test_rules_of_equality():
    yes = [
        ([1, 2], (1, 2)), ((1, [2]), [1, (2,)]), ({1, 2}, frozenset({2, 1})), (1, 1.0), (1.0, 1), (2, 2.0000001),
        (0.3, 0.1 + 0.2),
        (0, -0.0), (1e9, 1e9 + 999), (0.0, 9e-7), (1e-9, 2e-9), (INF, INF), (NAN, NAN), (-INF, -INF), (2**53, 2.0**53),
        (10**22, 1e22),
        (["a", None, True], ["a", None, True]), ({"a": [1.0]}, {"a": (1.0000001,)}), ({1: 2}, {1.0: 2}),
        ({(1, 2): 3}, {(1.0, 2): 3}),
        ({0.3, "a"}, {0.1 + 0.2, "a"}), ({1, 2}, {1.0, 2.0}), ({(1, 2)}, {(1.0, 2.0)}), (set(), frozenset()), ([], ()),
        (1j, 1.0000001j),
        ({1: {2: {3}}}, {1: {2: {3}}}), ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
        ({1, 1.5, None, NAN}, {NAN, None, 1.5, 1}), (10**5000, 10**5000),
    ]  # fmt: skip
    no = [
        (1, True), (True, 1), (0, False), (1.0, True), (False, 0.0), ([1], [True]), ({1}, {True}), ({True: 1}, {1: 1}),
        ("1", 1), (1, "1"),
        (None, 0), (None, False), (None, []), (0, None), ("", None), ([], None), ([], {}), (set(), {}),
        ([1, 2], {1, 2}), ([1, 2], [2, 1]),
        ("a", "A"), ("a", "a "), ("a", b"a"), ("é", "e\u0301"), (["a", "b"], "ab"), ("", []), (1, 2), (0.3333, 1 / 3),
        (1.0, 1.000002),
        (1e9, 1e9 + 1001), (0.0, 1.1e-6), (INF, -INF), (INF, NAN), (NAN, INF), (1.0, NAN), (1.0, INF), (NAN, 1.0),
        (INF, 1e308), (1e308, INF),
        (2**53 + 1, 2.0**53), (1e300, 1.0000001e300), (2**60, 2**60 + 1), (10**400, INF), (INF, 10**400), (1, 1 + 0j),
        (1j, 1), ([1], [1, 1]),
        ([1, 1], [1]), ({1: 2}, {1: 3}), ({1: 2}, {2: 2}), ({1: 2}, {}), ({0.3: 1}, {0.1 + 0.2: 1}),
        ({(0.3,)}, {(0.1 + 0.2,)}), ([[1]], [1]),
        ({1, 2}, {1}), ({1}, {1, 2}), ({1, "1"}, {1, 2}), ({0.3, 0.4}, {0.3, 0.5}), (10**5000, 10**5000 + 1),
        (int, float), (int, "int"),
        ([1, 2, 3], [1, 2, "3"]), ({1: 2}, [1, 2]), ((), ""), (frozenset({1}), {1: 1}), ({"a": 1}, {"a": 1, "b": 2}),
    ]  # fmt: skip
    assert [pair for pair in yes if not same(*pair)] == [] and [
        pair for pair in no if same(*pair)
    ] == []
    assert close(10**30, 1e30) == (10**30 == 1e30) and close(7, 7) and not close(7, 8)


@pytest.mark.slow
def test_equal_agrees_with_python_on_values_without_floats_and_bools():
    rng = random.Random(0)

    def draw(depth):
        kind = rng.randrange(7 if depth else 3)
        if kind < 3:
            return rng.choice([0, 1, "a", "b", None, 2**70])
        parts = [draw(depth - 1) for _ in range(rng.randrange(3))]
        if kind == 3:
            return parts
        keys = [
            rng.choice([0, 1, "a", None, (1, 2), frozenset({"a"})]) for _ in range(rng.randrange(3))
        ]
        return {4: dict(zip(keys, parts, strict=False)), 5: set(keys), 6: frozenset(keys)}[kind]

    values = [draw(3) for _ in range(400)]
    equal_pairs = 0
    for x in values:
        for y in values[:150]:
            assert same(x, y) == (x == y), (x, y)
            equal_pairs += x == y
    assert equal_pairs > 1000


def test_stdout_is_compared_by_lines_and_decimals():
    yes = [
        ("1\n2", " \n1 \r\n2\n\n"), ("1.0 2", "1 2e0"), ("0.1", ".1"), ("-0", "+0.0"), ("5.", "5"), ("a b", "a b"),
        ("", "\n"),
        ("1" * 5000, "1" * 5000 + ".0"), ("1e400000000", "10e399999999"), ("nan", "nan"), ("1\n\n2", "1\n \n2"),
        ("100", "1E+2"),
    ]  # fmt: skip
    no = [
        ("1\n2", "1 2"), ("1 2", "1\n2"), ("1\n2", "1\n\n2"), ("1", ""), ("", "1"), ("0.3333", "0.33333"),
        ("1", "1.0000001"), ("a b", "a  b"),
        ("A", "a"), ("nan", "NaN"), ("inf", "Infinity"), ("inf", "1e999"), ("1000", "1_000"), ("17", "１７"),
        ("17", "٠17"), ("1", "1 1"),
        ("1 1", "1"), ("16", "0x10"), ("1", "True"), ("1e400000000", "1e400000001"),
        ("1e9999999999999999999", "1e99999999999999999999"),
        ("1", "1e99999999999999999999999"), ("12", "1 2"), ("-1", "1"), ("sNaN 1", "snan 1.0"), ("1", "1\0"),
        ("1 x", "1.0 x"), ("1", "+-1"),
    ]  # fmt: skip
    assert [pair for pair in yes if not same_output(*pair)] == [] and [
        pair for pair in no if same_output(*pair)
    ] == []
    start = time.process_time()
    many = [
        "1" * 3_000_000 + "x",
        "1." * 10**6,
        "1e" * 10**6,
        "1 " * 500_000,
        "1\n" * 10**6,
        "1e" + "9" * 10**6,
    ]
    for text in many:
        assert not same_output("2 3", text)
        same_output("1" + text, text + "1")
    assert time.process_time() - start < 5


def test_unpack_names_the_kinds():
    assert [unpack(sent(v))[0] for v in (None, True, 1, 1.5, "a", b"a", 1j, int, (), set(), {})] == [
        "none", "bool", "number", "number", "text", "bytes", "complex", "type", "sequence", "set", "dict",
    ]  # fmt: skip

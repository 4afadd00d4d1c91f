"""Plain Python values as JSON and back, and the rules by which a program's result equals the
expected one.

Plain values have exactly one of the types None, bool, int, float, complex, str, bytes, list, tuple,
set, frozenset and dict: an object of a subclass can redefine what `==` means and is not plain. The
standard library's Counter, OrderedDict and defaultdict travel as the dicts that they equal; the
plain types themselves (int, list, ...) by their names.

JSON form: null, true, 5 (below 2^63), 1.5, "text"; everything else is a list that starts with a
tag: ["l", items...] list, ["t", ...] tuple, ["s", ...] set, ["z", ...] frozenset, ["d", key, value,
key, value, ...] dict, ["i", hexadecimal] int, ["f", "inf" | "-inf" | "nan"], ["c", "1.0", "nan"]
complex, ["b", hexadecimal] bytes, ["u", hexadecimal UTF-8] text with lone surrogates, ["y", "int"]
type, ["h", 0] an object that stays where it is.

This module uses the standard library only, since the confined programs import it too.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from decimal import Decimal
from typing import Any

DEPTH = 100  # most levels of nesting
EXACT_ABOVE = 2**53  # beyond it floats are sparser than integers
TOLERANCE = 1e-6
TAGS = {list: "l", tuple: "t", set: "s", frozenset: "z"}
KINDS = {bool: "bool", int: "number", float: "number", str: "text"}
SEQUENCES, SETS = ("l", "t"), ("s", "z")
TYPES = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
}
DICTS = (dict, Counter, OrderedDict, defaultdict)
SURROGATE = re.compile("[\ud800-\udfff]")
# With ASCII digits only. Decimal also accepts `nan`, `inf`, `1_0` and digits of other scripts; here
# these are words.
DECIMAL = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?", re.ASCII)


class Unserialisable(ValueError):
    """Raised for a value that is not plain, too deep or too large (a value that contains itself is
    too deep).
    """


class Malformed(ValueError):
    """Raised for what is not the JSON form of any value."""


def encode(value: Any, limit: int = 1 << 26, other: Callable[[Any], Any] | None = None) -> Any:
    """Return the JSON form of a value. `other` gives that of an object that is not plain, instead
    of Unserialisable.

    More than `limit` characters of JSON raise Unserialisable, in time proportional to the limit
    (not to the value: a list of the same list 10^8 times is refused early). The JSON text may still
    be longer, because of escapes.
    """
    return _Encoder(limit, other).encode(value, DEPTH)


class _Encoder:
    def __init__(self, limit: int, other: Callable[[Any], Any] | None) -> None:
        self.left, self.other = limit, other

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        self._spend(2)
        if value is None or kind is bool:
            return value
        if kind is int:
            self._spend(value.bit_length() // 4)
            return value if -(2**63) < value < 2**63 else ["i", f"{value:x}"]
        if kind is str:
            self._spend(len(value))
            surrogates = SURROGATE.search(value)
            return ["u", value.encode("utf-8", "surrogatepass").hex()] if surrogates else value
        if kind is float:
            return value if math.isfinite(value) else ["f", str(value)]
        self._spend(6)
        if depth == 0:
            raise Unserialisable(f"nested more than {DEPTH} deep")
        if kind in TAGS:
            return [TAGS[kind], *self._each(value, depth - 1)]
        if kind in DICTS:
            return [
                "d",
                *self._each((part for item in dict.items(value) for part in item), depth - 1),
            ]
        if kind is bytes:
            self._spend(2 * len(value))
            return ["b", value.hex()]
        if kind is type and TYPES.get(value.__name__) is value:
            return ["y", value.__name__]
        if kind is complex:
            return ["c", *self._each((str(value.real), str(value.imag)), depth - 1)]
        if self.other is not None:
            return self.other(value)
        raise Unserialisable("an object that is not plain data")

    def _each(self, values: Any, depth: int) -> list[Any]:
        encoded = []
        for value in values:
            # a shortcut for most values
            if type(value) is int and -EXACT_ABOVE < value < EXACT_ABOVE:
                self._spend(2)
                encoded.append(value)
            else:
                encoded.append(self.encode(value, depth))
        return encoded

    def _spend(self, characters: int) -> None:
        self.left -= characters
        if self.left < 0:
            raise Unserialisable("too large")


def decode(form: Any, handle: Callable[[int], Any] | None = None, depth: int = DEPTH) -> Any:
    """Return the value, with everything in it new. `handle` gives the object behind ["h", number].
    Raises Malformed.
    """
    if type(form) is not list:
        return unpack(form)[1]
    kind, content = unpack(form)
    if kind == "handle":
        if handle is None:
            raise Malformed("an object from elsewhere")
        return handle(content)
    if kind not in ("sequence", "set", "dict"):
        return content
    if depth == 0:
        raise Malformed(f"nested more than {DEPTH} deep")
    parts = [decode(part, handle, depth - 1) for part in content]
    tag = form[0]
    try:
        if kind == "dict":
            return dict(zip(parts[::2], parts[1::2], strict=True))
        return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](parts)
    except TypeError:
        raise Malformed("an element or key that has no hash") from None


def unpack(form: Any) -> tuple[str, Any]:
    """Return (kind, content) of a JSON form, one level deep, in time proportional to its length.
    Raises Malformed.

    Kinds: none, bool, number, text, bytes, complex, type, sequence, set, dict (keys and values in
    turn), handle.
    """
    kind = type(form)
    if kind is not list:
        if form is not None and kind not in (bool, int, float, str):
            raise Malformed("a JSON object")
        return KINDS.get(kind, "none"), form
    tag, content = (form[0], form[1:]) if form else (None, [])
    if tag in SEQUENCES:
        return "sequence", content
    if tag in SETS:
        return "set", content
    if tag == "d" and len(content) % 2 == 0:
        return "dict", content
    if tag == "h" and len(content) == 1 and type(content[0]) is int:
        return "handle", content[0]
    if all(type(part) is str for part in content):
        return _from_texts(tag, *content)
    raise Malformed("no known tag")


def _from_texts(tag: Any, *texts: str) -> tuple[str, Any]:
    try:
        match (tag, *texts):
            case "i", digits:
                return "number", int(digits, 16)  # linear in the length, unlike decimal digits
            case "f", ("inf" | "-inf" | "nan") as name:
                return "number", float(name)
            case "c", real, imaginary:
                return "complex", complex(float(real), float(imaginary))
            case "b", digits:
                return "bytes", bytes.fromhex(digits)
            case "u", digits:
                return "text", bytes.fromhex(digits).decode("utf-8", "surrogatepass")
            case "y", name if name in TYPES:
                return "type", TYPES[name]
    except ValueError:
        pass
    raise Malformed("no known tag")


def require_shallow(form: Any) -> None:
    """Raise Malformed for what is nested too deeply for recursion, and for what `encode` never
    makes: JSON objects, and numbers such as 1e999 that cannot be written again."""
    level = [form]
    for _ in range(DEPTH + 2):
        for part in level:
            if type(part) is dict or (type(part) is float and not math.isfinite(part)):
                raise Malformed("not the form of a value")
        level = [part for parts in level if type(parts) is list for part in parts]
        if not level:
            return
    raise Malformed(f"nested more than {DEPTH} deep")


def equal(expected: Any, actual: Any, depth: int = DEPTH) -> bool:
    """Return whether a result equals the expected one; both as JSON forms. Raises Malformed. The
    rules:

    - a tuple equals a list, a frozenset a set; otherwise kinds differ: True is not 1, b"a" is not
      "a", (1+0j) is not 1;
    - numbers: `close`; complex numbers: both parts; text and bytes exactly; None only None;
    - lists by order; dicts by keys, which are exact (1 and 1.0 are the same key), values by these
      rules;
    - sets: numbers are put in order and compared pair by pair by `close`; all other elements are
      exact.

    Time proportional to length (x log): elements are ordered by digests, so that keys chosen to
    collide do no harm.
    """
    (kind, a), (other, b) = unpack(expected), unpack(actual)
    if kind != other:
        return False
    if kind == "number":
        return close(a, b)
    if kind == "complex":
        return close(a.real, b.real) and close(a.imag, b.imag)
    if kind not in ("sequence", "set", "dict"):
        return a == b
    if depth == 0 or len(a) != len(b):
        return False
    if kind == "sequence":
        return all(equal(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if kind == "set":
        return _equal_sets(a, b)
    wanted, given = _by_key(a), _by_key(b)
    return wanted.keys() == given.keys() and all(
        equal(wanted[key], given[key], depth - 1) for key in wanted
    )


def close(expected: float, actual: float) -> bool:
    """Return |actual - expected| <= 1e-6 max(1, |expected|) where at least one is a float, and
    equality for two ints.

    Equality is also required where one exceeds 2^53 in size. Infinity equals the same infinity, and
    NaN equals NaN.
    """
    if type(expected) is int and type(actual) is int:
        return expected == actual
    if expected != expected or actual != actual:
        return expected != expected and actual != actual
    if abs(expected) > EXACT_ABOVE or abs(actual) > EXACT_ABOVE:
        return expected == actual
    return abs(actual - expected) <= TOLERANCE * max(1, abs(expected))


def _equal_sets(expected: list[Any], actual: list[Any]) -> bool:
    (numbers, others), (their_numbers, their_others) = _split(expected), _split(actual)
    if others != their_others or len(numbers) != len(their_numbers):
        return False
    return all(close(x, y) for x, y in zip(numbers, their_numbers, strict=True))


def _split(elements: list[Any]) -> tuple[list[float], list[bytes]]:
    """Return the numbers of a set in order, and the digests of its other elements in order."""
    numbers, others = [], []
    for element in elements:
        kind, content = unpack(element)
        if kind == "number" and content == content:
            numbers.append(content)
        else:
            others.append(_digest(element, DEPTH))
    return sorted(numbers), sorted(others)


def _by_key(parts: list[Any]) -> dict[bytes, Any]:
    keys = [_digest(key, DEPTH) for key in parts[::2]]
    if len(set(keys)) < len(keys):
        raise Malformed("a key twice")
    return dict(zip(keys, parts[1::2], strict=True))


def _digest(form: Any, depth: int) -> bytes:
    """Return a digest that is the same for equal values and for no others: numbers by value, tuple
    as list, sets in any order."""
    kind, content = unpack(form)
    if kind in ("sequence", "set", "dict"):
        if depth == 0:
            raise Malformed(f"nested more than {DEPTH} deep")
        parts = [_digest(part, depth - 1) for part in content]
        if kind == "dict":
            parts = sorted(key + value for key, value in zip(parts[::2], parts[1::2], strict=True))
        data = b"".join(sorted(parts) if kind == "set" else parts)
    elif kind == "text":
        data = content.encode("utf-8", "surrogatepass")
    elif kind == "bytes":
        data = content
    elif kind == "number" and (type(content) is int or content.is_integer()):
        data = b"%x" % int(content)
    else:
        data = repr(content).encode()
    return hashlib.blake2b(kind.encode() + b":" + data, digest_size=16).digest()


def same_output(
    expected: str, printed: str, tolerance: float = 0.0, ignores_case: bool = False
) -> bool:
    """Return whether two outputs agree by LiveCodeBench's rule for standard output.

    With a tolerance, relative or absolute, numbers that the expected output writes with a point or
    an exponent may be off by so much, also beside words. With `ignores_case` letter case does not
    count.

    Both are stripped, cut into lines, each line stripped. As many lines in both; two lines are
    alike if they are equal, or have as many words, all of them decimal numbers (ASCII digits, sign,
    point, exponent), that are equal in pairs as exact decimals: "1.0 2" and "1 2e0" are alike,
    "0.3333" and "0.33333" are not, "nan" is a word.
    """
    if ignores_case:
        expected, printed = expected.lower(), printed.lower()
    wanted, given = expected.strip().split("\n"), printed.strip().split("\n")
    return len(wanted) == len(given) and all(
        _same_line(x.strip(), y.strip(), tolerance) for x, y in zip(wanted, given, strict=True)
    )


def _same_line(expected: str, printed: str, tolerance: float) -> bool:
    if expected == printed:
        return True
    wanted, given = expected.split(), printed.split()
    if len(wanted) != len(given):
        return False
    if tolerance:
        return all(x == y or _near(x, y, tolerance) for x, y in zip(wanted, given, strict=True))
    if not all(map(DECIMAL.fullmatch, (*wanted, *given))):
        return False
    try:
        return all(Decimal(x) == Decimal(y) for x, y in zip(wanted, given, strict=True))
    except ArithmeticError:  # an exponent is beyond any decimal's
        return False


def _near(expected: str, printed: str, tolerance: float) -> bool:
    """Return whether two words are numbers that are equal or, unless the expected one is an
    integer, near.
    """
    if not (DECIMAL.fullmatch(expected) and DECIMAL.fullmatch(printed)):
        return False
    try:
        wanted, given = Decimal(expected), Decimal(printed)
        if wanted == given:
            return True
        is_integer = re.fullmatch(r"[+-]?\d+", expected) is not None
        return not is_integer and abs(wanted - given) <= Decimal(tolerance) * max(
            Decimal(1), abs(wanted)
        )
    except ArithmeticError:  # an exponent is beyond any decimal's
        return False

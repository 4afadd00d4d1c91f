"""Plain Python values as JSON and back, and the rules by which a result is the expected one.

Plain values have exactly one of the types None, bool, int, float, complex, str, bytes, list, tuple,
set, frozenset and dict. An object of a subclass can redefine `==` and is not plain. The standard
library's Counter, OrderedDict and defaultdict travel as the dicts that they equal. The plain types
themselves (int, list, ...) travel by their names.

JSON form: null, true, 5 (below 2^63), 1.5 and "text" stand for themselves. All other values are
lists that start with a tag:

    ["l", items...]    list        ["d", key, value, key, value, ...]   dict
    ["t", items...]    tuple       ["i", hexadecimal]                   int
    ["s", items...]    set         ["f", "inf" | "-inf" | "nan"]        float
    ["z", items...]    frozenset   ["c", "1.0", "nan"]                  complex
    ["y", "int"]       type        ["b", hexadecimal]                   bytes
    ["h", 0]           an object that stays in the program's process
    ["u", hexadecimal UTF-8]       text with lone surrogates

This module uses the standard library only, since the confined programs import it too.
"""

import hashlib
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

MAX_DEPTH = 100  # levels of nesting
EXACT_ABOVE = 2**53  # beyond it floats are sparser than integers
TOLERANCE = 1e-6
TAGS = {list: "l", tuple: "t", set: "s", frozenset: "z"}
KINDS = {bool: "bool", int: "number", float: "number", str: "text"}
SEQUENCE_TAGS = ("l", "t")
SET_TAGS = ("s", "z")
TYPES = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
}
DICTS = (dict, Counter, OrderedDict, defaultdict)
SURROGATE = re.compile("[\ud800-\udfff]")
# With ASCII digits only. Decimal also accepts `nan`, `inf`, `1_0` and digits of other scripts,
# which are words here.
DECIMAL = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?", re.ASCII)
INTEGER = re.compile(r"[+-]?\d+")


class Unserialisable(ValueError):
    """Raised for a value that is not plain, too deep or too large.

    A value that contains itself is too deep."""


class Malformed(ValueError):
    """Raised for JSON that is not the form of any value."""


def encode(value: Any, limit: int = 1 << 26, other: Callable[[Any], Any] | None = None) -> Any:
    """Return the JSON form of a value.

    `other` returns the form of an object that is not plain. Without it such an object raises
    Unserialisable. More than `limit` characters of JSON raise Unserialisable too, in time
    proportional to the limit. So a list that holds the same list 10^8 times is refused early. The
    JSON text may still be longer, because of escapes.
    """
    return _Encoder(limit, other).encode(value, MAX_DEPTH)


@dataclass
class _Encoder:
    characters_left: int
    other: Callable[[Any], Any] | None

    def encode(self, value: Any, depth: int) -> Any:
        kind = type(value)
        self._spend(2)
        if value is None or kind is bool:
            return value
        if kind is int:
            self._spend(value.bit_length() // 4)
            if -(2**63) < value < 2**63:
                return value
            return ["i", f"{value:x}"]
        if kind is str:
            self._spend(len(value))
            if SURROGATE.search(value):
                return ["u", value.encode("utf-8", "surrogatepass").hex()]
            return value
        if kind is float:
            return value if math.isfinite(value) else ["f", str(value)]
        self._spend(6)
        if depth == 0:
            raise Unserialisable(f"nested more than {MAX_DEPTH} deep")
        if kind in TAGS:
            return [TAGS[kind], *self._each(value, depth - 1)]
        if kind in DICTS:
            keys_and_values = (part for item in dict.items(value) for part in item)
            return ["d", *self._each(keys_and_values, depth - 1)]
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
        self.characters_left -= characters
        if self.characters_left < 0:
            raise Unserialisable("too large")


def decode(form: Any, handle: Callable[[int], Any] | None = None, depth: int = MAX_DEPTH) -> Any:
    """Return a new value from its JSON form. Raises Malformed.

    `handle` returns the object behind ["h", number]."""
    kind, content = unpack(form)
    if kind == "handle":
        if handle is None:
            raise Malformed("an object from elsewhere")
        return handle(content)
    if kind not in ("sequence", "set", "dict"):
        return content
    if depth == 0:
        raise Malformed(f"nested more than {MAX_DEPTH} deep")
    parts = [decode(part, handle, depth - 1) for part in content]
    tag = form[0]
    try:
        if kind == "dict":
            return dict(zip(parts[::2], parts[1::2], strict=True))
        return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](parts)
    except TypeError:
        raise Malformed("an element or key that has no hash") from None


def unpack(form: Any) -> tuple[str, Any]:
    """Return (kind, content) of a JSON form, one level deep. Raises Malformed.

    Kinds: none, bool, number, text, bytes, complex, type, sequence, set, dict (keys and values in
    turn), handle. The time is proportional to the length of the form.
    """
    kind = type(form)
    if kind is not list:
        if form is not None and kind not in (bool, int, float, str):
            raise Malformed("a JSON object")
        return KINDS.get(kind, "none"), form
    tag = form[0] if form else None
    content = form[1:]
    if tag in SEQUENCE_TAGS:
        return "sequence", content
    if tag in SET_TAGS:
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
    """Raise Malformed for a form that is too deep for recursion or that `encode` never makes.

    `encode` makes no JSON objects, and no numbers such as 1e999 that cannot be written again."""
    level = [form]
    for _ in range(MAX_DEPTH + 2):
        for part in level:
            if type(part) is dict or (type(part) is float and not math.isfinite(part)):
                raise Malformed("not the form of a value")
        level = [part for parts in level if type(parts) is list for part in parts]
        if not level:
            return
    raise Malformed(f"nested more than {MAX_DEPTH} deep")


def equal(expected: Any, actual: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether a result equals the expected one, both as JSON forms. Raises Malformed.

    The rules:

    - a tuple equals a list, and a frozenset a set. Otherwise kinds differ: True is not 1, b"a" is
      not "a", (1+0j) is not 1.
    - numbers are compared by `close`, complex numbers by both parts, text and bytes exactly. None
      equals only None.
    - lists are compared by order. Dicts are compared by keys, which are exact (1 and 1.0 are the
      same key), and values by these rules.
    - numbers of sets are put in order and compared pair by pair by `close`. All other elements of
      sets are exact.

    The time is proportional to length (x log). Elements are ordered by digests, so keys chosen to
    collide do no harm.
    """
    kind, a = unpack(expected)
    actual_kind, b = unpack(actual)
    if kind != actual_kind:
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
        numbers, digests = _split(a)
        actual_numbers, actual_digests = _split(b)
        return digests == actual_digests and all(map(close, numbers, actual_numbers))
    expected_values = _by_key(a)
    actual_values = _by_key(b)
    return expected_values.keys() == actual_values.keys() and all(
        equal(value, actual_values[key], depth - 1) for key, value in expected_values.items()
    )


def close(expected: float, actual: float) -> bool:
    """Return whether two numbers agree.

    Two ints must be equal. If at least one is a float, |actual - expected| <= 1e-6 max(1,
    |expected|) suffices, unless one exceeds 2^53 in size: then they must be equal. Infinity equals
    the same infinity, and NaN equals NaN.
    """
    if type(expected) is int and type(actual) is int:
        return expected == actual
    if expected != expected or actual != actual:
        return expected != expected and actual != actual
    if abs(expected) > EXACT_ABOVE or abs(actual) > EXACT_ABOVE:
        return expected == actual
    return abs(actual - expected) <= TOLERANCE * max(1, abs(expected))


def _split(elements: list[Any]) -> tuple[list[float], list[bytes]]:
    """Return the numbers of a set in order, and the digests of its other elements in order."""
    numbers = []
    digests = []
    for element in elements:
        kind, content = unpack(element)
        if kind == "number" and content == content:
            numbers.append(content)
        else:
            digests.append(_digest(element, MAX_DEPTH))
    return sorted(numbers), sorted(digests)


def _by_key(parts: list[Any]) -> dict[bytes, Any]:
    """Return the values of a dict by the digests of their keys. `parts` alternates both."""
    keys = [_digest(key, MAX_DEPTH) for key in parts[::2]]
    if len(set(keys)) < len(keys):
        raise Malformed("a key twice")
    return dict(zip(keys, parts[1::2], strict=True))


def _digest(form: Any, depth: int) -> bytes:
    """Return a digest that is the same for equal values only.

    Numbers count by value, a tuple is a list, and sets have no order."""
    kind, content = unpack(form)
    if kind in ("sequence", "set", "dict"):
        if depth == 0:
            raise Malformed(f"nested more than {MAX_DEPTH} deep")
        parts = [_digest(part, depth - 1) for part in content]
        if kind == "dict":
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = sorted(key + value for key, value in pairs)
        elif kind == "set":
            parts.sort()
        data = b"".join(parts)
    elif kind == "text":
        data = content.encode("utf-8", "surrogatepass")
    elif kind == "bytes":
        data = content
    elif kind == "number" and (type(content) is int or content.is_integer()):
        data = b"%x" % int(content)
    else:
        data = repr(content).encode()
    return hashlib.blake2b(kind.encode() + b":" + data, digest_size=16).digest()


def same_output(expected: str, printed: str, tolerance: float = 0.0) -> bool:
    """Return whether two outputs agree by LiveCodeBench's rule for standard output.

    Both are stripped and cut into lines, and each line is stripped. They must have the same number
    of lines. Two lines agree if they are equal. They also agree if both have the same number of
    words, and all words are decimal numbers (ASCII digits, sign, point, exponent) that are equal in
    pairs as exact decimals. So "1.0 2" and "1 2e0" agree, "0.3333" and "0.33333" do not, and "nan"
    is a word.

    `tolerance`, relative or absolute, is for numbers that the expected output writes with a point
    or an exponent, also beside words.
    """
    expected_lines = expected.strip().split("\n")
    printed_lines = printed.strip().split("\n")
    return len(expected_lines) == len(printed_lines) and all(
        _same_line(x.strip(), y.strip(), tolerance)
        for x, y in zip(expected_lines, printed_lines, strict=True)
    )


def _same_line(expected: str, printed: str, tolerance: float) -> bool:
    if expected == printed:
        return True
    expected_words = expected.split()
    printed_words = printed.split()
    if len(expected_words) != len(printed_words):
        return False
    for x, y in zip(expected_words, printed_words, strict=True):
        has_tolerance = tolerance > 0 and not INTEGER.fullmatch(x)
        is_same_word = tolerance > 0 and x == y
        if not is_same_word and not near(x, y, tolerance if has_tolerance else 0.0):
            return False
    return True


def near(expected: str, printed: str, tolerance: float, is_relative: bool = True) -> bool:
    """Return whether two words are decimal numbers that differ by no more than `tolerance`.

    With `is_relative` it is relative to the expected number, if that is larger than 1 in size."""
    if not (DECIMAL.fullmatch(expected) and DECIMAL.fullmatch(printed)):
        return False
    try:
        expected_number = Decimal(expected)
        printed_number = Decimal(printed)
        if expected_number == printed_number:
            return True
        if not tolerance:
            return False
        bound = Decimal(tolerance)
        if is_relative:
            bound *= max(Decimal(1), abs(expected_number))
        return abs(expected_number - printed_number) <= bound
    except ArithmeticError:  # an exponent is beyond any decimal's
        return False

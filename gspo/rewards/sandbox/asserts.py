"""Runs trusted test code in a confined child, and asks the harness for each call of the program.

    first message   {"prelude", "test", "entry_point"}
    each request    {"call", "arguments", "keywords"}   answered by {"value"} or {"object": number}
    last message    {"verdict", "detail"}

The names that the program should provide are stand-ins. Calling a stand-in sends the arguments to
the program's process, and plain data of exact types comes back. So `==` here has its meaning in
Python. Anything else that the program made, such as Pair(5, 24), comes back as an opaque object,
which can only be given back to the program. This process, which the program cannot reach, alone
decides whether the test passed.

HumanEval: the prompt is the prelude (the tests call its helper functions). The test defines
check(candidate), which is called with the stand-in of the entry point. MBPP: the test is its assert
lines.
"""

import ast
import builtins
import importlib
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gspo.rewards.sandbox.frames import Channel
from gspo.rewards.sandbox.values import Malformed, Unserialisable, decode, encode

SEED = 0  # tests that draw random inputs draw the same ones for every program
MAX_DETAIL_CHARS = 200
OPERATIONS = (
    "eq ne lt le gt ge bool hash len iter next reversed contains getitem setitem delitem call repr "
    "str format int float index complex add radd sub rsub mul rmul truediv rtruediv floordiv "
    "rfloordiv mod rmod pow rpow and rand or ror xor rxor neg pos abs round enter exit "
    "getattribute setattr delattr dir"
)


class OpaqueObjectUsed(BaseException):
    """Raised when the test looks at something that is not plain data.

    It is not an Exception, so no test swallows it."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise OpaqueObjectUsed


class Opaque:
    """An object that stays with the program. Every operation on it raises OpaqueObjectUsed."""

    __slots__ = ("number",)


NUMBER = Opaque.__dict__["number"]
for _name in OPERATIONS.split():
    setattr(Opaque, f"__{_name}__", _refuse)


def run(channel: Channel) -> None:
    """Run the test of the first message and report the verdict."""
    first = channel.read_first()
    tester = Tester(channel, first["entry_point"])
    random.seed(SEED)
    verdict, detail = tester.judge(first["prelude"], first["test"])
    channel.write({"verdict": verdict, "detail": detail})


def describe(error: BaseException) -> str:
    """Return an exception in a few words."""
    try:
        return f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]
    # the exception is untrusted: it may have its own __str__, or an integer of too many digits
    except Exception:
        return "an exception without words"


@dataclass
class Tester:
    """Trusted test code with stand-ins for the functions of the program."""

    channel: Channel
    entry_point: str
    calls: int = 0

    def judge(self, prelude: str, test: str) -> tuple[str, str]:
        """Return (verdict, detail).

        An error before the first call of the program is the test's own fault, a sandbox error."""
        try:
            self._run(prelude, test)
        except AssertionError as error:
            return "wrong", describe(error)
        except (OpaqueObjectUsed, Unserialisable):
            return "unserialisable", "a value that is not plain data"
        except Malformed as error:
            return "protocol", str(error)
        except MemoryError:
            return "memory", "in the test"
        # the test did something with a result that only a right result allows
        except Exception as error:
            verdict = "wrong" if self.calls else "sandbox-error"
            return verdict, f"in the test: {describe(error)}"
        return "pass", ""

    def _run(self, prelude: str, test: str) -> None:
        module = types.ModuleType("test")
        sys.modules["test"] = module
        names = module.__dict__
        prelude_tree = ast.parse(prelude)
        test_tree = ast.parse(test)
        names.update(self._outside_names((prelude_tree, test_tree)))
        exec(compile(prelude, "prelude.py", "exec", dont_inherit=True), names)
        if self.entry_point:
            # replaces the empty one of HumanEval's prelude
            names[self.entry_point] = self.stand_in(self.entry_point)
        exec(compile(test, "test.py", "exec", dont_inherit=True), names)
        if _defines_check(test_tree):
            names["check"](names[self.entry_point])

    def stand_in(self, name: str) -> Callable[..., Any]:
        """Return a function that calls the program's function of that name."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.call(name, arguments, keywords)

        call.__name__ = name
        call.__qualname__ = name
        return call

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the result of a call in the program's process."""
        self.calls += 1
        limit = self.channel.write_limit
        request = {
            "call": name,
            "arguments": encode(arguments, limit, _opaque_form),
            "keywords": encode(keywords, limit, _opaque_form),
        }
        self.channel.write(request)
        reply = self.channel.read()
        if reply is None:  # the harness has closed the channel
            raise SystemExit
        if "object" not in reply:
            return decode(reply["value"])
        opaque = object.__new__(Opaque)
        NUMBER.__set__(opaque, reply["object"])
        return opaque

    def _outside_names(self, trees: tuple[ast.Module, ...]) -> dict[str, Any]:
        """Return the values of the names that the test uses and does not define.

        They are modules of the standard library, and stand-ins for all other names."""
        used = set()
        defined = set(dir(builtins))
        for tree in trees:
            for node in ast.walk(tree):
                match node:
                    case ast.Name(id=name, ctx=ast.Load()):
                        used.add(name)
                    case (
                        ast.Name(id=name)
                        | ast.FunctionDef(name=name)
                        | ast.ClassDef(name=name)
                        | ast.ExceptHandler(name=str(name))
                        | ast.arg(arg=name)
                    ):
                        defined.add(name)
                    case ast.alias():
                        defined.add((node.asname or node.name).partition(".")[0])
        outside = used - defined - {self.entry_point}
        # MBPP's tests rely on the solution's `import sys`
        modules = outside & sys.stdlib_module_names
        names = {name: self.stand_in(name) for name in outside - modules}
        return names | {name: importlib.import_module(name) for name in modules}


def _opaque_form(value: Any) -> Any:
    """Return the JSON form in which an opaque object goes back to the program."""
    if type(value) is not Opaque:
        raise Unserialisable("an argument that is not plain data")
    return ["h", NUMBER.__get__(value)]


def _defines_check(test: ast.Module) -> bool:
    """Return whether the test defines check(candidate) and leaves the call to us."""
    is_defined = False
    is_called = False
    for node in test.body:
        match node:
            case ast.FunctionDef(name="check"):
                is_defined = True
            case ast.Expr(value=ast.Call(func=ast.Name(id="check"))):
                is_called = True
    return is_defined and not is_called

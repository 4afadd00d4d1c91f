"""Loads an untrusted program once, in the confined child, then calls its functions on request.

    first message   {"code", "objects"}
    each request    {"index", "call", "arguments", "keywords"}   (values.py: the form of values)
    each answer     {"index", "value"},
                    {"index", "object": number} for a result that is not plain and stays here
                    (only with "objects": true), or
                    {"index", "status", "detail"} for a failure
    index -1        the loading of the program

The harness trusts nothing here. The program lives in the same process, may change everything in
this module, and may write frames of its own. It sends values only. A process that it cannot reach
compares them with the expected values, which never come here.
"""

import os
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

from gspo.rewards.sandbox import asserts
from gspo.rewards.sandbox.asserts import describe
from gspo.rewards.sandbox.frames import Channel, TooLong, encode
from gspo.rewards.sandbox.stdin import COMPILE_ERRORS, MEMORY_SIGNAL
from gspo.rewards.sandbox.values import Unserialisable, decode
from gspo.rewards.sandbox.values import encode as encode_value

LOADING = -1


class MissingFunction(Exception):
    """Raised when the program has no such function."""


def run(kind: str, channel: Channel) -> None:
    """Serve one program (kind "function") or one test (kind "tester").

    It ends when the harness closes the channel.
    """
    sys.argv[:] = ["program.py"]
    try:
        if kind == "tester":
            asserts.run(channel)
        else:
            serve(channel)
    except MemoryError:  # there was no memory even for an answer
        signal.signal(MEMORY_SIGNAL, signal.SIG_DFL)
        os.kill(os.getpid(), MEMORY_SIGNAL)


def serve(channel: Channel) -> None:
    """Load the program of the first message, then answer requests until there are no more."""
    first = channel.read_first()
    candidate = Candidate(first["objects"], channel.write_limit)
    channel.write(candidate.answer(LOADING, candidate.load, first["code"]))
    del first
    while True:
        message = channel.read()
        if message is None:
            return
        reply = candidate.answer(message["index"], candidate.call, message)
        try:
            encode(reply, channel.write_limit)
        except TooLong:
            reply = failure(message["index"], "unserialisable", "too large")
        channel.write(reply)


def failure(index: int, status: str, detail: str) -> dict[str, Any]:
    return {"index": index, "status": status, "detail": detail}


class Candidate:
    """An untrusted program: its names, and the objects it made that can be given back to it."""

    def __init__(self, keeps_objects: bool, limit: int) -> None:
        self.keeps_objects = keeps_objects
        self.limit = limit
        # the name is not __main__, so that code for the command line does not run
        self.module = types.ModuleType("program")
        self.objects: list[Any] = []

    def answer(
        self, index: int, work: Callable[[Any], dict[str, Any]], argument: Any
    ) -> dict[str, Any]:
        """Return the answer of work(argument), or how it failed."""
        try:
            return {"index": index, **work(argument)}
        except MissingFunction as error:
            return failure(index, "missing", str(error))
        except MemoryError:
            return failure(index, "memory", "MemoryError")
        # from untrusted code SystemExit and KeyboardInterrupt are errors like any other
        except BaseException as error:
            return failure(index, "runtime-error", describe(error))

    def load(self, code: str) -> dict[str, Any]:
        """Run the program from top to bottom."""
        try:
            program = compile(code, "program.py", "exec", dont_inherit=True)
        except COMPILE_ERRORS as error:
            return {"status": "compile-error", "detail": describe(error)}
        sys.modules["program"] = self.module  # dataclasses and pickle look the module up there
        exec(program, self.module.__dict__)
        return {"value": None}

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call a function with arguments that nobody else holds.

        "Solution.name" is called on a new Solution()."""
        arguments = decode(message["arguments"], self.objects.__getitem__)
        keywords = decode(message["keywords"], self.objects.__getitem__)
        result = self.find(message["call"])(*arguments, **keywords)
        try:
            return {"value": encode_value(result, self.limit)}
        except Unserialisable as error:
            if not self.keeps_objects:
                return {"status": "unserialisable", "detail": str(error)}
        except RuntimeError:  # another thread changed it meanwhile
            return {"status": "unserialisable", "detail": "it changes"}
        self.objects.append(result)
        return {"object": len(self.objects) - 1}

    def find(self, name: str) -> Any:
        """Return the function of that name. Raises MissingFunction."""
        owner_name, _, method = name.partition(".")
        owner = self.module.__dict__.get(owner_name)
        if not callable(owner) or (method and not callable(getattr(owner, method, None))):
            raise MissingFunction(f"no function {name}")
        return getattr(owner(), method) if method else owner

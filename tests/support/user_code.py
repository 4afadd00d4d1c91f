"""A package as a user would write it, in a folder of its own: loss, advantages, rewards, task,
metric, callback.
"""

import importlib
import sys
from pathlib import Path

LOSSES = '''
from dataclasses import dataclass
from gspo.algorithm.objectives.base import Clipped, LossInputs, LossOutputs
from own_package.helpers import same


@dataclass
class Copy(Clipped):
    """The loss of GRPO."""

    clip_low: float = 0.2
    clip_high: float = 0.27

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio_BT, bounded_BT = self.token_ratio(inputs)
        return same(self.clipped(ratio_BT, bounded_BT, inputs))


class Bare(Clipped):
    def __call__(self, inputs):
        return None


@dataclass
class Named(Copy):
    name: str = "grpo"


@dataclass
class Wrong(Clipped):
    def __call__(self, inputs, more):
        return None


@dataclass
class Empty(Clipped):
    pass


@dataclass
class Odd(Copy):
    thing: object = print
'''
EXTRAS = '''
from dataclasses import dataclass
from typing import ClassVar
from gspo.algorithm.advantages import GroupAdvantage
from gspo.io.ranges import ranged
from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.tasks.base import Task
from gspo.train.extensions import Callback, CustomMetric


@dataclass
class Mean(GroupAdvantage):
    def compare(self, rewards_B, groups):
        return rewards_B - groups.mean(rewards_B)


@dataclass
class Long(CustomMetric):
    unit: ClassVar[str] = "share of responses"
    meaning: ClassVar[str] = "responses of at least `tokens` tokens"
    tokens: int = ranged(4, least=1)

    def __call__(self, trained):
        return sum(r.length >= self.tokens for r in trained.responses) / len(trained.responses)


@dataclass
class Failing(CustomMetric):
    unit: ClassVar[str] = "none"
    meaning: ClassVar[str] = "nothing"

    def __call__(self, trained):
        return trained.metrics["no such metric"]


@dataclass
class StopAfter(Callback):
    steps: int = 2
    seen: int = 0

    def after_step(self, step, trainer, metrics):
        self.seen += 1
        return self.seen >= self.steps

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"]


@dataclass
class Idle(Callback):
    pass


@dataclass
class Letters(Task):
    """Write the letter."""

    name: str = "letters"

    def evaluation_sets(self):
        return ["held"]

    def problem(self, seed, split, index):
        return Problem(self.name, index, f"{index % 9}+{split == 'held'}", str(index % 9))

    def score(self, answers):
        return [Score(float(p.answer in text), "correct" if p.answer in text else "wrong") for p, text, _ in answers]
'''
REWARDS = """
import asyncio
import time


def digits(prompt, response, row):
    return sum(c.isdigit() for c in response) / max(len(response), 1)


def batch(prompts, responses, rows):
    return [len(row["answer"]) + len(response) for response, row in zip(responses, rows)]


def short_batch(prompts, responses, rows):
    return [1.0]


def spoiled_batch(prompts, responses, rows):
    spoiled = {"nan": float("nan"), "text": "a text"}
    return [spoiled.get(response, 1.0) for response in responses]


async def later(prompt, response, row):
    await asyncio.sleep(0.01)
    return response == "right"


async def hangs_in_a_thread(prompt, response, row):
    await asyncio.to_thread(time.sleep, 600 if response == "hang" else 0.001)
    return 1


TWO_AT_A_TIME = asyncio.Semaphore(2)


async def limited(prompt, response, row):
    async with TWO_AT_A_TIME:
        await asyncio.sleep(0.001)
    return 1


def decorated(prompt, response, row):
    return later(prompt, response, row)


async def hangs(prompt, response, row):
    if response == "hang":
        await asyncio.sleep(60)
    return 1


async def times_out(prompt, response, row):
    raise TimeoutError("the server did not answer")


async def batch_times_out(prompts, responses, rows):
    raise TimeoutError("the server did not answer")


def blocks(prompt, response, row):
    if response == "hang":
        time.sleep(60)
    return 1


def raises(prompt, response, row):
    print("a word on the standard output")
    if response == "bad":
        raise KeyError("gold")
    if response == "none":
        return None
    if response == "nan":
        return float("nan")
    if response == "exit":
        import os
        os._exit(3)
    return 0.5


def two(prompt, response):
    return 1


number = 3


def missing(prompt, response, row):
    return float(response.endswith(row["gold"]))


def optional(prompt, response, row):
    return float("gold" in row or row.get("gold", 1.0))


def falls_back(prompt, response, row):
    try:
        gold = row["reference"]
    except KeyError:
        gold = row["answer"]
    return float(response.split("####")[1] == gold)


def unbound(prompt, response, row):
    if "####" in response:
        found = 1.0
    return found


def named(prompt, response, row):
    return {"correct": 1.0, "format": float("42" in response)}


def text(prompt, response, row):
    return "1.0"


def digits_batch(prompts, responses, rows):
    return "1" * len(responses)


def set_batch(prompts, responses, rows):
    return set(map(float, range(len(responses))))


def more(prompt, response, row, *arguments, **others):
    return 1.0


def plain(prompt, response, row):
    import yaml
    return float(type(row) is dict and bool(yaml.safe_dump(row)))


def misspelt(prompt, response, row):
    return flaot(response)


def imports(prompt, response, row):
    import no_such_module
    return 1.0


def word(prompt, response, row):
    return "good"


def parsed(prompt, response, row):
    return float(response.split("####")[1] == row["answer"])


def pair(prompts, responses, rows):
    return 1.0


def nested(prompt, response, row):
    import json
    return json.loads(response)["score"]


def together(prompt, response, row):
    # It returns 1 once three calls have begun, and so needs three calls at the same time.
    from pathlib import Path
    folder = Path(row["folder"])
    (folder / response).touch()
    until = time.monotonic() + 60
    while len(list(folder.iterdir())) < 3:
        if time.monotonic() > until:
            return 0
        time.sleep(0.01)
    return 1
"""


def write(folder: Path) -> Path:
    """Write own_package into a folder."""
    package = folder / "own_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "helpers.py").write_text("def same(x):\n    return x\n")
    for name, text in (("losses", LOSSES), ("extras", EXTRAS), ("rewards", REWARDS)):
        (package / f"{name}.py").write_text(text)
    (package / "unclosed.py").write_text("def f(:\n")
    (package / "broken.py").write_text("import json\nraise OSError('no network')\n")
    return package


def forget() -> None:
    """Let the next import read the package anew."""
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_package"]:
        del sys.modules[name]

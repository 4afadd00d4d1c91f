"""Environments of the library verifiers, as someone would write them: played by tests, and loaded
by name.
"""

import asyncio

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    """A number is to be guessed; it answers with higher or lower."""

    async def setup_state(self, state):
        state["secret"] = int(state["answer"])
        return state

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content.strip()
        if said == "crash":
            raise KeyError("said crash")
        if said == "outage":
            raise vf.InfraError("the service is away")
        if said == str(state["secret"]):
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return []
        return [
            {
                "role": "user",
                "content": "higher" if said.isdigit() and int(said) < state["secret"] else "lower",
            }
        ]

    @vf.cleanup
    async def note_the_end(self, state):
        ENDS.append(state["stop_condition"] if state["is_completed"] else "cancelled")


ENDS: list[str] = []  # how each rollout of Guess has ended
# bound to the event loop that first waits for it, as the clients of services are
LOCK = asyncio.Lock()


def found(state):
    return float(state["stop_condition"] == "has_final_env_response")


async def quick(state):
    async with LOCK:
        await asyncio.sleep(0.001)
    return 1 / len(state["trajectory"])


def faulty(completion):
    raise IndexError("nothing there")


def load_environment(rounds: int = 4, size: int = 80, fault: bool = False):
    rows = [{"question": "Guess my number.", "answer": str(i % 40)} for i in range(size)]
    rubric = vf.Rubric(funcs=[found, quick] + [faulty] * fault, weights=[1.0, 0.5] + [1.0] * fault)
    return Guess(
        dataset=Dataset.from_list(rows),
        rubric=rubric,
        max_turns=rounds,
        system_prompt="Answer by a number.",
    )


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def right(completion, answer):
    return float(answer in completion[-1].content)


def sums(count):
    return Dataset.from_list(
        [{"question": f"{i}+{i}?", "answer": str(2 * i)} for i in range(count)]
    )


def load_tools():
    return vf.ToolEnv(
        tools=[add], dataset=sums(8), eval_dataset=sums(3), rubric=vf.Rubric(funcs=[right]), max_turns=5
    )  # fmt: skip


def load_single():
    return vf.SingleTurnEnv(eval_dataset=sums(8), rubric=vf.Rubric(funcs=[right]))


def best_of_group(states):
    return [1.0 for _ in states]


def load_group():
    return vf.SingleTurnEnv(dataset=sums(80), rubric=vf.Rubric(funcs=[best_of_group]))


def load_nothing():
    return "an environment"


class Forgetful(Guess):
    """Shows the policy its last guess alone."""

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:]


def load_forgetful():
    return Forgetful(
        dataset=sums(80), rubric=vf.Rubric(funcs=[found]), system_prompt="Answer by a number."
    )

"""The recipes of docs/recipes.md: that each composes with what its page says, and takes three steps
in miniature.
"""

import json

import pytest
import yaml

from commands import train
from composing import options, settings
from gspo.tracking.tracker import read_rows

RECIPES = [name for name in options("experiment") if name.startswith(("qwen", "olmoe"))]
MBPP = {
    "text": "Write a function to double a number.", "code": "def double(n):\n    return 2 * n", "test_setup_code": "",
    "test_list": ["assert double(1) == 2", "assert double(2) == 4", "assert double(0) == 0"],
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Problems in the formats of the recipes' benchmarks."""
    folder = tmp_path_factory.mktemp("data")
    for name, first in (("train", 10), ("test", 60)):
        numbers = range(first, first + 16)
        rows = {
            "gsm8k": [
                {"question": f"What is {n} + {n}?", "answer": f"Add.\n#### {2 * n}"}
                for n in numbers
            ],
            "math": [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in numbers],
        }
        for task, records in rows.items():
            (folder / task).mkdir(exist_ok=True)
            (folder / task / f"{name}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in records)
            )
    ids = [2, 3, 4, *range(11, 27), *range(601, 617)]
    code = [MBPP | {"task_id": n, "text": f"{MBPP['text']} Number {n}."} for n in ids]
    (folder / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in code))
    return folder


def words(recipe: str, data) -> list[str]:
    if recipe.endswith("gsm8k"):
        files = [f"task.path={data}/gsm8k"]
    elif recipe.endswith("code"):
        files = [f"task.path={data}/mbpp.jsonl"]
    else:
        files = [f"task.path={data}/math/test.jsonl", f"task.train_path={data}/math/train.jsonl"]
    return [f"experiment={recipe}", *files]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_with_the_papers_objective(recipe, data):
    s = settings(*words(recipe, data))
    assert (s.objective.name, s.objective.clip_low, s.objective.clip_high) == ("gspo", 3e-4, 4e-4)
    assert (
        s.trainer.minibatches == 4
        and s.policy.precision == s.rollout.dtype == "bfloat16"
        and s.study == recipe
    )
    assert s.rollout.prompts_per_step % s.trainer.minibatches == 0 and s.model.name == "hf"
    assert settings(*words(recipe, data), "rollout=local").rollout.name == "local"


@pytest.mark.parametrize("recipe", RECIPES)
def test_cut_it_is_the_same_recipe_in_miniature(recipe, data):
    whole, cut = settings(*words(recipe, data)), settings(*words(recipe, data), "cut=tiny")
    assert (
        cut.model.name == "stand_in"
        and cut.model.path == whole.model.path
        and cut.rollout.name == "local"
    )
    for kept in (
        "objective",
        "advantage",
        "kl",
        "correction",
        "task",
        "prompt",
        "reward",
        "optim",
        "sampler",
    ):
        assert getattr(cut, kept) == getattr(whole, kept), kept
    assert (
        cut.trainer.minibatches == whole.trainer.minibatches
        and cut.trainer.aggregation == whole.trainer.aggregation
    )
    assert (
        cut.policy.precision == "bfloat16"
        and cut.policy.routing_replay == whole.policy.routing_replay
    )
    assert settings(*words(recipe, data), "cut=tiny", "steps=5", "rollout.group_size=2").steps == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [*((recipe, ()) for recipe in RECIPES), ("olmoe_1b_7b_gsm8k", ("policy.routing_replay=r3",))],
)
def test_cut_it_takes_three_steps(recipe, more, data, tmp_path):
    done = train(tmp_path, *words(recipe, data), "cut=tiny", *more)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / recipe).glob("gspo-seed1-*")
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["optim/skipped"] == 0 and row["length/mean"] > 0 for row in rows[1:])
    assert all("mismatch/k3" in row for row in rows[1:]) and any(
        key.startswith("eval/") for key in rows[0]
    )
    if "olmoe" in recipe:
        assert (
            0 < rows[-1]["routing/consistency"] <= 1 and rows[-1]["routing/engine_agreement"] > 0.5
        )
    prompt = json.loads((run / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])[
        "rendered"
    ]
    chat = yaml.safe_load((run / "settings.yaml").read_text())["prompt_used"]
    starts = {
        "plain": "",
        "chat": "<|endoftext|><|user|>\n" if "olmoe" in recipe else "<|im_start|>",
    }
    assert prompt.startswith(starts[chat]), prompt

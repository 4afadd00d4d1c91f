r"""Published mathematics: GSM8K, MATH-500, AIME 2024 and 2025, AMC 2023.

The reward is 1 if the verdict is "correct", else 0. `form` chooses both the wording of the prompt
and the place of the answer in a response:

boxed    problem, then "Please reason step by step, and put your final answer within \boxed{}."
         (Qwen2.5-Math, Qwen3)
hash     problem, then "Let's think step by step and output the final answer after "####"."
         (verl's GSM8K)
answer   "Solve the following math problem step by step. ... Answer: $Answer ..."
         (DAPO)

gspo/rewards/math/verifier.py documents the verdicts. `prompt.format`, not the task, decides whether
the prompt becomes the user's turn of a chat or stays plain text.
"""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

from gspo.data.samples import Score
from gspo.io.ranges import SPEED_ONLY, choice, ranged
from gspo.rewards.math.extract import UnusableAnswer, last_box
from gspo.rewards.math.verifier import MathVerifier
from gspo.tasks.base import Answer
from gspo.tasks.benchmarks.base import Benchmark, Item
from gspo.tasks.benchmarks.data_row import DataRow

WORDINGS = {
    "boxed": "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "hash": '{} Let\'s think step by step and output the final answer after "####".',
    "answer": (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
        "\n\n{}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
}
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
# also 025 and 27.0; some copies write 336^\circ
INTEGER = re.compile(r"(-?[0-9]{1,12})(?:\.0+)?(?:\^\\circ)?")
# max_tokens_per_call in Qwen2.5-Math's evaluation (evaluation/math_eval.py)
QWEN_MATH_MAX_NEW_TOKENS = 2048
# "the maximum generation length is set to 32,768 tokens" (arXiv:2501.12948, model card)
DEEPSEEK_R1_MAX_NEW_TOKENS = 32_768
# the markers of DeepSeek-R1's chat, which some copies have in the prompt
R1_USER = "<｜User｜>"
R1_ASSISTANT = "<｜Assistant｜>"


@dataclass
class MathBenchmark(Benchmark):
    """A set of problems with final answers.

    Records: {problem or question, answer or solution}. Other keys are ignored. `workers` processes
    compare formulas, each within `seconds` and `memory_mb`. Numbers and words need no process.
    """

    form: str = choice("boxed", tuple(WORDINGS))
    workers: int = ranged(1, least=1, most=64, metadata=SPEED_ONLY)
    seconds: float = ranged(5.0, above=0, most=600)
    memory_mb: int = ranged(2048, least=256, most=65536)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._verifier = MathVerifier(self.form, self.workers, self.seconds, self.memory_mb)

    def item(self, row: DataRow, training: bool) -> Item:
        text, gold = self.read(row)
        return Item(text, WORDINGS[self.form].format(text), gold, self.family(row))

    def read(self, row: DataRow) -> tuple[str, str]:
        """Return the problem and its gold (the right answer).

        Raises ValueError for an invalid record."""
        return row.first("problem", "question"), gold_of(row)

    def family(self, row: DataRow) -> str:
        """Return the kind of problem, "" if the record does not have it."""
        return ""

    def score(self, answers: list[Answer]) -> list[Score]:
        """Return reward 1 for correct responses, else 0.

        A truncated response scores 0, whatever its text. An unreadable gold gives no reward."""
        judgements = self._verifier.verify(
            [(text if ended else "", problem.answer) for problem, text, ended in answers]
        )
        scores = []
        for (_, _, ended), judgement in zip(answers, judgements, strict=True):
            verdict = judgement.verdict
            if verdict == "unreadable-gold":
                scores.append(Score(None, verdict))
            elif ended:
                scores.append(Score(float(verdict == "correct"), verdict, judgement.answer))
            else:
                scores.append(Score(0.0, "truncated"))
        return scores

    def close(self) -> None:
        """End the processes that compare formulas."""
        self._verifier.close()


@dataclass
class GSM8K(MathBenchmark):
    """Grade-school word problems, 7473 for training and 1319 for testing.

    Cobbe et al., arXiv:2110.14168. Records: {question, answer with "#### N"}."""

    name: str = "gsm8k"
    hub: str = "openai/gsm8k"
    hub_config: str = "main"
    max_new_tokens: ClassVar[int] = QWEN_MATH_MAX_NEW_TOKENS
    hub_train_split = "train"

    def read(self, row: DataRow) -> tuple[str, str]:
        solution = row.text("answer")
        gold = solution.rpartition("####")[2].strip().replace(",", "")
        if "####" not in solution or not NUMBER.fullmatch(gold):
            raise row.wrong("answer", "must end in #### and a number")
        return row.text("question"), gold


@dataclass
class Math500(MathBenchmark):
    """500 problems of MATH (Hendrycks et al., arXiv:2103.03874).

    The split is from Lightman et al., arXiv:2305.20050. Records: {problem, answer, subject, level},
    as on the hub, or {prompt, reference_solution that ends in "#### gold"}. DeepSeek-R1's chat
    markers are removed from such a prompt. Training records may also be {problem, solution} with
    the gold in the last box, as in MATH itself.
    """

    name: str = "math500"
    hub: str = "HuggingFaceH4/MATH-500"
    max_new_tokens: ClassVar[int] = DEEPSEEK_R1_MAX_NEW_TOKENS

    def read(self, row: DataRow) -> tuple[str, str]:
        if "reference_solution" not in row.values:
            return super().read(row)
        prompt = row.text("prompt")
        solution = row.text("reference_solution")
        _, _, after_user = prompt.partition(R1_USER)
        problem, assistant, _ = after_user.partition(R1_ASSISTANT)
        gold = solution.rpartition("####")[2].strip()
        if "####" not in solution or not gold:
            raise row.wrong("reference_solution", "must end in #### and the answer")
        return (problem.strip() if assistant else prompt), gold

    def family(self, row: DataRow) -> str:
        subject = row.get("subject", str, default="")
        if not subject:
            subject = row.get("type", str, default="")
        level = row.get("level", int, str, default="")
        return f"{subject} {level}".strip()


@dataclass
class Competition(MathBenchmark):
    """A competition whose answers are integers. Training problems may have other answers."""

    max_new_tokens: ClassVar[int] = DEEPSEEK_R1_MAX_NEW_TOKENS
    smallest: ClassVar[int] = 0
    largest: ClassVar[int] = 999

    def item(self, row: DataRow, training: bool) -> Item:
        item = super().item(row, training)
        if training:
            return item
        gold = INTEGER.fullmatch(item.answer)
        if not gold or not self.smallest <= int(gold[1]) <= self.largest:
            raise row.wrong(
                "answer",
                f"must be an integer from {self.smallest} to {self.largest}, not {item.answer!r}",
            )
        return Item(item.text, item.prompt, str(int(gold[1])))


@dataclass
class AIME24(Competition):
    """The 30 problems of AIME I and II 2024, whose answers are integers from 0 to 999."""

    name: str = "aime24"
    hub: str = "HuggingFaceH4/aime_2024"
    hub_split = "train"


@dataclass
class AIME25(Competition):
    """The 30 problems of AIME I and II 2025, whose answers are integers from 0 to 999."""

    name: str = "aime25"
    hub: str = "math-ai/aime25"


@dataclass
class AMC23(Competition):
    """The 40 problems of AMC 12A and 12B 2023 whose answer is an integer.

    Records have floats such as 27.0."""

    name: str = "amc23"
    hub: str = "math-ai/amc23"
    max_new_tokens: ClassVar[int] = QWEN_MATH_MAX_NEW_TOKENS
    smallest: ClassVar[int] = -(10**9)
    largest: ClassVar[int] = 10**9


def gold_of(row: DataRow) -> str:
    """Return the gold of a record: its `answer`, or the content of the last box of `solution`."""
    if "answer" in row.values:
        answer = row.get("answer", str, int, float)
        if isinstance(answer, float):
            if not math.isfinite(answer):
                raise row.wrong("answer", f"is {answer}")
            return str(int(answer)) if answer.is_integer() else repr(answer)
        if not str(answer).strip():
            raise row.wrong("answer", "is empty")
        return str(answer).strip()
    try:
        return last_box(row.text("solution")).strip()
    except UnusableAnswer as verdict:
        raise row.wrong("solution", f"has no answer in a \\boxed{{}} ({verdict})") from None

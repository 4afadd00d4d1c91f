"""Problems of the library reasoning-gym (Stojanovski et al., arXiv:2505.24760), scored strictly.

A policy could exploit the library's own scorers. Many give credit for a long text that contains the
answer, and some run the answer as Python. Here the reward is 0 or 1, and there are four kinds of
families of problems:

EXACT    one right answer. A response must give the library's answer, except for spaces, quotes,
         case and trailing zeros of decimals.
NUMBERS  an arithmetic expression that uses each given number once and has a given value. The value
         is computed here, exactly.
SHAPES   many right answers. The whole answer must have the family's form, and the library's scorer
         must give 1.0.
REFUSED  not usable, with the reason. A family in no list has not been examined, and is refused too.

The text of a problem alone decides whether it belongs to training or to evaluation
(gspo.tasks.base.held_out). The library numbers its problems by seed + index, so two seeds share
most of their problems.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from gspo.data.problems import Problem
from gspo.data.samples import Score
from gspo.data.seeding import seed_for
from gspo.io.errors import SettingError
from gspo.io.ranges import choice, ranged
from gspo.rewards.math.extract import UnusableAnswer, extract
from gspo.tasks.base import TRAINING_SPLITS, Answer, SingleSet, draw_prompt

EXACT_FAMILIES = """
    ab aiw arc_1d arc_agi base_conversion basic_arithmetic binary_alternation binary_matrix
    bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum circuit_logic color_cube_rotation
    complex_arithmetic count_bits count_primes course_schedule decimal_arithmetic decimal_chain_sum
    dice emoji_mystery family_relationships game_of_life game_of_life_halting gcd gsm_symbolic
    largest_island lcm leg_counting letter_counting letter_jumble manipulate_matrix maze mini_sudoku
    needle_haystack number_filtering number_format number_sequence number_sorting
    prime_factorization products rearc rectangle_count rotate_matrix rotten_oranges self_reference
    simple_equations simple_geometry spell_backward spiral_matrix string_insertion
    string_manipulation string_splitting string_synthesis sudoku syllogism time_intervals
    word_sequence_reversal word_sorting zebra_puzzles
"""
EXACT = frozenset(EXACT_FAMILIES.split())
NUMBERS = frozenset(["countdown", "puzzle24"])
LISTS_OF_WORDS = r'\[\["[a-z]+"(, ?"[a-z]+")*\](, ?\["[a-z]+"(, ?"[a-z]+")*\])*\]'
JUG_MOVE = r'"(?:fill|empty|pour) [A-Z](?:->[A-Z])?"'
HANOI_MOVE = r"Move disk \d+ from Peg \d+ to Peg \d+"
SHAPES = {
    "cryptarithm": r"[A-Z]=\d(, ?[A-Z]=\d)*",
    "graph_color": r'\{"\d+": ?\d+(, ?"\d+": ?\d+)*\}',
    "group_anagrams": LISTS_OF_WORDS,
    "jugs": rf"\[{JUG_MOVE}(?:, ?{JUG_MOVE})*\]",
    "n_queens": r"[Q_]( [Q_])*(\n[Q_]( [Q_])*)*",
    "palindrome_generation": r"[A-Za-z]+",
    "palindrome_partitioning": LISTS_OF_WORDS,
    "quantum_lock": r"[A-C]( → [A-C])*",
    "shortest_path": r"infeasible|(up|down|left|right)( (up|down|left|right))*",
    "sokoban": r"[UDLR]+",
    "tower_of_hanoi": rf"{HANOI_MOVE}(\n{HANOI_MOVE})*",
}
UNSTABLE = "makes other problems in another process, so that runs could not be repeated"
EXECUTES = "has many right answers, and its scorer runs the answer as Python"
REFUSED = {
    "boxnet": "has no answer of its own, and its scorer fails on text that is no plan",
    "codeio": "has many right answers, and its scorer gives credit for likeness",
    "composite": "is a mixture: choose its families one by one",
    "fraction_simplification": (
        "has a scorer that accepts any text after the answer, and several right spellings"
    ),
    "intermediate_integration": EXECUTES,
    "isomorphic_strings": UNSTABLE,
    "knight_swap": UNSTABLE,
    "knights_knaves": (
        "has a scorer that accepts any text around the answer, and several right spellings"
    ),
    "polynomial_equations": EXECUTES,
    "polynomial_multiplication": EXECUTES,
    "power_function": "has rounded answers, and no rule for rounding in the question",
    "propositional_logic": "has no answer of its own, and its scorer gives its own solution 0",
    "ransom_note": UNSTABLE,
    "rubiks_cube": "has no answer of its own",
    "rush_hour": "has a scorer that skips illegal moves",
    "simple_integration": EXECUTES,
    "word_ladder": UNSTABLE,
}
MAX_ANSWER_CHARS = 1 << 16
MAX_EXPRESSION_CHARS = 200
INSTRUCTIONS = {
    "tags": (
        "Think step by step. Then give the final answer, and nothing else, "
        "between <answer> and </answer>."
    ),
    "boxed": "Think step by step, and put the final answer, and nothing else, within \\boxed{}.",
}
# the name of a value: A in A=1, "0" in {"0": 1}
KEY = re.compile(r'[A-Z](?==)|"\d+"(?=:)')
TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
INSTALL = 'pip install -e ".[gym]"'


@dataclass(frozen=True, eq=False)
class Entry:
    """The library's answer to a problem, and the library's facts about the problem."""

    answer: str | None
    metadata: dict[str, Any]


@dataclass
class GymProblems(SingleSet):
    """Problems of the family `dataset`, with the library's settings for it in `config`.

    There is no end of training problems, and there are `evaluation_size` evaluation problems.
    `form` is the place of the answer in a response: between tags, or in a box."""

    name: str = "reasoning_gym"
    dataset: str = "chain_sum"
    config: dict[str, Any] = field(default_factory=dict)
    evaluation_size: int = ranged(200, least=1, most=100_000)
    form: str = choice("tags", tuple(INSTRUCTIONS))

    def __post_init__(self) -> None:
        super().__post_init__()
        examined = sorted(EXACT | NUMBERS | SHAPES.keys())
        if self.dataset not in examined:
            reason = REFUSED.get(
                self.dataset, "is unknown, or has not been examined for holes in its scoring"
            )
            remedy = f"choose one of {', '.join(examined)}"
            raise SettingError(f"{self.key}.dataset", self.dataset, reason, remedy)
        for key in {"seed", "size"} & set(self.config):
            raise SettingError(
                f"{self.key}.config.{key}",
                self.config[key],
                "set by the harness, from the run's seed",
            )
        self._scorer: Any = None
        # evaluation problems by (seed, index), because evaluations use them again and again
        self._held_out: dict[tuple[int, int], Problem] = {}

    def problem(self, seed: int, split: str, index: int) -> Problem:
        """Return problem `index` of a split.

        Raises ValueError if the library is missing or refuses `config`."""
        self.check_split(split)
        if (seed, index) in self._held_out and split not in TRAINING_SPLITS:
            return self._held_out[seed, index]
        drawn = []

        def draw() -> str:
            library_seed = seed_for(seed, self.dataset, split, index, len(drawn)) % 2**31
            drawn.append(self._make(library_seed)[0])
            return drawn[-1]["question"]

        question = draw_prompt(split, draw)
        prompt = f"{question.strip()}\n\n{INSTRUCTIONS[self.form]}"
        answer = Entry(drawn[-1]["answer"], drawn[-1]["metadata"])
        problem = Problem(self.name, index, prompt, answer, family=self.dataset)
        if split not in TRAINING_SPLITS:
            self._held_out[seed, index] = problem
        return problem

    def score(self, answers: list[Answer]) -> list[Score]:
        return [
            self._score(problem.answer, text) if ended else Score(0.0, "truncated")
            for problem, text, ended in answers
        ]

    def _score(self, entry: Entry, text: str) -> Score:
        try:
            answer = final_answer(text, self.form)
        except UnusableAnswer as verdict:
            return Score(0.0, str(verdict))
        if self.dataset in EXACT:
            if entry.answer is None:
                raise ValueError("reasoning-gym gives no answer to this problem")
            right = normal_form(answer) == normal_form(entry.answer)
        elif self.dataset in NUMBERS:
            right = reaches(answer, entry.metadata["numbers"], entry.metadata.get("target", 24))
        else:
            right = has_shape(self.dataset, answer) and self._accepted(entry, answer)
        return Score(float(right), "correct" if right else "wrong", normal_form(answer))

    def _accepted(self, entry: Entry, answer: str) -> bool:
        """Return whether the library's scorer gives the full score."""
        if self._scorer is None:
            self._scorer = self._make(0)
        try:
            score = self._scorer.score_answer(
                answer, {"answer": entry.answer, "metadata": entry.metadata}
            )
        except Exception:  # the library's scorers raise many errors for wrong answers
            return False
        return score >= 1.0

    def _make(self, seed: int) -> Any:
        """Return the library's dataset of one problem."""
        try:
            import reasoning_gym  # optional, an extra of the installation
        except ImportError:
            raise SettingError(
                "task", self.name, "needs the package reasoning-gym", INSTALL
            ) from None
        try:
            return reasoning_gym.create_dataset(self.dataset, seed=seed, size=1, **self.config)
        except (TypeError, AssertionError, ValueError) as error:
            raise SettingError(
                f"{self.key}.config", dict(self.config), f"does not fit {self.dataset}: {error}"
            ) from error


def final_answer(text: str, form: str) -> str:
    """Return the answer in the last box or between the last tags.

    Raises UnusableAnswer, with the verdict as its message."""
    if form == "boxed":
        return extract(text, "boxed").strip()
    answers = TAG.findall(text)
    if not answers or not answers[-1].strip():
        raise UnusableAnswer("no-answer")
    answer = answers[-1].strip().replace("\r\n", "\n")
    if len(answer) > MAX_ANSWER_CHARS:
        raise UnusableAnswer("malformed")
    return answer


def has_shape(family: str, answer: str) -> bool:
    """Return whether the whole answer has the form of its family, and has no key twice.

    The library would count only the last value of a repeated key."""
    keys = KEY.findall(answer)
    return bool(re.fullmatch(SHAPES[family], answer)) and len(set(keys)) == len(keys)


def normal_form(answer: str) -> str:
    """Return the answer in one spelling.

    It has no spaces at the ends of lines, beside signs or doubled, no " quotes, no capital
    letters, and 5 for 5.0."""
    lines = answer.strip().replace('"', "'").casefold().split("\n")
    text = "\n".join(" ".join(line.split()) for line in lines)
    text = re.sub(r" (?=[^\w\s])|(?<=[^\w\s]) ", "", text)
    return re.sub(r"(?<![\d.])(\d+)(?:\.0+|(\.\d*?[1-9])0+)(?![\d.])", r"\1\2", text)


def reaches(expression: str, numbers: list[int], target: int) -> bool:
    """Return whether an expression uses each of the numbers once and has the value `target`.

    It may have the operations + - * / and brackets."""
    is_short = len(expression) <= MAX_EXPRESSION_CHARS
    if not is_short or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        return False
    used = []
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body, used) == target and Counter(used) == Counter(numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Return the exact value of an expression, and append its numbers to `used`.

    Raises ValueError for anything but the four operations."""
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            used.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, used)
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_value(left, used), _value(right, used))
    raise ValueError("not one of + - * /")

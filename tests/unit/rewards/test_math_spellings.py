"""Spellings that people and models use: functions with a base, arguments without braces, fonts,
lists of boxes.
"""

import pytest

from gspo.rewards.math.extract import normal
from gspo.rewards.math.verifier import MathVerifier

RIGHT = [
    (r"\log_2 3", r"\log_2(3)"), (r"\log_{10} 7", r"\log_{10}(7)"), (r"\sin^2 x", r"\sin^2(x)"),
    (r"\sin^2 x", r"\sin(x)^2"), (r"\tan^{-1} 2", r"\tan^{-1}(2)"), (r"\sum_{k=1}^{3} k", r"\sum_{k=1}^{3}(k)"),
    (r"\sum_{k=1}^{3} k", "6"), (r"\prod_{k=1}^{4} k", r"\prod_{k=1}^{4}(k)"), (r"\int_0^1 x dx", r"\int_0^1(x)dx"),
    (r"x^2(x+1)", "x^3+x^2"), (r"x_1(x+1)", r"x_1 x + x_1"),
    (r"\frac\pi2", r"\frac{\pi}{2}"), (r"\sqrt[3]2", r"\sqrt[3]{2}"), (r"\frac{\sqrt3}2", r"\frac{\sqrt{3}}{2}"),
    (r"\frac\sqrt{3}2", r"\frac{\sqrt{3}}{2}"), (r"\frac12", "0.5"), (r"\sqrt\pi", r"\sqrt{\pi}"),
    ("e^2", r"\exp(2)"), ("e^{x+1}", r"\exp{(x+1)}"), ("|x|", r"\lvert x\rvert"), ("5", r"\boldsymbol{5}"),
    ("5", r"\textcolor{red}{5}"), ("5", r"\color{blue}5"), ("5", "5~"), (r"5\text{ cm}", r"5\enspace\text{cm}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}"), (r"1,2,\dots", r"1,2,\ldots"),
    (r"(3,\infty)", r"\{x \mid x>3\}"), (r"\{x : 1<x<2\}", "(1,2)"), (r"(-\infty,3]", r"\{x\in\mathbb{R} : x\le 3\}"),
    (r"\{(1,2),(2,1)\}", r"(a,b)\in\{(1,2),(2,1)\}"), ("12", r"\textbf{(B)}\ 12"), ("B", r"\textbf{(B)}\ 12"),
    (r"\textbf{(B)}\ 12", "B"), (r"\textbf{(B)}\ 12", "12"), (r"\textbf{(B)}\ 12", r"\text{(B) } 12"),
    ("C_1e^{x}+C_2e^{-x}", "C_2e^{-x}+C_1e^x"), ("A_1+A_2", "A_2+A_1"), ("F_{n+1}-1", "-1+F_{n+1}"),
    ("V_0+at", "V_0+at"), (r"\frac{V_0}{R}", "V_0/R"), ("2T_1", r"T_1\cdot 2"), ("2A_1", r"A_1\cdot 2"),
    ("v_A+v_B", "v_B+v_A"), (r"\sigma_A^2+1", r"1+\sigma_A^2"), (r"\log_A B+1", r"1+\log_A B"),
    ("N_{A}x", "xN_A"), ("1011_2", "1011_{2}"), ("A5_{16}", "A5_{16}"),
    (r"\sum_{k=1}^N a_k", r"\sum_{k=1}^{N} a_k"), (r"\sum_{i=1}^{n} i", r"\frac{n(n+1)}{2}"),
    (r"\sum_{k=0}^{n}\binom{n}{k}x^k", "(1+x)^n"), (r"\prod_{k=1}^n (k+1)", r"\prod_{k=2}^{n+1} k"),
    (r"\langle 1,2\rangle", r"\left\langle 1, 2\right\rangle"), ("(1,2)", r"\langle 1,2\rangle"),
    (r"\overline{AB}", r"\overline{AB}"), (r"3\mathbf{i}+2\mathbf{j}", r"2\mathbf{j}+3\mathbf{i}"),
    (r"3\hat{i}+2\hat{j}", r"2\hat{\mathbf{j}}+3\hat{\mathbf{i}}"),
]  # fmt: skip
WRONG = [
    (r"\log_2 3", r"\log_2(3)+1"), (r"\log_2 3", r"\log_3(2)"), (r"\sin^2 x", r"\sin(x)"), ("6", r"\sum_{k=1}^{3}(k)"),
    (r"\sum_{k=1}^{3} k", r"\sum_{k=1}^{4}(k)"), (r"\frac\pi2", r"\frac{2}{\pi}"), ("7", "~7"), ("7", r"x=\;~7"),
    (r"\sqrt[3]2", r"\sqrt{2}"), ("e^2", r"\exp(3)"), ("|x|", "x"), ("5", r"\textcolor{red}{6}"),
    (r"(3,\infty)", r"\{x \mid x\ge 3\}"), (r"(3,\infty)", r"\{x \mid y>3\}"), ("13", r"\textbf{(B)}\ 12"),
    ("C", r"\textbf{(B)}\ 12"), (r"\textbf{(B)}\ 12", r"\textbf{(B)}\ 13"), (r"\textbf{(B)}\ 12", r"\textbf{(C)}\ 12"),
    ("A_1+A_2", "A_1+A_3"), ("A_1A_2", "A_1^2"), ("A_1+1", "A_2+1"), ("V_0+at", "V_1+at"), ("V_0", "V"),
    (r"\sum_{k=1}^n a_k", "n a_k"), (r"\sum_{i=1}^{n} i", r"\frac{n(n-1)}{2}"), (r"\sum_{i=1}^{n} i", "n^2"),
    (r"\langle 1,2\rangle", r"\langle 2,1\rangle"), (r"\overline{AB}", r"\overline{AC}"),
    (r"3\mathbf{i}+2\mathbf{j}", r"3\mathbf{j}+2\mathbf{i}"), ("2^{3}4", "2^{34}"),
    (r"\textbf{(B)}\ 12", "C"), (r"\{(1,2),(2,1)\}", r"(a,b)\in\{(1,2)\}"), (r"1,2,\dots", "1,2"),
]  # fmt: skip
BOXES = [
    (r"\boxed{1}, \boxed{2}", "1,2", "correct"),
    (r"$\boxed{1}$ and $\boxed{2}$", "2,1", "correct"),
    # not all of it is a list: the last box counts
    (r"\(\boxed{1}\), and $\boxed{2}$", "2", "correct"),
    (r"\boxed{1},\quad\text{and }\boxed{2}", "1,2", "correct"),
    (r"\boxed{6}, \boxed{7}, \boxed{8}", "8", "wrong"),
    (r"\boxed{7} or \boxed{8}", "8", "wrong"),
    # one value, twice
    (r"$\boxed{15\frac{39}{40}},$ or $\boxed{\frac{639}{40}}$", r"\frac{639}{40}", "correct"),
    (r"$\boxed{15\frac{39}{40}},$ or $\boxed{\frac{640}{40}}$", r"\frac{639}{40}", "wrong"),
    (r"\boxed{(1,2)} or \boxed{(1, 2)}", "(1,2)", "correct"),
    (r"\boxed{7} ... wait, \boxed{8}", "8", "correct"),
    ("\\boxed{7}\n\n\\boxed{8}", "8", "correct"),
    (r"\boxed{7}, that is \boxed{8}", "8", "correct"),
]

LINES = [  # with form=answer, of the right answer 5
    (r"Answer: \(\boxed{5}\)", "correct"),
    (r"Answer: \[\boxed{5}\]", "correct"),
    (r"Answer: x = \boxed{5}", "correct"),
    (r"The answer is \(\boxed{5}\).", "correct"),
    ("Answer:\n\\[\n5\n\\]", "correct"),
    ("**Answer:**\n\n$$\n\\boxed{5}\n$$", "correct"),
    ("Answer:\n$$\n5\n$$ or 6", "no-answer"),
    (r"Answer: \boxed{5} or 6", "malformed"),
    (r"Answer: \boxed{5} or \boxed{6}", "malformed"),
    (r"Answer: 4 \boxed{5}", "malformed"),
]


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier() as shared:
        yield shared


@pytest.mark.slow
def test_spellings_of_a_right_answer(verifier):
    verdicts = verifier.verify([(rf"\boxed{{{answer}}}", gold) for gold, answer in RIGHT])
    assert [
        pair for pair, found in zip(RIGHT, verdicts, strict=True) if found.verdict != "correct"
    ] == []


@pytest.mark.slow
def test_no_wrong_answer_comes_in_with_them(verifier):
    verdicts = verifier.verify([(rf"\boxed{{{answer}}}", gold) for gold, answer in WRONG])
    assert [
        pair for pair, found in zip(WRONG, verdicts, strict=True) if found.verdict != "wrong"
    ] == []


@pytest.mark.parametrize(("text", "gold", "expected"), BOXES)
def test_boxes_side_by_side_are_one_list(verifier, text, gold, expected):
    assert verifier.verify([(text, gold)])[0].verdict == expected


def test_a_gold_that_cannot_be_parsed_leaves_the_response_ungraded(verifier):
    golds = [r"\frac{\foo{1}", r"\sqrt[", r"\frac{1}{"]
    verdicts = verifier.verify(
        [(r"\boxed{x+1}", gold) for gold in golds] + [(r"\boxed{\foo{1}}", r"\foo{1}")]
    )
    assert [found.verdict for found in verdicts] == ["unreadable-gold"] * 4, (
        "also for its own spelling: wrong answers would be left out, and right ones count"
    )


@pytest.mark.parametrize("gold", [r"\widehat{AB}", r"A \cap B", r"(\widehat{AB}, 2)", "1, z^*"])
def test_all_answers_to_a_gold_that_cannot_be_parsed_are_treated_alike(verifier, gold):
    answers = [gold, "7", r"\overline{CD}", "(1, 2)", "1, 2"]
    verdicts = verifier.verify([(rf"\boxed{{{answer}}}", gold) for answer in answers])
    graded = {found.verdict for found in verdicts}
    assert "correct" not in graded


def test_arguments_get_their_braces():
    assert normal(r"\frac\pi2") == r"\frac{\pi}{2}"
    assert normal(r"\sqrt[3]2") == r"\sqrt[3]{2}"
    assert normal(r"\binom52") == r"\binom{5}{2}"
    assert normal(r"\frac{1}{2}") == r"\frac{1}{2}"
    assert normal(r"\exp(x+(1))+1") == "e^{x+(1)}+1"
    assert normal(r"\sqrt") == r"\sqrt" and normal(r"\frac1") == r"\frac{1}", (
        "what is not there is not made up"
    )


@pytest.mark.parametrize(("response", "verdict"), LINES)
def test_the_line_of_the_answer_may_be_a_formula(response, verdict):
    with MathVerifier(form="answer") as verifier:
        assert verifier.verify([(response, "5")])[0].verdict == verdict

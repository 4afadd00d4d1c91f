"""Extraction, exact values, units and the rules of judgement: all that needs no worker, by
hand-worked cases.
"""

import time
from fractions import Fraction

import pytest

from gspo.rewards.math.extract import MAX_ANSWER_CHARS, UnusableAnswer, extract, normal
from gspo.rewards.math.formula import comparable, power, rewrite
from gspo.rewards.math.literal import literal, split_unit
from gspo.rewards.math.text import spelling, structure


def refusal(text: str, form: str = "boxed") -> str:
    with pytest.raises(UnusableAnswer) as refused:
        extract(text, form)
    return str(refused.value)


def test_the_last_box_is_the_answer():
    cases = {
        r"\boxed{7} ... wait, \boxed{8}": "8",
        r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
        r"\boxed{\{1,2\}}": r"\{1,2\}",
        r"\boxed {7}": "7",
        r"\fbox{7}": "7",
        r"\framebox{204}": "204",
        r"\boxed 12$.": "12",
        r"\boxed{\boxed{7}}": "7",
        r"\boxed{7 \boxed{8}": "8",  # the outer one is never closed
        "\\boxed{a\\\\{b}}": "a\\\\{b}",  # a line break, then a brace that counts
        r"\boxedx{7} \boxed{1}": "1",
    }
    for text, answer in cases.items():
        assert extract(text, "boxed") == answer, text


def test_what_is_no_box_or_no_clean_one():
    assert [refusal(text) for text in ("", "42", r"\boxed{}", r"\boxed{ }", r"\boxedx{7}")] == [
        "no-answer"
    ] * 5
    unclean = [
        r"\boxed{7} \boxed{8",
        r"\boxed{8\boxed{7}}",
        r"\boxed{\boxed{7}\boxed{8}}",
        r"\boxed{\}",
        r"\boxed",
    ]
    unclean += [
        "\\boxed{7\0}",
        "\\boxed{\ud800}",
        "\\boxed{\u202e7}",
        "\\boxed{⑦}",
        "\\boxed{٧}",
        "\\boxed{7\u200b}",
    ]
    unclean += [
        "\\boxed{７⁷}",
        "\\boxed{Ａ}",
        "\\boxed{10⁴}",
        r"\boxed{" + "（" * 20 + "7" + "）" * 20 + "}",
    ]
    unclean += [
        "\\boxed{" + "7" * (MAX_ANSWER_CHARS + 1) + "}",
        r"\boxed{" + "(" * 20 + "7" + ")" * 20 + "}",
    ]
    assert [refusal(text) for text in unclean] == ["malformed"] * len(unclean)


def test_hash_and_answer_lines():
    assert extract("a #### 5\nb\n#### 1,080\nrest", "hash") == "1,080"
    assert (
        refusal("12", "hash")
        == refusal("####", "hash")
        == refusal("#### \n7", "hash")
        == "no-answer"
    )
    for text in (
        "Answer: 7",
        "x\nAnswer: 6\nAnswer: 7\n",
        "**Answer:** 7",
        "Final Answer: \\boxed{7}",
        "ANSWER : 7",
    ):
        assert extract(text, "answer").strip() == "7", text
    minerva = "Final Answer: The final answer is $7$. I hope it is correct."
    assert normal(extract(minerva, "answer")) == "7"
    assert refusal("the result: 7", "answer") == refusal("Answer:", "answer") == "no-answer"


def test_one_normal_form():
    same = [
        r"\frac{1}{2}",
        r"\dfrac12",
        r"\tfrac{1}2",
        r"$\frac 12$",
        r"\left. \frac1{2} \right.",
        r"\displaystyle\frac{1}{2}.",
    ]
    assert {normal(text) for text in same} == {r"\frac{1}{2}"}
    assert normal(r"10{,}000") == normal(r"10,\!000") == "10,000"
    assert normal(r"\left( 3, \frac\pi2 \right)".replace(r"\pi", "x")) == r"( 3, \frac{x}{2} )"
    cases = {
        r"{1 \over 2}": r"\frac{1}{2}", r"{1\over2}": r"\frac{1}{2}", r"1 \over 2": r"\frac{1}{2}",
        r"\sqrt{1 \over 2}": r"\sqrt{\frac{1}{2}}", r"{1 \over {2 \over 3}}": r"\frac{1}{{\frac{2}{3}}}",
        r"1 \over 2 \over 3": r"1 \over 2 \over 3", r"x = 1 \over 2": r"x = 1 \over 2",
        "３．５。": "3.5", "7，": "7", "7。5": "7。5", "7...": "7...", "3×10⁴": r"3\times 10^{4}",
        "2·10⁻³": r"2\cdot 10^{-3}", "（１，２）": "(1,2)", "｛1、2｝": r"\{1, 2\}",
    }  # fmt: skip
    assert {text: normal(text) for text in cases} == cases
    assert normal(r"\textbf{7}") == normal("**7**") == normal(r"\( 7 \)") == "7"


VALUES = {
    "42": 42, "042": 42, "-5": -5, "+5": 5, "42.0": 42, ".5": Fraction(1, 2), "7.": 7,
    "1,234,567.5": Fraction(2469135, 2),
    r"10\,000": 10000, r"\frac{2}{4}": Fraction(1, 2), r"-\frac{3}{4}": Fraction(-3, 4),
    r"\frac{3}{-4}": Fraction(-3, 4),
    "14/4": Fraction(7, 2), r"1\frac{1}{2}": Fraction(3, 2), r"-1\frac{1}{2}": Fraction(-3, 2), "3 1/2": Fraction(7, 2),
    r"1.5\times 10^{3}": 1500, r"6.72\cdot 10^{-5}": Fraction(672, 10**7), "1e3": 1000,
    r"0.\overline{3}": Fraction(1, 3),
    r"0.1\bar{6}": Fraction(1, 6),
    r"0.\dot{3}": Fraction(1, 3),
    r"0.1\overline{6}": Fraction(1, 6), r".\overline{142857}": Fraction(1, 7), "(7)": 7, r"2\times 10^5": 200000,
}  # fmt: skip


def test_literal_values_are_exact():
    for text, value in VALUES.items():
        found = literal(text)
        assert found is not None and found.value == value and not found.percent, text
    assert literal("50%").text() == "50%"


def test_what_is_not_evaluated_is_no_literal():
    several = (
        r"7^1 3+4 7+0x 7\pm0 \frac{14}{1+1} 123\times456 \sqrt{49} 5! 10^3 2^{10} 1,2 1,00 0,123 1,0000 1/0 7:8 7! "
        r"\frac{7}{0} 3\frac{3}{2} 7\frac{0}{1} --7 7%8 7%% \infty x 1.2.3 1e9999999 1.5\times10^{999999999} 1e301 0x7"
    )
    for text in several.split():
        assert literal(text) is None, text
    assert literal("7 8") is None and literal("") is None


def test_percent_is_a_hundredth_or_a_unit_but_not_both():
    half = [literal(text) for text in ("50%", "50", "0.5")]
    assert all(half[0].equals(other) and other.equals(half[0]) for other in half)
    assert not half[1].equals(half[2])
    assert not literal("50%").equals(literal("0.5%"))
    assert not literal("50%").equals(literal("5"))


def test_units():
    cases = {
        r"10\text{ cm}": ("10", "cm"), r"10\text{ centimeters}": ("10", "cm"), "10 cm": ("10", "cm"), r"\$5": ("5",
        "$"),
        r"-\$5": ("-5", "$"), "5 dollars": ("5", "$"), r"90^\circ": ("90", "°"), r"90\text{ degrees}": ("90", "°"),
        r"9\mbox{ inches}^2": ("9", "inch^2"), "9 square inches": ("9", "inch^2"), "7 apples": ("7", "apple"),
        r"\pi\text{ cm}": (r"\pi", "cm"),
    }  # fmt: skip
    for text, parts in cases.items():
        assert split_unit(normal(text)) == parts, text
    for text in (
        "7x",
        "7 x",
        "7 million",
        r"7\text{ or }8",
        "7 or 8",
        r"7\text{ not}",
        r"7\text{ is wrong}",
        "7 half",
    ):
        assert split_unit(normal(text))[1] == "", text


def test_spelling_is_one_for_all_ways_to_write_a_number_or_a_list():
    assert {
        spelling(structure(normal(t)))
        for t in ("7", "7.0", "007", r"\frac{14}{2}", "x=7", r"7\text{ cm}")
    } == {"7"}
    assert spelling(structure("3,1,2")) == spelling(structure(r"\{1,2,3\}")) == "{1,2,3}"
    assert spelling(structure("(2,1)")) == "(,2,1,)"
    assert spelling(structure(r"\text{Tuesday}")) == spelling(structure("tuesday")) == "tuesday"


def test_the_vocabulary_of_the_gold():
    assert (
        comparable(r"\sqrt{8}", r"2\sqrt{2}")
        and comparable("x^2", "x*x")
        and comparable(r"\cot x", r"\cos x/\sin x")
    )
    assert comparable("5!", "4!") and comparable("e^{x^2}", "e^{x^2}")
    for gold, answer in [
        (r"\frac{\sqrt{3}}{2}", r"\sin 60"), ("x", "y"), ("R", "r"), ("x", "x+0y"), (r"\pi", r"\pm\pi"), (r"\pi",
        r"\int\pi"),
        ("2^{10}", "9^{9^{9}}"), ("x", "x^{99999}"), ("x", "(x^{999})^{999}"), ("5!", "5!!"), ("5!", "(5!)!"), ("5!",
        "10000!"),
        ("x", "x" + "1" * 31), ("x", "x=x"), ("x", "x,x"), ("x", "(x"), ("x", "x)("), ("x", r"\text{x}"), ("x",
        "|x|" * 10),
    ]:  # fmt: skip
        assert not comparable(gold, answer), (gold, answer)


def test_exponents_on_each_other_multiply():
    assert power("x^2+x^3") == 3
    assert power("(x^2+1)^3") == power("{x^2}^{3}") == 6
    assert power("((x^{10})^{10})^{10}") == 1000
    assert power("x^{1/2}") == power("x") == 1


def test_formulas_are_rewritten_for_a_parser_that_misreads_them():
    assert rewrite("2(3)") == r"2\cdot (3)"  # a mixed number, 2 + 3, to it
    assert rewrite("0.5x") == r"\frac{5}{10}x"
    assert rewrite("R-r") == "z_{18}-r"  # one variable to it


def test_hundred_kilobytes_are_refused_in_no_time():
    start = time.perf_counter()
    for text in (
        "\\boxed{" * 14000,
        "\\boxed{7" + "}" * 10**5,
        "{" * 10**5 + "\\boxed{8",
        "\\" * 10**5,
    ):
        with pytest.raises(UnusableAnswer):
            extract(text + "\\boxed{", "boxed")
    assert time.perf_counter() - start < 0.5

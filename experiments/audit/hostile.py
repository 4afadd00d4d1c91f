r"""Answers written to fool a math verifier or to keep it busy.

The tests and the audit of an installed machine use them. Everything here is the content of a
\boxed{}.
"""

import re
from collections.abc import Iterator

# Each entry is a gold, and answers of which none may be accepted, separated by three spaces or a
# new line.
HACKS = [
    ("7", r"""
        x=8=7   7=7=8   x=7=7   8=7   7=8   3+4   7^1   7+0x   7\pm 0   \pm 7   7 \text{ or } 8   7\text{ or }8
        7 or 8   7 and 8   7,8   7;8   7 8   8,7   \{7\}   \{7,8\}   \{1,2,3,4,5,6,7,8,9\}   x\in\{7,8\}   x\in\{7\}
        [7,7]   (7,7)   (7,8)   7 \mid 8   7\ldots   7...   \infty   \min(7,8)   \max(7,-8)   \phantom{8}7
        7\phantom{8}   \text{not }7   \neq 7   \ne 7   x\neq 7   >7   <7   \ge 7   x>7   x\ge 7   \approx 7
        x\approx 7   \sim 7   ~7   7~8   7\text{ is wrong}   7 is wrong   \frac{14}{1+1}   \frac{14}{\sqrt{4}}
        \sqrt{49}   \log_2 128   7!/6!   \binom{7}{1}   \sum_{i=1}^{7}1   \int_0^7 dx   \lim_{x\to7}x   7\cdot 1
        7\times 1   1\times 7   14\div 2   14:2   7-0   7+0   8-1   -(-7)   --7   \lfloor 7.5\rfloor
        \lceil 6.5\rceil   \lvert -7\rvert   |-7|   7e   7i   7x   7 x   7 \text{ million}   7 million
        7\text{ hundred}
        7\text{ squared}   7^2   7_8   7_{10}   7.0001   6.9999999999   7\frac{0}{1}   6\frac{2}{2}
        7\text{ or eight}   x   y=x   \text{seven}   7:8   7\to 8   7\%8   7\%\%   70\%   7&8   7\\8
        \begin{pmatrix}7\end{pmatrix}   f(7)   f(x)=x   \det(7)   7\mod 8   7 \bmod 8   \gcd(7,14)   (7)(1)   7(1)
        (3)(4)-5   \{x: x=7\}   \emptyset   0x7   7e0.5   7//1   7/1/1   \frac{7}{0}   7\text{ or more}
        \text{about }7   7\text{+}   7^{+}   7?   7\star   7\neq 8   \frac{7}{1}=8   \boxed{7}\boxed{8}   8\boxed{7}
        7\text{ to }8   7-8   7/8   \overline{7}   7'   \cancel{8}7   \underline{8}\,7   7\overset{8}{}   7\atop 8
        {7\choose 1}   7\,8   7\ 8   7{,}8   7{8}   {7}{8}   1 or 2 or 7   x=7, x=8   x=7 or 8
        \text{the answer is }7   7\mathrm{or}8   7\lor 8   7\vee 8   7\cup 8   7\in\mathbb{N}   n=7=n   a=b=7   x=y=7
        2x=14   x-7=0   x^2=49   \text{7 or 8}   7\text{, }8   \text{7, 8}   7\text{ or }7   7+0i   7+0\pi
        7\cdot x^0   7^{1}   \sqrt[1]{7}   \exp(\ln 7)   e^{\ln 7}
    """),
    ("56088", r"""
        123\times 456   123 \cdot 456   123*456   (123)(456)   56088.5   5.6088\times 10^3   123\times 456=56088
    """),
    (r"\frac{1}{3}", r"""
        0.3333   0.333333333   0.33333333333333333333   .\overline{34}   33.3\%   33.333333\%   \frac{3333}{10000}   3
    """),
    (r"\pi", r"""
        3.14159   3.14   \frac{22}{7}   \frac{355}{113}   3.14159265358979323846264338327
        \frac{314159265358979}{100000000000000}
    """),
    (r"\sqrt{8}", r"""
        2.83   2.8284271247461903   \pm\sqrt{8}   \pm 2\sqrt{2}   2\sqrt{2},-2\sqrt{2}   2\sqrt{2}\text{ or }3
        2\sqrt{3}   8   \sqrt{8}=\sqrt{9}   \int_0^{1}2\sqrt{2}\,dx   2\sqrt{2}+0x
    """),
    ("x^2+2x+1", r"""
        (x-1)^2   (x+1)^2=(x+2)^2   x^2+2x+1\text{ or }x   x^2+2x+1,x   (y+1)^2   (X+1)^2   x^2   1   \pm(x+1)^2
        \sum_{k=0}^{2}x^k
    """),
    (r"\pi(R^2-r^2)", r"""
        0   \pi(r^2-R^2)   \pi(r^2-r^2)
    """),
    ("x=5", r"""
        2x=10   x-5=0   x=5=6   y=5   x=4   x=5,6   5=5   x>4
    """),
    ("(1,2)", r"""
        (2,1)   1,2   [1,2]   (1,2,3)   \{1,2\}   (1,2],(1,2)   (1,1+1)
    """),
    ("1,2", r"""
        1   2   1,2,3   1,1   (1,2)   12   1.2   1,2,2   1,\text{ or }3   \{1,2,3\}
    """),
    (r"(-\infty,3]", r"""
        (-\infty,3)   x<3   x\ge 3   (-\infty,4]   x\le 3\text{ or }x>5   (-\infty,\infty)   [-\infty,3]
    """),
    (r"\text{Tuesday}", r"""
        \text{Monday}   \text{Tuesday or Monday}   Tuesyad   \text{not Tuesday}   T   \text{Tuesday, Monday}
    """),
    (r"\text{(B)}", r"""
        A   \text{(A)}   A,B   (A)(B)   AB   \text{A or B}   \text{(A) or (B)}   \text{not B}   BB
    """),
    (r"90^\circ", r"""
        \frac{\pi}{2}   90\text{ radians}   91^\circ   90^{90}   89.9999^\circ
    """),
    (r"10\text{ cm}", r"""
        10\text{ m}   10\text{ cm}^2   100\text{ mm}   \$10   1\text{ m}
    """),
    ("52_8", r"""
        52   42   52_9   52_{10}   5_82
    """),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"""
        \begin{pmatrix}1&2\\4&3\end{pmatrix}   (1,2,3,4)   \begin{pmatrix}1&2&3&4\end{pmatrix}
        \begin{vmatrix}1&2\\3&4\end{vmatrix}   -2
    """),
]  # fmt: skip


def hacks() -> Iterator[tuple[str, str]]:
    """Yield (gold, answer) of every hack."""
    for gold, answers in HACKS:
        for answer in re.split(r"   |\n", answers):
            if answer.strip():
                yield gold, answer.strip()


SYMBOLIC_GOLDS = (
    r"\frac{\sqrt{2}}{2}",
    "x^2+2x+1",
    "2^{10}",
    "(a+5)(b+2)",
    r"\binom{5}{2}",
    r"\cot x",
    "5!",
    "y=2x+3",
)


def poisons(count: int) -> Iterator[tuple[str, str]]:
    """Yield `count` different (gold, answer) that are wrong and would take a naive verifier
    seconds, gigabytes or forever."""
    golds = ("7", *SYMBOLIC_GOLDS)
    for number in range(count):
        kind = POISONS[number % len(POISONS)]
        yield golds[(number // len(POISONS)) % len(golds)], kind.replace("#", str(11 + number))


# Each is a different answer for every number that is put for #.
POISONS = [
    "9^{9^{9#}}", "|x|" * 90 + "#", "_".join("x" * 100) + "#", "9^{9^{9999}}#", "x+" * 140 + "#", "-" * 200 + "#",
    "9**9**#", "10^{10^{10#}}", "(10^{6#})!", "#!!!!", "((#!)!)!", r"\binom{10^9#}{5\cdot 10^8}",
    r"2^{10^9#} \mod 7", r"1.5\times10^{999999#}", "1e999999#", r"\sum_{i=1}^{1000000#} i",
    r"\prod_{i=1}^{100000#} i",
    r"\int_0^{\infty} \frac{\sin(x^{#})}{x^5+e^{x^2}}\,dx", "(x+#)^{9999}", "((x+#)^{99})^{99}",
    "(((9^{99})^{99})^{99})^{#}",
    r"\frac{1}{" * 40 + "#" + "}" * 40, "(" * 60 + "#" + ")" * 60, "{" * 60 + "#" + "}" * 60, "1+" * 140 + "#",
    r"\{" + "#," * 50 + r"1\}", r"\sqrt{" * 20 + "#" + "}" * 20, r"\left(" * 30 + "#", "9" * 200 + "#",
    "#" + "^2" * 90,
    r"\lim_{n\to\infty}(1+\frac{#}{n})^{n^n}", "a" * 200 + "#",
    "x^{" * 20 + "#" + "}" * 20, r"\sqrt[#]{" * 8 + "2" + "}" * 8,
    "(x+y+z+#)^{999}(x-y)^{999}", r"\sin(\cos(\sin(\cos(#x))))" * 4, "2^{9999}^{#}", "9999^{9999}" * 10 + "#",
    "7#\x00", "\ud800#", "\u202e7#", "７#", "٧#", "7\u200b#", r"\begin{pmatrix}" + r"1&" * 40 + "#" + r"\end{pmatrix}",
    "__import__('os').system('#')", "lambda: #", "#" + "|" * 100, "$" * 100 + "#", "&" * 50 + "#", r"\\" * 50 + "#",
    r"\frac{#}{(a+5)^{99}-(a+5)^{98}(a+5)}", "(a+b+#)^{999}(a-b)^{998}", r"\cot(\cot(\cot(\cot(\cot(#x)))))",
    "7 " * 100 + "#", r"\text{" * 10 + "#" + "}" * 10, "0." + "3" * 250 + "#", "1" + ",000" * 60 + ",#",
    "#" + "!" * 50,
]  # fmt: skip

# These are whole responses that are broken, long or both.
HOSTILE_RESPONSES = [
    r"\boxed{" * 14000, r"\boxed{7" + "}" * 100_000, "$" * 100_000, "(" * 100_000, "{" * 100_000 + r"\boxed{8}",
    r"\boxed{" + "1+" * 50_000 + "1}", r"\boxed{" + "9" * 100_000 + "}", r"\boxed{7", r"\boxed{}", r"\boxed",
    r"\boxed{{7}",
    r"\boxed{\boxed{7}\boxed{8}}",
    r"\fbox{" * 10_000 + "}" * 10_000, "a" * 100_000, r"\boxed{\{" + "1," * 10_000 + r"1\}}",
    "#### " * 20_000, "Answer: " * 12_000, "\x00" * 1000, "\\" * 100_000, r"\boxed" * 16_000, "\ud800\udfff" * 1000, "",
    "answer is" + " " * 65_000 + "x", "answer" + "*" * 65_000, "Answer:" + "\t" * 65_000,
]  # fmt: skip

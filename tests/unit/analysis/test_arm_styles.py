"""The arms' looks: told apart by the colour-blind and in grey, measured, and one look per arm in
every figure.

Colour blindness: Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB. Difference:
CIEDE2000 (Sharma, Wu and Dalal 2005), D65. The bounds are CIEDE2000 12 between any two of the
paper's arms, 30 between those that share the paper's figures (a just noticeable difference is about
1; arms were once 8 apart), and 10 in lightness L* for grey.
"""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from gspo.analysis import arm_styles, load, style
from gspo.analysis.load import GRPO, GRPO_R2, GSPO, GSPO_TOKEN

ANALYSIS = Path(__file__).parents[3] / "analysis"

SIGHTS = {
    "all cones": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.072175],
        [0.0193339, 0.119192, 0.9503041],
    ]
)
LEAST, LEAST_TOGETHER, LEAST_GREY = 12, 30, 10
TOGETHER = (GSPO, GRPO_R2, GRPO)  # of Figs 1 to 3
OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}


def lab(colour: str, sight: str = "all cones") -> np.ndarray:
    """CIELAB of a hex colour as these eyes see it."""
    coded = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    t = XYZ @ np.clip(np.array(SIGHTS[sight]) @ linear, 0, 1) / XYZ.sum(1)
    x, y, z = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def ciede2000(one: np.ndarray, two: np.ndarray) -> float:
    """Sharma, Wu and Dalal (2005), equations 2 to 22, weights 1."""
    (l1, a1, b1), (l2, a2, b2) = one, two
    chroma = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 1.5 - 0.5 * np.sqrt(chroma**7 / (chroma**7 + 25**7))
    c1, c2 = np.hypot(g * a1, b1), np.hypot(g * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, g * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    big = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    hue = (
        h1 + h2
        if not c1 * c2
        else (h1 + h2) / 2
        if abs(h1 - h2) <= 180
        else (h1 + h2 + 360) / 2 % 360
    )
    cosines = ((0.17, 1, 30), (-0.24, 2, 0), (-0.32, 3, -6), (0.2, 4, 63))
    t = 1 - sum(
        weight * np.cos(np.radians(times * hue - shift)) for weight, times, shift in cosines
    )
    s_l = 1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2)
    s_c, s_h = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    r = (
        -2
        * np.sqrt(chroma**7 / (chroma**7 + 25**7))
        * np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2))))
    )
    dl, dc, dh = (l2 - l1) / s_l, (c2 - c1) / s_c, big / s_h
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + r * dc * dh))


def least(a: str, b: str) -> float:
    """The smallest difference of two colours over all kinds of sight."""
    return min(ciede2000(lab(a, sight), lab(b, sight)) for sight in SIGHTS)


def test_the_measure_on_published_pairs():
    pairs = [  # Sharma, Wu and Dalal (2005), table 1: pairs 1, 7, 14, 17, 25
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 0, 0), (50, -1, 2), 2.3669),
        ((50, -0.001, 2.49), (50, 0.0011, -2.49), 4.7461),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ]
    for one, two, difference in pairs:
        assert ciede2000(np.array(one), np.array(two)) == pytest.approx(difference, abs=1e-3)
    assert lab("#FFFFFF") == pytest.approx([100, 0, 0], abs=0.01)
    assert least(arm_styles.BLUE, "#7A5195") < LEAST, "GRPO's colour of old is found out"


def test_the_papers_arms_are_told_apart_by_any_eyes_and_in_grey():
    assert {arm_styles.arm_style(arm).colour for arm in load.ARMS} <= OKABE_ITO
    for a, b in itertools.combinations(load.ARMS, 2):
        one, two = arm_styles.arm_style(a), arm_styles.arm_style(b)
        assert least(one.colour, two.colour) >= (
            LEAST_TOGETHER if {a, b} <= set(TOGETHER) else LEAST
        ), (a, b)
        assert abs(lab(one.colour)[0] - lab(two.colour)[0]) >= LEAST_GREY, (a, b)
        assert one.marker != two.marker and one.line != two.line, (a, b)


def test_every_objective_has_a_look_that_no_other_has():
    arms = [
        *load.ARMS,
        *(arm for arm in load.OBJECTIVES.values() if arm not in load.ARMS),
        "an objective of one's own",
    ]
    each = [arm_styles.arm_style(arm) for arm in arms]
    assert len({look.marker for look in each}) == len(arms)
    assert len({(look.colour, look.line) for look in each}) == len(arms)
    assert {look.colour for look in each[:-1]} <= OKABE_ITO


def test_every_marker_can_be_drawn_as_dots():
    ax = Figure().add_subplot()
    for look in arm_styles.STYLES.values():
        style.dots(ax, [1, 2], [1, 2], look.colour, look.marker)
    assert [line.get_marker() for line in ax.lines] == [
        look.marker for look in arm_styles.STYLES.values()
    ]
    assert {line.get_linestyle() for line in ax.lines} == {"None"}


def test_a_look_stays_with_its_arm():
    own = arm_styles.arm_styles([GSPO, GRPO])
    assert own == {GSPO: arm_styles.arm_style(GSPO), GRPO: arm_styles.arm_style(GRPO)}
    assert arm_styles.arm_style("GRPO [optim.lr=0.001]") == arm_styles.arm_style(GRPO)
    replayed = arm_styles.arm_style("GRPO + Routing Replay (R3)")
    assert (
        replayed.colour == arm_styles.arm_style(GRPO).colour
        and replayed.line != arm_styles.arm_style(GRPO).line
    )
    for count in (2, 5, 20):  # settings of one objective, beside another objective
        arms = [f"GSPO [x={n}]" for n in range(count)]
        found = arm_styles.arm_styles([*arms, GSPO_TOKEN])
        assert len(set(found.values())) == count + 1 and found[GSPO_TOKEN] == arm_styles.arm_style(
            GSPO_TOKEN
        )
        assert found[arms[0]].colour == arm_styles.arm_style(GSPO).colour.lower()


def test_replays_at_several_settings_keep_their_line_and_differ_from_everything_else():
    arms = [
        f"GSPO{replay}{setting}"
        for replay in ("", " + Routing Replay (R2)")
        for setting in ("", " [frozen router]")
    ]
    found = arm_styles.arm_styles(arms)
    assert len(set(found.values())) == len(found)
    replayed = [look for arm, look in found.items() if "Replay" in arm]
    assert {look.line for look in replayed} == {arm_styles.REPLAYED}, (
        "drawn as every other replay is"
    )


def test_no_figure_has_colours_of_its_own_for_arms():
    for file in ANALYSIS.glob("*.py"):
        if file.name not in ("arm_styles.py", "style.py", "blocks.py"):
            assert not re.findall(r"\"#[0-9A-Fa-f]{6}\"", file.read_text()), file.name

"""The style of every arm, the same in every figure: a colour, a marker, a kind of line.

Colours are Okabe and Ito's. The paper's arms can be told apart by colour alone under the three
kinds of colour blindness, and by lightness alone in grey (tests/unit/analysis/test_arm_styles.py
measures both). All other arms can be told apart by colour, marker and line together.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.colors import to_hex, to_rgb

from gspo.analysis.load import GRPO, GRPO_R2, GSPO, GSPO_TOKEN

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#767676"
DASHES = (0, (5, 1.6))
CHAIN = (0, (6, 1.5, 1.2, 1.5))
DOTS = (0, (1.2, 1.4))
REPLAYED = (0, (6, 1.2, 1.2, 1.2, 1.2, 1.2))


@dataclass(frozen=True)
class ArmStyle:
    """The colour, marker and line of an arm. `line` is a matplotlib line style."""

    colour: str
    marker: str
    line: str | tuple = "-"

    def plot_options(self) -> dict[str, object]:
        """Return the arguments of `Axes.plot` for this style."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "ls": self.line,
            "mec": "white",
            "mew": 0.5,
        }


ArmStyles = dict[str, ArmStyle]  # by the name of the arm
STYLES: ArmStyles = {
    GSPO: ArmStyle(BLUE, "o", "-"),
    GRPO_R2: ArmStyle(ORANGE, "s", DASHES),
    GRPO: ArmStyle(BLACK, "^", CHAIN),
    GSPO_TOKEN: ArmStyle(GREEN, "D", DOTS),
    "LUSPO": ArmStyle(SKY, "v", "-"),
    "GMPO": ArmStyle(VERMILION, "P", "-"),
    "Dr.GRPO": ArmStyle(PURPLE, "X", "-"),
    "DAPO": ArmStyle(SKY, "<", DASHES),
    "PPO": ArmStyle(VERMILION, ">", DASHES),
    "REINFORCE": ArmStyle(PURPLE, "*", DASHES),
    "CISPO": ArmStyle(SKY, "h", CHAIN),
    "MiniRL": ArmStyle(VERMILION, "p", CHAIN),
    "DPPO": ArmStyle(PURPLE, "d", CHAIN),
    "SAPO": ArmStyle(SKY, "8", DOTS),
    "GSPO, all tokens": ArmStyle(VERMILION, "H", DOTS),
    "GSPO-turn": ArmStyle(GREEN, "$t$", DASHES),
    "VESPO": ArmStyle(BLUE, "$v$", DASHES),
    "CTPO": ArmStyle(ORANGE, "$c$", CHAIN),
    "CTPO-LA": ArmStyle(ORANGE, "$l$", DOTS),
    "DRO": ArmStyle(GREEN, "$d$", CHAIN),
    "prime-rl": ArmStyle(BLUE, "$p$", DOTS),
    "prime-rl, IPO": ArmStyle(BLUE, "$i$", CHAIN),
    "P3O": ArmStyle(PURPLE, "$3$", DOTS),
}
UNLISTED = ArmStyle(GREY, ".", "-")  # of an objective outside the list, such as a user's own
VARIANT_LINES = ("-", DASHES, CHAIN, DOTS)


def arm_style(arm: str) -> ArmStyle:
    """Return an arm's style.

    Appended settings ("GRPO [optim.lr=0.001]") do not change it. A replay without a style of its
    own has the colour and marker of its objective and the line of replays.
    """
    name = arm.split(" [")[0]
    if name in STYLES:
        return STYLES[name]
    objective, replay, _ = name.partition(" + Routing Replay")
    style = STYLES.get(objective, UNLISTED)
    return replace(style, line=REPLAYED) if replay else style


def arm_styles(arms: list[str]) -> ArmStyles:
    """Return a style for each arm, all different.

    Arms that would share a style (an objective at several settings) get shades of its colour, from
    dark to pale, and different kinds of line in turn. Replays keep the line of replays.
    """
    sharing = Counter(arm_style(arm) for arm in arms)
    drawn = Counter()
    styles = {}
    for arm in arms:
        style = arm_style(arm)
        if sharing[style] > 1:
            index = drawn[style]
            drawn[style] += 1
            shade = tint(style.colour, 1 - 0.7 * index / (sharing[style] - 1))
            line = style.line
            if line != REPLAYED:
                line = VARIANT_LINES[index % len(VARIANT_LINES)]
            styles[arm] = replace(style, colour=shade, line=line)
        else:
            styles[arm] = style
    return styles


def tint(colour: str, strength: float) -> str:
    """Return a colour mixed with white; strength 1 is the colour itself.

    The mixture is opaque, so overlaps do not darken.
    """
    mixed = 1 - strength * (1 - np.array(to_rgb(colour)))
    return to_hex(mixed)

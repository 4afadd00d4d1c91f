"""How every arm is drawn, the same in every figure: a colour of Okabe and Ito's palette, a marker,
a kind of line.

The paper's arms can be told apart by colour alone under the three kinds of colour blindness, and by
lightness alone in grey (tests/unit/analysis/test_looks.py measures both); all other arms by colour,
marker and line together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import matplotlib
from gspo.analysis.load import GRPO, GRPO_R2, GSPO, GSPO_TOKEN

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#767676"
DASHES, CHAIN, DOTS = (0, (5, 1.6)), (0, (6, 1.5, 1.2, 1.5)), (0, (1.2, 1.4))
REPLAYED = (0, (6, 1.2, 1.2, 1.2, 1.2, 1.2))


@dataclass(frozen=True)
class Look:
    """How one arm is drawn. `line` is a matplotlib line style."""

    colour: str
    marker: str
    line: str | tuple = "-"

    def plot(self) -> dict[str, object]:
        """Return the arguments of `Axes.plot` for this look."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "ls": self.line,
            "mec": "white",
            "mew": 0.5,
        }


LOOKS = {
    GSPO: Look(BLUE, "o", "-"),
    GRPO_R2: Look(ORANGE, "s", DASHES),
    GRPO: Look(BLACK, "^", CHAIN),
    GSPO_TOKEN: Look(GREEN, "D", DOTS),
    "LUSPO": Look(SKY, "v", "-"),
    "GMPO": Look(VERMILION, "P", "-"),
    "Dr.GRPO": Look(PURPLE, "X", "-"),
    "DAPO": Look(SKY, "<", DASHES),
    "PPO": Look(VERMILION, ">", DASHES),
    "REINFORCE": Look(PURPLE, "*", DASHES),
    "CISPO": Look(SKY, "h", CHAIN),
    "MiniRL": Look(VERMILION, "p", CHAIN),
    "DPPO": Look(PURPLE, "d", CHAIN),
    "SAPO": Look(SKY, "8", DOTS),
    "GSPO, all tokens": Look(VERMILION, "H", DOTS),
}
OTHER = Look(GREY, ".", "-")  # an objective that is not listed above, such as a user's own
VARIANTS = ("-", DASHES, CHAIN, DOTS)


def look(arm: str) -> Look:
    """Return an arm's look. Appended settings ("GRPO [optim.lr=0.001]") do not change it; a replay
    that has no look of its own gets the colour and marker of its objective and the line style of
    replays."""
    name = arm.split(" [")[0]
    if name in LOOKS:
        return LOOKS[name]
    base, replay, _ = name.partition(" + Routing Replay")
    base_look = LOOKS.get(base, OTHER)
    return replace(base_look, line=REPLAYED) if replay else base_look


def looks(arms: list[str]) -> dict[str, Look]:
    """Return a look for each arm, all different. Arms that would share one (the same objective at
    several settings) get shades of its colour, from dark to pale, and different kinds of line in
    turn; replays keep the line of replays."""
    sharing, seen, found = Counter(look(arm) for arm in arms), Counter(), {}
    for arm in arms:
        own = look(arm)
        if sharing[own] > 1:
            place = seen[own]
            seen[own] += 1
            shade = tint(own.colour, 1 - 0.7 * place / (sharing[own] - 1))
            line = REPLAYED if own.line == REPLAYED else VARIANTS[place % len(VARIANTS)]
            found[arm] = replace(own, colour=shade, line=line)
        else:
            found[arm] = own
    return found


def tint(colour: str, strength: float) -> str:
    """Return a colour mixed with white, where strength 1 is the colour itself. It is opaque, so
    that overlaps do not darken."""
    return matplotlib.colors.to_hex(
        [1 - strength * (1 - c) for c in matplotlib.colors.to_rgb(colour)]
    )

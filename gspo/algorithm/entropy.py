"""The coefficient of the entropy bonus, and the rule that holds the entropy at a target.

For example, with a target of 0.2 nats, a coefficient of 0 and a step of 0.005: while the policy's
entropy is above 0.2 there is no bonus. After each update with an entropy of 0.2 or less the
coefficient grows by 0.005, and the next update has a bonus, until the entropy is above 0.2 again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class EntropyCoefficient:
    """Holds the coefficient alpha of the entropy bonus, fixed or adapted (Skywork-OR1,
    arXiv:2505.22312, section 4).

    With e_k the entropy of update k, the mean over the response tokens of its whole mini-batch:

        alpha_k   = c_k if e_(k-1) <= target else 0
        c_(k+1)   = c_k + delta if e_k <= target else c_k - delta,   kept within [least, most]

    The bonus of an update goes by the entropy of the update before it, as in TRL, because its own
    is known only after the pass. The first update has no update before it: its alpha is c_1.
    `value` and `measured` are the whole state.
    """

    value: float  # c_k
    target: float | None = None  # nats per token; None: alpha is `value`, and stays
    delta: float = 0.005
    least: float = 0.0
    most: float = 1.0
    measured: float | None = None  # e_(k-1), nats per token

    @property
    def acting(self) -> float:
        """The coefficient alpha_k of the next update."""
        healthy = (
            self.target is not None and self.measured is not None and self.measured > self.target
        )
        return 0.0 if healthy else self.value

    def update(self, entropy: float) -> None:
        """Adapt the coefficient after an update whose mean entropy was `entropy` nats per token.
        One that is no number changes nothing: its update was skipped too."""
        if self.target is None or not math.isfinite(entropy):
            return
        change = self.delta if entropy <= self.target else -self.delta
        self.value = min(max(self.value + change, self.least), self.most)
        self.measured = entropy

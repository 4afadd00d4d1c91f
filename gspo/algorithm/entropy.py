"""The coefficient of the entropy bonus, and the rule that keeps the entropy at a target.

For example, the target is 0.2 nats, the first coefficient is 0 and delta is 0.005. While the
policy's entropy is above 0.2, there is no bonus. After each update with an entropy of 0.2 or less,
the coefficient grows by 0.005. The updates then have a bonus until the entropy is above 0.2 again.
"""

import math
from dataclasses import dataclass


@dataclass
class EntropyCoefficient:
    """The coefficient alpha of the entropy bonus, fixed or adaptive (Skywork-OR1).

    See arXiv:2505.22312, section 4, for the rule. e_k is the entropy of update k. It is a mean
    over the response tokens of the whole mini-batch.

        alpha_k   = c_k if e_(k-1) <= target else 0
        c_(k+1)   = c_k + delta if e_k <= target else c_k - delta,   kept within [least, most]

    The bonus depends on the entropy of the previous update, as in TRL. The entropy of the current
    update is known only after the pass. The first update has no previous update, so its alpha is
    c_1. The whole state is `value` and `measured`.
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
        if self.target is None or self.measured is None:
            return self.value
        return 0.0 if self.measured > self.target else self.value

    def update(self, entropy: float) -> None:
        """Adapt the coefficient after an update with a mean entropy of `entropy` nats per token.

        An entropy that is not finite changes nothing, because its update was skipped too.
        """
        if self.target is None or not math.isfinite(entropy):
            return
        change = self.delta if entropy <= self.target else -self.delta
        self.value = min(max(self.value + change, self.least), self.most)
        self.measured = entropy

"""What our own code gives for an entry, ready to be compared."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Values:
    """Our values under one name, where they are compared, and how much further apart they may be
    there (absolutely).
    """

    value: Tensor
    where: Tensor | None = None  # a mask, or None for everywhere
    slack: Tensor | None = None


@dataclass
class Ours:
    """Our side of one entry."""

    section: str  # the page's section
    row: str  # the row of the section's table
    setting: str  # the translation in our names
    loss: float | None = None
    grad_BT: Tensor | None = None
    outputs: dict[str, Values] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    epsilon: bool = False  # whether the peer's denominators hold 1e-8, which we leave out
    epsilon_loss: float | None = None  # our loss with that 1e-8 put back
    epsilon_grad_BT: Tensor | None = None
    exponent: float = 0.0  # the largest |log-ratio| that was exponentiated, in nats
    sequence_exponent: bool = False  # whether the exponent is a mean over a response
    stated: str = ""  # the reason why the values may differ, if they do
    notes: list[str] = field(default_factory=list)

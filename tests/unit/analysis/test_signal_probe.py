"""experiments/signal_probe.py: the gradient's signal-to-noise by hand."""

import math

import torch

from experiments import signal_probe


def test_signal_to_noise_by_hand():
    """Gradients (3, 1) and (1, -1): |G|^2 = 3 - 1 = 2, mean |g|^2 = (10 + 2) / 2 = 6."""
    assert signal_probe.signal_to_noise(torch.tensor([[3.0, 1.0], [1.0, -1.0]])) == 0.5
    opposite = signal_probe.signal_to_noise(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert opposite == -0.5, "|G|^2 = -1, tr(S) = 2: without bias, so it may be negative"
    assert math.isnan(signal_probe.signal_to_noise(torch.zeros(4, 3)))

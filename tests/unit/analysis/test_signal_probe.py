"""experiments/signal_probe.py: mutual information and the gradient's signal-to-noise by hand."""

import math

import numpy as np
import pytest
import torch

from experiments import signal_probe


def test_mutual_information_is_zero_if_prompts_make_no_difference():
    logp_RP = np.array([[-1.0, -1.0], [-3.0, -3.0]])
    assert signal_probe.mutual_information(logp_RP, np.array([0, 1])) == pytest.approx(0.0)


def test_mutual_information_by_hand():
    """One response of probability .5 under its own prompt and .1 under the other: log(.5 / .3)."""
    logp_RP = np.log([[0.5, 0.1]])
    value = signal_probe.mutual_information(logp_RP, np.array([0]))
    assert value == pytest.approx(math.log(5 / 3))
    certain_RP = np.array([[0.0, -99.0], [-99.0, 0.0]])
    assert signal_probe.mutual_information(certain_RP, np.array([0, 1])) == pytest.approx(
        math.log(2)
    )
    assert (
        signal_probe.retrieval_accuracy(np.log([[0.5, 0.1], [0.3, 0.2]]), np.array([0, 1])) == 0.5
    )


def test_signal_to_noise_by_hand():
    """Gradients (3, 1) and (1, -1): |G|^2 = 3 - 1 = 2, mean |g|^2 = (10 + 2) / 2 = 6."""
    assert signal_probe.signal_to_noise(torch.tensor([[3.0, 1.0], [1.0, -1.0]])) == 0.5
    opposite = signal_probe.signal_to_noise(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert opposite == -0.5, "|G|^2 = -1, tr(S) = 2: without bias, so it may be negative"
    assert math.isnan(signal_probe.signal_to_noise(torch.zeros(4, 3)))

"""policy.deterministic asks PyTorch for sums in a fixed order."""

import os

import pytest
import torch

from gspo.run.policies import use_deterministic_algorithms


@pytest.fixture
def as_before(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)


def test_it_is_asked_for_in_the_form_that_a_gpu_needs(as_before):
    assert not torch.are_deterministic_algorithms_enabled()
    use_deterministic_algorithms()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"


def test_a_users_own_workspace_stays(as_before, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    use_deterministic_algorithms()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"

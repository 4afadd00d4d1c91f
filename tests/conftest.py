"""What every test runs with."""

import os

import pytest
import torch

from builders import small_policy
from gspo.model.loading import TinyDense
from gspo.model.policy import Policy

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(autouse=True, scope="session")
def state_of_the_user(tmp_path_factory):
    """The key that run directories are signed with is not the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def moe() -> Policy:
    return small_policy()


@pytest.fixture
def dense() -> Policy:
    return small_policy(TinyDense(hidden=32, layers=3, heads=2, width=48))

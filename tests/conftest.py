"""What every test runs with. PyTorch is imported by the fixtures: the process that hands out the
tests needs none.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gspo.model.policy import Policy


def pytest_collection_finish():
    gc.freeze()  # the garbage collector need not look again and again at what the imports have made
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0" and (forked := sys.modules.get("forked")):
        # most tests that need it wait for it if it starts when it is first asked for
        forked.server()


@pytest.fixture(autouse=True, scope="session")
def state_of_the_user(tmp_path_factory):
    """The key that run directories are signed with is not the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def threads():
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture
def moe() -> Policy:
    from builders import small_policy

    return small_policy()


@pytest.fixture
def dense() -> Policy:
    from builders import small_policy
    from gspo.model.settings import TinyDense

    return small_policy(TinyDense(hidden=32, layers=3, heads=2, width=48))

"""The learning rate of a step in a run that was rolled back."""

import json

import pytest

from composing import settings as composed
from gspo.run.rollback import Rollbacks


def test_a_step_has_the_rate_of_the_last_rollback_to_a_step_before_it(tmp_path):
    settings = composed("optim.lr=0.8", "monitor.action=rollback", "monitor.rollback_lr=0.5")
    targets = [(20, 10), (30, 5), (50, 40)]
    entries = [{"from": start, "to": target, "moved": True} for start, target in targets]
    (tmp_path / "rollbacks.json").write_text(json.dumps(entries))
    rollbacks = Rollbacks(tmp_path)
    rates = [rollbacks.optim_of(step, settings).lr for step in (5, 6, 11, 40, 41)]
    # steps 6 to 40 were made again by the second rollback
    assert rates == pytest.approx([0.8, 0.2, 0.2, 0.2, 0.1])
    assert rollbacks.lowered(settings).optim.lr == pytest.approx(0.1)
    assert Rollbacks(tmp_path / "none").optim_of(3, settings).lr == 0.8

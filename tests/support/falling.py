"""Runs `gspo train` in this process with rewards that are forced: `falling.py STEP LR
TRAIN...`.

Every second response of a group is right, so that the mean reward is one half, until step STEP;
from there on every response is wrong, as long as the learning rate is LR. A run that is rolled back
to a lower rate earns again. So a collapse and a recovery come at the same steps on every machine.
"""

import runpy
import sys

from gspo.data.samples import Score
from gspo.train.trainer import Trainer


def force_rewards(first_wrong_step: int, lr: float) -> None:
    """Give the responses of every step their forced scores before the step sees them."""
    train_step = Trainer.train_step

    def with_forced_rewards(trainer, step, rollout):
        wrong = step >= first_wrong_step and trainer.optim.lr == lr
        for group in rollout.groups:
            for place, response in enumerate(group):
                right = place % 2 == 0 and not wrong
                response.score = Score(float(right), "correct" if right else "wrong")
        return train_step(trainer, step, rollout)

    Trainer.train_step = with_forced_rewards


if __name__ == "__main__":
    force_rewards(int(sys.argv[1]), float(sys.argv[2]))
    sys.argv = ["gspo", "train", *sys.argv[3:]]
    runpy.run_module("gspo", run_name="__main__")

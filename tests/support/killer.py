"""Runs `gspo train` in this process and ends it by SIGKILL at a chosen moment: `killer.py
WHERE STEP TRAIN...`.

`killer.py WHERE STEP --falling FROM LR TRAIN...` forces the rewards too, as
tests/support/falling.py does.

WHERE is `phase.moment` of MOMENTS; STEP is the training step from which on it counts. The process
writes `killed_in` into the current folder right before it dies, so that a test knows that the
moment came.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import torch

from falling import force_rewards
from gspo.model.forward import network
from gspo.rollout.engines import decode
from gspo.run.rollback import Rollbacks
from gspo.tracking import tracker
from gspo.train import checkpoint, checkpoint_files, sharded_checkpoint, trainer
from gspo.train.old_policy import OldPolicyPass
from gspo.train.trainer import Trainer

now = {"step": 0, "calls": 0}


def die() -> None:
    Path("killed_in").write_text(f"{WHERE} step {now['step']}")
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(
    owner: object, name: str, before=None, after=None, calls: int = 1, when=lambda: True
) -> None:
    """Die at the `calls`-th call of a function from the chosen step on, before or after it, of
    those calls at which `when()` is true."""
    plain = getattr(owner, name)

    def wrapped(*args, **options):
        counts = now["step"] >= STEP and when()
        now["calls"] += counts
        due = now["calls"] == calls and counts
        if due and before:
            before(*args)
            die()
        result = plain(*args, **options)
        if due and after:
            die()
        return result

    setattr(owner, name, wrapped)


def half_a_save(content, file) -> None:
    save(content, file)
    file.truncate(file.tell() // 2)


def half_a_text(path: Path, text: str) -> None:
    path.with_name(f".{'0' * 16}.unfinished").write_text(text[: len(text) // 2])


def half_a_row(log, step, metrics, responses) -> None:
    log.rows.write(f'{{"step": {step}, "reward/me')
    log.rows.flush()


def a_row_and_no_more(log, step, metrics, responses) -> None:
    log.wandb = None
    log_row(log, step, metrics, responses)


def half_the_responses(path: Path, responses) -> None:
    path.write_text('{"task": "math", "fam')


def anything(*_) -> None:
    pass


save, log_row = torch.save, tracker.Tracker.log
MOMENTS = {
    "rollout.first_token": lambda: wrap(decode.NetworkDecoder, "prefill", after=True),
    "rollout.some_token": lambda: wrap(decode.NetworkDecoder, "step", before=anything, calls=5),
    "rollout.rows_dropped": lambda: wrap(decode.NetworkDecoder, "keep", after=True),
    "rollout.scored": lambda: wrap(Trainer, "train_step", before=anything),
    "update.old_policy": lambda: wrap(OldPolicyPass, "add", after=True),
    "update.in_a_layer": lambda: wrap(
        network, "run_experts", after=True, when=torch.is_grad_enabled
    ),
    "update.backward": lambda: wrap(torch.Tensor, "backward", after=True),
    "update.gradient_clipped": lambda: wrap(trainer, "clip_grad_norm", after=True, calls=2),
    "update.first_minibatch_done": lambda: wrap(Trainer, "update", after=True),
    "update.last_minibatch_done": lambda: wrap(Trainer, "routing_after_step", before=anything),
    "checkpoint.before_weights": lambda: wrap(checkpoint, "save", before=anything),
    "checkpoint.weights_written": lambda: wrap(checkpoint, "save", after=True),
    "checkpoint.half_an_optimizer": lambda: wrap(torch, "save", before=half_a_save),
    "checkpoint.some_files": lambda: wrap(sharded_checkpoint, "write_files", after=True),
    "checkpoint.not_renamed": lambda: wrap(checkpoint_files, "checksum", before=anything, calls=4),
    "checkpoint.renamed": lambda: wrap(checkpoint, "replace_text", before=half_a_text),
    "checkpoint.pointer_moved": lambda: wrap(checkpoint, "replace_text", after=True),
    "checkpoint.old_one_going": lambda: wrap(checkpoint.shutil, "rmtree", after=True, calls=2),
    "metrics.before": lambda: wrap(tracker.Tracker, "log", before=anything),
    "metrics.half_a_row": lambda: wrap(tracker.Tracker, "log", before=half_a_row),
    "metrics.not_in_wandb": lambda: wrap(tracker.Tracker, "log", before=a_row_and_no_more),
    "metrics.half_the_responses": lambda: wrap(
        tracker, "write_rollouts", before=half_the_responses
    ),
    "rollback.decided": lambda: wrap(Rollbacks, "move", before=anything),
    "metrics.after": lambda: wrap(tracker.Tracker, "log", after=True),
}

if __name__ == "__main__":
    WHERE, STEP = sys.argv[1], int(sys.argv[2])
    train_arguments = sys.argv[3:]
    if train_arguments[0] == "--falling":
        force_rewards(int(train_arguments[1]), float(train_arguments[2]))
        train_arguments = train_arguments[3:]
    sys.argv = ["gspo", "train", *train_arguments]

    def next_of(kind):
        plain = kind.next

        def noted(self, step):
            now["step"] = step
            return plain(self, step)

        kind.next = noted

    from gspo.rollout.sources.off_policy import StaleSource
    from gspo.rollout.sources.on_policy import OnPolicySource

    next_of(OnPolicySource)
    next_of(StaleSource)
    MOMENTS[WHERE]()
    runpy.run_module("gspo", run_name="__main__")

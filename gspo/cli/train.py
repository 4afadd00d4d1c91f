"""Trains a policy: Hydra composes conf/, the settings become dataclasses, the trainer runs.

`--help` says more.
"""

import math
import os
import signal
import sys
from importlib import import_module

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from gspo.cli.option_files import MULTIRUN, composed, register_options
from gspo.config.load import WRITTEN, chosen_settings
from gspo.config.own_file import check_own_file
from gspo.run.devices import keep_devices, take_share
from gspo.run.directory import RunDirectory
from gspo.run.entry_point import Stopped, command_line, one_line, stop_signal
from gspo.run.launched import as_rank, is_follower, join_scheduler, process_count, silence
from gspo.run.sweep_state import forecast
from gspo.run.sweeps import taken_by_another_job
from gspo.tracking.wandb_choice import own_arguments, under_agent

SWEEP = (
    "a sweep, with several processes: they share one run; start each run by a torchrun of its own"
)
CONTINUES = "; the same command continues each run from its last checkpoint"


def main() -> None:
    """Make the run, or the sweep of runs, that the command line describes."""
    # The workers of a sweep import installed modules, never files of the current folder.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    stop_signal().loud = not is_follower()
    if is_follower():
        silence()
    if under_agent():
        sys.argv[1:] = own_arguments(sys.argv[1:], WRITTEN)
    keep_devices()
    stop_signal().ends_at_once = not set(MULTIRUN) & set(sys.argv)
    # in a sweep with workers, this process waits for them to end their steps
    stop_signal().install(signal.SIGINT)
    register_options()
    command = composed("train", job) if process_count() == 1 else one_run
    as_rank(lambda: command_line(command, CONTINUES))


def one_run() -> None:
    """Make the run that several processes share."""
    if set(MULTIRUN) & set(sys.argv):
        raise ValueError(SWEEP)
    composed("train", job)()


@one_line
def job(config: DictConfig) -> float:
    """Make a run, alone or as a job of a sweep, and return its score, or NaN if it has none."""
    hydra = HydraConfig.get()
    scheduled = join_scheduler()
    if hydra.mode == RunMode.RUN:  # a sweep has checked it once for all jobs
        check_own_file(hydra)
    settings = chosen_settings(config, list(hydra.overrides.task), hydra.runtime.choices)
    if settings.dry_run:
        folder = RunDirectory.for_run(settings, in_sweep=False).path
        print(forecast([{"overrides": [], "folder": str(folder), "steps": settings.steps}]))
        return math.nan
    other_job = taken_by_another_job(settings)
    if other_job:
        print(f"job {hydra.job.num} is {other_job}: nothing is left to do")
        return math.nan
    if process_count() > 1 and hydra.mode == RunMode.MULTIRUN and not scheduled:
        raise ValueError(SWEEP)
    # These imports take seconds. Help, refusals and dry runs do without them.
    import_module("gspo.tracking.preload")
    from gspo.run.lifecycle import run
    from gspo.run.processes import join, leave_group

    stop = stop_signal()
    stop.loud = stop.loud and not is_follower()
    stop.install(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    stop.install_scheduler()
    if not stop.loud:
        stop.end_with_parent()
    take_share(hydra, settings.threads)
    score = math.nan
    stop.ends_at_once = False
    with stop.busy:
        try:
            if not stop.requested():  # a sweep that was asked to stop starts no further run
                peers = join(settings)
                with peers.watched():
                    score = run(settings, hydra.mode == RunMode.RUN and not under_agent(), peers)
        except Stopped:
            print(
                f"{settings.label()}: stopped before its first step; "
                "the same command starts it again"
            )
        finally:
            if scheduled:
                leave_group()
    stop.requeue()
    return score

"""Deletes records, and their pages, of steps that are neither due nor among the last steps."""

from pathlib import Path

from gspo.data.step_record_files import record_file, recorded_steps
from gspo.tracking.monitor import Monitor
from gspo.tracking.settings import TrackingSettings
from gspo.tracking.step_page import page_file


def delete_old_records(run: Path, step: int, settings: TrackingSettings, monitor: Monitor) -> None:
    """Delete the records that a run with tracking.record_last does not keep.

    It keeps the last steps up to `step`, and the last steps up to the beginning of each fall of the
    reward: of the falls that the monitor has reported, and of a present fall, which it reports
    after 20 steps. It also keeps every step that tracking.record_every asks for."""
    ends = [step, *monitor.falls, monitor.fall_began]
    for recorded in recorded_steps(run):
        is_due = settings.record_every and recorded % settings.record_every == 0
        is_among_last = any(end - settings.record_last < recorded <= end for end in ends)
        if not is_due and not is_among_last:
            record_file(run, recorded).unlink(missing_ok=True)
            page_file(run, recorded).unlink(missing_ok=True)

"""The report of a run at work: rewritten as rows arrive, in a bounded share of the run's time."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_megatron.observe.report.page import REPORT_FILE, write_report
from verl_megatron.observe.report.record import State, record_of, stalled_ranks

LEAST_INTERVAL_S = 20.0  # between two versions of the file
SHARE = 0.002  # of the run's time that writing it may take


class ReportWriter:
    """Writes `report.html` of a run whose rows it is given.

    The next version follows when the last one's time is `SHARE` of the time since, and after
    `LEAST_INTERVAL_S` at least. A missing plotly is said once; the run goes on without a report.
    """

    def __init__(self, folder: Path, rows: list[dict[str, Any]], *, total_steps: int):
        self._folder, self._rows, self._total_steps = folder, rows, total_steps
        self._due_at = 0.0  # the first row is worth a page
        self._has_failed = False

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add a row of metrics and write the report if it is due."""
        self._rows.append({"step": step, **metrics})
        if time.monotonic() >= self._due_at:
            self.write(at_work=True)

    def write(self, *, at_work: bool) -> None:
        """Write the report.

        Args:
            at_work: False in the last version.
        """
        if self._has_failed or not self._rows:
            return
        begin = time.monotonic()
        ranks, _ = stalled_ranks(self._folder)
        state = State(at_work=at_work, stalled_ranks=ranks)
        run = record_of(self._folder, self._rows, state=state, total_steps=self._total_steps)
        try:
            write_report(self._folder / REPORT_FILE, [run])
        except ValueError as error:
            self._has_failed = True
            print(f"warning: no report is written: {error}", flush=True)
        now = time.monotonic()
        self._due_at = now + max((now - begin) / SHARE, LEAST_INTERVAL_S)

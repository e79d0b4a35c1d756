"""What a run's folder holds, as the report needs it: metrics by name, samples, timeline and state."""

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.runtime import run_lock
from verl_megatron.observe.report.samples import Group, read_groups
from verl_megatron.observe.report.starts import Start, read_starts, settings_of
from verl_megatron.observe.timeline import TRACE_FILE, Timeline
from verl_megatron.observe.tracking import METRICS_FILE, complete_lines, parsed_rows

# Prefixes of metrics and the kind of run that has them; the first that occurs names the run.
KINDS = {
    "sft/": "supervised fine-tuning",
    "dpo/": "direct preference optimization",
    "reward_model/": "reward model",
    "rollout/": "reinforcement learning",
    "reward/": "reinforcement learning",
    "policy/": "reinforcement learning",
}


@dataclass(frozen=True, slots=True)
class Series:
    """A metric: increasing iterations, and its value at each; None where it was not finite."""

    steps: list[int]
    values: list[float | None]

    def finite(self) -> tuple[list[int], list[float]]:
        """Return the iterations with a finite value, and these values."""
        points = [(step, value) for step, value in zip(self.steps, self.values) if value is not None]
        return [step for step, _ in points], [value for _, value in points]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is known of a run besides its metrics, at the time of reading."""

    at_work: bool = False  # a process holds the folder
    was_killed: bool = False  # a process held it, and does not renew its lock
    silent_s: float = 0.0  # since the last row of metrics
    stalled_ranks: tuple[int, ...] = ()  # whose stacks the watchdog wrote
    stalled_last: bool = False  # these stacks are newer than the last row of metrics


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, as its report shows it."""

    name: str
    series: dict[str, Series]
    state: State = State()
    timeline: Timeline | None = None
    starts: list[Start] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)  # samples by prompt
    notes: list[str] = field(default_factory=list)  # what could not be read
    total_steps: int | None = None
    folder: Path | None = None
    settings: dict[str, str] = field(default_factory=dict)  # as JSON, by section.name

    @property
    def max_staleness(self) -> int | None:
        """The setting `async.max_staleness`; None if it is not known."""
        text = self.settings.get("async.max_staleness", "")
        return int(text) if text.isdecimal() else None

    @property
    def kind(self) -> str:
        """Name of the kind of run, empty if no metric tells it."""
        prefixes = [key.partition("/")[0] + "/" for key in self.series]
        return next((kind for prefix, kind in KINDS.items() if prefix in prefixes), "")

    @property
    def last_step(self) -> int:
        """The last iteration with a metric; 0 without any."""
        return max((series.steps[-1] for series in self.series.values()), default=0)

    def finite(self, key: str) -> tuple[list[int], list[float]]:
        """Return iterations and values of a metric where it is finite; empty if it was not measured."""
        return self.series[key].finite() if key in self.series else ([], [])


def series_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Return the metrics of rows by name, in the order of their first occurrence.

    A step may have several rows. Where two have the same metric, as after a resumption, the later one counts.
    """
    points: dict[str, dict[int, float | None]] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step":
                is_finite = value is not None and math.isfinite(value)
                points.setdefault(key, {})[row["step"]] = value if is_finite else None
    return {key: _series(by_step) for key, by_step in points.items()}


def _series(by_step: Mapping[int, float | None]) -> Series:
    steps = sorted(by_step)
    return Series(steps, [by_step[step] for step in steps])


def read_run(folder: str | Path) -> RunRecord:
    """Read a run's output folder; a last line that is cut off and damaged files are left out and noted.

    Raises:
        ValueError: the folder has no metrics of a run, or they cannot be read.
    """
    folder = Path(folder)
    path = folder / METRICS_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} is no folder of a run: it has no {METRICS_FILE}; "
            "name a run.output_dir whose run.track_metrics has jsonl"
        )
    try:
        rows, others = parsed_rows(complete_lines(path))
        silent_s = time.time() - path.stat().st_mtime
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); make it readable") from None
    notes = [f"{others} lines of {METRICS_FILE} are no rows of metrics and are left out"] * bool(others)
    return record_of(folder, rows, state=_state(folder, silent_s), notes=notes)


def record_of(
    folder: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    state: State,
    total_steps: int | None = None,
    notes: Iterable[str] = (),
) -> RunRecord:
    """Return the record of a run with these rows of metrics, and what else its folder holds."""
    series, said = series_of(rows), list(notes)
    last_step = max((curve.steps[-1] for curve in series.values()), default=0)
    starts = read_starts(folder, said)
    return RunRecord(
        folder=folder,
        name=folder.resolve().name or str(folder),
        series=series,
        state=state,
        timeline=_timeline(folder, said),
        groups=read_groups(folder, last_step=last_step, notes=said),
        notes=said,
        starts=starts,
        settings=settings_of(folder),
        total_steps=total_steps or (starts[-1].iterations if starts else None),
    )


def _timeline(folder: Path, notes: list[str]) -> Timeline | None:
    path = folder / TRACE_FILE
    if not path.is_file():
        return None
    try:
        return Timeline.read(path)
    except ValueError:
        notes.append(f"{TRACE_FILE} is no timeline and is left out")
        return None


def _state(folder: Path, silent_s: float) -> State:
    lock = folder / run_lock.NAME
    try:
        lock_age_s = time.time() - lock.stat().st_mtime if lock.is_file() else None
    except OSError:  # the run has just ended
        lock_age_s = None
    ranks, stacks_age_s = stalled_ranks(folder)
    return State(
        at_work=lock_age_s is not None and lock_age_s <= run_lock.SILENT_S,
        was_killed=lock_age_s is not None and lock_age_s > run_lock.SILENT_S,
        silent_s=silent_s,
        stalled_ranks=ranks,
        stalled_last=bool(ranks) and stacks_age_s < silent_s,
    )


def stalled_ranks(folder: Path) -> tuple[tuple[int, ...], float]:
    """Return the ranks whose stacks the watchdog wrote, and the age of the newest of them in seconds."""
    found = {}
    for path in (folder / "stacks").glob("rank_*.txt"):
        number = re.fullmatch(r"rank_(\d{1,9})", path.stem)
        if number and path.is_file() and path.stat().st_size:
            found[int(number[1])] = time.time() - path.stat().st_mtime
    return tuple(sorted(found)), min(found.values(), default=0.0)

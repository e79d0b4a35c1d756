"""What benchmarks write: lines of a table, and a CSV whose columns also describe the run."""

import csv
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRow:
    """Seconds of a line of the table, over the repetitions."""

    name: str
    median_s: float
    min_s: float
    max_s: float


def times_of(seconds: Sequence[float]) -> dict[str, float]:
    """Return the fields of a `TimedRow` from the seconds of each repetition."""
    return dict(median_s=median(seconds), min_s=min(seconds), max_s=max(seconds))


def versions() -> dict[str, str]:
    """Return the last columns that describe a run."""
    return {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def write_csv(path: Path, run: Mapping[str, object], rows: Sequence[Any]) -> None:
    """Write one line per row (a dataclass); the columns `run`, which describe the measurement, come first."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*run, *asdict(rows[0])])
        writer.writeheader()
        writer.writerows({**run, **asdict(row)} for row in rows)


def status_bytes(name: str) -> int:
    """Return RssAnon, resident anonymous memory, or VmHWM, the peak resident set."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])

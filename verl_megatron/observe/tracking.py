"""Metric sinks: console, files, TensorBoard, and services whose packages are imported only on request.

Steps count finished iterations: 0 is the state before the first.
"""

import contextlib
import csv
import errno
import importlib.util
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, Self

from verl_megatron.observe.destination import Destination, replace_text
from verl_megatron.observe.services import MLflow, Wandb

METRICS_FILE = "metrics.jsonl"
MOST_BYTES = 2**32  # of a file that a run has written about itself
# Parts of a console line, and codes of a terminal's colours.
COLOURS = (
    (re.compile(r"^step \d+/\d+"), "1"),
    (re.compile(r"\b(?:reward|validation accuracy|loss) -?[\d.]+"), "32"),
    (re.compile(r"\bfailed rewards [\d.]+%|\b[a-z ]+ (?:nan|-?inf)\b"), "31"),
)


def complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that may be absent; a last line cut off by a killed run is dropped.

    Raises:
        OSError: the file cannot be read, or is larger than any that a run writes.
    """
    return whole(path).split(b"\n")[:-1] if path.is_file() else []


def whole(path: Path) -> bytes:
    """Return the content of a file; OSError if it cannot be read or has more than MOST_BYTES."""
    if path.stat().st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return path.read_bytes()


def parsed_rows(lines: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that are rows of metrics, and the number of other lines."""
    rows = [row for line in lines if (row := _parsed_row(line)) is not None]
    return rows, len(lines) - len(rows)


def _parsed_row(line: bytes) -> dict[str, float | None] | None:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return None
    return (
        row
        if all(value is None or type(value) is float or _is_small(value) for value in row.values())
        else None
    )


def _is_small(value: object) -> bool:
    return type(value) is int and abs(value) <= 2**53  # larger integers may have no exact float


def read_metrics(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl` in order, each with "step"; None replaces non-finite numbers.

    Raises:
        ValueError: the file cannot be read or has other lines.
    """
    path = Path(output_dir) / METRICS_FILE
    try:
        rows, others = parsed_rows(complete_lines(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); make it readable") from None
    if others:
        raise ValueError(f"{path} has {others} lines that are no rows of metrics; take them out")
    return rows


def put_aside(path: Path, others: int) -> None:
    """Rename a file with invalid lines and print a warning; the rows go into a new file."""
    names = (path.with_name(f"{path.name}.damaged{number}") for number in ("", *range(2, 10_000)))
    aside = next(name for name in names if not os.path.lexists(name))
    os.replace(path, aside)
    print(f"warning: {path} had {others} lines that are no rows of metrics; it is now {aside}", flush=True)


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Add one row."""
        ...

    def close(self) -> None:
        """Flush and release resources."""
        ...


def console_line(step: int, total_steps: int, metrics: dict[str, float]) -> str:
    """Format one iteration as one line, without metrics that were not measured or failed rewards of 0."""
    parts = [
        f"{label} {metrics[key]:{spec}}{unit}"
        for key, label, spec, unit in (
            ("sft/loss", "loss", ".4f", ""),
            ("dpo/loss", "loss", ".4f", ""),
            ("reward_model/loss", "loss", ".4f", ""),
            ("validation/loss", "validation loss", ".4f", ""),
            ("validation/accuracy", "validation accuracy", ".3f", ""),
            ("reward/mean", "reward", ".3f", ""),
            ("reward/failed", "failed rewards", ".1%", ""),
            ("kl/ref", "kl", ".4f", ""),
            ("policy/entropy", "entropy", ".3f", ""),
            ("rollout/response_tokens_mean", "length", ".1f", ""),
            ("rollout/throughput_tokens_per_sec", "rollout at", ",.0f", " tokens/s"),
        )
        if key in metrics and (metrics[key] or key != "reward/failed")
    ]
    seconds = {
        key[len("time/") : -len("_s")]: value for key, value in metrics.items() if key.startswith("time/")
    }
    if seconds:
        phases = " ".join(f"{phase} {value:.1f}" for phase, value in seconds.items())
        parts.append(f"{sum(seconds.values()):.1f} s ({phases})")
    return f"step {step}/{total_steps}: " + ", ".join(parts)


def wants_colour(stream: Any) -> bool:
    """Whether a stream is a terminal that shows colours; NO_COLOR turns them off (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(line: str) -> str:
    """Return a console line with the step in bold, scores in green, and failures and NaN in red."""
    for pattern, code in COLOURS:
        line = pattern.sub(lambda found, code=code: f"\x1b[{code}m{found[0]}\x1b[0m", line)
    return line


class Console:
    """A line per row, with the remaining time; in colours on a terminal.

    On a terminal a progress bar below shows that time; elsewhere it ends the line.
    """

    def __init__(self, to: Destination):
        from tqdm import tqdm

        self._total, self._done, self._first = (
            to.total_steps,
            max(to.first_step - 1, 0),
            max(to.first_step - 1, 0),
        )
        self._started = time.monotonic()
        self._bar = tqdm(
            total=self._total,
            initial=self._done,
            unit="iteration",
            dynamic_ncols=True,
            disable=None,  # only on a terminal
        )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        line = console_line(step, self._total, metrics)
        self._bar.update(max(step - self._done, 0))
        self._done = max(step, self._done)
        if self._bar.disable and self._first < self._done < self._total:
            step_s = (time.monotonic() - self._started) / (self._done - self._first)
            line += f", {step_s * (self._total - self._done):.0f} s left"
        self._bar.write(coloured(line) if wants_colour(sys.stdout) else line)

    def close(self) -> None:
        self._bar.close()


class JsonLines:
    """`metrics.jsonl`: one object per row; numbers that are not finite become null, as JSON requires."""

    def __init__(self, to: Destination):
        self._path = to.output_dir / METRICS_FILE
        rows, others = parsed_rows(complete_lines(self._path))
        if others:
            put_aside(self._path, others)
        replace_text(
            self._path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] < to.first_step)
        )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        row = {"step": step} | {
            key: value if math.isfinite(value) else None for key, value in metrics.items()
        }
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Do nothing: every row is on disk already."""


def _cells(line: bytes) -> list[str]:
    """Split a line of comma-separated values; empty if it is not one."""
    try:
        return next(csv.reader([line.decode()]), [])
    except (ValueError, csv.Error):
        return []


class Csv:
    """`metrics.csv`: a column for every key seen so far; a new key rewrites the file with a wider header."""

    def __init__(self, to: Destination):
        self._path = to.output_dir / "metrics.csv"
        self._columns, rows, others = self._read()
        if others:
            put_aside(self._path, others)
        self._rewrite([row for row in rows if int(row["step"]) < to.first_step])

    def _read(self) -> tuple[list[str], list[dict[str, str]], int]:
        """Return the columns, the rows, and the number of invalid lines."""
        header, *lines = [_cells(line) for line in complete_lines(self._path)] or [["step"]]
        if header[:1] != ["step"] or len(set(header)) < len(header):
            return ["step"], [], 1 + len(lines)
        rows = [
            dict(zip(header, cells))
            for cells in lines
            if len(cells) == len(header) and re.fullmatch(r"[0-9]{1,15}", cells[0])
        ]
        return header, rows, len(lines) - len(rows)

    def _rewrite(self, rows: list[dict]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_text(self._path, text.getvalue())

    def write(self, step: int, metrics: dict[str, float]) -> None:
        new_columns = [key for key in metrics if key not in self._columns]
        if new_columns:
            _, rows, _ = self._read()
            self._columns += new_columns
            self._rewrite(rows)
        with self._path.open("a") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow({"step": step, **metrics})

    def close(self) -> None:
        """Do nothing: every row is on disk already."""


class TensorBoard:
    """Event files in `tensorboard/`."""

    def __init__(self, to: Destination):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(to.output_dir / "tensorboard"), purge_step=to.first_step)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Report:
    """`report.html`, of the rows of earlier starts of the run as well; see `report`."""

    def __init__(self, to: Destination):
        from verl_megatron.observe.report.sink import ReportWriter

        rows, _ = parsed_rows(complete_lines(to.output_dir / METRICS_FILE))
        earlier = [row for row in rows if row["step"] < to.first_step]
        self._report = ReportWriter(to.output_dir, earlier, total_steps=to.total_steps)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._report.add(step, finite)

    def close(self) -> None:
        self._report.write(at_work=False)


# name: the class and the package it needs
SINKS: dict[str, tuple[Callable[[Destination], Sink], str]] = {
    "console": (Console, "tqdm"),
    "jsonl": (JsonLines, "json"),
    "csv": (Csv, "csv"),
    "tensorboard": (TensorBoard, "tensorboard"),
    "report": (Report, "jinja2"),  # without plotly a run goes on, and says so
    "wandb": (Wandb, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}
# Other values of track_metrics and the package each needs: these are recorded on several ranks (timeline.py,
# profiling.py), not written by a sink.
RECORDINGS = {"timeline": "matplotlib", "profile": "torch"}


def check_sinks(names: list[str]) -> None:
    """Raise ValueError for a sink or recording that is unknown or whose package is not installed."""
    packages = {name: package for name, (_, package) in SINKS.items()} | RECORDINGS
    for name in names:
        if name not in packages:
            raise ValueError(f"run.track_metrics: {name!r} is not known; choose among {', '.join(packages)}")
        package = packages[name]
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"run.track_metrics: {name!r} needs the package {package};"
                f" pip install {package} or take {name!r} out"
            )


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block into a ValueError with the remedy."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{folder} does not take what the run writes ({error});"
            " make room or make it writable, and start again"
        ) from None


class MetricsTracker:
    """Writes rows of metrics to every selected sink. Only one rank creates one.

    `first_step` is the first step that this run logs: a resumed run drops rows that an earlier run logged at
    or after it, and appends.

    Raises:
        ValueError: a sink is unknown, or its package is not installed.
    """

    def __init__(self, output_dir: str | Path, sinks: list[str], *, total_steps: int, first_step: int = 0):
        check_sinks(sinks)
        to = Destination(Path(output_dir), first_step, total_steps)
        with writing_to(to.output_dir):
            to.output_dir.mkdir(parents=True, exist_ok=True)
            self._sinks = [SINKS[name][0](to) for name in sinks if name in SINKS]
        self._folder = to.output_dir
        self._is_open = True

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one row.

        A step may have several rows, such as an iteration's and its validation's.

        Raises:
            ValueError: the row cannot be written.
        """
        with writing_to(self._folder):
            for sink in self._sinks:
                sink.write(step, metrics)

    def close(self) -> None:
        """Flush and close every sink; once is enough."""
        if self._is_open:
            self._is_open = False
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

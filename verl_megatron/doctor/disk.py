"""Checks of the output folder: whether it can be written, its free space and its speed."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from verl_megatron.checks.output_folder import why_no_folder
from verl_megatron.doctor.finding import Case, Finding

GIB = 2**30
SOME_BYTES, FEW_BYTES = 50 * GIB, 1 * GIB
SLOW = 200e6  # B/s; an 8B model with its optimizer takes ten minutes to save
PIECE_BYTES, MOST_BYTES, MOST_S = 8 << 20, 256 << 20, 4.0


def check_disk(case: Case) -> Iterator[Finding]:
    """Whether the folder can be written, and its free space."""
    if reason := why_no_folder(str(case.folder)):
        yield Finding(
            check="output folder",
            status="problem",
            found=f"{case.folder} {reason}",
            why="a run writes checkpoints, metrics and models there",
            remedy="name another folder with --disk, and in the run with run.output_dir",
        )
        return
    folder = _existing(case.folder)
    try:
        free = shutil.disk_usage(folder).free
        nodes = os.statvfs(folder)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
            has_links = _has_links(Path(scratch))
            writing, reading = _speed(Path(scratch) / "speed")
    except OSError as error:
        yield Finding(
            check="output folder",
            status="problem",
            found=f"{folder} cannot be written ({error.strerror or error})",
            why="a run writes checkpoints, metrics and models there",
            remedy="make room or make it writable, or name another folder with --disk",
        )
        return
    yield from _space(folder, free, nodes.f_favail if nodes.f_files else None)
    yield _speed_finding(folder, writing, reading)
    if not has_links:
        yield Finding(
            check="output folder",
            status="warning",
            found=f"{folder} has no hard links",
            why="two runs that start in one folder at the same moment may not notice each other",
            remedy="start one run in a folder at a time",
        )


def _space(folder: Path, free: int, nodes: int | None) -> Iterator[Finding]:
    is_little = free < SOME_BYTES or (nodes is not None and nodes < 10_000)
    files = "" if nodes is None or nodes >= 10_000 else f", room for {nodes:,} files"
    yield Finding(
        check="disk space",
        status="problem" if free < FEW_BYTES else "warning" if is_little else "ok",
        found=f"{folder} has {free / GIB:,.1f} GiB free{files}",
        why="a checkpoint of an 8B model with its optimizer has 112 GB" if is_little else "",
        remedy="make room, or name another folder with run.output_dir" if is_little else "",
    )


def _speed_finding(folder: Path, writing: float, reading: float) -> Finding:
    found = f"{folder} is written at {_rate(writing)} and read at {_rate(reading)}"
    if writing >= SLOW:
        return Finding(check="disk speed", status="ok", found=found)
    return Finding(
        check="disk speed",
        status="warning",
        found=found,
        why="training waits for checkpoints, unless run.async_save=true",
        remedy="name a folder on a local or parallel file system, or set run.async_save=true",
    )


def _rate(rate: float) -> str:
    return f"{rate / 1e6:,.0f} MB/s" if rate < 1e9 else f"{rate / 1e9:.1f} GB/s"


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _has_links(folder: Path) -> bool:
    (folder / "file").touch()
    try:
        os.link(folder / "file", folder / "link")
    except OSError:
        return False
    return True


def _speed(path: Path) -> tuple[float, float]:
    """Return bytes per second of writing a file to the disk, and of reading it from there."""
    piece, written = os.urandom(PIECE_BYTES), 0
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        began = time.perf_counter()
        while written < MOST_BYTES and time.perf_counter() - began < MOST_S:
            written += os.write(handle, piece)
            os.fdatasync(handle)
        writing = written / (time.perf_counter() - began)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is read from the disk
        began, read = time.perf_counter(), 0
        while read < written and time.perf_counter() - began < MOST_S:
            read += len(os.pread(handle, PIECE_BYTES, read))
        return writing, read / (time.perf_counter() - began)
    finally:
        os.close(handle)

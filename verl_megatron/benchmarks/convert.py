"""Speed and memory of the converter and of `cp`, step by step: `benchmark convert`."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median

import torch

from parallel.weights.architecture import read_architecture, read_config
from parallel.weights.files import INDEX
from parallel.weights.rules import hf_shapes
from parallel.weights.shapes import shape
from verl_megatron.benchmarks.options.convert import parser, read_options
from verl_megatron.benchmarks.output import TimedRow, times_of, versions, write_csv
from verl_megatron.examples.random_weights import write_weights

CONVERT = ("-m", "verl_megatron.commands.convert")
MIB, GB, SAMPLE_S = 2**20, 10**9, 0.2


# By name: copies of a folder's files with an fsync of each, as in the converter.
COPIES = {
    "cp": 'cp -r --reflink=never "$0" "$1" && sync "$1"/*',
    "cp, {} at a time": (
        'mkdir "$1" && ls -S "$0"/* | xargs -n 1 -P {} cp --reflink=never -t "$1" && sync "$1"/*'
    ),
}


@dataclass(frozen=True, slots=True)
class Use:
    """Total use of a process tree: bytes, and processor seconds since its start."""

    pss: int = 0
    rss: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One timed command: its wall-clock time and peak use."""

    seconds: float
    peak: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(TimedRow):
    """A line of the table and of the CSV: medians over the repetitions, and the highest peaks."""

    gb_per_s: float  # 1e9 bytes of weights per second, at the median
    of_cp: float  # cp's median / this median
    cpu_s: float  # user and system
    peak_pss_mib: float
    peak_rss_mib: float


def watched(command: Sequence[object]) -> Run:
    """Run a command to its end; CalledProcessError with its output if it fails."""
    with tempfile.TemporaryFile("w+") as output:
        start = time.monotonic()
        process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=subprocess.STDOUT)
        uses = [Use()]
        while process.poll() is None:
            uses.append(use_of(tree(process.pid)))
            time.sleep(SAMPLE_S)
        seconds = time.monotonic() - start
        if process.returncode:
            output.seek(0)
            words = [str(part) for part in command]
            raise subprocess.CalledProcessError(process.returncode, words, output.read())
    peak = [max(values) for values in zip(*map(astuple, uses))]
    return Run(seconds, Use(*peak))


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # the process has exited
        children = []
    return [pid, *(one for child in children for one in tree(child))]


def use_of(pids: Sequence[int]) -> Use:
    """Return the sum over the processes; those that have exited count as 0."""
    total = [0, 0, 0.0]
    for pid in pids:
        try:
            memory = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            # its own, and that of its exited children
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        except OSError:
            continue
        fields = [line.split() for line in memory]  # name with a colon, KiB, "kB"
        kib = {name: int(size) for name, size, *_ in fields}
        seconds = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        own = (1024 * kib.get("Pss:", 0), 1024 * kib.get("Rss:", 0), seconds)
        total = [a + b for a, b in zip(total, own)]
    return Use(*total)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that later reads come from the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_model(folder: Path, config: dict, *, copies: int) -> int:
    """Write the folder unless it exists, and return the bytes of its weights.

    Raises:
        ValueError: the folder contains another model, or the disk has no room for it and that many copies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described, complete = folder / "config.json", (folder / INDEX).is_file()
    if complete and json.loads(described.read_text()) != config:
        raise ValueError(f"{folder} holds another model; remove it or name another folder")
    described.write_text(json.dumps(config, indent=2))
    size = torch.bfloat16.itemsize * sum(map(prod, hf_shapes(read_architecture(folder)).values()))
    needed, free = (copies + (not complete)) * size * 1.01, shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{folder} has {free / GB:.1f} GB free and --layers {config['num_hidden_layers']} needs "
            f"{needed / GB:.1f} GB; take fewer layers or another disk"
        )
    if not complete:
        write_weights(folder, seed=1)
    return size


def measure(root: Path, arguments) -> dict[str, list[Run]]:
    """Return every repetition of every step by name.

    Raises:
        CalledProcessError: a step failed; for verify, also if a tensor differs.
    """
    source, mcore, back, copied = (root / name for name in ("hf", "mcore", "back", "copy"))
    options = ("--memory-gib", arguments.memory_gib, "--workers", arguments.workers)

    def convert(command: str, *folders: Path) -> Run:
        return watched([sys.executable, *CONVERT, command, *folders, *options])

    steps: list[tuple[str, Path, Callable[[], Run]]] = [
        *(
            (
                name.format(arguments.workers),
                source,
                partial(watched, ["bash", "-c", script.format(arguments.workers), source, copied]),
            )
            for name, script in COPIES.items()
        ),
        ("hf-to-mcore", source, partial(convert, "hf-to-mcore", source, mcore)),
        ("mcore-to-hf", mcore, partial(convert, "mcore-to-hf", mcore, back)),
        ("verify", back, partial(convert, "verify", source, back)),
    ]
    runs: dict[str, list[Run]] = {name: [] for name, _, _ in steps}
    try:
        for repetition in range(arguments.repetitions):
            for name, read, step in steps:
                for folder in {read, source}:
                    forget(folder)
                time.sleep(arguments.settle_s)
                runs[name].append(step())
                print(
                    f"{repetition + 1}/{arguments.repetitions} {name}: {runs[name][-1].seconds:.1f} s",
                    flush=True,
                )
                shutil.rmtree(copied, ignore_errors=True)
            for folder in (mcore, back):
                shutil.rmtree(folder)
    finally:
        for folder in (copied, mcore, back, *root.glob("*.partial")):
            shutil.rmtree(folder, ignore_errors=True)
    return runs


def rows_of(runs: dict[str, list[Run]], size: int) -> list[Row]:
    reference, rows = median(run.seconds for run in runs["cp"]), []
    for name, repeated in runs.items():
        times = times_of([run.seconds for run in repeated])
        rows.append(
            Row(
                name=name,
                **times,
                gb_per_s=size / GB / times["median_s"],
                of_cp=reference / times["median_s"],
                cpu_s=median(run.peak.cpu_s for run in repeated),
                peak_pss_mib=max(run.peak.pss for run in repeated) / MIB,
                peak_rss_mib=max(run.peak.rss for run in repeated) / MIB,
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """Return the table for a terminal."""
    lines = [
        f"{'':20}{'median s':>10}{'min':>8}{'max':>8}{'GB/s':>8}{'of cp':>8}{'CPU s':>8}"
        f"{'peak MiB: shared pages once':>29}{'many times':>12}"
    ]
    for row in rows:
        times = (
            f"{row.median_s:>10.1f}{row.min_s:>8.1f}{row.max_s:>8.1f}{row.gb_per_s:>8.3f}{row.of_cp:>8.0%}"
            f"{row.cpu_s:>8.1f}"
        )
        lines.append(f"{row.name:20}{times}{row.peak_pss_mib:>29,.0f}{row.peak_rss_mib:>12,.0f}")
    return "\n".join(lines)


def machine_columns() -> dict[str, str]:
    """Return the columns of the CSV that describe the machine and the versions."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    processor = next(
        (value.strip() for name, _, value in lines if name.startswith("model name")), platform.machine()
    )
    return {"machine": f"{os.cpu_count()} x {processor}"} | versions()


def main() -> int:
    options = read_options()
    config = read_config(options.hf) if options.hf else shape(options.shape)
    config |= dict(num_hidden_layers=options.layers) if options.layers else {}
    try:
        size = write_model(options.folder / "hf", config, copies=2)
        runs = measure(options.folder, options)
    except ValueError as error:
        parser().error(str(error))
    except subprocess.CalledProcessError as error:
        parser().exit(1, f"{error}\n{error.output}\n")
    rows = rows_of(runs, size)
    peak = max(row.peak_pss_mib for row in rows) * MIB
    print(
        f"{config['num_hidden_layers']} layers, {size / GB:.2f} GB of weights; --memory-gib "
        f"{options.memory_gib:g}, {options.workers} processes"
    )
    print(table(rows))
    print("the round trip is bit-identical")
    print(f"peak of all processes together: {peak / 2**30:.2f} GiB of {options.memory_gib:g} GiB")
    if options.csv:
        run = dict(
            model=options.hf or options.shape,
            layers=config["num_hidden_layers"],
            bytes=size,
            memory_gib=options.memory_gib,
            workers=options.workers,
        )
        write_csv(options.csv, run | machine_columns(), rows)
    return 0 if peak <= options.memory_gib * 2**30 else 1


if __name__ == "__main__":
    sys.exit(main())

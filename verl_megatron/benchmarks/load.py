"""Time to load a rank's slices of a folder, by byte ranges and as a whole: `benchmark load`."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from parallel.layout import Layout
from parallel.weights.architecture import read_architecture, read_config
from parallel.weights.files import CheckpointFolder
from parallel.weights.loading import load_parameters
from parallel.weights.rules import megatron_parameters
from parallel.weights.shapes import shape
from parallel.weights.shard import ShardedParameter
from verl_megatron.benchmarks.convert import GB, MIB, forget, machine_columns, write_model
from verl_megatron.benchmarks.options.load import RANGES, WHOLE, parser, read_options
from verl_megatron.benchmarks.output import TimedRow, status_bytes, times_of, write_csv

Tensors = dict[tuple[int, str], Tensor]
SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(TimedRow):
    """A line of the table and of the CSV: medians over the repetitions, and the highest peaks."""

    read_mib: float
    peak_rss_mib: float
    peak_own_mib: float


def by_ranges(folder: Path, dtype: torch.dtype) -> Callable[[list[ShardedParameter], Tensors], None]:
    def load(parameters: list[ShardedParameter], tensors: Tensors) -> None:
        with CheckpointFolder(folder) as files:
            load_parameters(files, parameters, tensors)

    return load


def whole_model(folder: Path, dtype: torch.dtype) -> Callable[[list[ShardedParameter], Tensors], None]:
    from transformers import AutoModelForCausalLM

    def load(parameters: list[ShardedParameter], tensors: Tensors) -> None:
        state = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
        for parameter in parameters:
            matrix = tensors[parameter.chunk, parameter.name].zero_().view(parameter.shape[0], -1)
            for block in parameter.blocks:
                part = state[block.tensor].view(state[block.tensor].shape[0], -1)[
                    slice(*block.rows), slice(*block.cols)
                ]
                matrix[block.row : block.row + part.shape[0], block.col : block.col + part.shape[1]] = part

    return load


METHODS = {RANGES: by_ranges, WHOLE: whole_model}


def measured(method: str, folder: Path, tp: int, rank: int, dtype: torch.dtype) -> dict[str, object]:
    """Measure one method in a separate process; returns its use and a digest of the loaded parameters."""
    load = METHODS[method](folder, dtype)
    arch, layout = read_architecture(folder), Layout.parse(f"tp{tp}", tuple(range(tp)))
    parameters = megatron_parameters(arch, layout, rank, spec="local")
    tensors = {(p.chunk, p.name): torch.empty(p.shape, dtype=dtype) for p in parameters}
    own, done = [status_bytes("RssAnon")], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            own.append(status_bytes("RssAnon"))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    before, start = read_bytes(), time.monotonic()
    load(parameters, tensors)
    seconds, read, peak = time.monotonic() - start, read_bytes() - before, status_bytes("VmHWM")
    done.set()
    sampler.join()
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    needed = sum(tensor.nbytes for tensor in tensors.values())
    return dict(
        seconds=seconds, read=read, peak_rss=peak, peak_own=max(own), digest=digest.hexdigest(), needed=needed
    )


def read_bytes() -> int:
    """Return the bytes that this process has read from the disk so far."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])


def compare(folder: Path, arguments) -> tuple[list[Row], int]:
    """Return a row per method and the bytes of the rank's parameters.

    Raises:
        AssertionError: the methods load different bits.
    """
    runs: dict[str, list[dict]] = {method: [] for method in METHODS}
    for _ in range(arguments.repetitions):
        for method, repeated in runs.items():
            forget(folder)
            command = [
                sys.executable,
                "-m",
                "verl_megatron.benchmarks.load",
                str(folder.parent),
                "--tp",
                str(arguments.tp),
                "--rank",
                str(arguments.rank),
                "--dtype",
                arguments.dtype,
                "--only",
                method,
            ]
            repeated.append(
                json.loads(
                    subprocess.run(
                        command, check=True, stdout=subprocess.PIPE, text=True
                    ).stdout.splitlines()[-1]
                )
            )
    everything = [run for repeated in runs.values() for run in repeated]
    assert len({run["digest"] for run in everything}) == 1, "the two methods loaded different bits"
    rows = []
    for method, repeated in runs.items():
        read = median(run["read"] for run in repeated) / MIB
        rows.append(
            Row(
                name=method,
                **times_of([run["seconds"] for run in repeated]),
                read_mib=read,
                peak_rss_mib=max(run["peak_rss"] for run in repeated) / MIB,
                peak_own_mib=max(run["peak_own"] for run in repeated) / MIB,
            )
        )
    return rows, everything[0]["needed"]


def table(rows: list[Row]) -> str:
    """Return the table for a terminal."""
    lines = [
        f"{'':30}{'median s':>10}{'min':>8}{'max':>8}{'MiB read':>11}{'peak MiB':>11}"
        f"{'without mapped files':>23}"
    ]
    for row in rows:
        lines.append(
            f"{row.name:30}{row.median_s:>10.2f}{row.min_s:>8.2f}{row.max_s:>8.2f}{row.read_mib:>11,.0f}"
            f"{row.peak_rss_mib:>11,.0f}{row.peak_own_mib:>23,.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    options = read_options()
    folder = options.folder / "hf"
    if options.only:
        print(
            json.dumps(
                measured(options.only, folder, options.tp, options.rank, getattr(torch, options.dtype))
            )
        )
        return
    config = (read_config(options.hf) if options.hf else shape(options.shape)) | dict(
        num_hidden_layers=options.layers
    )
    try:
        size = write_model(folder, config, copies=0)
    except ValueError as error:
        parser().error(str(error))
    rows, needed = compare(folder, options)
    print(
        f"{options.layers} layers, {size / GB:.2f} GB of weights; rank {options.rank} of tp{options.tp} "
        f"holds {needed / MIB:,.0f} MiB of {options.dtype}, the same bits either way"
    )
    print(table(rows))
    if options.csv:
        run = dict(model=options.hf or options.shape, layers=options.layers, bytes=size)
        run |= dict(tp=options.tp, rank=options.rank, dtype=options.dtype, needed_mib=needed / MIB)
        write_csv(options.csv, run | machine_columns(), rows)


if __name__ == "__main__":
    main()

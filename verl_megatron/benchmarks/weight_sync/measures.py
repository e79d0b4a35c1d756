"""Measurements of `bench/weight_sync.py`: time of the slowest rank, memory of the fullest, and output."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallel import device
from parallel.rank_set import world

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """A number of the result, and a line of the CSV."""

    kind: str  # phase, memory, plan, build, check or digest
    name: str
    value: Any  # a number, the median if it is a time; the text of a digest
    unit: str
    p10: float | str = ""
    p90: float | str = ""


class Clock:
    """Milliseconds of named phases, repetition by repetition, on this rank."""

    def __init__(self):
        self.milliseconds: dict[str, list[float]] = {}
        self.splits = True  # whether to time the phases of a direction or only the whole direction

    def part(self, name: str) -> AbstractContextManager[None]:
        """Time one phase; all ranks begin together."""
        return self._timed(name) if self.splits else nullcontext()

    def whole(self, name: str) -> AbstractContextManager[None]:
        """Time one direction, including its phases."""
        return nullcontext() if self.splits else self._timed(name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        dist.barrier()
        device.synchronize()
        start = time.perf_counter()
        yield
        device.synchronize()
        self.milliseconds.setdefault(name, []).append(1000 * (time.perf_counter() - start))
        dist.barrier()

    def rows(self, kind: str) -> list[Row]:
        """Return the slowest rank's median, p10 and p90 of each phase. Collective over the world."""
        shares, rows = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64), []
        for name, times in self.milliseconds.items():
            median, p10, p90 = torch.quantile(
                world().all_max(torch.tensor(times, dtype=torch.float64)), shares
            ).tolist()
            rows.append(Row(kind, name, median, "ms", p10, p90))
        return rows


class Memory:
    """Memory in use on the fullest rank at each stage, and the allocator's peak since the previous stage."""

    NAMES = (
        "allocated",
        "reserved",
        "peak allocated",
        "used on the GPU" if device.is_gpu() else "the process's peak",
    )

    def __init__(self):
        self.stages: dict[str, list[list[int]]] = {}  # by stage: values of NAMES at each repetition
        self._asleep_bytes = 0

    def begin(self) -> None:
        """Reset the peak before the first stage."""
        self._asleep_bytes = asleep_bytes()
        if device.is_gpu():
            torch.cuda.reset_peak_memory_stats()

    def note(self, stage: str) -> None:
        """Record the values at the end of a stage, and begin the next."""
        # PyTorch counts vLLM's sleeping blocks, which have only reserved addresses.
        asleep = asleep_bytes()
        always = min(asleep, self._asleep_bytes)
        used = [
            torch.cuda.memory_allocated() - asleep,
            torch.cuda.memory_reserved() - asleep,
            torch.cuda.max_memory_allocated() - always,
        ]
        self.stages.setdefault(stage, []).append([*used, device.used_memory_bytes()])
        self.begin()

    def rows(self) -> list[Row]:
        """Return the result's rows. Collective over the world."""
        rows = []
        for stage, numbers in self.stages.items():
            fullest = world().all_max(torch.tensor(numbers)).amax(0).tolist()
            rows += [
                Row("memory", f"{stage}: {name}", number / GIB, "GiB")
                for name, number in zip(self.NAMES, fullest)
            ]
        return rows


def asleep_bytes() -> int:
    """Return the bytes of vLLM's memory that are asleep."""
    if not device.is_gpu():
        return 0
    from vllm.device_allocator.cumem import CuMemAllocator

    blocks = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(block.handle[1] for block in blocks if getattr(block, "is_asleep", False))


def table(rows: list[Row]) -> str:
    """Return the phases, the memory, and the other values line by line."""
    by_kind: dict[str, list[Row]] = {
        kind: [] for kind in ("phase", "memory", "plan", "build", "check", "digest")
    }
    for row in rows:
        by_kind[row.kind].append(row)
    lines = [f"{'':42}{'median ms':>12}{'p10':>12}{'p90':>12}"]
    lines += [f"{row.name:42}{row.value:>12.3f}{row.p10:>12.3f}{row.p90:>12.3f}" for row in by_kind["phase"]]
    lines += ["", f"{'GiB of the fullest rank':24}" + "".join(f"{name:>20}" for name in Memory.NAMES)]
    stages: dict[str, list[Row]] = {}
    for row in by_kind["memory"]:
        stages.setdefault(row.name.split(":")[0], []).append(row)
    for stage, numbers in stages.items():
        lines.append(f"{stage:24}" + "".join(f"{row.value:>20.3f}" for row in numbers))
    lines += ["", *(f"{row.name:42}{row.value:>12.4f} GiB" for row in by_kind["plan"])]
    lines += ["", *(f"{'built: ' + row.name:42}{row.value / 1000:>12.2f} s" for row in by_kind["build"])]
    lines += [
        "",
        *(f"{row.value:3} {row.name}" for row in by_kind["check"]),
        *(f"digest of {row.name}: {row.value}" for row in by_kind["digest"]),
    ]
    return "\n".join(lines)

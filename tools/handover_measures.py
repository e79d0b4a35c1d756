"""What `bench_handover.py` measures with: clocks and memory of the slowest and the fullest rank, and the result in print."""

import csv
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from parallel import device
from parallel.collectives import all_max

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """A number of the result, and a line of the CSV."""

    kind: str  # phase, memory, plan, build, check or digest
    name: str
    value: float | str  # of times the median
    unit: str
    p10: float | str = ""
    p90: float | str = ""


class Clock:
    """Milliseconds of named phases, repetition by repetition, on this rank."""

    def __init__(self):
        self.milliseconds: dict[str, list[float]] = {}
        self.splits = True  # whether the parts of a way are timed, or each way in one go

    def part(self, name: str) -> AbstractContextManager[None]:
        """Around one phase; all ranks begin together."""
        return self._timed(name) if self.splits else nullcontext()

    def whole(self, name: str) -> AbstractContextManager[None]:
        """Around a way, with its parts inside."""
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
        """Medians of what the slowest rank took, with the tenth and the ninetieth percentile. Collective over the world."""
        shares, rows = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64), []
        for name, times in self.milliseconds.items():
            median, p10, p90 = torch.quantile(
                all_max(torch.tensor(times, dtype=torch.float64)), shares
            ).tolist()
            rows.append(Row(kind, name, median, "ms", p10, p90))
        return rows


class Memory:
    """What the fullest rank holds at each stage, and the allocator's peak since the stage before."""

    NAMES = (
        "allocated",
        "reserved",
        "peak allocated",
        "used on the GPU" if device.is_gpu() else "the process's peak",
    )

    def __init__(self):
        self.stages: dict[str, list[list[int]]] = {}  # by stage: the numbers of NAMES at each repetition
        self._asleep_bytes = 0

    def begin(self) -> None:
        """Forget the peak of what was not asked about."""
        self._asleep_bytes = asleep_bytes()
        if device.is_gpu():
            torch.cuda.reset_peak_memory_stats()

    def note(self, stage: str) -> None:
        """The numbers at the end of a stage; the next begins."""
        # PyTorch counts vLLM's sleeping blocks, of which only the addresses are left.
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
        """Collective over the world."""
        rows = []
        for stage, numbers in self.stages.items():
            fullest = all_max(torch.tensor(numbers)).amax(0).tolist()
            rows += [
                Row("memory", f"{stage}: {name}", number / GIB, "GiB")
                for name, number in zip(self.NAMES, fullest)
            ]
        return rows


def asleep_bytes() -> int:
    """Of vLLM's memory, what is asleep."""
    if not device.is_gpu():
        return 0
    from vllm.device_allocator.cumem import CuMemAllocator

    blocks = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(block.handle[1] for block in blocks if getattr(block, "is_asleep", False))


def table(rows: list[Row]) -> str:
    """The phases, the memory, and the rest line by line."""
    by_kind = {
        kind: [row for row in rows if row.kind == kind]
        for kind in ("phase", "memory", "plan", "build", "check", "digest")
    }
    lines = [f"{'':42}{'median ms':>12}{'p10':>12}{'p90':>12}"]
    lines += [f"{row.name:42}{row.value:>12.3f}{row.p10:>12.3f}{row.p90:>12.3f}" for row in by_kind["phase"]]
    lines += ["", f"{'GiB of the fullest rank':24}" + "".join(f"{name:>20}" for name in Memory.NAMES)]
    stages: dict[str, list[Row]] = {}
    for row in by_kind["memory"]:
        stages.setdefault(row.name.split(":")[0], []).append(row)
    lines += [
        f"{stage:24}" + "".join(f"{row.value:>20.3f}" for row in numbers) for stage, numbers in stages.items()
    ]
    lines += ["", *(f"{row.name:42}{row.value:>12.4f} GiB" for row in by_kind["plan"])]
    lines += ["", *(f"{'built: ' + row.name:42}{row.value / 1000:>12.2f} s" for row in by_kind["build"])]
    lines += [
        "",
        *(f"{row.value:3} {row.name}" for row in by_kind["check"]),
        *(f"digest of {row.name}: {row.value}" for row in by_kind["digest"]),
    ]
    return "\n".join(lines)


def write_csv(path: Path, run: Mapping[str, object], rows: list[Row]) -> None:
    """One line a row, each beginning with the columns `run` that say what was measured."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*run, *asdict(rows[0])])
        writer.writeheader()
        writer.writerows(run | asdict(row) for row in rows)

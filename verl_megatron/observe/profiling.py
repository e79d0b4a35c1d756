"""Profiles of each phase of an iteration: torch.profiler around its first seconds.

The first and the last rank are profiled. A phase is profiled the second time it runs, when kernels are
compiled and memory is pinned. Profiling itself takes time, so that iteration's seconds do not measure speed.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from parallel import device
from parallel.rank_set import RankSet
from parallel.runtime.watchdog import Watchdog
from verl_megatron.observe.metrics import PhaseTimer

FOLDER = "profile"
SECONDS = 2.0  # profiled per phase; one second gives some hundred thousand trace events
ROWS = 20  # of each table
BETWEEN = "(between operators: Python)"


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in which a kernel or operator ran, in microseconds."""

    start: float
    end: float
    name: str


def record_profile(
    clock: PhaseTimer,
    watchdog: Watchdog,
    track_metrics: Sequence[str],
    output_dir: str | Path,
    world: RankSet,
) -> None:
    """Profile the phases of `clock` on the first and the last rank if `track_metrics` contains "profile".

    Writes OUTPUT_DIR/profile/PHASE_rankR.txt and a Chrome trace next to it.
    """
    if "profile" in track_metrics and world.rank in (0, world.size - 1):
        profiler = PhaseProfiler(Path(output_dir) / FOLDER, world.rank)
        clock.enter(profiler.around)
        watchdog.on_beat = profiler.beat


class PhaseProfiler:
    """One rank's profiles. `beat` is called during a phase, from the thread that runs it."""

    def __init__(self, folder: Path, rank: int, *, seconds: float = SECONDS):
        self.folder, self.rank, self.seconds = folder, rank, seconds
        self._came: Counter[str] = Counter()
        self._stop: Callable[[], None] | None = None  # ends the current profile
        self._ends_at = 0.0

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Profile the block if it is the second run of phase `name`."""
        self._came[name] += 1
        if self._came[name] == 2:
            self._start(name)
        try:
            yield
        finally:
            self._finish()

    def beat(self) -> None:
        """End the current profile if it has lasted long enough."""
        if time.perf_counter() >= self._ends_at:
            self._finish()

    def _start(self, name: str) -> None:
        device.synchronize()
        profiler = make_profiler()
        profiler.start()
        began = time.perf_counter()
        self._ends_at = began + self.seconds

        def stop() -> None:
            device.synchronize()
            wall_s = time.perf_counter() - began
            profiler.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{name}_rank{self.rank}"
            path.with_suffix(".txt").write_text(
                f"{name} on rank {self.rank}, the first {wall_s:.2f} s\n{described(profiler)}"
            )
            profiler.export_chrome_trace(str(path.with_suffix(".json")))

        self._stop = stop

    def _finish(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


def make_profiler() -> profile:
    """Create a torch profiler of the process and, if there is one, its GPU."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it logs each start and stop
    return profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * device.is_gpu())


def described(profiler: profile) -> str:
    """Report GPU idle time, the process's operators during it, and the tables of kernels and operators."""
    kernels, operators = [], []
    for event in profiler.events() or []:
        on_gpu = event.device_type != DeviceType.CPU
        # A named range on the GPU spans its kernels and the gaps between them.
        if on_gpu and event.is_user_annotation:
            continue
        (kernels if on_gpu else operators).append(
            Span(event.time_range.start, event.time_range.end, event.name)
        )
    text, averages = "", profiler.key_averages()
    if kernels:
        text += (
            "\n".join(idle_lines(kernels, operators))
            + "\n\n"
            + averages.table(sort_by="self_device_time_total", row_limit=ROWS)
        )
    return text + "\n" + averages.table(sort_by="self_cpu_time_total", row_limit=ROWS)


def idle_lines(kernels: list[Span], operators: list[Span]) -> list[str]:
    """Report the GPU's idle time between its first and last kernel, and the process's operators during it."""
    whole_us, gaps = (
        max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels),
        idle_between(kernels),
    )
    idle_us = sum(gap.end - gap.start for gap in gaps)
    lines = [
        f"the GPU was idle {idle_us / 1e6:.3f} s of {whole_us / 1e6:.3f} ({idle_us / whole_us:.1%}),"
        f" {len(gaps)} times; meanwhile the process was in"
    ]
    return lines + [
        f"{microseconds / 1e6:10.3f} s  {name}"
        for name, microseconds in meanwhile(gaps, operators).most_common(ROWS)
    ]


def idle_between(kernels: list[Span]) -> list[Span]:
    """Return the gaps in which no kernel ran, each named after the kernel that ended it."""
    gaps, end = [], min((kernel.start for kernel in kernels), default=0.0)
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.start > end:
            gaps.append(Span(end, kernel.start, kernel.name))
        end = max(end, kernel.end)
    return gaps


def meanwhile(gaps: list[Span], operators: list[Span]) -> Counter[str]:
    """Sum the microseconds of the gaps by the operator that was running in their middle.

    Gaps are in order. Of several operators, the one that began last counts.
    """
    time_by_operation: Any = Counter()
    coming, under_way = sorted(operators, key=lambda operator: -operator.start), []
    for gap in gaps:
        middle = (gap.start + gap.end) / 2
        while coming and coming[-1].start <= middle:
            under_way.append(coming.pop())
        while under_way and under_way[-1].end <= middle:
            under_way.pop()
        time_by_operation[under_way[-1].name if under_way else BETWEEN] += gap.end - gap.start
    return time_by_operation

"""Process pool for a list of jobs, with one progress bar in bytes; its processes end with their parent."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

POLL_S = 0.2
# slabs per process at most: one, a part of it, a copy while it is written, and the allocator's cache
WORKER_BUFFERS = 6
LARGEST_SLAB_BYTES = 16 * 2**20

# Imported once, by the forkserver: forked processes share its memory and start at once.
SHARED_MODULES = ["parallel.convert.compare", "parallel.convert.to_megatron"]

_counter: Any = None  # bytes done by all processes of the pool; set in each of them


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory budget: bytes of a slab, and number of processes."""

    slab_bytes: int
    workers: int

    @classmethod
    def of(cls, memory_bytes: int, workers: int) -> "Budget":
        slab = min(LARGEST_SLAB_BYTES, memory_bytes // WORKER_BUFFERS)
        return cls(
            slab_bytes=slab, workers=max(1, min(workers, memory_bytes // (WORKER_BUFFERS * max(1, slab))))
        )

    def rows(self, row_bytes: int, what: str) -> int:
        """Return the number of rows in a slab; ValueError if not even one fits."""
        if row_bytes > self.slab_bytes:
            raise ValueError(
                f"a row of {what} has {row_bytes} bytes and --memory-gib leaves {self.slab_bytes} for a part "
                "of a tensor; raise it"
            )
        return self.slab_bytes // row_bytes


def run_jobs(
    function: Callable[[Any, Callable[[int], object]], Any],
    jobs: Sequence[Any],
    *,
    workers: int,
    total_bytes: int,
    title: str,
) -> Iterator[Any]:
    """Yield the results of `function(job, report)` as they complete.

    `report(bytes)` advances the progress bar of a terminal. An exception in a job ends the others.

    Raises:
        ValueError: a process of the pool was killed.
    """
    # None: it is disabled where there is no terminal
    with tqdm(
        total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc=title, disable=None
    ) as bar:
        if workers == 1 or len(jobs) <= 1:
            for job in jobs:
                yield function(job, bar.update)
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(SHARED_MODULES)
        counter = context.Value("q", 0)
        with ProcessPoolExecutor(
            min(workers, len(jobs)), mp_context=context, initializer=_begin, initargs=(counter,)
        ) as pool:
            pending = {pool.submit(_run, function, job) for job in jobs}
            try:
                while pending:
                    done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
                    bar.update(counter.value - bar.n)
                    for future in done:
                        yield future.result()
            except BrokenProcessPool:
                raise ValueError(
                    f"a process of {title} was killed; the host may be out of memory (dmesg says so): start "
                    "again with fewer --workers"
                ) from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def _begin(counter) -> None:
    global _counter
    _counter = counter
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process with its parent, as a killed parent cannot end its pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers of the pool run this"
    parent.join()
    os._exit(1)


def _run(function, job):
    return function(job, _report)


def _report(count: int) -> None:
    with _counter.get_lock():
        _counter.value += count

"""Collective checkpoint I/O concurrent with training: one thread with its own process groups."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from parallel import device
from parallel.rank_set import RankSet

Job = Callable[[RankSet], None]


class Background:
    """Queue of jobs collective over `ranks`; each rank submits the same jobs in the same order.

    Every rank of the torchrun world constructs it.

    Args:
        enabled: False runs each job immediately, in the caller's thread and over `ranks` themselves.
    """

    def __init__(self, ranks: RankSet, *, enabled: bool):
        self._ranks = ranks.duplicate() if enabled else ranks
        on_this_gpu: dict[str, Any] = {}
        if device.is_gpu():
            on_this_gpu = dict(initializer=_begin, initargs=(device.device(),))
        self._executor = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="background", **on_this_gpu)
            if enabled
            else None
        )
        self._jobs: list[Future] = []

    def submit(self, job: Job) -> None:
        """Run the job after all earlier ones, passing it the ranks with the groups for its collectives.

        After a failed job no further job runs.
        """
        if self._executor is None:
            return job(self._ranks)
        previous = self._jobs[-1] if self._jobs else None

        def work() -> None:
            if previous is not None and (error := previous.exception()) is not None:
                raise error
            job(self._ranks)

        self._jobs.append(self._executor.submit(work))

    def wait(self) -> None:
        """Wait for all jobs, and raise the exception of the first one that failed."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def close(self) -> None:
        """Wait for all jobs, and end the thread."""
        self.wait()
        if self._executor is not None:
            self._executor.shutdown()


def _begin(gpu: torch.device) -> None:
    """Set the GPU and a stream of its own for the thread.

    A new thread would use the first GPU, which may be another rank's, and the default stream. torch's writer
    synchronizes with its stream repeatedly, and training may use the default one.
    """
    torch.cuda.set_device(gpu)
    torch.cuda.set_stream(torch.cuda.Stream(gpu))

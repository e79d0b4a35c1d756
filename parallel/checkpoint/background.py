"""Collective work on the disk beside training: job after job in one thread, which has a process group of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from parallel import device

Job = Callable[[dist.ProcessGroup | None], None]


class Background:
    """Every rank of the world constructs it, and submits the same jobs in the same order.

    Args:
        enabled: False does each job at once, in the caller's thread and over the world.
    """

    def __init__(self, *, enabled: bool):
        self._group = dist.new_group(backend="gloo", timeout=device.COLLECTIVE_TIMEOUT) if enabled else None
        on_this_gpu = dict(initializer=_begin, initargs=(device.device(),)) if device.is_gpu() else {}
        self._executor = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="background", **on_this_gpu)
            if enabled
            else None
        )
        self._jobs: list[Future] = []

    def submit(self, job: Job) -> None:
        """Start the job once those before it are done; it is given the group for its collectives. After one that failed none is done."""
        if self._executor is None:
            return job(None)
        previous = self._jobs[-1] if self._jobs else None

        def work() -> None:
            if previous is not None and previous.exception() is not None:
                raise previous.exception()
            job(self._group)

        self._jobs.append(self._executor.submit(work))

    def wait(self) -> None:
        """Until all is done; what the first failing job raised is raised here."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        self.wait()
        if self._executor is not None:
            self._executor.shutdown()


def _begin(gpu: torch.device) -> None:
    """A new thread would use the first GPU, which may be another rank's, and the default stream: torch's writer waits for it again and again, and training may use it."""
    torch.cuda.set_device(gpu)
    torch.cuda.set_stream(torch.cuda.Stream(gpu))

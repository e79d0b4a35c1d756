"""Ends a run well when its machine is taken away: SIGTERM asks for it, and all ranks agree at the end of an iteration.

What has to be set around it, the longest last: `grace_s`; torchrun's --shutdown-timeout (or TORCH_ELASTIC_SHUTDOWN_TIMEOUT), the
whole seconds between the SIGTERM that it passes on and its SIGKILL, 30 where nothing is set (recipes send their ranks SIGTERM
themselves: there only GRACE_S counts); and what the scheduler waits after its own SIGTERM (Kubernetes: terminationGracePeriodSeconds,
30; Slurm: KillWait, 30, or sbatch --signal=TERM@SECONDS). torchrun sends SIGTERM to the process group of each rank, so that processes
started by a rank end at once unless they have groups of their own, and having received SIGTERM it exits non-zero whatever its ranks
return.
"""

import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from types import TracebackType

import torch
import torch.distributed as dist

from parallel.runtime import leftovers

EXIT_STATUS = 128 + signal.SIGTERM  # what a shell shows for a process that SIGTERM ended
COPY_S = 2.0  # a scheduler may signal torchrun and its ranks, and torchrun passes its own on: one request, two signals


class Preemption:
    """Takes SIGTERM as a request to end at the next `requested` that all ranks agree on; entered on every rank, in the main thread.

    The process ends with `EXIT_STATUS` by itself, without teardown, `grace_s` after the first SIGTERM (not after `hold`), or at a second
    one that comes more than `COPY_S` after the first. Both work while the main thread is inside a collective; a call that keeps Python's lock
    delays them. The end of the `with` block brings the former handler back. Where it ends by an error after a SIGTERM, the error is
    said in a line and the signal is handed to the former handler: torchrun also sends it when another rank has failed.

    Args:
        grace_s: seconds from the first SIGTERM to the end by force; below torchrun's --shutdown-timeout.

    Raises:
        ValueError: `grace_s` is not positive, or `with` is not entered in the main thread.
    """

    def __init__(self, *, grace_s: float = 25.0):
        if not grace_s > 0:
            raise ValueError(
                f"grace_s={grace_s} must be greater than 0: seconds from SIGTERM to the end by force"
            )
        self.grace_s = grace_s
        self._asked, self._held = threading.Event(), threading.Event()

    def hold(self) -> None:
        """The run is on its way out and saves: from here on no deadline ends it, only a second SIGTERM (or whoever sends a SIGKILL)."""
        self._held.set()

    def requested(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether a rank of `group` (default: the world) has received SIGTERM; the same on each. A collective of CPU tensors."""
        flag = torch.tensor(int(self._asked.is_set()))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        return bool(flag)

    def __enter__(self) -> "Preemption":
        # A Python handler waits for a C call of the main thread (a collective) to return; the byte that the C handler writes does not.
        self._ends = os.pipe()
        os.set_blocking(self._ends[1], False)
        self._former_fd = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        self._former = (
            signal.signal(signal.SIGTERM, _nothing) or signal.SIG_DFL
        )  # None: a handler that is not Python's
        self._is_entered = True
        os.register_at_fork(after_in_child=self._leave_child)
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        os.write(self._ends[1], b"\0")  # no signal: the thread ends
        self._thread.join()
        for end in self._ends:
            os.close(end)
        if error is not None and self._asked.is_set():
            line = next(iter(traceback.extract_tb(trace)[-1:]), None)
            place = f" ({line.filename}:{line.lineno})" if line else ""
            _say(f"{_who()}: after SIGTERM came {kind.__name__}: {error}{place}")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self) -> None:
        self._is_entered = False
        signal.signal(signal.SIGTERM, self._former)  # first: no SIGTERM may be lost in between
        signal.set_wakeup_fd(self._former_fd)

    def _leave_child(self) -> None:
        """A forked child shares the pipe, and the SIGTERM that ends it is none for this process."""
        if self._is_entered:
            self._restore()

    def _listen(self) -> None:
        """The thread: the first byte raises the flag, a later one or the deadline ends the process."""
        deadline = copies_end = None
        while True:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0 and self._held.is_set():
                left_s = None
            elif left_s is not None and left_s <= 0:
                _end(f"{self.grace_s:g} s of grace are over before the end of the iteration")
            if not select.select([self._ends[0]], [], [], left_s)[0]:
                continue
            signals = os.read(self._ends[0], 4096)
            if 0 in signals:
                return
            if self._former_fd != -1:
                with contextlib.suppress(OSError):  # it is full, and its reader awake
                    os.write(self._former_fd, signals)
            if signal.SIGTERM not in signals:
                continue
            now = time.monotonic()
            if deadline is None:
                deadline, copies_end = now + self.grace_s, now + COPY_S
                self._asked.set()
                _say(f"{_who()}: SIGTERM; the run ends after this iteration, or in {self.grace_s:g} s")
            elif now > copies_end:
                _end("a second SIGTERM")


def usual_grace_s() -> float:
    """What GRACE_S says, which launchers set; else five seconds less than torchrun waits between SIGTERM and SIGKILL, as far as a rank can know.

    Raises:
        ValueError: GRACE_S is no positive number.
    """
    if given := os.environ.get("GRACE_S"):
        if not re.fullmatch(r"\d+(\.\d+)?", given) or not float(given):
            raise ValueError(
                f"GRACE_S={given!r} must be greater than 0: seconds from SIGTERM to the end by force"
            )
        return float(given)
    waits_s = 30
    if torch.__version__ >= (2, 12):  # earlier ones do not read it
        waits_s = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", waits_s))
    return max(waits_s - 5.0, 1.0)


def _nothing(number: int, frame: object) -> None:
    """The handler: that there is one makes Python write the byte."""


def _who() -> str:
    return f"rank {os.environ.get('RANK', '0')}"


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # not through sys.stderr: the main thread may be inside it


def _end(reason: str) -> None:
    _say(f"{_who()}: {reason}: ending now")
    leftovers.end()
    os._exit(EXIT_STATUS)

"""Graceful preemption: SIGTERM requests the end of a run; all ranks agree on it at the end of an iteration.

Three timeouts matter, each longer than the one before:

- `grace_s`;
- torchrun's --shutdown-timeout (or TORCH_ELASTIC_SHUTDOWN_TIMEOUT): whole seconds between the SIGTERM it
  forwards and its SIGKILL, 30 by default (recipes send their ranks SIGTERM themselves: there only GRACE_S
  counts);
- the scheduler's grace period after its SIGTERM (Kubernetes: terminationGracePeriodSeconds, 30; Slurm:
  KillWait, 30, or sbatch --signal=TERM@SECONDS).

torchrun sends SIGTERM to each rank's process group, so child processes of a rank end at once unless they have
groups of their own. After SIGTERM, torchrun exits non-zero whatever its ranks return.
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
from collections.abc import Callable
from math import inf
from types import TracebackType
from typing import NoReturn

import torch

from parallel.rank_set import RankSet
from parallel.runtime import endings, leftovers, process

EXIT_STATUS = 128 + signal.SIGTERM  # a shell's status for a process ended by SIGTERM
# the scheduler may signal torchrun and its ranks, and torchrun forwards its own: one request, two signals
COPY_S = 2.0


class Preemption:
    """Turn SIGTERM into a request to stop at the next `requested` call that all ranks agree on.

    Entered on every rank, in the main thread.

    The process exits with `EXIT_STATUS`, without teardown, `grace_s` after the first SIGTERM (not after
    `hold`), or at a second one that comes more than `COPY_S` after the first. Both work while the main thread
    is inside a collective; a call that holds the GIL delays them.

    The end of the `with` block restores the former handler. If the block ends with an exception after a
    SIGTERM, one line reports the exception and the former handler receives the signal, because torchrun also
    sends SIGTERM when another rank has failed. If another rank of this host has ended, that rank's error is
    the one to tell: everything goes to `log`.

    Args:
        grace_s: seconds from the first SIGTERM to the forced exit; below torchrun's --shutdown-timeout.
        log: takes what is not for the console; called from a thread as well.

    Raises:
        ValueError: `grace_s` is not positive, or `with` is not entered in the main thread.
    """

    def __init__(self, *, grace_s: float = 25.0, log: Callable[[str], None] | None = None):
        if not grace_s > 0:
            raise ValueError(
                f"grace_s={grace_s} must be greater than 0: seconds from SIGTERM to the end by force"
            )
        self.grace_s = grace_s
        self._asked, self._held = threading.Event(), threading.Event()
        self._say, self._log = _say, log or _say

    def hold(self) -> None:
        """Cancel the deadline because the run is saving.

        From here on only a second SIGTERM or a SIGKILL ends it.
        """
        self._held.set()

    def requested(self, ranks: RankSet) -> bool:
        """Return whether one of `ranks` received SIGTERM; the same on each. Collective over `ranks`."""
        return bool(ranks.all_max(torch.tensor(int(self._asked.is_set()))))

    def __enter__(self) -> "Preemption":
        # A Python handler waits until a C call of the main thread (a collective) returns; the wakeup byte
        # that the C handler writes does not.
        self._ends = os.pipe()
        os.set_blocking(self._ends[1], False)
        self._former_fd = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        # None: a handler that was not installed from Python
        self._former = signal.signal(signal.SIGTERM, _nothing) or signal.SIG_DFL
        self._is_entered = True
        os.register_at_fork(after_in_child=self._leave_child)
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        os.write(self._ends[1], b"\0")  # not a signal: ends the thread
        self._thread.join()
        for end in self._ends:
            os.close(end)
        if error is not None and self._asked.is_set():
            self._report(error, trace)
            sys.stdout.flush()
            endings.tell("error", f"after SIGTERM came {type(error).__name__}: {error}")
            os.kill(os.getpid(), signal.SIGTERM)

    def _report(self, error: BaseException, trace: TracebackType | None) -> None:
        if self._say is not _say:
            self._say("".join(traceback.format_exception(error)))
            return
        line = next(iter(traceback.extract_tb(trace)[-1:]), None)
        place = f" ({line.filename}:{line.lineno})" if line else ""
        _say(f"{_who()}: after SIGTERM came {type(error).__name__}: {error}{place}")

    def _restore(self) -> None:
        self._is_entered = False
        signal.signal(signal.SIGTERM, self._former)  # first, so that no SIGTERM is lost in between
        signal.set_wakeup_fd(self._former_fd)

    def _leave_child(self) -> None:
        """Detach a forked child, which shares the pipe: its SIGTERM does not concern this process."""
        if self._is_entered:
            self._restore()

    def _listen(self) -> None:
        """Thread: the first byte sets the flag; a later one or the deadline ends the process."""
        deadline, copies_end = None, inf
        while True:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0 and self._held.is_set():
                left_s = None
            elif left_s is not None and left_s <= 0:
                self._end(f"{self.grace_s:g} s of grace are over before the end of the iteration")
            if not select.select([self._ends[0]], [], [], left_s)[0]:
                continue
            signals = os.read(self._ends[0], 4096)
            if 0 in signals:
                return
            if self._former_fd != -1:
                with contextlib.suppress(OSError):  # the pipe is full, so its reader is awake
                    os.write(self._former_fd, signals)
            if signal.SIGTERM not in signals:
                continue
            now = time.monotonic()
            if deadline is None:
                deadline, copies_end = now + self.grace_s, now + COPY_S
                self._say = self._log if process.has_lost_rank() else _say
                self._asked.set()
                self._say(f"{_who()}: SIGTERM; the run ends after this iteration, or in {self.grace_s:g} s")
            elif now > copies_end:
                self._end("a second SIGTERM")

    def _end(self, reason: str) -> NoReturn:
        self._say(f"{_who()}: {reason}: ending now")
        endings.tell("stopped", f"SIGTERM: {reason}; nothing is saved beyond the newest checkpoint")
        leftovers.end()
        os._exit(EXIT_STATUS)


def usual_grace_s() -> float:
    """Return GRACE_S, which launchers set, or the shutdown timeout known to a rank less five seconds.

    Raises:
        ValueError: GRACE_S is not a positive number.
    """
    if given := os.environ.get("GRACE_S"):
        if not re.fullmatch(r"\d+(\.\d+)?", given) or not float(given):
            raise ValueError(
                f"GRACE_S={given!r} must be greater than 0: seconds from SIGTERM to the end by force"
            )
        return float(given)
    waits_s = 30
    if torch.__version__ >= "2.12":  # earlier versions do not read it
        waits_s = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", waits_s))
    return max(waits_s - 5.0, 1.0)


def _nothing(number: int, frame: object) -> None:
    """Signal handler; Python writes the wakeup byte only if a handler is installed."""


def _who() -> str:
    return f"rank {os.environ.get('RANK', '0')}"


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # not sys.stderr: the main thread may be inside it

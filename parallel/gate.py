"""The gate of a run: its ranks import their modules while its checks run, and wait there until they pass.

Needs only the standard library.
"""

import contextlib
import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from parallel.runtime import process

GATE = "VERL_MEGATRON_GATE"  # environment variable of the ranks: the file that says whether the checks passed
PASSED = b"passed"
LAUNCHER_S = 3.0  # for the launcher to hear that the checks have failed


class Gate:
    """Checks in a process of their own, whose verdict the ranks that this process starts wait for.

    The file is in memory. The process that checks keeps it locked until it ends, however it ends.

    Args:
        check: prints what is wrong and exits, or raises an unexpected error; called in a forked process. This
            one must have no threads yet, and no GPU in use.
    """

    def __init__(self, check: Callable[[], object]):
        file = os.memfd_create("checks of the run")
        self._path = f"/proc/{os.getpid()}/fd/{file}"
        lock, parent = os.open(self._path, os.O_RDWR), os.getpid()
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.pid = os.fork()
        if not self.pid:
            _check(check, lock, parent)
        os.close(lock)  # the lock is the other process's now
        self._status: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks."""
        return {GATE: self._path}

    def wait(self) -> int:
        """Return the exit status of the checks once they have ended; 0 if all is right."""
        if self._status is None:
            _, ended = os.waitpid(self.pid, 0)
            status = os.waitstatus_to_exitcode(ended)
            if status < 0 and -status not in (signal.SIGINT, signal.SIGTERM):
                print(f"error: the checks were {process.ended_by(-status)}", file=sys.stderr, flush=True)
            self._status = status if status >= 0 else 128 - status
        return self._status

    def watch(self, refused: Callable[[int], None]) -> None:
        """Call `refused` with the exit status, in a thread, if the checks do not pass."""

        def watch() -> None:
            if status := self.wait():
                refused(status)

        if self._status is None:
            threading.Thread(target=watch, name="checks of the run", daemon=True).start()

    def end(self) -> None:
        """End the checks, which nobody wants any more; no-op if they have ended."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def _check(check: Callable[[], object], lock: int, parent: int) -> None:
    """Run the checks in the forked process, which ends here."""
    status = 1
    try:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # temporary files are removed
        process.end_with(signal.SIGTERM, is_orphan=lambda: os.getppid() != parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends this process
        check()
        os.write(lock, PASSED)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            sys.stdout.flush()
        os._exit(status)  # nothing of the process that was forked goes on here


def may_go_ahead(ranks: int, *, forked: bool) -> bool:
    """Whether ranks may start before the checks pass: a core is left for these.

    Args:
        forked: one process imports for all of them (`parallel.runtime.forking`).
    """
    importing = min(ranks, 1) if forked else ranks
    return 0 < importing < len(os.sched_getaffinity(0))


def is_here() -> bool:
    """Whether this process is a rank whose run has a gate."""
    return GATE in os.environ


def pass_through() -> None:
    """Wait until the run's checks have passed; the process ends if they fail. No-op without a gate."""
    if not is_here():
        return
    try:
        file = os.open(os.environ[GATE], os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # of a launcher that has ended: something else started this
        return
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.read(file, len(PASSED)) != PASSED:
            time.sleep(LAUNCHER_S)  # the launcher ends this rank meanwhile, with the status of the checks
            process.end(2)
    finally:
        os.close(file)

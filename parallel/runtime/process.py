"""First steps of a command, before slow imports: it ends with its launcher, and Ctrl-C ends it with one line.

Needs only the standard library.
"""

import contextlib
import ctypes
import gc
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from parallel.runtime import endings, leftovers

INTERRUPTED = 128 + signal.SIGINT  # a shell's status for a process ended by Ctrl-C
# From the launcher on Ctrl-C. It ends a rank that does not handle it yet without a word; SIGINT would end it
# with a traceback.
INTERRUPT = signal.SIGUSR1
LAUNCHER = (
    # environment variable: process id of parallel.runtime.launch, which reports for its ranks
    "VERL_MEGATRON_LAUNCHER"
)
LAUNCH = (
    "VERL_MEGATRON_LAUNCH"  # environment variable: id of this host's launch, the same for all its attempts
)
_LIKELY = {  # causes of signals that the system sends
    "SIGKILL": "the host may be out of memory (dmesg says so)",
    "SIGBUS": "a file that it was reading, such as weights, may have been shortened, or /dev/shm may be full",
}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def begin() -> None:
    """End with the process that started this rank, handle Ctrl-C, and mark names in shared folders.

    Standard streams that are closed are opened.

    Called once, in the main thread. Garbage collection is off from here on, because imports make many
    permanent objects; what runs turns it on again.
    """
    gc.disable()
    open_streams()
    keep_exit_statuses()
    end_with_launcher()
    _take_interrupts()
    leftovers.begin(keep_folder=LAUNCHER in os.environ)


def keep_exit_statuses() -> None:
    """Let this process learn how its children end, also below a program that ignores SIGCHLD, as daemons may.

    Called in the main thread.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_with_launcher() -> None:
    """Receive SIGKILL when torchrun or parallel.runtime.launch ends, so that no rank trains on without it.

    The signal comes when the launcher thread that started this process ends; that is its main thread. Ranks
    of other launchers (Ray, Slurm) are left alone, since those may handle this themselves.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or LAUNCHER in os.environ:
        end_with(signal.SIGKILL, is_orphan=_has_lost_launcher)


def end_with(number: signal.Signals, *, is_orphan) -> None:
    """Ask the kernel to send this process the signal when its parent ends.

    Args:
        is_orphan: whether the parent has already ended.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if is_orphan():
        os._exit(128 + number)


def children(parent: int | str = "self") -> list[int]:
    """Return the ids of a process's children; empty where the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended, or is another user's
        for task in os.listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found


def ranks(launcher: int | str = "self") -> list[int]:
    """Return the ids of a launcher's ranks: those of its children that lead a session."""
    found = []
    for child in children(launcher):
        with contextlib.suppress(OSError):  # it has just ended
            found += [child] if os.getsid(child) == child else []
    return found


def await_end(pids: Iterable[int], *, within_s: float) -> None:
    """Wait until processes have ended, for some seconds at most."""
    end, left = time.monotonic() + within_s, list(pids)
    while left and time.monotonic() < end:
        with contextlib.suppress(OSError):
            leftovers.started_at(left[-1])
            time.sleep(0.02)
            continue
        left.pop()


def interrupt(ranks: Sequence[int], *, within_s: float) -> None:
    """Let a launcher's ranks record that Ctrl-C ends them, and wait until they have, for some seconds."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(rank, INTERRUPT)
    await_end(ranks, within_s=within_s)


def has_lost_rank() -> bool:
    """Return whether another rank of this host has ended, as far as parallel.runtime.launch shows it."""
    parent, started = os.getppid(), os.environ.get("LOCAL_WORLD_SIZE", "")
    if os.environ.get(LAUNCHER) != str(parent) or not started.isdecimal():
        return False
    return 0 < len(ranks(parent)) < int(started)


def _has_lost_launcher() -> bool:
    """Return whether the parent is init or a session manager, not the launcher of this rank."""
    parent = os.getppid()
    if LAUNCHER in os.environ:
        return os.environ[LAUNCHER] != str(parent)
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
        is_torchrun = "libtorch" in Path(f"/proc/{parent}/maps").read_text()
    except OSError:  # another user's process
        return False
    return (parent == 1 or name in ("init", "systemd")) and not is_torchrun


def _take_interrupts() -> None:
    """Let a thread end the process on Ctrl-C.

    A Python handler would wait for a collective of the main thread, and raise at an arbitrary point.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _nothing)
    if LAUNCHER in os.environ:
        signal.signal(INTERRUPT, _nothing)
    own = os.getpid()
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_listen, args=(reading, own), name="interrupts", daemon=True).start()


def _listen(reading: int, own: int) -> None:
    while select.select([reading], [], [])[0]:
        received = {*os.read(reading, 4096)} & {signal.SIGINT, INTERRUPT}
        if not received or os.getpid() != own:
            continue
        if os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ:
            say_interrupted()
        endings.tell(*endings.INTERRUPTED)
        _take_leave()
        if INTERRUPT in received:  # its child processes end with it, before they complain of what it leaves
            with contextlib.suppress(ProcessLookupError):  # it leads no group
                os.killpg(own, signal.SIGKILL)
        os._exit(INTERRUPTED)


def say_interrupted() -> None:
    os.write(2, b"interrupted; the same command goes on from the newest checkpoint, where there is one\n")


def ended_by(number: int, *, otherwise: str = "start the run again") -> str:
    """Return `ended by SIGNAL; REMEDY`, which is `otherwise` unless the signal has a likely cause."""
    name = signal.Signals(number).name
    return f"ended by {name}; {_LIKELY.get(name, otherwise)}"


def end(status: int) -> NoReturn:
    """Exit at once, without teardown, and remove files that only this process uses."""
    _take_leave()
    os._exit(status)


def _take_leave() -> None:
    leftovers.end()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        # It was closed, its reader is gone, or this is called in the middle of a write.
        except (AttributeError, OSError, ValueError, RuntimeError):
            continue


def _nothing(number: int, frame: object) -> None:
    """Signal handler; Python writes the wakeup byte only if a handler is installed."""


# ---- standard streams --------------------------------------------------------------------------------------


def open_streams() -> None:
    """Open streams that are closed on /dev/null, for this process and those that it starts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_nothing(number)
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 (lives on)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _open_nothing(number: int) -> None:
    """Make a closed descriptor one of /dev/null, before another file gets its number."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    os.set_inheritable(number, True)


def watch_stdout(failed: Callable[[OSError], NoReturn]) -> None:
    """Have `failed` called when standard output cannot be written; it ends the program.

    Characters that the terminal's encoding lacks are written as escapes.
    """
    before = cast(io.TextIOWrapper, sys.stdout)
    before.flush()
    raw = _Stdout(failed)
    sys.stdout = io.TextIOWrapper(
        raw if before.write_through else io.BufferedWriter(raw),  # as of python -u
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=os.isatty(1),
        write_through=before.write_through,
    )


class _Stdout(io.FileIO):
    """Standard output whose failure ends the program, and is not taken for that of another file."""

    def __init__(self, failed: Callable[[OSError], NoReturn]):
        super().__init__(1, "wb", closefd=False)
        self._failed = failed

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere
            self._failed(error)

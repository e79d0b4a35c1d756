"""What a command does first: it ends with its launcher, and Ctrl-C ends it in a line.

Runs before anything slow is imported, and needs only the standard library.
"""

import ctypes
import os
import select
import signal
import sys
import threading
from pathlib import Path

from parallel import leftovers

INTERRUPTED = 128 + signal.SIGINT  # what a shell shows for a process that Ctrl-C ended
LAUNCHER = "VERL_MEGATRON_LAUNCHER"  # environment: process id of parallel.launch, which speaks for its ranks
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def begin() -> None:
    """End with the launcher, take Ctrl-C, mark names in shared folders; in the main thread, once."""
    end_with_launcher()
    _take_interrupts()
    leftovers.begin(keep_folder=LAUNCHER in os.environ)


def end_with_launcher() -> None:
    """Have SIGKILL come when torchrun, or parallel.launch, is gone: it leaves no rank that trains on.

    The signal comes at the end of the launcher's thread that started this process, which is its main
    thread. A rank that another launcher started (Ray, Slurm) is left alone: that may have its own way.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or LAUNCHER in os.environ:
        end_with(signal.SIGKILL, is_orphan=_has_lost_launcher)


def end_with(number: signal.Signals, *, is_orphan) -> None:
    """Get the signal at the parent's end; `is_orphan` tells whether that was before."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if is_orphan():
        os._exit(128 + number)


def _has_lost_launcher() -> bool:
    """Whether the parent is not who started this rank but init, or a manager of sessions."""
    parent = os.getppid()
    if LAUNCHER in os.environ:
        return os.environ[LAUNCHER] != str(parent)
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
        is_torchrun = "libtorch" in Path(f"/proc/{parent}/maps").read_text()
    except OSError:  # another user's
        return False
    return (parent == 1 or name in ("init", "systemd")) and not is_torchrun


def _take_interrupts() -> None:
    """Let a thread end the process: a handler in Python would wait for a collective of the main thread."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _nothing)
    own = os.getpid()
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_listen, args=(reading, own), name="interrupts", daemon=True).start()


def _listen(reading: int, own: int) -> None:
    while select.select([reading], [], [])[0]:
        if signal.SIGINT in os.read(reading, 4096) and os.getpid() == own:
            if os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ:
                say_interrupted()
            end(INTERRUPTED)


def say_interrupted() -> None:
    os.write(2, b"interrupted; the same command goes on from the newest checkpoint, where there is one\n")


def end(status: int) -> None:
    """End at once, without teardown, and take along what is only this process's."""
    leftovers.end()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            continue
    os._exit(status)


def _nothing(number: int, frame: object) -> None:
    """The handler: that there is one makes Python write the byte."""

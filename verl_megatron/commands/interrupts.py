"""Ctrl-C during a command that starts no ranks: one line and status 130."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from parallel.runtime import process


def take_interrupts() -> None:
    """Raise KeyboardInterrupt on Ctrl-C, but end at once during an import, where libraries swallow it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job
        return
    own = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        if os.getpid() == own and _is_importing(frame):
            end_interrupted()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def end_interrupted() -> NoReturn:
    """Say so, and exit without teardown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(2, b"interrupted\n")  # not a stream, which the signal may have interrupted
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (what is buffered is half a line at best)
    process.end(process.INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False

"""Standard streams of a command: closed ones, a reader that has enough, and a full disk."""

import contextlib
import errno
import io
import os
import sys
from typing import Any, NoReturn

from parallel.runtime.refusal import REFUSED

PIPE_CLOSED = 128 + 13  # status of a program that SIGPIPE ends, as a shell shows it


class _Stdout(io.FileIO):
    """Standard output whose failure ends the program, and is not taken for that of another file."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> NoReturn:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # what is still buffered goes nowhere
        if error.errno == errno.EPIPE:
            raise SystemExit(PIPE_CLOSED)
        with contextlib.suppress(OSError):
            text = f"error: the output cannot be written ({error.strerror}); send it to another place"
            print(text, file=sys.stderr, flush=True)
        raise SystemExit(REFUSED)  # not `complain`, which flushes this stream


def prepare_streams() -> None:
    """Open streams that are closed on /dev/null, and let a failure of standard output end the program.

    A reader that closes its pipe, such as `head`, ends the program with status 141 and no message. A full
    disk is one error. Characters that the terminal's encoding lacks are written as escapes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_nothing(number)
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115 (lives on)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    before = sys.stdout
    before.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(1, "wb", closefd=False)),
        encoding=before.encoding,
        errors="backslashreplace",
        line_buffering=os.isatty(1),
    )


def _open_nothing(number: int) -> None:
    """Make a closed descriptor one of /dev/null, before another file gets its number."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)

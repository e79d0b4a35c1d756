"""Standard streams of a command: closed ones, a reader that has enough, and a full disk."""

import contextlib
import errno
import sys
from typing import NoReturn

from parallel.runtime import process
from parallel.runtime.refusal import REFUSED, about_output

PIPE_CLOSED = 128 + 13  # status of a program that SIGPIPE ends, as a shell shows it


def prepare_streams() -> None:
    """Open streams that are closed on /dev/null, and let a failure of standard output end the program.

    A reader that closes its pipe, such as `head`, ends the program with status 141 and no message. A full
    disk is one error. Characters that the terminal's encoding lacks are written as escapes.
    """
    process.open_streams()
    process.watch_stdout(_end)


def _end(error: OSError) -> NoReturn:
    if error.errno == errno.EPIPE:
        raise SystemExit(PIPE_CLOSED)
    with contextlib.suppress(OSError):
        print(f"error: {about_output(error)}", file=sys.stderr, flush=True)
    raise SystemExit(REFUSED)  # not `complain`: temporary files of the command are removed

"""User errors: shortened, with the nearest valid name, the same on every rank, and printed once.

torchrun's report includes the message. Only the standard library is imported.
"""

import difflib
import json
import os
import reprlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NoReturn

from parallel import gate
from parallel.runtime import endings, process

VALUE, LINE, LINES = 200, 1000, 200  # characters of a value and of a line; lines of a message
CLOSE = 0.65  # least similarity of a name that is suggested
REFUSED = 2  # exit status
NO_ROOM = 3  # exit status of a dry run: the settings are valid, but the run does not fit its GPUs
OURS = ("parallel", "verl_megatron")


class RefusalError(ValueError):
    """A user error that every rank knows of."""


# ---- text --------------------------------------------------------------------------------------------------

_SHORT = reprlib.Repr()  # reads no more of a large value than is shown
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 30
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = sys.maxsize  # `_cut` says how much is left out


def nearest(name: object, names: Iterable[str]) -> str:
    """Return `, did you mean "x"?` for the closest of `names`, or an empty string."""
    known = {each.lower(): each for each in reversed(list(names))}
    close = difflib.get_close_matches(str(name)[:VALUE].lower(), list(known), n=1, cutoff=CLOSE)
    return f', did you mean "{known[close[0]]}"?' if close else ""


def counted(count: int, one: str, many: str = "") -> str:
    """Return `1 rank`, or `2 ranks`; `many` is a plural that has no s at its end."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def short_repr(value: object, *, limit: int = VALUE) -> str:
    """Return `value` as Python writes it, for a message: long, large and deep values are cut."""
    try:
        return _cut(_SHORT.repr(value), limit)
    except (ValueError, RecursionError):  # Python writes no integer of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to be shown"


def readable(text: str) -> str:
    """Return `text` without control characters and without the middle of long lines."""
    lines = text.split("\n")
    if len(lines) > LINES:
        lines = [*lines[: LINES // 2], f"... ({len(lines) - LINES:,} lines)", *lines[-LINES // 2 :]]
    return "\n".join(_cut(_printable(_cut(line, 2 * LINE)), LINE) for line in lines)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = limit * 3 // 5, limit * 2 // 5 - 40
    return f"{text[:head]}... ({len(text) - head - tail:,} characters) ...{text[-tail:]}"


# ---- ranks -------------------------------------------------------------------------------------------------


def complain(text: str, *, agreed: bool = False) -> NoReturn:
    """Print a user error from one rank and exit; the other ranks wait until torchrun ends them.

    Args:
        agreed: every rank has this text; otherwise a rank that is not ended in time prints it as well.
    """
    gate.pass_through()  # if the run's checks fail, they have said it
    rank, text = os.environ.get("RANK") or "0", readable(text)
    said = text + f" (rank {rank})" * (rank != "0")
    tell_torchrun(text if agreed else said, agreed=agreed)
    if rank != "0":
        let_others_speak(REFUSED, seconds=5)
    if rank == "0" or not agreed:
        _say(said)
    process.end(REFUSED)


def about_output(error: OSError) -> str:
    """Return the words of a standard output that cannot be written."""
    return f"the output cannot be written ({error.strerror}); send it to another place"


def complain_of_output(error: OSError) -> NoReturn:
    """End a rank whose standard output cannot be written, with one line."""
    text = about_output(error)
    endings.tell("error", text)
    complain(text)


def fail(error: BaseException) -> NoReturn:
    """Print an unexpected error in one line and exit with 1; with its traceback, unless a log has that."""
    gate.pass_through()
    text = readable(endings.last_words(error))
    tell_torchrun(text)
    if "log" not in endings.place_of(error):
        traceback.print_exception(error, file=sys.__stderr__)
    _say(text)
    process.end(1)


def _say(text: str) -> None:
    if not _launcher_speaks():
        # Not sys.stderr: torch collects what is written there while it shows an exception. The line is one
        # write, also of an unbuffered stream, so that those of several ranks do not mix.
        print(f"error: {text}\n", end="", file=sys.__stderr__, flush=True)


def _launcher_speaks() -> bool:
    """Whether parallel.runtime.launch prints what is in the error file, once all ranks have ended."""
    if process.LAUNCHER not in os.environ or not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return False
    attempt, last = (
        os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return not (attempt.isdecimal() and last.isdecimal() and int(attempt) < int(last))


def tell_torchrun(text: str, *, agreed: bool = False) -> None:
    """Write the reason for a failure to torchrun's error file; its report ends with it.

    Args:
        agreed: every rank of the world writes this text.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The format of torch.distributed.elastic.multiprocessing.errors; for a plain message it would not
        # print the time.
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "agreed": agreed}
        message = {"message": text, "extraInfo": extra}
        try:
            with open(path, "w") as file:
                json.dump({"message": message}, file)
        except OSError:
            pass  # the report belongs to torchrun; the message is printed anyway


def let_others_speak(code: int, *, seconds: float) -> None:
    """Wait for the rank that prints the message: torchrun ends this rank once that one exits.

    If this rank is still alive afterwards, the caller prints.
    """
    signal.signal(signal.SIGTERM, lambda *_: process.end(code))
    time.sleep(seconds)


# ---- the Python interface ----------------------------------------------------------------------------------


def speak_once() -> None:
    """Report uncaught ValueErrors of torchrun ranks as the command line does, without a traceback per rank.

    Without torchrun, for example in a notebook, an exception stays an exception.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Exception hook that wraps another one."""

    def __init__(self, others: Callable[..., Any]):
        self.others = others

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, ValueError) and _came_through_us(trace):
            complain(str(error), agreed=isinstance(error, RefusalError))
        if "log" in endings.place_of(error):  # of a run, which has the traceback
            fail(error)
        self.others(kind, error, trace)


def _came_through_us(trace: TracebackType | None) -> bool:
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").split(".")[0] in OURS:
            return True
        trace = trace.tb_next
    return False

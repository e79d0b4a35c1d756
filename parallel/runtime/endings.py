"""How a run ends: where an error came from, and who is told before a process ends without teardown."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

Listener = Callable[[str, str], None]  # takes a reason and a text

# Reason and text of an end by Ctrl-C.
INTERRUPTED = "interrupted", "Ctrl-C; nothing is saved beyond the newest checkpoint"

_listeners: list[Listener] = []
_PLACE = "_verl_megatron_place"


def listen(listener: Listener) -> None:
    """Have `listener` called before the watchdog, SIGTERM or Ctrl-C ends this process without teardown."""
    _listeners.append(listener)


def leave(listener: Listener) -> None:
    """Undo `listen`."""
    with contextlib.suppress(ValueError):
        _listeners.remove(listener)


def tell(reason: str, text: str) -> None:
    """Call the listeners: the process ends now. Reasons are `stuck`, `stopped`, `error` and `interrupted`."""
    for listener in list(_listeners):
        # Whatever is wrong with a record, the process has to end.
        with contextlib.suppress(Exception):
            listener(reason, text)


def locate(error: BaseException, **place: Any) -> None:
    """Note where an error came from (`phase`, `iteration`, `log`); what is known already stays."""
    known = error.__dict__.setdefault(_PLACE, {})
    known.update({name: value for name, value in place.items() if name not in known})


def place_of(error: BaseException) -> dict[str, Any]:
    """Return what `locate` has noted of an error."""
    return dict(getattr(error, _PLACE, {}))


def last_words(error: BaseException) -> str:
    """Return an error in one line: rank, phase, type and message, and where its traceback stands."""
    place = place_of(error)
    where = f"rank {os.environ.get('RANK') or '0'}"
    if phase := place.get("phase"):
        where += f" in {phase}"
    if iteration := place.get("iteration"):
        where += f" of iteration {iteration}"
    message = " ".join(str(error).split()) or "no message"
    log = f"; tracebacks of all ranks are in {place['log']}" if place.get("log") else ""
    return f"{where}: {type(error).__name__}: {message}{log}"

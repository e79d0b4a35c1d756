"""Program that passes on what a rank prints to its console, and writes it to a log with time and rank.

A process of its own, so that the last words of a rank that crashes are kept. Needs only the standard library
and starts in a few milliseconds. Its argument is a JSON object with the fields of `Task`. It ends when no
process holds the rank's streams any more.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import sys
import time
from typing import NamedTuple

LONGEST = 1 << 16  # bytes of a line; longer ones are cut into several
CODES = re.compile(
    rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)


class Task(NamedTuple):
    """What the rank asks for."""

    path: str  # of the log
    rank: int
    limit_bytes: int  # of the log; then it becomes `path`.1, and a new one begins
    control: int  # a socket: lines of JSON
    streams: dict[str, int]  # console to write to, by the descriptor to read from


class Log:
    """Appends lines to a file that other ranks append to as well."""

    def __init__(self, task: Task):
        self._path, self._limit, self._mark = task.path, task.limit_bytes, b" rank %d: " % task.rank
        self._lines: list[bytes] = []
        self._has_failed = False

    def add(self, line: bytes) -> None:
        """Add a line with its time; control characters and a bar's earlier states are left out."""
        text = CODES.sub(b"", line.rstrip(b"\r").rpartition(b"\r")[2]).rstrip()
        if text:
            now = time.time()
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
            self._lines.append(stamp.encode() + self._mark + text + b"\n")

    def write(self) -> str:
        """Write the lines so far; return a warning the first time that it fails."""
        lines, self._lines = b"".join(self._lines), []
        try:
            if lines:
                self._append(lines)
        except OSError as error:
            warning = "" if self._has_failed else f"warning: {self._path} cannot be written ({error})\n"
            self._has_failed = True
            return warning
        return ""

    def _append(self, lines: bytes) -> None:
        # By its name each time: another rank may have put the file aside.
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(handle).st_size + len(lines) > self._limit and self._put_aside(handle):
                return self._append(lines[-self._limit :])
            os.write(handle, lines)
        finally:
            os.close(handle)

    def _put_aside(self, handle: int) -> bool:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if not os.fstat(handle).st_size:
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(handle)):
                os.replace(self._path, f"{self._path}.1")
        return True


class Stream:
    """One stream of the rank: passed on as it is, and cut into lines for the log."""

    def __init__(self, reading: int, console: int, log: Log):
        self.reading, self.console, self._log = reading, console, log
        self._rest = b""

    def take(self) -> bool:
        """Pass on what there is; return False at the end of the stream."""
        try:
            data = os.read(self.reading, 1 << 16)
        except OSError:  # a terminal's other end is closed
            data = b""
        if not data:
            if self._rest:
                self._log.add(self._rest)
            return False
        pass_on(self.console, data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:  # a line without an end, or a bar
            kept = self._rest.rpartition(b"\r")[2]
            lines, self._rest = ([*lines, kept], b"") if len(kept) > LONGEST else (lines, kept)
        for line in lines:
            self._log.add(line)
        return True


def pass_on(console: int, data: bytes) -> None:
    """Write to the console; one that is gone does not end the log."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(console, data) :]


class Collector:
    """Reads the streams and the control socket until all streams have ended."""

    def __init__(self, task: Task):
        self._log, self._control, self._asked = Log(task), task.control, b""
        self._streams = {
            int(reading): Stream(int(reading), console, self._log)
            for reading, console in task.streams.items()
        }
        self._poll = select.poll()
        for reading in (self._control, *self._streams):
            self._poll.register(reading, select.POLLIN)

    def run(self) -> None:
        while self._streams:
            self._turn(None)

    def _turn(self, timeout_ms: int | None) -> bool:
        """Take what there is; return whether there was anything."""
        ready = [handle for handle, _ in self._poll.poll(timeout_ms)]
        for handle in ready:
            if handle in self._streams and not self._streams[handle].take():
                self._poll.unregister(handle)
                del self._streams[handle]
        if timeout_ms is None and self._control in ready:
            self._obey()
        self._say(self._log.write())
        return any(handle != self._control for handle in ready)

    def _obey(self) -> None:
        """Do what the rank asks for: `log` a text, or `sync`, that is, answer once all is passed on."""
        try:
            data = os.read(self._control, 1 << 16)
        except OSError:  # the rank has ended before it read an answer
            data = b""
        if not data:
            self._poll.unregister(self._control)
            return
        *orders, self._asked = (self._asked + data).split(b"\n")
        for order in map(_parsed, orders):
            for line in order.get("log", "").encode(errors="backslashreplace").splitlines():
                self._log.add(line)
            if order.get("sync"):
                while self._streams and self._turn(0):
                    pass
                self._say(self._log.write())
                with contextlib.suppress(OSError):
                    os.write(self._control, b"\n")

    def _say(self, warning: str) -> None:
        if warning:
            pass_on(next(iter(self._streams.values())).console if self._streams else 2, warning.encode())


def _parsed(order: bytes) -> dict:
    try:
        return json.loads(order)
    except ValueError:  # cut off: the rank did not wait for a console that stands still
        return {}


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the rank
    Collector(Task(**json.loads(sys.argv[1]))).run()

"""The log of a run: what all ranks print, by file descriptors, so that C libraries and crashes are in it."""

import contextlib
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import termios
import traceback
import tty
from pathlib import Path

from parallel.runtime import collector, endings

NAME = "run.log"
LIMIT_BYTES = 32 << 20  # then the log becomes run.log.1, in place of an earlier one
PATIENCE_S = 5.0  # for the collector to pass on what was printed last
PIPE_BYTES = 1 << 20  # so that a rank seldom waits for its console


class RunLog:
    """Copies what this rank and its child processes print into the log within a `with` block.

    The console shows what it would show anyway; on a terminal the streams are a terminal's. An exception that
    leaves the block is in the log with its traceback. Without a process for it, there is a warning and no
    log.

    Args:
        folder: exists; ranks of the first host write `run.log`, those of another `run.nodeN.log`, because
            appending is not atomic between hosts.
        rank: number of this rank, for each line.
        node: number of this host.
    """

    def __init__(self, folder: str | Path, *, rank: int, node: int = 0):
        self.path = Path(folder) / (f"run.node{node}.log" if node else NAME)
        self._rank = rank
        self._saved: dict[int, int] = {}  # console, by the descriptor that it has outside
        self._control: socket.socket | None = None

    def __enter__(self) -> "RunLog":
        try:
            self._start()
        except OSError as error:
            self._restore()
            print(f"warning: no {self.path}, because no process can be started for it ({error})", flush=True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._flush()
        self._order(sync=True)  # what was printed before the traceback comes before it
        if error is not None and self._control is not None:
            self.write("".join(traceback.format_exception(error)))
            self._order(sync=True)
            endings.locate(error, log=str(self.path))
        self._restore()
        if self._control is not None:
            self._control.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a child process still prints
                self._process.wait(0.2)

    def write(self, text: str) -> None:
        """Write lines into the log only."""
        self._order(log=text)

    # ---- the collector

    def _start(self) -> None:
        self._flush()
        ours, theirs = socket.socketpair()
        readings: dict[int, int] = {}  # console, by the descriptor to read from
        writings: dict[int, int] = {}  # by the descriptor that it takes the place of
        try:
            for number in (1, 2):
                self._saved[number] = os.dup(number)
            for numbers in ([1, 2],) if _is_same(1, 2) else ([1], [2]):
                reading, writing = _channel(numbers[0])
                readings[reading] = self._saved[numbers[0]]
                writings |= dict.fromkeys(numbers, writing)
            task = collector.Task(
                path=str(self.path.absolute()),
                rank=self._rank,
                limit_bytes=LIMIT_BYTES,
                control=theirs.fileno(),
                streams={str(reading): console for reading, console in readings.items()},
            )
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", collector.__file__, json.dumps(task._asdict())],
                pass_fds=[theirs.fileno(), *readings, *self._saved.values()],
                stdin=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # signals to the rank's group are not for it
                env={name: value for name, value in os.environ.items() if not name.endswith("RANK")},
            )
            self._control = ours
            for number, writing in writings.items():
                os.dup2(writing, number)
        finally:
            theirs.close()
            for handle in {*readings, *writings.values()}:
                os.close(handle)

    def _order(self, **order: object) -> None:
        """Send an order; with `sync` wait until what was printed so far is passed on."""
        if self._control is None:
            return
        with contextlib.suppress(OSError):
            self._control.settimeout(PATIENCE_S)
            self._control.sendall(json.dumps(order).encode() + b"\n")
            if order.get("sync") and select.select([self._control], [], [], PATIENCE_S)[0]:
                self._control.recv(16)

    def _restore(self) -> None:
        for number, console in self._saved.items():
            os.dup2(console, number)
            os.close(console)
        self._saved = {}

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # pyright: ignore[reportOptionalMemberAccess]  # None without a console


def _channel(console: int) -> tuple[int, int]:
    """Return where to read from and where to write to: a pipe, or a terminal in place of a terminal."""
    if os.isatty(console):
        with contextlib.suppress(OSError, termios.error):
            reading, writing = os.openpty()
            tty.setraw(writing)  # the console's own terminal translates line ends
            termios.tcsetwinsize(writing, termios.tcgetwinsize(console))
            return reading, writing
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def _is_same(first: int, second: int) -> bool:
    """Whether two descriptors write to the same place: then one channel keeps the order."""
    return os.path.samestat(os.fstat(first), os.fstat(second))

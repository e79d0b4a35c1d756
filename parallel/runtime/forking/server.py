"""The process of `python -m parallel.runtime.forking.server SOCKET PRELOADED_BY MODULE ARGUMENTS`.

It calls `PRELOADED_BY.preload(ARGUMENTS)`, and then either becomes a rank, or forks one for each request on
the socket. A rank runs what `python -u -m MODULE ARGUMENTS` runs, in a session of its own. The parent of a
forked one is the launcher, as if that had started it: the process between them ends at once, and the launcher
adopts the rank (`adopting` in `client`). So the launcher alone waits for ranks and signals to them. The
process ends with the launcher.

One that forks has one thread, because a fork copies only the thread that calls it. If imports start others it
ends, and so it does if they or a fork fail; ranks then start without it.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from parallel.runtime import forking, process

# Requests, which come with file descriptors: the rank's environment, its stdout and its stderr.
FORK, BECOME = b"fork", b"be 1"
BLANK = " " * 8  # RANK when the process starts: a place for that of a rank
OF_ARGUMENTS = slice(45, 47)  # of /proc/PID/stat after the name: begin and end in memory, proc_pid_stat(5)
OF_ENVIRONMENT = slice(47, 49)


def main(channel: socket.socket, preloaded_by: str, module: str, arguments: Sequence[str]) -> None:
    """Serve until the launcher ends; in a rank, run its module."""
    del os.environ["RANK"]
    launcher = int(os.environ[process.LAUNCHER])
    process.end_with(signal.SIGKILL, is_orphan=lambda: os.getppid() != launcher)
    forking.began = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        _preload(preloaded_by, arguments)
        sys.modules.pop(module, None)  # the rank runs it
    except BaseException:
        os._exit(1)
    try:
        _serve(channel)
    except OSError:  # no more processes, or the launcher has ended
        os._exit(1)
    command = [sys.executable, "-u", "-m", module, *arguments]
    _show(command)
    sys.orig_argv[:], sys.argv[1:] = command, arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _preload(by: str, arguments: Sequence[str]) -> None:
    gc.disable()
    importlib.import_module(by).preload(arguments)
    gc.freeze()  # the pages of these objects stay shared
    gc.enable()


def _serve(channel: socket.socket) -> None:
    """Answer requests; return only in ranks."""
    while True:
        request, files, _, _ = socket.recv_fds(channel, len(FORK), 3)
        if not request:
            os._exit(0)
        if request == BECOME:
            _become(channel, files)
            return
        if len(os.listdir("/proc/self/task")) > 1:
            os._exit(1)
        number = _fork(files)
        if number is None:
            channel.close()
            return
        if not number:
            os._exit(1)  # nothing of no bytes can be sent
        for file in files:
            os.close(file)
        channel.send(number)


def _become(channel: socket.socket, files: Sequence[int]) -> None:
    """Be the launcher's rank from here on. A SIGTERM that comes meanwhile ends the rank once it is known."""
    asked: list[int] = []
    ends = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)  # until it has left the group of the launcher
    os.setpgid(0, os.getpgid(os.getppid()))  # the leader of a group cannot have a session of its own
    os.setsid()
    signal.signal(signal.SIGINT, interrupts)
    _replace(files)
    channel.send(b"%d" % os.getpid())
    channel.close()
    signal.signal(signal.SIGTERM, ends)
    for number in asked:
        os.kill(os.getpid(), number)


def _fork(files: Sequence[int]) -> bytes | None:
    """Return the process id of a new rank, empty if there is none; None in the rank."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with open(reading, "rb") as told:
            number = told.read()  # until the rank has a session, and is the launcher's child
        os.waitpid(between, 0)
        return number
    try:
        own = os.getpid()
        if rank := os.fork():
            os.write(writing, b"%d" % rank)
            os._exit(0)
    except BaseException:
        os._exit(1)
    try:
        os.setsid()
        _replace(files)
        while os.getppid() == own:
            time.sleep(0.001)
        os.close(writing)
        os.close(reading)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    return None


def _replace(files: Sequence[int]) -> None:
    """Give a rank its environment, its streams, and random numbers of its own."""
    with open(files[0], "rb") as file:
        entries = os.fsdecode(file.read()).split("\0")
    os.environ.clear()
    for entry in entries:
        name, _, os.environ[name] = entry.partition("=")
    for number, file in enumerate(files[1:], 1):
        os.dup2(file, number)
        os.close(file)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a new process; Python's own generator sees to it


def _show(command: Sequence[str]) -> None:
    """Let `ps` and /proc show the rank's command and RANK in place of the server's, which are longer."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = map(int, fields[OF_ARGUMENTS])
        _overwrite(begin, end - begin, "\0".join(command))
        begin, end = map(int, fields[OF_ENVIRONMENT])
        blank = f"RANK={BLANK}"
        place = ctypes.string_at(begin, end - begin).index(blank.encode())
        _overwrite(begin + place, len(blank), f"RANK={os.environ['RANK']}")


def _overwrite(begin: int, size: int, text: str) -> None:
    found = os.fsencode(text)
    if begin and len(found) <= size:
        ctypes.memmove(begin, found.ljust(size, b"\0"), size)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3], sys.argv[4:])

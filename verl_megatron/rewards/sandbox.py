"""Sandbox of a reward worker: separate processes that cannot reach the trainer and that end with it.

A worker process becomes three. The warden, a child of the trainer, forwards the worker's output up to a
limit. Its child, the reaper, waits for every process that the reward starts, and kills them all when the
worker, its own child, ends. Where the system allows it, reaper and worker have their own user and process-id
namespaces. They can then signal no process outside and read no memory of other processes, and the kernel ends
every process inside together with the reaper. Files, network, environment and /proc are as outside. Otherwise
they share the system's process ids: a reward's children still end with it, but it may signal whatever its
user may.

Worker processes import this file, so it needs only the standard library.
"""

import contextlib
import ctypes
import errno
import os
import signal
import threading
from pathlib import Path
from typing import NoReturn

KILLED = 128 + signal.SIGKILL  # exit code of the warden when the worker was killed

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000  # linux/sched.h
LIBC = ctypes.CDLL(None, use_errno=True)


def enter(parent: int, *, connection: int, output_bytes: int) -> str:
    """Turn this process into the worker; return why it has no own namespaces, or "".

    `connection` is a file descriptor that only the worker keeps. The first `output_bytes` of its output go to
    this process's stderr. Call it in a single-threaded child of process `parent`; all processes end with the
    parent's thread that started this one.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until each process has its handler
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)
    printed, printing = os.pipe()
    refused = _isolate()
    reaper = os.fork()
    if reaper:
        os.close(connection)
        os.close(printing)
        _keep(reaper, signal.SIGTERM if refused else signal.SIGKILL, printed, output_bytes)
    os.close(printed)
    for stream in (1, 2):
        os.dup2(printing, stream)
    os.close(printing)
    end_with_parent(signal.SIGTERM if refused else signal.SIGKILL)
    if refused:
        LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        os.close(connection)
        _reap(worker)
    end_with_parent(signal.SIGKILL)
    with contextlib.suppress(OSError):  # out of memory, the kernel would end the largest process: a trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.setsid()  # a signal to its process group reaches neither of the other two
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return refused


def end_with_parent(number: int) -> None:
    LIBC.prctl(_PR_SET_PDEATHSIG, number)


def _keep(reaper: int, ending: int, printed: int, output_bytes: int) -> NoReturn:
    """Run the warden: on SIGTERM it sends `ending` to the reaper; it exits with the worker's exit code."""
    signal.signal(signal.SIGTERM, lambda *_: signal_process(reaper, ending))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    left = output_bytes
    while chunk := os.read(printed, 1 << 16):  # ends when no process of the sandbox is left
        try:
            if left > 0:
                os.write(2, chunk[:left])
                if len(chunk) > left:
                    os.write(2, b"\n(a reward worker prints more than is shown)\n")
        except OSError:  # stderr is closed
            left = 0
        left -= len(chunk)
    leave_as(os.waitpid(reaper, 0)[1])


def signal_process(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended and been reaped
        os.kill(process, number)


def _reap(worker: int) -> NoReturn:
    """Run the reaper: the first process of a namespace, or else the subreaper that adopts orphans."""
    signal.signal(signal.SIGTERM, lambda *_: signal_process(worker, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ended, status = os.waitpid(-1, 0)
    while ended != worker:
        ended, status = os.waitpid(-1, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while os.getpid() != 1:  # the kernel does it if this is the namespace's first process
            for child in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)  # its children are now this process's
    leave_as(status)


def leave_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _isolate() -> str:
    """Give this process's user and its future children their own namespaces; return the error text, or ""."""
    trial = os.fork()  # a process that fails half-way cannot go back
    if not trial:
        os._exit(_unshare())
    error = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1]) or _unshare()
    return os.strerror(error) if error else ""


def _unshare() -> int:
    """Return 0 or an error number.

    Ids keep their values where this process may map them, so that files stay readable.
    """
    ready, unshared = os.pipe()
    outside = os.fork()
    if not outside:
        os.close(unshared)
        os.read(ready, 1)
        os._exit(_map_ids(os.getppid()))
    os.close(ready)
    error = ctypes.get_errno() or errno.EPERM if LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWPID) else 0
    os.close(unshared)  # lets the outside process continue
    return error or os.waitstatus_to_exitcode(os.waitpid(outside, 0)[1])


def _map_ids(pid: int) -> int:
    """Return 0 or an error number. Maps all ids if this process is privileged, else only its own."""
    folder = Path(f"/proc/{pid}")
    try:
        for kind in ("uid_map", "gid_map"):
            ranges = [line.split() for line in Path(f"/proc/self/{kind}").read_text().splitlines()]
            (folder / kind).write_text("".join(f"{first} {first} {count}\n" for first, _, count in ranges))
    except OSError:
        try:
            (folder / "setgroups").write_text("deny")
            (folder / "uid_map").write_text(f"{os.geteuid()} {os.geteuid()} 1")
            (folder / "gid_map").write_text(f"{os.getegid()} {os.getegid()} 1")
        except OSError as error:
            return error.errno or errno.EPERM
    return 0

"""The sandbox of a reward worker: processes of its own that cannot reach the trainer and end with it.

A worker process becomes three. The warden, a child of the trainer, passes on what the worker prints, up to a
limit. Below it the reaper waits for every process the reward starts, and ends them all when the worker, its child,
ends. Where the system allows, reaper and worker have user and process-id namespaces of their own: they can signal
nobody outside and read no memory of other processes, and the kernel ends every process inside together with the
reaper. Files, network, environment and /proc are as outside. Elsewhere they share the process ids of the system: a
reward's children still end with it, but it may signal what its user may.

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

KILLED = 128 + signal.SIGKILL  # exit code of the warden when somebody killed the worker

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000  # linux/sched.h
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter(parent: int, *, connection: int, output_bytes: int) -> str:
    """Becomes the worker; returns why it has no namespaces of its own, or nothing.

    `connection` is a file descriptor that only the worker keeps; the first `output_bytes` of its output go to
    this process's stderr. Call it in a process with one thread, a child of process `parent`: all end with the
    thread there that started it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until each knows what to do then
    _end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the line above
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
    _end_with_parent(signal.SIGTERM if refused else signal.SIGKILL)
    if refused:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        os.close(connection)
        _reap(worker)
    _end_with_parent(signal.SIGKILL)
    os.setsid()  # a signal to its own group reaches neither of the other two
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return refused


def _end_with_parent(number: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def _keep(reaper: int, ending: int, printed: int, output_bytes: int) -> NoReturn:
    """The warden: asked to end, it sends the reaper the signal `ending`; its exit code is the worker's."""
    signal.signal(signal.SIGTERM, lambda *_: _end(reaper, ending))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    left = output_bytes
    while chunk := os.read(printed, 1 << 16):  # ends when no process of the sandbox is left
        try:
            if left > 0:
                os.write(2, chunk[:left])
                if len(chunk) > left:
                    os.write(2, b"\n(a reward worker prints more than is shown)\n")
        except OSError:  # nobody listens
            left = 0
        left -= len(chunk)
    _leave_as(os.waitpid(reaper, 0)[1])


def _end(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and been waited for
        os.kill(process, number)


def _reap(worker: int) -> NoReturn:
    """The reaper: the first process of a namespace, or what adopts orphans where there is none."""
    signal.signal(signal.SIGTERM, lambda *_: _end(worker, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ended, status = os.waitpid(-1, 0)
    while ended != worker:
        ended, status = os.waitpid(-1, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while os.getpid() != 1:  # the kernel does it where this is the first
            for child in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)  # whose children are this process's now
    _leave_as(status)


def _leave_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _isolate() -> str:
    """Gives this process's user, and its children to come, namespaces of their own; says why it could not."""
    trial = os.fork()  # whoever fails half-way cannot go back
    if not trial:
        os._exit(_unshare())
    error = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1]) or _unshare()
    return os.strerror(error) if error else ""


def _unshare() -> int:
    """0, or an error number. Ids keep their numbers, where this process may say so: files stay readable."""
    ready, unshared = os.pipe()
    outside = os.fork()
    if not outside:
        os.close(unshared)
        os.read(ready, 1)
        os._exit(_map_ids(os.getppid()))
    os.close(ready)
    error = ctypes.get_errno() or errno.EPERM if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWPID) else 0
    os.close(unshared)  # the one outside goes on
    return error or os.waitstatus_to_exitcode(os.waitpid(outside, 0)[1])


def _map_ids(pid: int) -> int:
    """0, or an error number: all ids where this process is privileged, else its own only."""
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

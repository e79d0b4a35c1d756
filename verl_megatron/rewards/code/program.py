"""Sandbox of a program that nobody has looked at: it computes, and reaches nothing.

A program becomes three processes below the one that calls `run_program`. The outer one gives itself
namespaces and waits. Its child, the first process of the process-id namespace, makes a file system of its own
and waits. The child's child is the program. It has

- namespaces of its own for users, processes, mounts, network, IPC and host name, and no network at all;
- a user who owns no file, no capabilities, and no way to get any;
- a file system with Python and the system's libraries, read-only, and empty folders in memory for /tmp,
  /var/tmp and /dev/shm. There is no /proc, no home, no file of the run;
- no file descriptor but its input and output, and a clean environment;
- no system calls that would give it memory without limits, or that it has no need of;
- limits of time, memory, processes, sizes of files, and output. Memory of several processes is looked at from
  outside, forty times a second.

The kernel ends all its processes with the first one of its namespace.

Worker processes import this file, so it needs only the standard library.
"""

import contextlib
import fcntl
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import NoReturn

from verl_megatron.rewards.code.file_system import FILE_BYTES, MAIN, make_file_system
from verl_megatron.rewards.code.kernel import call, refuse_calls
from verl_megatron.rewards.sandbox import LIBC, end_with_parent, leave_as, signal_process

REMEDY = (
    "allow user namespaces (user.max_user_namespaces above 0, "
    "kernel.apparmor_restrict_unprivileged_userns=0, in containers a seccomp profile with unshare and "
    "mount), or score code with a function of yours"
)
MOST_PROCESSES = 16  # threads count
_LOOK_S = 0.025  # between two looks at the memory of all processes

# Users, processes, mounts, network, IPC, host name (linux/sched.h)
_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38  # linux/prctl.h
_USER, _NOBODY = 1000, 65534  # the program's user inside; outside, if this process may choose
_ENVIRONMENT = {
    **{"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"},
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    seconds: float
    memory_bytes: int  # address space of each process, and memory of all of them
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    output: bytes
    code: int  # exit code; 128 + the signal that ended it
    cut: str = ""  # why it was ended; empty: it ended by itself


def run_program(source: str, given: bytes, limits: Limits) -> Ended:
    """Run Python code with `given` as its standard input; return its standard output.

    Raises:
        OSError: the sandbox cannot be made.
    """
    with contextlib.ExitStack() as stack:
        said, saying = _pipe(stack)
        mapped, mapping = _pipe(stack)
        output, writing = _pipe(stack)
        started, starting = _pipe(stack)
        memory = stack.enter_context(open(os.memfd_create("input"), "w+b"))
        memory.write(given)
        memory.seek(0)
        ends = (memory, writing, saying, mapped, starting)
        streams = _Streams(*(end.fileno() for end in ends))
        parent = os.getpid()
        outer = os.fork()
        if not outer:
            _guarded(streams.said, lambda: _be_outer(parent, streams, source, limits))
        cut, text, problem = "", b"", b""
        try:
            for end in ends[1:]:
                end.close()
            number, problem = _map_users(said, mapping)
            if not problem:
                text, cut = _read(output, started, limits, number)
        finally:
            signal_process(outer, signal.SIGTERM)  # it ends all others first
            code = os.waitstatus_to_exitcode(os.waitpid(outer, 0)[1])
        problem += said.read() or b""
    if problem:
        raise OSError(problem.decode(errors="replace"))
    return Ended(text, code if code >= 0 else 128 - code, cut)


@dataclass(frozen=True, slots=True)
class _Streams:
    """File descriptors of the processes below."""

    given: int
    output: int
    said: int  # what went wrong
    mapped: int  # a byte arrives once the users are mapped
    starting: int  # it is closed once the program has begun


def _pipe(stack: contextlib.ExitStack) -> tuple[RawIOBase, RawIOBase]:
    reading, writing = os.pipe()
    ends = open(reading, "rb", buffering=0), open(writing, "wb", buffering=0)
    for end in ends:
        stack.enter_context(end)
    return ends


def _map_users(said: RawIOBase, mapping: RawIOBase) -> tuple[str, bytes]:
    """Map the users of the outer process, which may not do it itself.

    Returns:
        Its number in /proc, which is another one than in this namespace, and what it says of a problem.
    """
    number = said.read(32) or b""
    if not number.isdigit():
        return "", number or b"no process"
    folder = Path("/proc") / number.decode()
    own = os.geteuid(), os.getegid()
    if own[0] == 0:  # no limit of processes holds for root
        maps = (f"0 0 1\n{_USER} {_NOBODY} 1\n",) * 2
    else:
        (folder / "setgroups").write_text("deny")
        maps = tuple(f"{_USER} {one} 1\n" for one in own)
    for name, text in zip(("uid_map", "gid_map"), maps):
        (folder / name).write_text(text)
    mapping.write(b"1")
    return number.decode(), b""


def _read(output: RawIOBase, started: RawIOBase, limits: Limits, outer: str) -> tuple[bytes, str]:
    """Return the output until all processes have ended, and why they have to be ended, or ""."""
    until, text = time.monotonic() + limits.seconds, b""
    next_look = math.inf  # at the memory: before the program begins, it is a copy of this process
    poll = select.poll()
    for stream in (output, started):
        poll.register(stream, select.POLLIN)
    while (now := time.monotonic()) < until:
        if now >= next_look:
            if _memory_of_program(outer) > limits.memory_bytes:
                return text, "memory"
            next_look = time.monotonic() + _LOOK_S
        ready = [stream for stream, _ in poll.poll(math.ceil((min(until, next_look) - now) * 1000))]
        if started.fileno() in ready:
            poll.unregister(started)
            next_look = time.monotonic() + _LOOK_S
        if output.fileno() in ready:
            chunk = output.read(1 << 16) or b""
            text += chunk
            if not chunk:
                return text, ""
            if len(text) > limits.output_bytes:
                return text, "output"
    return text, "time"


def _memory_of_program(outer: str) -> int:
    """Return the bytes of memory of a program's processes; 0 where the kernel does not list them.

    Memory that processes share since a fork counts for each.
    """
    return sum(map(_memory_below, _children(outer)))


def _memory_below(number: str) -> int:
    total = 0
    for child in _children(number):
        with contextlib.suppress(OSError):  # it has ended
            resident, shared = Path(f"/proc/{child}/statm").read_text().split()[1:3]
            total += (int(resident) - int(shared)) * resource.getpagesize()
        total += _memory_below(child)
    return total


def _children(number: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{number}/task/{number}/children").read_text().split()
    return []


# ---- the processes of a program ----------------------------------------------------------------------------


def _guarded(said: int, act: Callable[[], None]) -> NoReturn:
    """Run a process; say what goes wrong."""
    try:
        act()
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(said, f"{type(error).__name__}: {error}"[:500].encode(errors="replace"))
    os._exit(1)


def _be_outer(parent: int, streams: _Streams, source: str, limits: Limits) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    call("unshare", _NAMESPACES)
    end_with_parent(signal.SIGKILL)  # a change of users takes it back
    os.write(streams.said, os.readlink("/proc/self").encode())
    if not os.read(streams.mapped, 1):
        os._exit(1)
    alive, staying = os.pipe()
    first = os.fork()
    if not first:
        os.close(staying)
        _guarded(streams.said, lambda: _be_first(alive, streams, source, limits))
    os.close(streams.starting)
    signal.signal(signal.SIGTERM, lambda *_: signal_process(first, signal.SIGKILL))
    os.write(staying, b"1")
    leave_as(os.waitpid(first, 0)[1])


def _be_first(alive: int, streams: _Streams, source: str, limits: Limits) -> None:
    end_with_parent(signal.SIGKILL)
    if not os.read(alive, 1):  # the parent ended before the line above
        os._exit(1)
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    make_file_system(source)
    program = os.fork()
    if not program:
        _guarded(streams.said, lambda: _be_program(streams, limits))
    os.close(streams.starting)
    ended, status = os.waitpid(-1, 0)
    while ended != program:
        ended, status = os.waitpid(-1, 0)
    leave_as(status)


def _be_program(streams: _Streams, limits: Limits) -> None:
    os.setsid()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    _drop_rights()
    _limit(limits)
    null = os.open("/dev/null", os.O_WRONLY)
    starting = fcntl.fcntl(streams.starting, fcntl.F_DUPFD_CLOEXEC, 5)
    for number, stream in enumerate((streams.given, streams.output, null)):
        os.dup2(stream, number)
    said = os.dup2(streams.said, 3, inheritable=False)  # both are closed as the program begins
    os.closerange(os.dup2(starting, 4, inheritable=False) + 1, most)
    try:
        os.execve(sys.executable, [sys.executable, "-I", "-B", MAIN], _ENVIRONMENT)
    except OSError as error:
        os.write(said, f"{sys.executable} cannot be started ({error.strerror})".encode())


def _drop_rights() -> None:
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):  # those that there are
        LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    with contextlib.suppress(PermissionError):  # where its own user is the only one that could be mapped
        os.setgroups([])
    os.setresgid(_USER, _USER, _USER)
    os.setresuid(_USER, _USER, _USER)  # exec then leaves no capabilities
    refuse_calls()


def _limit(limits: Limits) -> None:
    seconds = math.ceil(limits.seconds) + 1
    for name, limit in (
        ("CPU", seconds),
        ("AS", limits.memory_bytes),
        ("DATA", limits.memory_bytes),
        ("FSIZE", FILE_BYTES),
        ("NPROC", MOST_PROCESSES),
        ("NOFILE", 256),
        ("CORE", 0),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, limit))

"""Checks of the system's limits: shared memory, files, processes, memory, cores, reading other processes."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from verl_megatron.doctor import memory_probe
from verl_megatron.doctor.finding import Case, Finding, ask, end_group, line_within

GIB = 2**30
SHARED = Path("/dev/shm")
SHARED_BYTES = 1 * GIB  # for NCCL, vLLM and reward workers of a host
FILES, FEW_FILES = 4096, 1024  # sockets, shards and shared memory of a rank
PROCESSES = 4096
READ_S = 30.0  # for a small program
PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
INFINIBAND = Path("/sys/class/infiniband")
GROUP = Path("/sys/fs/cgroup")
PROBE = [sys.executable, "-I", "-S", memory_probe.__file__]


def check_shared_memory(case: Case) -> Iterator[Finding]:
    try:
        size, _, free = shutil.disk_usage(SHARED)
        is_writable = os.access(SHARED, os.W_OK)
    except OSError as error:
        size, free, is_writable = 0, 0, False
        found = f"{SHARED}: {error.strerror}"
    else:
        found = f"{SHARED} has {free / GIB:.1f} of {size / GIB:.1f} GiB free"
    if not is_writable:
        yield Finding(
            check="shared memory",
            status="problem",
            found=found if not size else f"{SHARED} cannot be written",
            why="NCCL, vLLM and reward workers exchange data there",
            remedy="start the container with --shm-size=16g, or mount a tmpfs there",
        )
    elif free < SHARED_BYTES:
        yield Finding(
            check="shared memory",
            status="warning",
            found=found,
            why="NCCL, vLLM and reward workers exchange data there; a full one ends them with a bus error",
            remedy="start the container with --shm-size=16g, or remove what fills it",
        )
    else:
        yield Finding(check="shared memory", status="ok", found=found)


def check_open_files(case: Case) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_text(soft)} files may be open (hard limit {_text(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= FILES:
        yield Finding(check="open files", status="ok", found=found)
        return
    yield Finding(
        check="open files",
        status="problem" if soft < FEW_FILES else "warning",
        found=found,
        why="ranks hold sockets to each other, shards and shared memory open",
        remedy=f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else max(soft, min(hard, 65536))}"
        + ("" if hard == resource.RLIM_INFINITY or hard >= FILES else ", after raising the hard limit"),
    )


def check_locked_memory(case: Case) -> Iterator[Finding]:
    """Locked memory: adapters of InfiniBand register what they send."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    text = f"{_bytes(soft)} may be locked"
    if not adapters:
        yield Finding(check="locked memory", status="ok", found=f"{text}; no InfiniBand, which needs it")
    elif soft == resource.RLIM_INFINITY:
        yield Finding(check="locked memory", status="ok", found=f"{text}; adapters {', '.join(adapters)}")
    else:
        yield Finding(
            check="locked memory",
            status="warning",
            found=f"{text}, and there are adapters {', '.join(adapters)}",
            why="NCCL fails to register memory with them",
            remedy="ulimit -l unlimited, or --ulimit memlock=-1 for a container",
        )


def check_processes(case: Case) -> Iterator[Finding]:
    """Number of processes and threads, and whether one can be started."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    answer = ask([sys.executable, "-I", "-S", "-c", "import os; print(os.getpid())"], timeout_s=READ_S)
    group = _number(GROUP / "pids.max")
    least = min(value for value in (soft if soft != resource.RLIM_INFINITY else None, group, 2**62) if value)
    text = "any number of processes" if least == 2**62 else f"{least:,} processes and threads"
    if answer.problem or least < PROCESSES:
        yield Finding(
            check="processes",
            status="problem" if answer.problem else "warning",
            found=answer.problem or f"at most {text}",
            why="a rank has hundreds of threads, and reward functions run in processes of their own",
            remedy="ulimit -u unlimited, or --pids-limit=-1 for a container",
        )
    else:
        yield Finding(check="processes", status="ok", found=f"{text}; a new one starts")


def check_memory(case: Case) -> Iterator[Finding]:
    """Memory and cores that this process may use."""
    total, group = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _number(GROUP / "memory.max")
    usable = min(total, group or total)
    cores = min(len(os.sched_getaffinity(0)), _quota_cores() or 1 << 30)
    limit = f", {usable / GIB:.0f} GiB of it for this container" if usable < total else ""
    found = f"{total / GIB:.0f} GiB of memory{limit}; {cores} cores"
    if cores < len(case.gpus) * 2:
        yield Finding(
            check="memory and cores",
            status="warning",
            found=f"{found} for {len(case.gpus)} GPUs",
            why="vLLM's scheduler and the launching of kernels need a fast core a rank, rewards some more",
            remedy="give the container or the job more cores",
        )
    else:
        yield Finding(check="memory and cores", status="ok", found=found)


def check_ptrace(case: Case) -> Iterator[Finding]:
    """Whether a process may read another one of the same user."""
    try:
        scope = PTRACE.read_text().strip()
    except OSError:
        scope = ""
    said = _said_of_reading()
    text = f"ptrace_scope {scope}" if scope else "no ptrace_scope"
    if said == "read":
        yield Finding(check="ptrace", status="ok", found=f"{text}; a process reads another one's memory")
        return
    yield Finding(
        check="ptrace",
        status="warning",
        found=f"{text}; a process cannot read another one's memory: {said or 'no answer'}",
        why="py-spy cannot show where a rank hangs, and NCCL passes no memory on; runs work without it",
        remedy="sysctl kernel.yama.ptrace_scope=0, or --cap-add=SYS_PTRACE for a container",
    )


def _said_of_reading() -> str:
    """Start a process and one beside it, as ranks are; return "read", or why the second cannot read."""
    owner = subprocess.Popen(
        [*PROBE, "own"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        answer = ask([*PROBE, "read", *line_within(owner, READ_S).split()], timeout_s=READ_S)
        return answer.problem or answer.text.strip()
    finally:
        end_group(owner)


def _number(path: Path) -> int | None:
    """Return the number in a file of the control group; None for no limit or no file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _quota_cores() -> int | None:
    try:
        quota, period = (GROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return max(1, int(quota) // int(period)) if quota.isdecimal() and int(period) else None


def _text(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _bytes(limit: int) -> str:
    return "any memory" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:,.0f} MiB"

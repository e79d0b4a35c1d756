"""Cases in forked processes of a parent that has imported everything, within limits of time and memory."""

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.fuzz.case import Case, Ended

LIMIT_S = 180.0  # a case that takes longer hangs
MEMORY_BYTES = 4 << 30  # that a case may take beyond what the parent has
PATIENCE_S = 30.0  # for the processes of a case, after its own end
MARK = "VERL_MEGATRON_FUZZ"  # variable that names the case in whatever its process starts


@dataclass(kw_only=True)
class _Running:
    name: str
    case: Case
    log: Path
    began: float
    killed: bool = False


def run_cases(
    cases: Iterable[tuple[str, Callable[[], Case]]], *, logs: Path, at_once: int
) -> Iterator[tuple[str, Case, Ended]]:
    """Run what each name's function makes; results come as they end.

    Args:
        logs: folder for their output.
        at_once: how many processes run side by side.
    """
    waiting, running = iter(cases), {}
    while True:
        while len(running) < at_once and (found := next(waiting, None)) is not None:
            name, make = found
            case, log = make(), logs / name.replace(":", "_")
            child = _fork(name, case, log)
            running[child] = _Running(name=name, case=case, log=log, began=time.monotonic())
        if not running:
            return
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                one = running.pop(child)
                yield one.name, one.case, _ended(one, child, status)
        _kill_late(running)
        time.sleep(0.005)


def _fork(name: str, case: Case, log: Path) -> int:
    """Start a guardian, whose child runs the case: one that kills its parent does not reach the fuzz."""
    sys.stdout.flush()
    sys.stderr.flush()
    if guardian := os.fork():
        return guardian
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark = f"{os.getppid()}/{name}"
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        _prepare(mark, log)
    except BaseException:
        os._exit(1)
    _act(case)


def _prepare(mark: str, log: Path) -> None:
    os.environ[MARK] = mark
    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(f"{log}{suffix}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _act(case: Case) -> NoReturn:
    """Run a case and end as the interpreter does, whatever it did to this process."""
    code: object = 1
    try:
        case.act()
        code = 0
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no files
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _kill_late(running: dict[int, _Running]) -> None:
    for child, one in running.items():
        if time.monotonic() - one.began > LIMIT_S and not one.killed:
            one.killed = True
            os.killpg(child, signal.SIGKILL)


def _ended(one: _Running, child: int, status: int) -> Ended:
    seconds = time.monotonic() - one.began
    left = _end_what_is_left(f"{os.getpid()}/{one.name}", child)
    stdout, stderr = (Path(f"{one.log}{suffix}").read_text(errors="replace") for suffix in (".out", ".err"))
    return Ended(
        code=None if one.killed else os.waitstatus_to_exitcode(status),
        stdout=stdout,
        stderr=stderr,
        seconds=seconds,
        left=[] if one.killed else left,
    )


def _end_what_is_left(mark: str, session: int) -> list[str]:
    """Command lines of a case's processes that do not end by themselves; they are killed."""
    deadline = time.monotonic() + PATIENCE_S
    while (alive := _alive(mark, session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return list(alive.values())


def _alive(mark: str, session: int) -> dict[int, str]:
    """Process id and command line of a case's programs, by their mark, and forks, by their session."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its_session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            is_marked = f"{MARK}={mark}\0".encode() in (path / "environ").read_bytes()
            if state != "Z" and (is_marked or int(its_session) == session):
                found[int(path.name)] = (
                    (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:
            continue  # it has just ended
    return found

"""The launcher's side: starts processes that import the ranks' modules, and asks them for ranks.

They start at once, so that the launcher imports torch meanwhile. One process forks all ranks where that can
work. Elsewhere, as on GPUs, each rank is a process that has imported its modules (`SpareRank`). Needs only
the standard library until the agent starts.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from parallel.runtime.forking.server import BECOME, BLANK, FORK

# Modules whose ranks are prepared, and where the function `preload` is that imports what they import.
PRELOADED_BY = {
    "verl_megatron.train": "verl_megatron.train",
    "verl_megatron.sft": "verl_megatron.launch.supervised",
    "verl_megatron.dpo": "verl_megatron.launch.supervised",
    "verl_megatron.reward_model": "verl_megatron.launch.supervised",
    "verl_megatron.evaluation": "verl_megatron.evaluation",
}
SERVER = "parallel.runtime.forking.server"
# Of a host with GPUs: imports may initialize one there, which does not work in forks.
GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# Environment variables that differ between ranks, or are set late; no module reads them when it is imported.
OF_A_RANK = {
    *("RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
OF_TORCHRUN = "TORCHELASTIC_"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def may_fork(module: str) -> bool:
    """Whether ranks of this module are forked here.

    There is no GPU, standard streams are open, and imports start no threads, as OpenBLAS does of NumPy.
    """
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or "1"
    return threads == "1" and not any(map(os.path.exists, GPUS)) and _may_prepare(module)


def _may_prepare(module: str) -> bool:
    """Whether a process that imports this module's ranks can become one: standard streams are open."""
    streams = (f"/proc/self/fd/{number}" for number in range(3))
    return module in PRELOADED_BY and all(map(os.path.exists, streams))


@contextlib.contextmanager
def preparing(arguments: Sequence[str]) -> Iterator[None]:
    """Context in which torch's agent gets ranks that have imported their modules, if it can.

    Args:
        arguments: torchrun's.
    """
    place = arguments.index("-m") if "-m" in arguments else len(arguments)
    module, its_arguments = "".join(arguments[place + 1 : place + 2]), arguments[place + 2 :]
    kind, count = ForkServer, 1
    if not may_fork(module):
        kind, count = SpareRank, _num_ranks(arguments[:place]) if _may_prepare(module) else 0
    prepared: list[ForkServer | SpareRank] = []
    try:
        for _ in range(count):
            prepared.append(kind(module, its_arguments, preloaded_by=PRELOADED_BY[module]))
        with _asked_by_torch(prepared):
            yield
    finally:
        for each in prepared:
            each.close()


def _num_ranks(options: Sequence[str]) -> int:
    """Return torchrun's --nproc-per-node; 0 without a number."""
    given = " ".join(options).replace("=", " ").split()
    at = given.index("--nproc-per-node") + 1 if "--nproc-per-node" in given else len(given)
    return int(number) if (number := "".join(given[at : at + 1])).isdecimal() else 0


@contextlib.contextmanager
def _asked_by_torch(prepared: "Sequence[ForkServer | SpareRank]") -> Iterator[None]:
    """Context in which the agent's class for a rank's process asks these first: it takes no others."""
    if not prepared:
        yield
        return
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    theirs = SubprocessHandler._popen

    def start(handler, command: Sequence[str], environment: dict[str, str]):
        stdout, stderr = (
            file.fileno() if file else usual for file, usual in ((handler._stdout, 1), (handler._stderr, 2))
        )
        for each in prepared:
            if rank := each.rank(command, environment, stdout=stdout, stderr=stderr):
                return rank
        return theirs(handler, tuple(command), environment)

    handlers: Any = SubprocessHandler
    handlers._popen = start
    try:
        yield
    finally:
        handlers._popen = theirs


class _Preloaded:
    """A process that has imported what ranks of a module import.

    It has this process's environment. It must be started by the main thread, with which it ends.

    Args:
        module: each rank runs `python -u -m module arguments`.
        preloaded_by: a module whose function `preload(arguments)` the process calls.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, preloaded_by: str):
        self._command = (sys.executable, "-u", "-m", module, *arguments)
        self._environment = dict(os.environ)
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", SERVER, str(theirs.fileno()), preloaded_by, module, *arguments],
                env=self._environment | {"RANK": BLANK},
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the launcher; not a session, by which ranks are known
            )

    def _ask(
        self, request: bytes, command: Sequence[str], environment: dict[str, str], *, stdout: int, stderr: int
    ) -> int | None:
        """Return the id of the process that is now the rank; None if there is none."""
        if tuple(command) != self._command or not self._suits(environment):
            return None
        text = "\0".join(f"{name}={value}" for name, value in environment.items())
        with open(os.memfd_create("environment of a rank"), "w+b") as file:
            file.write(os.fsencode(text))
            file.seek(0)
            with contextlib.suppress(OSError):  # the process has ended
                socket.send_fds(self._channel, [request], [file.fileno(), stdout, stderr])
                if number := self._channel.recv(32):
                    return int(number)
        return None

    def _suits(self, environment: dict[str, str]) -> bool:
        """Whether nothing that is read at imports differs from the process's environment."""
        changed = {name for name, _ in environment.items() ^ self._environment.items()}
        return not any(name not in OF_A_RANK and not name.startswith(OF_TORCHRUN) for name in changed)

    def close(self) -> None:
        """End the process; ranks go on."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


class ForkServer(_Preloaded):
    """A process that has imported what ranks of a module import, and forks them."""

    def rank(
        self, command: Sequence[str], environment: dict[str, str], *, stdout: int, stderr: int
    ) -> "ForkedRank | None":
        """Start a rank; None if it cannot be forked, so that it has to be started as a new interpreter.

        Args:
            stdout: file descriptor.
            stderr: file descriptor.
        """
        with adopting():
            number = self._ask(FORK, command, environment, stdout=stdout, stderr=stderr)
            return None if number is None else _adopted(number)


class SpareRank(_Preloaded):
    """A process that has imported what a rank of a module imports, and becomes one."""

    _is_rank = _is_closed = False

    def rank(
        self, command: Sequence[str], environment: dict[str, str], *, stdout: int, stderr: int
    ) -> subprocess.Popen | None:
        """Let the process be a rank; arguments and None as of `ForkServer.rank`. One that cannot is ended."""
        if self._is_rank or self._is_closed:
            return None
        self._is_rank = self._ask(BECOME, command, environment, stdout=stdout, stderr=stderr) is not None
        if self._is_rank:
            return self._process
        self.close()
        return None

    def close(self) -> None:
        """End the process, unless it is a rank."""
        self._is_closed = True
        if self._is_rank:
            self._channel.close()
        else:
            super().close()


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Context in which this process becomes the parent of its descendants whose own parent ends."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _adopted(number: int) -> "ForkedRank | None":
    rank = ForkedRank(number)
    try:
        rank.poll()
    except ChildProcessError:  # this system gave it to another process
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        return None
    return rank


class ForkedRank:
    """A rank that is this process's child, with what torch's agent uses of `subprocess.Popen`."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return `poll`'s code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

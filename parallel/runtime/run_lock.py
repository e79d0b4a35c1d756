"""Lock of an output folder: a file with the host and process of the run that holds it. A dead run loses it.

A holder on this machine is looked up in /proc by process id and start time, as process ids are reused. Of a
holder elsewhere (another host that shares the folder, another container) only the file's age is visible; the
holder renews it every `BEAT_S`.

The file is created complete, by a hard link, which network file systems make atomic as well. `flock` on the
folder only keeps two runs of one host from replacing a dead run's file at the same time.
"""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from parallel.checkpoint.sealed import opened, shortened
from parallel.rank_set import RankSet
from parallel.runtime import leftovers, process
from parallel.runtime.refusal import RefusalError

NAME = "run.lock"
BEAT_S = 15.0
SILENT_S = 180.0  # a remote holder silent for so long is dead; imports and engines can hold the GIL for long
DYING_S = 5.0  # time for a run that was just ended to exit
RESTART_S = 30.0  # the same if torchrun restarts the ranks


class RunLock:
    """Lock that the first of `ranks` holds during the `with` block; every one of them enters it.

    Raises:
        RefusalError: on every rank, if another run holds the folder, or if it cannot be written.
    """

    def __init__(self, folder: str | Path, ranks: RankSet):
        self.ranks = ranks
        self.folder = Path(folder)
        self.path = self.folder / NAME
        self._mine: str | None = None  # the file's text; None: not held
        self._done = threading.Event()

    def __enter__(self) -> "RunLock":
        if problem := self.ranks.broadcast_object(self._acquire() if self.ranks.is_first else None):
            self._release()
            raise RefusalError(problem)
        return self

    def __exit__(self, *exception: object) -> None:
        self._release()

    def _acquire(self) -> str | None:
        """Return an error message if the folder cannot be locked."""
        me = identity()
        text = json.dumps(me)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if problem := self._wait(text, me):
                return problem
        except OSError as error:
            cause = f"cannot be locked for this run ({error})"
            return f"run.output_dir={str(self.folder)!r} {cause}; make it writable or name another folder"
        self._mine = text
        leftovers.add(self._release)
        threading.Thread(target=self._renew, name="run lock", daemon=True).start()
        return None

    def _wait(self, text: str, me: dict) -> str | None:
        """Wait until the file is written; return an error message if its holder is alive."""
        began, first = time.monotonic(), None
        while True:
            with _alone(self.folder):
                if _written(self.path, text) or self._taken_over(text, me):
                    return None
            holder, waited = _holder(self.path), time.monotonic() - began
            if holder is None or _is_here(holder, me):
                lives = waited > (RESTART_S if me["attempt"] else DYING_S)
            else:
                renewed = _renewed(self.path)
                lives = (first or renewed) != renewed or waited > 2 * SILENT_S
                if first is None:
                    print(
                        f"{self.path} is of {_named(holder)}: waiting until it is renewed or {SILENT_S:.0f} "
                        "s old",
                        flush=True,
                    )
                first = first or renewed
            if lives:
                return self._refusal(holder, me)
            time.sleep(0.2)

    def _taken_over(self, text: str, me: dict) -> bool:
        holder = _holder(self.path)
        if holder is None or not is_dead(holder, me, silent_s=_age_s(self.path)):
            return False
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        return _written(self.path, text)

    def _refusal(self, holder: dict | None, me: dict) -> str:
        folder = f"run.output_dir={str(self.folder)!r}"
        if holder is None:
            remedy = f"if no run is at work there, remove {self.path}"
            return f"{folder} is locked by {self.path}, which no run has written; {remedy}"
        end = (
            f"end it (kill {holder['pid']})"
            if _is_here(holder, me)
            else f"end it there, or remove {self.path} if it is gone"
        )
        return (
            f"{folder} is in use by another run: {_named(holder)}; wait for it, {end}, or name another folder"
        )

    def _renew(self) -> None:
        while not self._done.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if self._is_mine():
                    os.utime(self.path)

    def _is_mine(self) -> bool:
        try:
            return _content(self.path) == self._mine
        except (OSError, ValueError):
            return False

    def _release(self) -> None:
        self._done.set()
        leftovers.drop(self._release)
        if self._mine is not None and self._is_mine():
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._mine = None


# ---- holder ------------------------------------------------------------------------------------------------


def identity() -> dict:
    """Return a unique description of this process."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "machine": _machine(),
        "launch": os.environ.get("TORCHELASTIC_RUN_ID", ""),
        "attempt": _attempt(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _attempt() -> int:
    """Return the number of torchrun's attempt, from 0."""
    told = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(told) if told.isascii() and told.isdigit() else 0


def launch_identity() -> str:
    """Return an id of the launch that this process is of on its host, the same for all attempts."""
    parent = os.getppid()  # torchrun
    return os.environ.get(process.LAUNCH) or f"{_machine()} {parent} {_started(parent)}"


def _named(holder: dict) -> str:
    return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"


def is_dead(holder: dict, me: dict, *, silent_s: float) -> bool:
    """Return whether the file's process has certainly exited, or has not renewed the file for too long.

    torchrun ends the ranks of an attempt, on all hosts, before it starts those of the next.
    """
    if _is_here(holder, me):
        return _started(holder["pid"]) != holder["started"]
    is_restarted = (
        me["launch"] not in ("", "none")
        and holder["launch"] == me["launch"]
        and holder["attempt"] < me["attempt"]
    )
    return is_restarted or silent_s > SILENT_S


def _is_here(holder: dict, me: dict) -> bool:
    return bool(me["machine"]) and holder["machine"] == me["machine"]


def _machine() -> str:
    """Return an id of this boot and PID namespace, within which process ids are unique; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        # fields after the process name, which may contain anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


# ---- the file ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Exclude other processes of this host from the block of a folder, if the file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _written(path: Path, text: str) -> bool:
    """Write the complete file; return False if it exists."""
    scratch = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power failure could leave an empty file
    try:
        os.link(scratch, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            return False
    finally:
        scratch.unlink(missing_ok=True)
    return _content(path) == text


def _content(path: Path) -> str:
    with opened(path) as file:
        return file.read(10_000).decode()


def _holder(path: Path) -> dict | None:
    """Return the holder that the file describes; None if it is not output of `identity`."""
    try:
        found = json.loads(_content(path))
        if not all(type(found[name]) is int for name in ("pid", "attempt")) or not all(
            type(found[name]) is str for name in ("machine", "launch", "host", "since")
        ):
            return None
        return {
            "started": found["started"],
            **found,
            "host": shortened(found["host"], 80),
            "since": shortened(found["since"], 40),
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _renewed(path: Path) -> float | None:
    """Return the file's modification time by its server's clock; None if it does not exist."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _age_s(path: Path) -> float:
    """Return the seconds since the file was renewed, by the same clock."""
    probe = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        probe.touch()
        renewed = _renewed(path)
        return 0.0 if renewed is None else probe.stat().st_mtime - renewed
    finally:
        probe.unlink(missing_ok=True)

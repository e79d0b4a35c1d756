"""One run at a time in an output folder: a file with the host and process that hold it, which a dead run does not keep.

A holder on this machine is looked up in /proc, by its process id and the time at which it started: a process id
may be given out again. Of one elsewhere (on another host that shares the folder, in another container) only the
file's age can be seen, which a holder renews every `BEAT_S`. The file appears whole, by a link, which network file
systems make atomic, too; `flock` on the folder only keeps two runs of one host from replacing a dead run's file at
the same time.
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

import torch.distributed as dist

from parallel.checkpoint.sealed import opened, shortened

NAME = "run.lock"
BEAT_S = 15.0
SILENT_S = 180.0  # a holder elsewhere that is silent for so long is dead; imports and engines keep Python's lock, too
DYING_S = 5.0  # a run that was just ended is given so long to be gone
RESTART_S = 30.0  # the same where torchrun starts the ranks again


class RunLock:
    """Held by the first rank for as long as the `with` block lasts; every rank of the world enters it.

    Raises:
        ValueError: on every rank, if another run holds the folder, or if it cannot be written.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.path = self.folder / NAME
        self._mine: str | None = None  # the file's text; None: not held
        self._done = threading.Event()

    def __enter__(self) -> "RunLock":
        problem = [self._acquire() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(problem)
        if problem[0]:
            self._release()
            raise ValueError(problem[0])
        return self

    def __exit__(self, *exception: object) -> None:
        self._release()

    def _acquire(self) -> str | None:
        """A sentence if the folder cannot be had."""
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
        threading.Thread(target=self._renew, name="run lock", daemon=True).start()
        return None

    def _wait(self, text: str, me: dict) -> str | None:
        """Until the file is written; a sentence if its holder lives on."""
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
        if self._mine is not None and self._is_mine():
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._mine = None


# ---- who holds it ----------------------------------------------------------------------------------------


def identity() -> dict:
    """This process, in terms that no other one shares."""
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
    """Which of torchrun's attempts this is, from 0 on."""
    told = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(told) if told.isascii() and told.isdigit() else 0


def _named(holder: dict) -> str:
    return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"


def is_dead(holder: dict, me: dict, *, silent_s: float) -> bool:
    """Whether the process that wrote the file is gone for sure, or has not renewed it for too long.

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
    """Where process ids mean the same: this boot of this kernel, and their namespace; empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None: there is none, or it has ended and is a zombie."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        )  # after the name, which may have anything in it
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


# ---- the file --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process of this host is in this block for the same folder, unless the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _written(path: Path, text: str) -> bool:
    """Write the file, whole; False if there is one."""
    scratch = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # after a power failure there would be an empty one
    try:
        os.link(scratch, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
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
    """What the file says of its holder; None: nothing that `identity` gave."""
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
    """When the file was last renewed, by the clock of the machine that keeps the folder; None: it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _age_s(path: Path) -> float:
    """Seconds since the file was renewed, by the same clock."""
    probe = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        probe.touch()
        renewed = _renewed(path)
        return 0.0 if renewed is None else probe.stat().st_mtime - renewed
    finally:
        probe.unlink(missing_ok=True)

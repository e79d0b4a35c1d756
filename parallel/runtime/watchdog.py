"""Watchdog: names the rank that stopped making progress, writes every rank's stacks and ends the run.

Ranks waiting for each other in a collective all look stuck. Each rank therefore reports to a store, once a
second, which operation it is in and for how long. The culprit is the rank furthest behind, or one that
stopped reporting.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist

from parallel.runtime import leftovers

EXIT_STATUS = 75  # sysexits.h's EX_TEMPFAIL: the same command may succeed when it is started again
INTERVAL_S = 1.0  # between two reports of a rank
# A rank may enter this much later than the first, in addition to its timeout: joining the world takes some
# ranks seconds longer.
START_S = 60.0
SILENCE_S = (
    # added to the timeout before a rank counts as silent: its reports and our readings are a second apart
    2.0
)
# faulthandler ends a rank whose thread cannot run this long after the timeout, once others have named it
GUARD_S = 15.0
# Ranks wait this long for each other's stacks, faulthandler's included: torchrun ends all when the first has
# exited.
FAREWELL_S = 15.0
ENDED = 2**62  # sequence number of a rank that has left the watchdog

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
# torch.cuda.synchronize waits for collectives
_WAITING = tuple(os.path.join(_TORCH, part, "") for part in ("distributed", "cuda"))
_LAUNCHER = os.path.join(_TORCH, "distributed", "elastic", "")
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")
_number = itertools.count()  # of the watchdogs of this process: each has keys of its own in the store


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position of the main thread.

    Operations begin and end in the same order on every rank, so `sequence` is comparable across ranks.
    """

    operation: str = "no named operation"
    timeout_s: float
    sequence: int = 0  # operations begun and ended so far


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rank's report."""

    operation: str
    timeout_s: float
    sequence: int
    iteration: int
    idle_s: float  # since its last progress, by its own clock
    waits: bool  # its main thread is inside torch.distributed or torch.cuda
    at: str  # the line of the main thread
    pulse: int = 0  # number of the report

    @property
    def is_stuck(self) -> bool:
        return self.idle_s > self.timeout_s

    @property
    def place(self) -> str:
        return self.operation if self.sequence == ENDED else f"{self.operation} (iteration {self.iteration})"


# ---- verdict: reports in, a sentence out -------------------------------------------------------------------


def verdict(reports: Sequence[Report], silent: dict[int, float]) -> str | None:
    """Return a sentence that names the ranks which the others wait for; None while progress is possible.

    A rank behind the others gets its own timeout, however long they have waited for it. Among ranks at the
    same position, the culprits are those outside torch.distributed and torch.cuda, if others are inside.

    Args:
        reports: the last report of each rank, in rank order.
        silent: ranks that no longer report, and seconds since their last report.
    """
    if silent:
        for_s = max(silent.values())
        return _sentence(
            reports,
            sorted(silent),
            f"made no progress for {for_s:.0f} s and gave no sign of life (stopped, dead, or in a call that "
            "keeps Python's lock)",
        )
    behind = min(report.sequence for report in reports)
    last = [rank for rank, report in enumerate(reports) if report.sequence == behind]
    if behind == ENDED or not all(reports[rank].is_stuck for rank in last):
        return None
    stuck = f"made no progress for {max(reports[rank].idle_s for rank in last):.0f} s"
    culprits = _strays(reports, last) or [rank for rank in last if not reports[rank].waits]
    if culprits:
        return _sentence(reports, culprits, stuck)
    ahead = [rank for rank in range(len(reports)) if rank not in last]
    # the majority waits for each other and for these few, which went on without them
    if 0 < len(ahead) < len(last):
        return _sentence(reports, ahead, f"went on without the others, which {stuck}")
    return _sentence(reports, last, stuck)


def _strays(reports: Sequence[Report], ranks: list[int]) -> list[int]:
    """Return those of `ranks` that are in another operation than the majority; none without a majority."""
    names = Counter(reports[rank].operation for rank in ranks)
    (usual, most), *_ = names.most_common(1)
    return [rank for rank in ranks if reports[rank].operation != usual] if most * 2 > len(ranks) else []


def _sentence(reports: Sequence[Report], culprits: list[int], did: str) -> str:
    one = len(culprits) == 1
    where = [
        f"{_ranks(group)} {'is' if len(group) == 1 else 'are'} in {place}"
        for place, group in _places(reports, culprits, lines=True).items()
    ]
    if len(where) == 1:
        where = [
            f"{'it is' if one else 'they are'} in {place}" for place in _places(reports, culprits, lines=True)
        ]
    others = [
        rank for rank, report in enumerate(reports) if rank not in culprits and report.sequence != ENDED
    ]
    waiting = [
        f"{_ranks(group)} {'waits' if len(group) == 1 else 'wait'} for {'it' if one else 'them'} in {place}"
        for place, group in _places(reports, others).items()
    ]
    return f"{_ranks(culprits)} {did}: {', '.join(where + waiting)}"


def _places(reports: Sequence[Report], ranks: list[int], *, lines: bool = False) -> dict[str, list[int]]:
    """Group the ranks by position."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(reports[rank].place + (f", at {reports[rank].at}" if lines else ""), []).append(
            rank
        )
    return groups


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# ---- watchdog of one rank ----------------------------------------------------------------------------------


class Watchdog:
    """Watches the ranks of the world inside its `with` block.

    Constructed and entered on every rank, in the same order.

    When the rank that the others wait for makes no progress for its timeout, one rank reports it on stderr.
    Every rank that still can appends the stacks of all its threads to `folder`/stacks/rank_R.txt. Every rank
    then exits with `EXIT_STATUS`, without teardown.

    The watching thread needs the GIL, which collectives release. A rank whose main thread holds it in a C
    call stops reporting: the others name it, and faulthandler, which needs no GIL, writes its stacks and ends
    it with status 1.

    torchrun --max-restarts=N then restarts all ranks. A rank stopped by a signal ends only by torchrun's
    SIGKILL, its --shutdown-timeout (30 s) later.

    Set the timeout below that of torch.distributed (10 minutes for NCCL), which would otherwise end the run
    first without naming a rank. A process has one faulthandler.dump_traceback_later timer and this class uses
    it: do not call it elsewhere.

    Args:
        timeout_s: seconds without progress; 0 disables the watchdog.
        folder: on a file system that the user can read; `stacks` is created in it.
        store: a store that all ranks share and that outlives each of them; by default that of the process
            group. It is cloned, because a waiting call blocks a client for other threads.

    Raises:
        ValueError: a negative or infinite timeout.
    """

    def __init__(self, timeout_s: float, folder: str | Path, store: dist.Store | None = None):
        _check_timeout(timeout_s)
        self.timeout_s, self.stacks = timeout_s, Path(folder) / "stacks"
        self.iteration = 0  # for messages; the caller sets it
        self.on_beat: Callable[[], None] = lambda: None  # called by `beat`; the caller sets it
        self._file: IO[str] | None = None  # of the stacks; open within the context
        self._position = Position(timeout_s=timeout_s)
        self._progress_at = self._armed_at = time.monotonic()
        if timeout_s == 0:
            return
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        prefix = f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_number)}"
        shared: Any = dist.PrefixStore(prefix, store or dist.distributed_c10d._get_default_store())
        self._store = shared.clone()  # a connection of its own
        self._main = threading.main_thread().ident or 0
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._reports: dict[int, Report] = {}
        self._heard_at = dict.fromkeys(range(self.world_size), time.monotonic())

    # ---- the main thread

    def __enter__(self) -> "Watchdog":
        if self.timeout_s:
            self.stacks.mkdir(parents=True, exist_ok=True)
            # append: keeps the stacks of earlier attempts that torchrun restarted
            self._file = (self.stacks / f"rank_{self.rank}.txt").open("a")
            now = time.monotonic()
            self._progress_at, self._heard_at = now, dict.fromkeys(self._heard_at, now)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.timeout_s:
            self._leaving.set()
            self._thread.join(timeout=INTERVAL_S + FAREWELL_S)
            faulthandler.cancel_dump_traceback_later()
            assert self._file is not None
            self._file.close()
            with contextlib.suppress(OSError):  # the last rank to leave removes the empty folder
                if not Path(self._file.name).stat().st_size:
                    os.unlink(self._file.name)
                    self.stacks.rmdir()

    @contextlib.contextmanager
    def operation(self, name: str, *, timeout_s: float | None = None) -> Iterator[None]:
        """Name this rank's current operation; its begin and end count as progress.

        Every rank runs through the same operations in the same order.

        Args:
            timeout_s: for an operation that takes longer than others; by default that of the enclosing
                operation.

        Raises:
            ValueError: a timeout that is not positive and finite.
        """
        outer = self._position
        if timeout_s is not None and (not timeout_s or _check_timeout(timeout_s)):
            raise ValueError(
                f"operation {name!r}: timeout_s=0 turns nothing off; give the seconds that it may take"
            )
        self._move(
            Position(operation=name, timeout_s=timeout_s or outer.timeout_s, sequence=outer.sequence + 1)
        )
        try:
            yield
        finally:
            self._move(
                Position(
                    operation=outer.operation, timeout_s=outer.timeout_s, sequence=self._position.sequence + 1
                )
            )

    def beat(self) -> None:
        """Report progress inside an operation; the number of calls may differ between ranks."""
        self._progress_at = time.monotonic()
        self._arm(unless_newer_than_s=INTERVAL_S)
        self.on_beat()

    def _move(self, position: Position) -> None:
        self._position, self._progress_at = position, time.monotonic()
        self._arm()  # with its own timeout

    def _arm(self, *, unless_newer_than_s: float = 0) -> None:
        """Postpone faulthandler's exit, which comes when neither the main nor the watching thread runs."""
        now = time.monotonic()
        if (
            self._file is not None
            and not self._leaving.is_set()
            and now - self._armed_at >= unless_newer_than_s
        ):
            self._armed_at = now
            faulthandler.dump_traceback_later(self._position.timeout_s + GUARD_S, exit=True, file=self._file)

    # ---- the watching thread

    def _watch(self) -> None:
        # the lowest live ranks detect it first, which limits store reads in a large world
        period_s = min(INTERVAL_S * max(self.rank, 1), max(INTERVAL_S, self.timeout_s / 4))
        read_at = time.monotonic()
        try:
            for pulse in itertools.count(1):
                self._arm()
                self._store.set(f"rank/{self.rank}", json.dumps(asdict(self._report(pulse))))
                if self._leaving.is_set():
                    return
                if time.monotonic() - read_at >= period_s:
                    read_at = time.monotonic()
                    self._judge()
                if self._store.check(["verdict"]):
                    self._end(_Verdict(**json.loads(self._store.get("verdict"))))
                self._leaving.wait(INTERVAL_S)
        except RuntimeError as error:  # the store's, which has several subclasses
            self._watch_alone(error)

    def _report(self, pulse: int) -> Report:
        position, waits, at = self._position, *_where(sys._current_frames().get(self._main))
        if self._leaving.is_set():
            position = Position(
                operation="what follows the watched part", timeout_s=self.timeout_s, sequence=ENDED
            )
        return Report(
            **asdict(position),
            iteration=self.iteration,
            idle_s=time.monotonic() - self._progress_at,
            waits=waits,
            at=at,
            pulse=pulse,
        )

    def _judge(self) -> None:
        """Read all reports; if they show a rank that the others wait for, write the verdict for all ranks."""
        started = [
            rank
            for rank in range(self.world_size)
            if rank in self._reports or self._store.check([f"rank/{rank}"])
        ]
        now = time.monotonic()
        for rank, text in zip(started, self._store.multi_get([f"rank/{rank}" for rank in started])):
            report = Report(**json.loads(text))
            if rank not in self._reports or report.pulse != self._reports[rank].pulse:
                self._heard_at[rank] = now
            self._reports[rank] = report
        absent = Report(
            **asdict(Position(timeout_s=self.timeout_s + START_S)),
            iteration=0,
            idle_s=0,
            waits=False,
            at="no line yet",
        )
        reports = [self._reports.get(rank, absent) for rank in range(self.world_size)]
        unheard = {rank: now - at for rank, at in self._heard_at.items()}
        # a long operation does not excuse missing reports
        patience_s = {
            rank: SILENCE_S + (self.timeout_s if rank in self._reports else absent.timeout_s)
            for rank in unheard
        }
        silent = {
            rank: age_s
            for rank, age_s in unheard.items()
            if reports[rank].sequence != ENDED and age_s > patience_s[rank]
        }
        if said := verdict(reports, silent):
            ended = [rank for rank, report in enumerate(reports) if report.sequence == ENDED]
            record = asdict(_Verdict(text=f"{said}; stacks in {self.stacks}", ended=ended, by=self.rank))
            self._store.compare_set("verdict", "", json.dumps(record))

    def _end(self, found: "_Verdict") -> None:
        """Write the stacks, wait until the other ranks have written theirs, and exit."""
        if found.by == self.rank:
            _say(found.text)
        self._dump(found.text)
        keys = [f"written/{rank}" for rank in range(self.world_size) if rank not in found.ended]
        deadline = time.monotonic() + FAREWELL_S
        # the rank that serves the store may be gone: then all have written
        with contextlib.suppress(RuntimeError):
            self._store.set(f"written/{self.rank}", "1")
            while time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(0.1)
        _leave()

    def _watch_alone(self, error: Exception) -> None:
        """Watch only this rank after the store's process is gone, when nothing is known of the others."""
        while not self._leaving.wait(INTERVAL_S):
            self._arm()
            report = self._report(0)
            if report.is_stuck:
                reason = str(error).partition("\n")[0]
                text = (
                    f"rank {self.rank} made no progress for {report.idle_s:.0f} s: it is in {report.place}, "
                    f"at {report.at}; nothing is known of other ranks ({reason})"
                )
                _say(text)
                self._dump(text)
                _leave()

    def _dump(self, text: str) -> None:
        assert self._file is not None
        try:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)
        except OSError as error:  # a full disk must not prevent the exit
            _say(f"rank {self.rank}: no stacks in {self._file.name}: {error}")


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    text: str
    ended: list[int]  # ranks that will write no stacks
    by: int  # the rank that wrote the verdict and prints it


def _check_timeout(timeout_s: float) -> None:
    if not 0 <= timeout_s < threading.TIMEOUT_MAX:
        raise ValueError(f"timeout_s={timeout_s} must be a number of seconds, or 0 for no watchdog")


def _where(frame: FrameType | None) -> tuple[bool, str]:
    """Return whether a thread waits in torch.distributed or for its GPU, and its current line.

    The line is the innermost one outside torch and Python's standard library.

    Args:
        frame: the thread's innermost frame.
    """
    waits, at = False, ""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        waits = waits or (file.startswith(_WAITING) and not file.startswith(_LAUNCHER))
        is_library = file.startswith(_TORCH) or (file.startswith(_STANDARD) and "site-packages" not in file)
        if not at and not is_library:
            at = _line(frame)
        frame = frame.f_back
    return waits, at or (_line(innermost) if innermost else "no line")


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # not sys.stderr: the main thread may be inside it


def _leave() -> None:
    """Exit without teardown, which would wait for the stuck ranks."""
    # flushing blocks if the main thread is stuck in a write
    faulthandler.dump_traceback_later(GUARD_S, exit=True)
    sys.stdout.flush()
    sys.stderr.flush()
    leftovers.end()
    os._exit(EXIT_STATUS)

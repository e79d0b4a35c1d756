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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from parallel.rank_set import RankSet
from parallel.runtime import endings, leftovers
from parallel.runtime.verdict import ENDED, Position, Report, verdict, where

EXIT_STATUS = 75  # sysexits.h's EX_TEMPFAIL: the same command may succeed when it is started again
INTERVAL_S = 1.0  # between two reports of a rank
# A rank may enter this much later than the first, in addition to its timeout: joining the world takes some
# ranks seconds longer.
START_S = 60.0
# added to the timeout before a rank counts as silent: its reports and our readings are a second apart
SILENCE_S = 2.0
# faulthandler ends a rank whose thread cannot run this long after the timeout, once others have named it
GUARD_S = 15.0
# Ranks wait this long for each other's stacks, faulthandler's included: torchrun ends all when the first has
# exited.
FAREWELL_S = 15.0
# number of this process's watchdogs, by their ranks: each has keys of its own in the store
_numbers: Counter[tuple[int, ...]] = Counter()


class Watchdog:
    """Watches some ranks inside its `with` block.

    Constructed and entered on each of them, in the same order.

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
        ranks: the watched ranks. They report through their store, which outlives each of them.

    Raises:
        ValueError: a negative or infinite timeout.
    """

    def __init__(self, timeout_s: float, folder: str | Path, ranks: RankSet):
        _check_timeout(timeout_s)
        self.timeout_s, self.stacks = timeout_s, Path(folder) / "stacks"
        self.iteration = 0  # for messages; the caller sets it
        self.on_beat: Callable[[], None] = lambda: None  # called by `beat`; the caller sets it
        self._file: IO[str] | None = None  # of the stacks; open within the context
        self._position = Position(timeout_s=timeout_s)
        self._progress_at = self._armed_at = time.monotonic()
        if timeout_s == 0:
            return
        self.ranks, self.rank = ranks, ranks.global_rank
        _numbers[ranks.ranks] += 1
        # a clone, because a waiting call blocks a client for other threads
        store: Any = ranks.store(f"watchdog/{_numbers[ranks.ranks]}")
        self._store = store.clone()  # a connection of its own
        self._main = threading.main_thread().ident or 0
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._reports: dict[int, Report] = {}
        self._heard_at = dict.fromkeys(ranks.ranks, time.monotonic())

    # ---- the main thread

    def __enter__(self) -> "Watchdog":
        if self.timeout_s:
            self.stacks.mkdir(parents=True, exist_ok=True)
            # append: keeps the stacks of earlier attempts that torchrun restarted
            self._file = (self.stacks / f"rank_{self.rank}.txt").open("a")
            leftovers.add(self._remove_empty)
            now = time.monotonic()
            self._progress_at, self._heard_at = now, dict.fromkeys(self._heard_at, now)
            # before the thread runs, which a C call that keeps the GIL may prevent from here on
            with contextlib.suppress(RuntimeError):  # the thread will meet the same
                self._tell(0)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.timeout_s:
            self._leaving.set()
            self._thread.join(timeout=INTERVAL_S + FAREWELL_S)
            faulthandler.cancel_dump_traceback_later()
            leftovers.drop(self._remove_empty)
            assert self._file is not None
            self._file.close()
            self._remove_empty()

    def _remove_empty(self) -> None:
        """Remove the file of stacks if there are none; the last rank to leave removes the folder."""
        assert self._file is not None
        with contextlib.suppress(OSError):
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
        except Exception as error:
            endings.locate(error, phase=name, iteration=self.iteration)
            raise
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
        period_s = min(INTERVAL_S * max(self.ranks.rank, 1), max(INTERVAL_S, self.timeout_s / 4))
        read_at = time.monotonic()
        try:
            for pulse in itertools.count(1):
                self._arm()
                self._tell(pulse)
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

    def _tell(self, pulse: int) -> None:
        self._store.set(f"rank/{self.rank}", json.dumps(asdict(self._report(pulse))))

    def _report(self, pulse: int) -> Report:
        position, waits, at = self._position, *where(sys._current_frames().get(self._main))
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
            rank for rank in self.ranks.ranks if rank in self._reports or self._store.check([f"rank/{rank}"])
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
        reports = {rank: self._reports.get(rank, absent) for rank in self.ranks.ranks}
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
            ended = [rank for rank, report in reports.items() if report.sequence == ENDED]
            record = asdict(_Verdict(text=f"{said}; stacks in {self.stacks}", ended=ended, by=self.rank))
            self._store.compare_set("verdict", "", json.dumps(record))

    def _end(self, found: "_Verdict") -> None:
        """Write the stacks, wait until the other ranks have written theirs, and exit."""
        if found.by == self.rank:
            _say(f"error: {found.text}")
            endings.tell("stuck", found.text)
        self._dump(found.text)
        keys = [f"written/{rank}" for rank in self.ranks.ranks if rank not in found.ended]
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
                _say(f"error: {text}")
                endings.tell("stuck", text)
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

"""Verdict of the watchdog: from the ranks' reports to a sentence that names the ranks to blame."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

import torch

ENDED = 2**62  # sequence number of a rank that has left the watchdog

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
# torch.cuda.synchronize waits for collectives
_WAITING = tuple(os.path.join(_TORCH, part, "") for part in ("distributed", "cuda"))
_LAUNCHER = os.path.join(_TORCH, "distributed", "elastic", "")
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")


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


def verdict(reports: Mapping[int, Report], silent: dict[int, float]) -> str | None:
    """Return a sentence that names the ranks which the others wait for; None while progress is possible.

    A rank behind the others gets its own timeout, however long they have waited for it. Among ranks at the
    same position, the culprits are those outside torch.distributed and torch.cuda, if others are inside.

    Args:
        reports: the last report of each watched rank, by its global rank.
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
    behind = min(report.sequence for report in reports.values())
    last = [rank for rank, report in reports.items() if report.sequence == behind]
    if behind == ENDED or not all(reports[rank].is_stuck for rank in last):
        return None
    stuck = f"made no progress for {max(reports[rank].idle_s for rank in last):.0f} s"
    culprits = _strays(reports, last) or [rank for rank in last if not reports[rank].waits]
    if culprits:
        return _sentence(reports, culprits, stuck)
    ahead = [rank for rank in reports if rank not in last]
    # the majority waits for each other and for these few, which went on without them
    if 0 < len(ahead) < len(last):
        return _sentence(reports, ahead, f"went on without the others, which {stuck}")
    return _sentence(reports, last, stuck)


def _strays(reports: Mapping[int, Report], ranks: list[int]) -> list[int]:
    """Return those of `ranks` that are in another operation than the majority; none without a majority."""
    names = Counter(reports[rank].operation for rank in ranks)
    (usual, most), *_ = names.most_common(1)
    return [rank for rank in ranks if reports[rank].operation != usual] if most * 2 > len(ranks) else []


def _sentence(reports: Mapping[int, Report], culprits: list[int], did: str) -> str:
    one = len(culprits) == 1
    where = [
        f"{_ranks(group)} {'is' if len(group) == 1 else 'are'} in {place}"
        for place, group in _places(reports, culprits, lines=True).items()
    ]
    if len(where) == 1:
        where = [
            f"{'it is' if one else 'they are'} in {place}" for place in _places(reports, culprits, lines=True)
        ]
    others = [rank for rank, report in reports.items() if rank not in culprits and report.sequence != ENDED]
    waiting = [
        f"{_ranks(group)} {'waits' if len(group) == 1 else 'wait'} for {'it' if one else 'them'} in {place}"
        for place, group in _places(reports, others).items()
    ]
    return f"{_ranks(culprits)} {did}: {', '.join(where + waiting)}"


def _places(reports: Mapping[int, Report], ranks: list[int], *, lines: bool = False) -> dict[str, list[int]]:
    """Group the ranks by position."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(reports[rank].place + (f", at {reports[rank].at}" if lines else ""), []).append(
            rank
        )
    return groups


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def where(frame: FrameType | None) -> tuple[bool, str]:
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

"""The doctor's report: lines for a terminal, and data with stable keys."""

import socket
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import verl_megatron
from parallel.runtime.refusal import counted
from verl_megatron.doctor.finding import Finding

FORMAT = 1  # of the data: keys are added, not renamed
MARKS = {"ok": "ok", "warning": "warning", "problem": "problem", "skipped": "-"}
COLOURS = {"ok": "32", "warning": "33", "problem": "1;31", "skipped": "2"}
NAME, MARK = 21, 9  # columns


def heading(part: str, *, colour: bool) -> str:
    return f"\x1b[1m{part}\x1b[0m" if colour else part


def lines_of(finding: Finding, *, colour: bool, width: int = 100) -> list[str]:
    """Return a finding as lines: what was found, and below it why it matters and what to do."""
    mark = f"{MARKS[finding.status]:<{MARK}}"
    if colour:
        mark = f"\x1b[{COLOURS[finding.status]}m{mark}\x1b[0m"
    indent = " " * (2 + NAME + MARK)
    wrapped = [
        *_wrapped(finding.found, width=width, indent=indent),
        *_wrapped(finding.why and f"why: {finding.why}", width=width, indent=indent),
        *_wrapped(finding.remedy and f"do:  {finding.remedy}", width=width, indent=indent),
    ]
    first = wrapped[0].removeprefix(indent) if wrapped else ""
    return [f"  {finding.check:<{NAME}}{mark}{first}", *wrapped[1:]]


def _wrapped(text: str, *, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width=width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line: how many problems and warnings there are."""
    counts = Counter(finding.status for finding in findings)
    parts = [counted(counts[status], status) for status in ("problem", "warning")]
    done = sum(counts[status] for status in ("ok", "warning", "problem"))
    skipped = f", {counts['skipped']} not checked" if counts["skipped"] else ""
    return f"{counted(done, 'finding')}: {', '.join(parts)}{skipped}"


def as_data(found: Sequence[tuple[str, Finding]]) -> dict[str, Any]:
    """Return the report as data for JSON; `found` has the part of each finding."""
    counts = Counter(finding.status for _, finding in found)
    return {
        "format": FORMAT,
        "verl_megatron": verl_megatron.__version__,
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "healthy": not counts["problem"],
        "counts": {status: counts[status] for status in MARKS},
        "findings": [{"part": part} | asdict(finding) for part, finding in found],
    }

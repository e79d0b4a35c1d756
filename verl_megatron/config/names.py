"""Names of other projects' settings, answered with the name here.

The tables of `verl_names` and `trl_names` also make those of docs/coming-from-verl.md and
docs/coming-from-trl.md (tools/make_docs.py).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

ARR = "actor_rollout_ref"  # a section of verl's that the tables shorten to `arr`
_SETTING = re.compile(r"`([a-z]+\.[a-z_]+)[^`]*`")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One or several names of another project, and what stands for them here."""

    theirs: tuple[str, ...]  # full names
    ours: str  # markdown with settings in backticks; empty: there is no such setting
    note: str  # a clause

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that `ours` names, such as "rollout.tp"."""
        return tuple(_SETTING.findall(self.ours))

    def answer(self, name: str) -> str:
        """Return what stands for one of the names, in plain text: its own part if each name has one."""
        parts = self.ours.split(", ")
        paired = len(parts) == len(self.theirs)
        return (parts[self.theirs.index(name)] if paired else self.ours).replace("`", "")


Table = dict[str, tuple[Row, ...]]  # rows by heading of the page


@dataclass(frozen=True, slots=True)
class _Entry:
    project: str
    name: str
    parts: tuple[str, ...]  # of the name
    row: Row


def row(theirs: str, ours: str = "", note: str = "") -> Row:
    """Return a row from names separated by spaces.

    Args:
        theirs: `arr.` stands for `actor_rollout_ref.`.
        ours: names alone, or markdown.
        note: needed where there is no setting.
    """
    if ours and "`" not in ours:
        ours = ", ".join(f"`{name}`" for name in ours.split())
    assert ours or note, f"{theirs}: a reader without a setting needs the reason"
    names = [f"{ARR}.{name[4:]}" if name.startswith("arr.") else name for name in theirs.split()]
    return Row(theirs=tuple(names), ours=ours, note=note)


@cache
def _entries() -> tuple[_Entry, ...]:
    from verl_megatron.config.older_names import OLDER  # all are made with `row`
    from verl_megatron.config.trl_names import TRL
    from verl_megatron.config.verl_names import VERL

    found = []
    for project, table in (("verl", VERL), ("TRL", TRL), ("the older interface", OLDER)):
        for rows in table.values():
            for entry in rows:
                found += [_Entry(project, name, tuple(name.split(".")), entry) for name in entry.theirs]
    return tuple(found)


@cache
def _sections() -> frozenset[str]:
    """Sections that only other projects have."""
    theirs = {entry.parts[0] for entry in _entries() if len(entry.parts) > 1}
    ours = {setting.partition(".")[0] for entry in _entries() for setting in entry.row.settings}
    return frozenset(theirs - ours)


def name_here(name: str, known: Collection[str] = (), *, anywhere: bool = False) -> str:
    """Return a sentence about another project's setting `name`, or "" if no table has it.

    The row with the most equal parts counts, from the end of the name.

    Args:
        known: all settings of the run, such as "rollout.tp": rows about other settings are left out.
        anywhere: the setting's own name suffices although its section is in no table.
    """
    given = tuple(name.split("."))
    least = 1 if anywhere or len(given) == 1 or given[0] in _sections() else 2
    best, most = None, (least, False)
    for entry in _entries():
        score = (_equal_parts(given, entry.parts), given == entry.parts)
        settings = entry.row.settings
        fits = not known or not settings or not set(settings).isdisjoint(known)
        if fits and name not in settings and (score > most or (best is None and score == most)):
            best, most = entry, score
    if best is None:
        return ""
    note = f" ({best.row.note.replace('`', '')})" * bool(best.row.note)
    if not best.row.ours:
        return f"{name} of {best.project} has no setting here{note}; leave it out"
    return f"{name} of {best.project} is called {best.row.answer(best.name)} here{note}; rename it"


def _equal_parts(given: tuple[str, ...], parts: tuple[str, ...]) -> int:
    """Count equal parts from the end; one alone counts if it says enough, as `path` and `name` do not."""
    count = 0
    for one, other in zip(reversed(given), reversed(parts)):
        if one != other:
            break
        count += 1
    says_enough = count > 1 or len(parts) == 1 or "_" in given[-1] or given[0] in parts
    return count if says_enough else 0

"""Names of other projects' settings, answered with the name here.

The tables of `verl_names` and `trl_names` also make those of docs/coming-from-verl.md and
docs/coming-from-trl.md (tools/make_docs.py).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile

from parallel.runtime.refusal import nearest

ARR = "actor_rollout_ref"  # a section of verl's that the tables shorten to `arr`
_SETTING = re.compile(r"`([a-z]+\.[a-z_]+)[^`]*`")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One or several names of another project, and what stands for them here."""

    theirs: tuple[str, ...]  # full names, also for all names below them
    ours: str  # markdown with settings in backticks; empty: there is no such setting
    note: str  # a clause

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that `ours` names, such as "rollout.tp"."""
        return tuple(_SETTING.findall(self.ours))

    def part(self, name: str) -> str:
        """Return what stands for one of the names: its own part of `ours` if each name has one."""
        parts = self.ours.split(", ")
        return parts[self.theirs.index(name)] if len(parts) == len(self.theirs) else self.ours

    def answer(self, name: str) -> str:
        """Return what stands for one of the names, in plain text."""
        return self.part(name).replace("`", "")


Table = dict[str, tuple[Row, ...]]  # rows by heading of the page


@dataclass(frozen=True, slots=True)
class _Entry:
    project: str
    name: str
    parts: tuple[str, ...]  # of the name, or of what is left of it without verl's `actor_rollout_ref`
    row: Row
    settings: frozenset[str]  # that stand for this name


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
    """All names, each first as it is and then without `actor_rollout_ref`, which users leave out."""
    from verl_megatron.config.older_names import OLDER  # all are made with `row`
    from verl_megatron.config.trl_names import TRL
    from verl_megatron.config.verl_names import VERL

    found = [
        _Entry(project, name, tuple(name.split(".")), row, frozenset(_SETTING.findall(row.part(name))))
        for project, table in (("verl", VERL), ("TRL", TRL), ("the older interface", OLDER))
        for rows in table.values()
        for row in rows
        for name in row.theirs
    ]
    return *found, *(replace(entry, parts=entry.parts[1:]) for entry in found if entry.parts[0] == ARR)


@cache
def _projects() -> dict[str, str]:
    """The project of each section that only other projects have."""
    ours = {setting.partition(".")[0] for entry in _entries() for setting in entry.settings}
    theirs = [entry for entry in _entries() if len(entry.parts) > 1]
    return {entry.parts[0]: entry.project for entry in theirs if entry.parts[0] not in ours}


@cache
def _last_parts() -> frozenset[str]:
    """Settings' own names here, without their section."""
    return frozenset(setting.partition(".")[2] for entry in _entries() for setting in entry.settings)


def name_here(name: str, known: Collection[str] = (), *, anywhere: bool = False) -> str:
    """Return a sentence about another project's setting `name`, or "" if it is none.

    Every name in a section that only another project has is its setting, known or not.

    Args:
        known: all settings of the run, such as "rollout.tp"; no other is named. Empty: any.
        anywhere: the setting's own name suffices although its section is in no table.
    """
    given = tuple(name.split("."))
    likenesses = [(_likeness(given, entry.parts, anywhere=anywhere), entry) for entry in _entries()]
    most = max(likeness for likeness, entry in likenesses if name not in entry.settings)
    if not any(most):
        return "" if anywhere else _unknown(given)
    best = [entry for likeness, entry in likenesses if likeness == most and name not in entry.settings]
    found = next((entry for entry in best if _all_known(entry.settings, known)), None)
    said = f"{'.'.join(given[: most[1]] if most[0] == _BELOW else given)} of {(found or best[0]).project}"
    if found is None:
        return f"{said} has no setting in this kind of run; leave it out"
    note = f" ({found.row.note.replace('`', '')})" * bool(found.row.note)
    note *= _all_known(_SETTING.findall(found.row.note), known)
    if not found.row.ours:
        return f"{said} has no setting here{note}; leave it out"
    return f"{said} is called {found.row.answer(found.name)} here{note}; rename it"


def _all_known(settings: Collection[str], known: Collection[str]) -> bool:
    return not known or set(settings) <= set(known)


_EQUAL, _BELOW, _ALIKE = 3, 2, 1  # kinds of likeness


def _likeness(given: tuple[str, ...], parts: tuple[str, ...], *, anywhere: bool) -> tuple[int, int]:
    """Return the kind of likeness and the number of equal parts; zeros where there is none.

    Names are alike if their ends are: two parts, the last one with all those before it, or the last one
    alone if it says enough, as `path` and `name` do not, which settings here have, too.
    """
    last = given[-1]
    if given == parts:
        return _EQUAL, len(parts)
    if given[: len(parts)] == parts:
        return _BELOW, len(parts)
    pairs = zip(reversed(given), reversed(parts))
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    skips_levels = len(given) > 1 and given[:-1] == parts[: len(given) - 1]
    says_enough = "_" in last or len(parts) == 1 or (len(given) == 1 and last not in _last_parts())
    is_alone = says_enough and len(given) <= 1 + anywhere
    return (_ALIKE, count) if count > 1 or (count and (skips_levels or is_alone)) else (0, 0)


def _unknown(given: tuple[str, ...]) -> str:
    """Return a sentence about a name that no table has; "" outside of other projects' sections."""
    project, level = _projects().get(given[0]), len(given) - 1
    if project is None or not level:
        return ""
    beside = [
        entry.parts[level]
        for entry in _entries()
        if entry.parts[:level] == given[:level] and entry.parts[level:] and entry.parts[level] != given[level]
    ]
    said = f"{'.'.join(given)} is no setting here, nor a known one of {project}"
    return f"{said}{nearest(given[-1], beside)}; leave it out"

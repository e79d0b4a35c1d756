"""One bad (or harmless) input, what has to come of it, and what came of it."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fuzz.job import Job

REFUSED, ACCEPTED, EITHER = "refused", "accepted", "either way"  # what has to come of a case
# What may come of it besides, all of it wrong.
TRACEBACK, HANG, SILENT, WRONGLY, UNNAMED, UNCLEAR, LONG, LEFT, OTHER = FAULTS = (
    *("traceback", "hang", "silently accepted", "refused wrongly", "cause not named", "not one error"),
    *("too long a text", "processes left", "ended otherwise"),
)
NO_ROOM = 3  # exit status of a run that is right and does not fit its machine: a refusal as well

Names = tuple[str | tuple[str, ...], ...]


@dataclass(kw_only=True)
class Case:
    """A mutation, in words, with what it runs in a process of its own.

    `names` is what the output must hold, of each tuple of texts one; of EITHER, refused or accepted.
    """

    name: str
    expected: str
    act: Callable[[], None]  # ends as the command line does: with 0, or with 2 and one error
    names: Names = ()
    longest: int = 20_000  # characters of all output: a value of megabytes must not come back whole


Mutation = Callable[[Job, random.Random], Case]


@dataclass(kw_only=True)
class Ended:
    """How the process of a case ended."""

    code: int | None  # None: killed at the limit of time
    stdout: str
    stderr: str
    seconds: float
    left: list[str] = field(default_factory=list)  # command lines of processes that outlived it

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


def verdict(case: Case, ended: Ended) -> str:
    """REFUSED, ACCEPTED or EITHER if all is as it should be, else one of FAULTS."""
    if ended.code is None:
        return HANG
    if "Traceback (most recent call last)" in ended.text:
        return TRACEBACK
    if ended.left:
        return LEFT
    if ended.code not in (0, 2, NO_ROOM):
        return OTHER
    if len(ended.text) > case.longest:
        return LONG
    return _of_the_code(case, ended)


def _of_the_code(case: Case, ended: Ended) -> str:
    errors = len(re.findall(r"^error: ", ended.text, flags=re.MULTILINE))
    if errors != (ended.code == 2) or (ended.code == 2 and "dry run:" in ended.stdout):
        return UNCLEAR
    if case.expected == REFUSED and not ended.code:
        return SILENT
    if case.expected == ACCEPTED and ended.code:
        return WRONGLY
    return case.expected if all(_is_named(name, ended.text) for name in case.names) else UNNAMED


def _is_named(name: str | tuple[str, ...], text: str) -> bool:
    """Whether a message contains `name`, or one of several."""
    return any(option in text for option in ((name,) if isinstance(name, str) else name))

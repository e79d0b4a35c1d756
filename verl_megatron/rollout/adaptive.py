"""Sampling by prompt length: the table of `rollout.adaptive_sampling`.

A table is entries RANGE:SAMPLING with commas between, such as

    0-63:greedy,64-511:as_set,512-:top_k:50+temperature:0.7+samples:4

A range has its first and last prompt length in tokens; the last range is open. `greedy` is temperature 0,
`as_set` is the sampling of the other settings, and NAME:VALUE changes one of them; `samples` is the number of
samples of a prompt. Letters: B samples on this rank, T positions.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.config import LEAST_TEMPERATURE
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.sampling import Sampling

MOST_ENTRIES = 10  # each has metrics of its own
GREEDY, AS_SET, SAMPLES = "greedy", "as_set", "samples"

Number = float | int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The sampling of prompts of `first` to `last` tokens."""

    label: str  # the range, as the table has it
    first: int
    last: int | None  # None: any length
    changes: Mapping[str, Number] = field(default_factory=dict)  # fields of `Sampling`
    samples: int | None = None  # of a prompt; None: as set

    @property
    def greedy(self) -> bool:
        """Whether its samples are the most likely tokens."""
        return self.changes.get("temperature") == 0

    def sampling(self, usual: Sampling) -> Sampling:
        """Return the sampling parameters of its prompts."""
        return replace(usual, **self.changes)


Table = tuple[Entry, ...]


def entry_of(table: Table, prompt_tokens: int) -> Entry:
    """Return the entry of a prompt's length."""
    return next(entry for entry in table if entry.last is None or prompt_tokens <= entry.last)


def add_shares(table: Table, batch: RolloutBatch, sums: Sums) -> None:
    """Add each entry's share of the samples, and their mean reward if they have one.

    Args:
        batch: the samples owned by this rank.
    """
    first_B = batch.prompt_lengths
    for entry in table:
        is_here_B = first_B >= entry.first
        if entry.last is not None:
            is_here_B &= first_B <= entry.last
        count = is_here_B.sum()
        sums.add(f"sampling/share_{entry.label}", count, len(batch))
        if batch.rewards is not None:
            sums.add(f"sampling/reward_{entry.label}", (batch.rewards * is_here_B).sum(), count)


# ---- the text of a table -----------------------------------------------------------------------------------


def parse_table(text: str) -> Table:
    """Return the entries of a table, in order; none for an empty text.

    Raises:
        ValueError: a clause about the first thing that is wrong, with a remedy.
    """
    entries = [_entry(part.strip()) for part in text.split(",")] if text.strip() else []
    if len(entries) > MOST_ENTRIES:
        raise ValueError(f"has {len(entries)} entries; give at most {MOST_ENTRIES}")
    begin: int | None = 0
    for entry in entries:
        if begin is None:
            raise ValueError(f"has entries after an open range; put {entry.label} before it")
        if entry.first != begin:
            wrong = "overlaps the entry before it" if entry.first < begin else f"leaves out {begin}"
            raise ValueError(f"has a range {entry.label} that {wrong}; let it begin with {begin}")
        begin = None if entry.last is None else entry.last + 1
    if begin is not None and entries:
        raise ValueError(f"says nothing of prompts above {begin - 1} tokens; add {begin}-:as_set")
    return tuple(entries)


def _entry(text: str) -> Entry:
    found = re.fullmatch(r"(\d{1,9})-(\d{0,9})\s*:\s*(.+)", text, re.ASCII)
    if not found:
        raise ValueError(
            f"has {short_repr(text)}, which is no entry; write FIRST-LAST:SAMPLING, such as 0-63:greedy, "
            "or FIRST-:SAMPLING for the last one"
        )
    first, last, written = int(found[1]), int(found[2]) if found[2] else None, found[3]
    label = f"{found[1]}-{found[2]}"
    if last is not None and last < first:
        raise ValueError(f"has a range {label} that ends before it begins; exchange its ends")
    changes: dict[str, Number] = {}
    for part in written.split("+"):
        for name, value in _change(part.strip()).items():
            if name in changes:
                raise ValueError(f"says {name} twice in {short_repr(text)}; take one out")
            changes[name] = value
    samples = changes.pop(SAMPLES, None)
    return Entry(
        label=label,
        first=first,
        last=last,
        changes=changes,
        samples=None if samples is None else int(samples),
    )


def _change(text: str) -> dict[str, Number]:
    """Return what one part of an entry changes."""
    if text == GREEDY:
        return {"temperature": 0.0}
    if text == AS_SET:
        return {}
    name, _, value = (part.strip() for part in re.sub("=", ":", text, count=1).partition(":"))
    if name not in _FIELDS:
        known = [GREEDY, AS_SET, *_FIELDS]
        raise ValueError(
            f"has {short_repr(text)}, which is no sampling{nearest(name, known)}; it is {GREEDY}, {AS_SET}, "
            f"or {', '.join(_FIELDS)} with a value, such as temperature:0.7"
        )
    kind, is_valid, limits = _FIELDS[name]
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not is_valid(number):
        hint = f", or {GREEDY}" if name == "temperature" else ""
        raise ValueError(f"has {short_repr(text)}; {name} is {limits}{hint}")
    return {name: number}


_FIELDS: dict[str, tuple[Callable[[str], Number], Callable[[Number], bool], str]] = {
    "temperature": (
        float,
        lambda value: LEAST_TEMPERATURE <= value <= 2,
        f"a number from {LEAST_TEMPERATURE} to 2",
    ),
    "top_p": (float, lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    "top_k": (int, lambda value: value == -1 or 0 < value < 1 << 31, "a whole number of at least 1, or -1"),
    SAMPLES: (int, lambda value: 0 < value <= 1_000_000, "a whole number of at least 1"),
}  # name: how it is read, whether it is valid, what is

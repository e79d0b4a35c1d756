"""The groups of async.buffer=window that are drawn and not trained on: what is known of each, how many."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_megatron.rollout.sampler import Draw
from verl_megatron.separate.orders import VALIDATION, Block, GroupSamples

SHORT = 0.02  # share of an iteration; training that lacks groups for longer wants a larger lead
GROWTH = 1 / 8  # of an iteration's groups, after an iteration that lacked some
SPARE = 1 / 4  # of an iteration's groups that may be complete before training wants them
MEMORY = 8  # iterations in which a group must have been left over, to be one too many


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What every rank knows of a group that is complete."""

    number: int
    size: int
    versions: tuple[int, int]  # oldest and newest of its tokens
    is_kept: bool  # by dynamic sampling
    failed: int  # samples without a score
    complaint: str


@dataclass(kw_only=True)
class Entry:
    """A group that has been drawn and not trained on; the same on every rank."""

    block: Block
    version: int | None = None  # newest when it was ordered; None: it has to be ordered, or ordered again
    place: int = -1  # of the world that makes it; -1: none yet
    replica: int = 0
    arrival: Arrival | None = None  # None: it is not complete


class GroupTable:
    """Groups by number, those of validation included.

    Only `own` differs between ranks: it has the samples of the complete groups that this rank owns.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.own: dict[int, GroupSamples] = {}
        self._complete: list[int] = []  # in the order in which they came

    @property
    def num_own_samples(self) -> int:
        """Samples of this rank to train on."""
        own = (found for number, found in self.own.items() if number < VALIDATION)
        return sum(found.num_samples for found in own)

    @property
    def num_complete(self) -> int:
        """Complete groups that are not validation's."""
        return sum(number < VALIDATION for number in self._complete)

    @property
    def training(self) -> dict[int, Entry]:
        """The groups that are not validation's."""
        return {number: entry for number, entry in self.entries.items() if number < VALIDATION}

    @property
    def started(self) -> dict[int, int]:
        """The version with which each group was ordered, without validation's."""
        training = self.training.items()
        return {number: entry.version for number, entry in training if entry.version is not None}

    @property
    def waiting(self) -> dict[int, Block]:
        """The blocks of groups that have to be ordered, by number."""
        return {number: self.entries[number].block for number in sorted(self.training.keys() - self.started)}

    def load(self) -> Counter[tuple[int, int]]:
        """Return the number of incomplete groups by place and replica."""
        running = (entry for entry in self.entries.values() if entry.arrival is None)
        return Counter((entry.place, entry.replica) for entry in running)

    def stranded(self, here: Collection[int]) -> dict[int, Block]:
        """Return the blocks, by number, of incomplete groups that were ordered of places not `here`."""
        return {
            number: entry.block
            for number, entry in self.entries.items()
            if entry.arrival is None and entry.version is not None and entry.place not in here
        }

    def complete(self, arrival: Arrival) -> None:
        """Note that a group is complete."""
        self.entries[arrival.number].arrival = arrival
        self._complete.append(arrival.number)

    def choose(self, wanted: int, *, later: Callable[[int], int]) -> list[int] | None:
        """Return the groups to train on; None while some are missing.

        Those that could not be used in later iterations, with `wanted` in each, must be taken; then come the
        first that are complete.

        Args:
            later: iterations after this one in which groups of a version can be used.
        """
        later_of = {number: later(version) for number, version in self.started.items()}
        complete = [number for number in self._complete if number in later_of]
        if len(complete) < wanted:
            return None
        chosen: list[int] = []
        for left in sorted(set(later_of.values())):
            due = sum(other <= left for other in later_of.values()) - wanted * left
            assert due <= wanted, "more groups were started than can be used"
            missing = due - sum(later_of[number] <= left for number in chosen)
            able = [each for each in complete if later_of[each] <= left and each not in chosen]
            if len(able) < missing:
                return None
            chosen += able[: max(0, missing)]
        others = [number for number in complete if number not in chosen]
        return sorted(chosen + others[: wanted - len(chosen)])

    def all_of(self, block: Block) -> list[int] | None:
        """Return the groups of a block; None while some are missing."""
        numbers = range(block.first, block.first + block.count)
        return list(numbers) if all(self.entries[number].arrival for number in numbers) else None

    def take(self, numbers: Sequence[int]) -> tuple[list[Arrival], dict[int, GroupSamples]]:
        """Take complete groups out; return their arrivals, and this rank's samples by place in `numbers`."""
        arrivals, own = [], {}
        for place, number in enumerate(numbers):
            arrival = self.entries[number].arrival
            assert arrival is not None
            arrivals.append(arrival)
            if number in self.own:
                own[place] = self.own[number]
            self.forget(number)
        return arrivals, own

    def forget(self, number: int) -> GroupSamples | None:
        """Take a group out; return its samples if they are this rank's."""
        del self.entries[number]
        self._complete = [other for other in self._complete if other != number]
        return self.own.pop(number, None)

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def too_old(self, wanted: int, *, last: Callable[[int], int], iteration: int) -> list[int]:
        """Return the complete groups that are left over when their last iteration is over.

        Args:
            wanted: groups of an iteration.
            last: iteration in which groups of a version can be used.
            iteration: the next one.
        """
        version_of, found, num_used = self.started, [], 0
        complete = [number for number in self._complete if number in version_of]
        for number in sorted(complete, key=lambda number: version_of[number]):
            if last(version_of[number]) < iteration + num_used // wanted:
                found.append(number)
            else:
                num_used += 1
        return found

    def make_again(self, number: int) -> GroupSamples | None:
        """Let a group wait to be ordered; return its samples if they are this rank's."""
        block, own = self.entries[number].block, self.forget(number)
        self.entries[number] = Entry(block=block)
        return own

    def state_dict(self) -> dict[str, Any]:
        """Return the groups to train on, and this rank's samples."""
        training = self.training
        blocks = {entry.block.first: entry.block for entry in training.values()}
        return {
            "blocks": [(block.first, block.count, block.cursor) for block in blocks.values()],
            "groups": [
                (number, entry.block.first, entry.version, entry.arrival and asdict(entry.arrival))
                for number, entry in training.items()
            ],
            "complete": [number for number in self._complete if number in training],
            "samples": [vars(found) for number, found in self.own.items() if number in training],
        }

    @staticmethod
    def emptied(state: dict[str, Any]) -> dict[str, Any]:
        """Return a state in which no group is complete."""
        groups = [(number, first, None, None) for number, first, *_ in state["groups"]]
        return state | {"groups": groups, "complete": [], "samples": []}

    def load_state_dict(self, state: dict[str, Any], draw: Draw) -> None:
        """Restore what `state_dict` returned; `draw` is that of an iteration."""
        blocks = {
            first: Block(first=first, count=count, draw=draw, cursor=cursor)
            for first, count, cursor in state["blocks"]
        }
        for number, first, version, arrival in state["groups"]:
            entry = self.entries[number] = Entry(block=blocks[first])
            if arrival:
                entry.version, entry.arrival = version, Arrival(**arrival)
        self._complete = list(state["complete"])
        self.own = {found["number"]: GroupSamples(**found) for found in state["samples"]}


class Lead:
    """Groups that may be under way beyond those of the next iteration; the same on every rank.

    At least those of one iteration, so that both sides work at the same time, and at most those of
    `max_staleness` iterations. Without staleness there are none. It grows when too few groups were complete;
    a wait for the oldest, which must be taken, is none that more groups would shorten. It shrinks by the
    complete groups that each of the last iterations has left over, but for a few: so lengths and speeds may
    vary as they lately have without a wait.

    Args:
        wanted: groups of an iteration.
        max_staleness: iterations.
    """

    def __init__(self, wanted: int, *, max_staleness: int):
        self._wanted, self._least, self._most = wanted, wanted * min(1, max_staleness), wanted * max_staleness
        self._left: list[int] = []  # of the last iterations that were not short
        self.groups = self._least

    def restore(self, groups: int) -> None:
        """Go on with the lead of an earlier run, as far as it is allowed now."""
        self.groups = min(max(groups, self._least), self._most)

    def adapt(self, *, is_short: bool, left: int) -> None:
        """Follow an iteration's collection.

        Args:
            is_short: too few groups were complete for longer than `SHORT`, on any rank.
            left: groups that were complete and not taken.
        """
        if is_short:
            self._left = []
            self.restore(self.groups + max(1, round(self._wanted * GROWTH)))
            return
        self._left = [*self._left, left][-MEMORY:]
        if len(self._left) == MEMORY:
            surplus = max(0, min(self._left) - round(self._wanted * SPARE))
            before = self.groups
            self.restore(before - surplus)
            self._left = [each - (before - self.groups) for each in self._left]

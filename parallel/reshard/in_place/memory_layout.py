"""The memory layout of one rank: its destination parameters in the memory of its source parameters.

A destination parameter that finds no place gets its own memory. There are three layouts:

    source parameters   |   A    |   B     |    C      |
    share               |   a    |         |           |   own memory: b, c
    fill_by_name        |   a    | b    |..| c      |..|   each in its source parameter; padding (..) is left
    fill_in_order       |   a    | b    | c      | free|   packed without padding; most values move

`share` places only those that are one contiguous block of a source parameter. The other two also overwrite.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from parallel.reshard.plan import matrix_shape
from parallel.weights.shard import ShardedParameter

Key = tuple[int, str]  # model chunk, parameter
Address = tuple[int, int]  # index of an allocation of the rank, first byte in it
Addresses = dict[Key, Address]
Interval = tuple[int, int, int]  # allocation, first byte, end
Gap = tuple[int, int, int]  # bytes, allocation, first byte
ALIGNMENT = 256  # bytes, of a parameter in a gap
VECTOR = 16  # bytes; vLLM's kernels load this many at a time, so every parameter is aligned to it


@dataclass(frozen=True, kw_only=True)
class RankSides:
    """Both sides' parameters on one rank, and where the source's are."""

    source: Sequence[ShardedParameter]
    destination: Sequence[ShardedParameter]
    memory: Addresses  # of the source parameters
    element_bytes: int
    homes: Mapping[str, Key]  # the source parameter that holds each tensor, on any rank

    @cached_property
    def sizes(self) -> dict[Key, int]:
        """Bytes of the destination parameters."""
        return {(p.chunk, p.name): prod(p.shape) * self.element_bytes for p in self.destination}

    @cached_property
    def source_sizes(self) -> dict[Key, int]:
        return {(p.chunk, p.name): prod(p.shape) * self.element_bytes for p in self.source}

    @cached_property
    def source_tensors(self) -> set[str]:
        """Tensors that this rank's source parameters hold parts of."""
        return {block.tensor for p in self.source if p.owner for block in p.blocks}

    def home_of(self, parameter: ShardedParameter) -> Interval | None:
        """Return the memory of this rank's source parameter of the same name, if there is one."""
        key = self.homes.get(_first_tensor(parameter))
        if key not in self.memory:
            return None
        space, start = self.memory[key]
        return space, start, start + self.source_sizes[key]


@dataclass(slots=True)
class MemoryLayout:
    """Addresses of one rank's destination parameters in the memory of its source parameters."""

    sizes: Mapping[Key, int]  # bytes, of all destination parameters
    source_bytes: int
    addresses: Addresses  # a destination parameter without an address has its own memory
    aliased: set[Key]  # parameters whose values are in place already
    relocated: set[Key] = field(default_factory=set)
    vacated: list[Interval] = field(default_factory=list)  # memory that relocated parameters have left

    @property
    def larger_bytes(self) -> int:
        """Size of the larger copy, source or destination."""
        return max(sum(self.sizes.values()), self.source_bytes)

    @property
    def own_bytes(self) -> int:
        """Size of the destination parameters with their own memory."""
        return sum(size for key, size in self.sizes.items() if key not in self.addresses)

    @property
    def excess_bytes(self) -> int:
        """Memory of both copies together, less that of the larger copy."""
        return self.own_bytes - self.larger_bytes + self.source_bytes

    def relocate(self, keys: Sequence[Key]) -> None:
        """Move parameters elsewhere, and offer the memory that they leave to later calls.

        A parameter goes to memory that an earlier call left, if it fits and the parameter has not been
        relocated before. Otherwise it gets its own memory.
        """
        left = [self._interval(key, self.addresses.pop(key)) for key in keys]
        for key in keys:
            fitting = [
                (end - start, space, start, end)
                for space, start, end in self.vacated
                if end - start >= self.sizes[key] and key not in self.relocated
            ]
            if fitting:
                _, space, start, end = min(fitting)
                self.vacated.remove((space, start, end))
                self.addresses[key] = space, start
        self.vacated += left
        self.relocated.update(keys)
        self.aliased.difference_update(keys)

    def overwritten(self) -> list[Interval]:
        """Return the sorted intervals whose source values are overwritten."""
        return sorted(
            self._interval(key, address) for key, address in self.addresses.items() if key not in self.aliased
        )

    def _interval(self, key: Key, address: Address) -> Interval:
        space, start = address
        return space, start, start + self.sizes[key]


def share(rank: RankSides) -> MemoryLayout:
    """Alias the parameters that are one contiguous block of a source parameter."""
    aliased = _alias(rank, _FreeMemory(rank))
    return _layout(rank, aliased, aliased)


def fill_by_name(rank: RankSides) -> MemoryLayout:
    """Alias what `share` can; place the other parameters in the memory of their source parameter's name.

    They are placed largest first, in three passes: within that source parameter, from its beginning over what
    follows, then in any gap. A parameter whose values come from other ranks also goes to this rank's source
    parameter of that name. Whole parameters then swap places, in cycles that fit into a window. Padding may
    be left after each of them.
    """
    free = _FreeMemory(rank)
    aliased = _alias(rank, free)
    largest_first = sorted(
        rank.destination,
        key=lambda p: (-rank.sizes[p.chunk, p.name], _first_tensor(p) not in rank.source_tensors),
    )
    addresses = dict(aliased)
    for reserve in (free.reserve_within, free.reserve_from, free.reserve_smallest_gap):
        for parameter in largest_first:
            key = (parameter.chunk, parameter.name)
            if key in addresses:
                continue
            address = reserve(rank.home_of(parameter), rank.sizes[key])
            if address is not None:
                addresses[key] = address
    return _layout(rank, addresses, aliased)


def fill_in_order(rank: RankSides) -> MemoryLayout:
    """Place all parameters by first fit, in the order of their source parameters in memory.

    Parameters whose values come from other ranks are placed last. At the end the rest of an allocation is
    smaller than any parameter with its own memory. A parameter that is larger than its source is placed
    behind it: moved from the last to the first, nothing is overwritten that is still to be read.
    """

    def order(parameter: ShardedParameter) -> tuple[bool, Address]:
        tensor = _first_tensor(parameter)
        home = rank.homes.get(tensor, (0, ""))
        return tensor not in rank.source_tensors, rank.memory.get(home, (len(rank.memory), 0))

    free, addresses = _FreeMemory(rank), {}
    for parameter in sorted(rank.destination, key=order):
        key = (parameter.chunk, parameter.name)
        address = free.reserve_first_gap(rank.sizes[key])
        if address is not None:
            addresses[key] = address
    return _layout(rank, addresses, {})


def _layout(rank: RankSides, addresses: Addresses, aliased: Addresses) -> MemoryLayout:
    return MemoryLayout(rank.sizes, sum(rank.source_sizes.values()), addresses, set(aliased))


def _alias(rank: RankSides, free: "_FreeMemory") -> Addresses:
    """Reserve the addresses of the parameters that are one contiguous block of a source parameter."""
    holders = {
        block.tensor: parameter for parameter in rank.source if parameter.owner for block in parameter.blocks
    }
    aliased: Addresses = {}
    for parameter in rank.destination:
        holder = holders.get(_first_tensor(parameter))
        start = None if holder is None else _same_block(holder, parameter)
        if holder is None or start is None:
            continue
        space, offset = rank.memory[holder.chunk, holder.name]
        key, address = (parameter.chunk, parameter.name), (space, offset + start * rank.element_bytes)
        if free.reserve(address, rank.sizes[key]):
            aliased[key] = address
    return aliased


class _FreeMemory:
    """The intervals of a rank's source memory that no destination parameter is placed in yet."""

    def __init__(self, rank: RankSides):
        self.intervals = _merged((*rank.memory[key], size) for key, size in rank.source_sizes.items())

    def reserve(self, address: Address, size: int) -> bool:
        """Reserve `size` bytes; return False if they are not free or not aligned to VECTOR."""
        space, first = address
        if first % VECTOR:
            return False
        for index, (other, start, end) in enumerate(self.intervals):
            if other == space and start <= first and first + size <= end:
                rest = [(space, start, first), (space, first + size, end)]
                self.intervals[index : index + 1] = [part for part in rest if part[1] < part[2]]
                return True
        return False

    def reserve_within(self, home: Interval | None, size: int) -> Address | None:
        """Reserve `size` bytes at the first free place within `home`."""
        if home is None:
            return None
        space, start, end = home
        for other, first, stop in self.intervals:
            first = max(first, start)
            if other == space and first + size <= min(stop, end) and self.reserve((space, first), size):
                return space, first
        return None

    def reserve_from(self, home: Interval | None, size: int) -> Address | None:
        """Reserve `size` bytes from the beginning of `home` on, beyond its end if need be."""
        return home[:2] if home is not None and self.reserve(home[:2], size) else None

    def reserve_smallest_gap(self, home: Interval | None, size: int) -> Address | None:
        """Reserve `size` bytes in the smallest gap that fits, wherever `home` is."""
        return self._reserve_gap(min(self._gaps(size), default=None), size)

    def reserve_first_gap(self, size: int) -> Address | None:
        """Reserve `size` bytes in the gap with the lowest address that fits."""
        return self._reserve_gap(next(iter(self._gaps(size)), None), size)

    def _gaps(self, size: int) -> list[Gap]:
        gaps = [(end - _aligned(start), space, _aligned(start)) for space, start, end in self.intervals]
        return [gap for gap in gaps if gap[0] >= size]

    def _reserve_gap(self, gap: Gap | None, size: int) -> Address | None:
        if gap is None:
            return None
        self.reserve(gap[1:], size)
        return gap[1:]


def _first_tensor(parameter: ShardedParameter) -> str:
    return parameter.blocks[0].tensor if parameter.blocks else ""


def _aligned(start: int) -> int:
    return -(-start // ALIGNMENT) * ALIGNMENT


def _merged(regions: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge regions (allocation, first byte, bytes) into sorted intervals (allocation, first byte, end).

    Regions that only alignment padding separates become one interval.
    """
    merged: list[tuple[int, int, int]] = []
    for space, start, size in sorted(regions):
        if merged and merged[-1][0] == space and start - merged[-1][2] < ALIGNMENT:
            merged[-1] = (space, merged[-1][1], start + size)
        else:
            merged.append((space, start, start + size))
    return merged


def _same_block(holder: ShardedParameter, wanted: ShardedParameter) -> int | None:
    """Return the element of `holder` at which `wanted` begins; None unless `holder` contains all of it.

    The rows must have the same order and the same padding.
    """
    (rows, width), (held_rows, held_width) = matrix_shape(wanted.shape), matrix_shape(holder.shape)
    if width != held_width or any(
        block.cols[1] - block.cols[0] != width for block in (*wanted.blocks, *holder.blocks)
    ):
        return None
    first = wanted.blocks[0]
    below = next(
        (
            b
            for b in holder.blocks
            if (b.tensor, b.cols) == (first.tensor, first.cols) and b.rows[0] <= first.rows[0] < b.rows[1]
        ),
        None,
    )
    if below is None:
        return None
    shift = below.row + first.rows[0] - below.rows[0] - first.row
    if shift < 0 or shift + rows > held_rows:
        return None
    return shift * width if _row_names(holder, shift, shift + rows) == _row_names(wanted, 0, rows) else None


def _row_names(parameter: ShardedParameter, start: int, stop: int) -> list[tuple[int, int, tuple, int]]:
    """Return the contents of rows `start` to `stop`: (first, end, (tensor, columns), row in the tensor).

    `first` and `end` count from `start`; adjacent intervals of consecutive tensor rows are merged.
    """
    names: list[tuple[int, int, tuple, int]] = []
    for block in sorted(parameter.blocks, key=lambda block: block.row):
        first, end = max(block.row, start), min(block.row + block.rows[1] - block.rows[0], stop)
        if first < end:
            row, what = block.rows[0] + first - block.row, (block.tensor, block.cols)
            if (
                names
                and names[-1][1] == first - start
                and names[-1][2] == what
                and names[-1][3] + first - start - names[-1][0] == row
            ):
                names[-1] = (names[-1][0], end - start, *names[-1][2:])
            else:
                names.append((first - start, end - start, what, row))
    return names

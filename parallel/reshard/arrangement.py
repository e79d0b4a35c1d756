"""The memory layout of one rank: its destination parameters in the memory of its source parameters.

A destination parameter that finds no place gets its own memory. There are three layouts:

    source parameters   |   A    |   B     |    C      |
    share               |   a    |         |           |   own memory: b, c
    fill_by_name        |   a    | b    |..| c      |..|   each in its source parameter; padding (..) is left
    fill_in_order       |   a    | b    | c      | free|   packed without padding; most values move

`share` places only those that are one contiguous block of a source parameter. The other two also overwrite.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import itemgetter

from parallel.reshard.plan import matrix_shape
from parallel.weights.shard import ShardedParameter

Span = tuple[int, int, int]  # allocation, first byte, end
Gap = tuple[int, int, int]  # bytes, allocation, first byte
Key = tuple[int, str]  # model chunk, parameter
Address = tuple[int, int]  # index of an allocation of the rank, first byte in it
Addresses = dict[Key, Address]
Shards = Mapping[int, Sequence[ShardedParameter]]  # by world rank
ALIGNMENT = 256  # bytes, of a parameter in a gap
VECTOR = 16  # bytes; vLLM's kernels load this many at a time, so every parameter is aligned to it
WORTH_ANOTHER = 64  # another layout is tried if the excess is more than 1/64 of the larger copy


def arrangements(
    *,
    source: Shards,
    destination: Shards,
    memory: Mapping[int, Addresses],
    element_bytes: int,
    in_place: bool,
) -> Iterator[dict[int, "Arrangement"]]:
    """Yield the memory layouts of all ranks, first the one that moves least.

    A second one follows if the first one's excess is too large when the caller asks for the next.
    """
    homes = {
        block.tensor: (p.chunk, p.name)
        for shards in source.values()
        for p in shards
        if p.owner
        for block in p.blocks
    }
    for arrange in (
        (Arrangement.fill_by_name, Arrangement.fill_in_order) if in_place else (Arrangement.share,)
    ):
        laid = {
            rank: Arrangement(
                source.get(rank, ()), shards, memory.get(rank, {}), element_bytes=element_bytes, homes=homes
            )
            for rank, shards in destination.items()
        }
        for arrangement in laid.values():
            arrange(arrangement)
        yield laid
        if excess_bytes(laid) * WORTH_ANOTHER <= max(
            (arrangement.larger_bytes for arrangement in laid.values()), default=0
        ):
            return


def excess_bytes(laid: Mapping[int, "Arrangement"]) -> int:
    """Return the excess memory of the rank that has the most."""
    return max((arrangement.excess_bytes for arrangement in laid.values()), default=0)


class Arrangement:
    """The memory layout of one rank's destination parameters.

    Call `share`, `fill_by_name` or `fill_in_order` once, then `move` as often as needed.
    """

    def __init__(
        self,
        source: Sequence[ShardedParameter],
        destination: Sequence[ShardedParameter],
        memory: Addresses,
        *,
        element_bytes: int,
        homes: Mapping[str, Key],
    ):
        """
        Args:
            memory: addresses of the source parameters.
            homes: the source parameter that holds each tensor, on any rank.
        """
        self.source, self.destination, self.memory, self.element_bytes, self.homes = (
            source,
            destination,
            memory,
            element_bytes,
            homes,
        )
        self.addresses: Addresses = {}  # a destination parameter without an address has its own memory
        self.sizes = {(p.chunk, p.name): prod(p.shape) * element_bytes for p in destination}
        self.source_sizes = {(p.chunk, p.name): prod(p.shape) * element_bytes for p in source}
        self.held = {block.tensor for p in source if p.owner for block in p.blocks}
        self.free = _merged((*memory[key], size) for key, size in self.source_sizes.items())
        self.shared: set[Key] = set()
        self.moved: set[Key] = set()
        self.left: list[Span] = []  # memory that relocated parameters have left

    @property
    def larger_bytes(self) -> int:
        """Size of the larger copy, source or destination."""
        return max(sum(self.sizes.values()), sum(self.source_sizes.values()))

    @property
    def own_bytes(self) -> int:
        """Size of the destination parameters with their own memory."""
        return sum(size for key, size in self.sizes.items() if key not in self.addresses)

    @property
    def excess_bytes(self) -> int:
        """Memory of both copies together, less that of the larger copy."""
        return self.own_bytes - self.larger_bytes + sum(self.source_sizes.values())

    def share(self) -> None:
        """Alias the parameters that are one contiguous block of a source parameter."""
        holders = {
            block.tensor: parameter
            for parameter in self.source
            if parameter.owner
            for block in parameter.blocks
        }
        for parameter in self.destination:
            holder = holders.get(_first_tensor(parameter))
            start = holder and _same_block(holder, parameter)
            if start is not None and holder is not None:
                space, offset = self.memory[holder.chunk, holder.name]
                address = space, offset + start * self.element_bytes
                if self._take(address, self.sizes[parameter.chunk, parameter.name]):
                    self.addresses[parameter.chunk, parameter.name] = address
                    self.shared.add((parameter.chunk, parameter.name))

    def fill_by_name(self) -> None:
        """Alias what `share` can; place the other parameters in the memory of their source parameter's name.

        They are placed largest first, in three passes: within that source parameter, from its beginning over
        what follows, then in any gap. A parameter whose values come from other ranks also goes to this rank's
        source parameter of that name. Whole parameters then swap places, in cycles that fit into a window.
        Padding may be left after each of them.
        """
        self.share()
        own_first = sorted(
            self.destination, key=lambda p: (-self.sizes[p.chunk, p.name], _first_tensor(p) not in self.held)
        )
        rest = [p for p in own_first if (p.chunk, p.name) not in self.addresses]
        for find in (self._slot, self._spill, self._gap):
            for parameter in rest:
                key = (parameter.chunk, parameter.name)
                if (
                    key not in self.addresses
                    and (address := find(self.homes.get(_first_tensor(parameter)), self.sizes[key]))
                    is not None
                ):
                    self.addresses[key] = address

    def fill_in_order(self) -> None:
        """Place all parameters by first fit, in the order of their source parameters in memory.

        Parameters whose values come from other ranks are placed last. At the end the rest of an allocation is
        smaller than any parameter with its own memory. A parameter that is larger than its source is placed
        behind it: moved from the last to the first, nothing is overwritten that is still to be read.
        """

        def turn(parameter: ShardedParameter) -> tuple[bool, Address]:
            tensor = _first_tensor(parameter)
            return tensor not in self.held, self.memory.get(
                self.homes.get(tensor, (0, "")), (len(self.memory), 0)
            )

        for parameter in sorted(self.destination, key=turn):
            key = (parameter.chunk, parameter.name)
            address = self._gap(None, self.sizes[key], choose=itemgetter(0))
            if address is not None:
                self.addresses[key] = address

    def move(self, keys: Sequence[Key]) -> None:
        """Relocate parameters, and offer the memory that they leave to later calls.

        A parameter goes to memory that an earlier call left, if it fits and the parameter has not been
        relocated before. Otherwise it gets its own memory.
        """
        places = [
            (space, start, start + self.sizes[key])
            for key in keys
            for space, start in [self.addresses.pop(key)]
        ]
        for key in keys:
            fitting = [
                (end - start, space, start, end)
                for space, start, end in self.left
                if end - start >= self.sizes[key] and key not in self.moved
            ]
            if fitting:
                _, space, start, end = min(fitting)
                self.left.remove((space, start, end))
                self.addresses[key] = space, start
        self.left += places
        self.moved.update(keys)
        self.shared.difference_update(keys)

    def overwritten(self) -> list[Span]:
        """Return the sorted intervals (allocation, first byte, end) whose source values are overwritten."""
        return sorted(
            (space, start, start + self.sizes[key])
            for key, (space, start) in self.addresses.items()
            if key not in self.shared
        )

    def _slot(self, home: Key | None, size: int) -> Address | None:
        """Reserve `size` bytes at the first free place within the source parameter `home`."""
        if home not in self.memory:
            return None
        (space, start), end = self.memory[home], self.memory[home][1] + self.source_sizes[home]
        for held, first, stop in self.free:
            if (
                held == space
                and max(first, start) + size <= min(stop, end)
                and self._take((space, max(first, start)), size)
            ):
                return space, max(first, start)
        return None

    def _spill(self, home: Key | None, size: int) -> Address | None:
        """Reserve `size` bytes from the beginning of `home` on, beyond its end if need be."""
        return self.memory[home] if home in self.memory and self._take(self.memory[home], size) else None

    def _gap(self, home: Key | None, size: int, choose: Callable[[list[Gap]], Gap] = min) -> Address | None:
        """Reserve `size` bytes in the smallest gap that fits.

        Args:
            choose: selects another one of the gaps that fit, which are ordered by address.
        """
        aligned = ((end - _aligned(start), space, _aligned(start)) for space, start, end in self.free)
        gaps = [gap for gap in aligned if gap[0] >= size]
        if not gaps:
            return None
        _, space, start = choose(gaps)
        self._take((space, start), size)
        return space, start

    def _take(self, address: Address, size: int) -> bool:
        """Reserve an interval; return False if it is not free or not aligned to VECTOR."""
        space, first = address
        if first % VECTOR:
            return False
        for place, (held, start, end) in enumerate(self.free):
            if held == space and start <= first and first + size <= end:
                rest = [(space, start, first), (space, first + size, end)]
                self.free[place : place + 1] = [part for part in rest if part[1] < part[2]]
                return True
        return False


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

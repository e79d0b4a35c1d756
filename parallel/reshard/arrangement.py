"""Where one rank's destination parameters lie in the memory of its source parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import itemgetter

from parallel.reshard.plan import matrix_shape
from parallel.weights.shard import ShardedParameter

Span = tuple[int, int, int]  # allocation, first byte, end
Gap = tuple[int, int, int]  # bytes, allocation, first byte
Key = tuple[int, str]  # model chunk, parameter
Address = tuple[int, int]  # which of a rank's allocations, first byte in it
Addresses = dict[Key, Address]
Shards = Mapping[int, Sequence[ShardedParameter]]  # by world rank
ALIGNMENT = 256  # bytes, of a parameter in a gap
VECTOR = 16  # bytes; vLLM's kernels read so many at a time, so that no parameter may begin between
WORTH_ANOTHER = 64  # excess memory is, from this part of the larger copy on


def arrangements(
    *,
    source: Shards,
    destination: Shards,
    memory: Mapping[int, Addresses],
    element_bytes: int,
    in_place: bool,
) -> Iterator[dict[int, "Arrangement"]]:
    """Every rank's arrangement, in the way that moves least; if that leaves too much unused when the next one is asked for, in the other way."""
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
    """Of the rank that has most."""
    return max((arrangement.excess_bytes for arrangement in laid.values()), default=0)


class Arrangement:
    """One rank's destination parameters over its source memory: first `share`, `fill_by_name` or `fill_in_order`, once, then `move`."""

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
            memory: where the source parameters lie.
            homes: which source parameter holds a tensor, on whatever rank.
        """
        self.source, self.destination, self.memory, self.element_bytes, self.homes = (
            source,
            destination,
            memory,
            element_bytes,
            homes,
        )
        self.addresses: Addresses = {}  # a destination parameter that is not named has memory of its own
        self.sizes = {(p.chunk, p.name): prod(p.shape) * element_bytes for p in destination}
        self.source_sizes = {(p.chunk, p.name): prod(p.shape) * element_bytes for p in source}
        self.held = {block.tensor for p in source if p.owner for block in p.blocks}
        self.free = _merged((*memory[key], size) for key, size in self.source_sizes.items())
        self.shared: set[Key] = set()
        self.moved: set[Key] = set()
        self.left: list[Span] = []  # by parameters that moved

    @property
    def larger_bytes(self) -> int:
        """The larger one of the two copies."""
        return max(sum(self.sizes.values()), sum(self.source_sizes.values()))

    @property
    def own_bytes(self) -> int:
        """Of the parameters that have memory of their own."""
        return sum(size for key, size in self.sizes.items() if key not in self.addresses)

    @property
    def excess_bytes(self) -> int:
        """By how much both together exceed the larger copy."""
        return self.own_bytes - self.larger_bytes + sum(self.source_sizes.values())

    def share(self) -> None:
        """Parameters that are one contiguous block of a source parameter."""
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
        """Share; the others, largest first: where their elements come from here, then where such elements would be, then wherever they fit.

        What other ranks hold in a parameter of some name goes into this rank's parameter of that name: then whole parameters change
        places, in circles that fit a window. Gaps may be left beside each of them.
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
        """All one after the other, in the order of their sources in memory, those of other ranks last, each as far in front as it fits.

        In the end what is left of an allocation is smaller than any parameter with memory of its own. A parameter that is larger than
        its source lies behind it: dealt from the last to the first, nothing is overwritten that is still to be read.
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
        """Each to where another was that has moved, but once only, or to memory of its own; then others may lie where these were."""
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
        """Intervals (allocation, first byte, end) in which the source's values are lost, sorted."""
        return sorted(
            (space, start, start + self.sizes[key])
            for key, (space, start) in self.addresses.items()
            if key not in self.shared
        )

    def _slot(self, home: Key | None, size: int) -> Address | None:
        """What is free of the source parameter `home`, from its beginning on."""
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
        """From the beginning of `home` over what follows."""
        return self.memory[home] if home in self.memory and self._take(self.memory[home], size) else None

    def _gap(self, home: Key | None, size: int, choose: Callable[[list[Gap]], Gap] = min) -> Address | None:
        """The smallest one, or what `choose` takes of all that are large enough, in the order of their addresses."""
        aligned = ((end - _aligned(start), space, _aligned(start)) for space, start, end in self.free)
        gaps = [gap for gap in aligned if gap[0] >= size]
        if not gaps:
            return None
        _, space, start = choose(gaps)
        self._take((space, start), size)
        return space, start

    def _take(self, address: Address, size: int) -> bool:
        """Whether the interval was free and begins well; now it is taken."""
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
    """(allocation, first byte, bytes) to sorted (allocation, first byte, end); what only alignment parts becomes one."""
    merged: list[tuple[int, int, int]] = []
    for space, start, size in sorted(regions):
        if merged and merged[-1][0] == space and start - merged[-1][2] < ALIGNMENT:
            merged[-1] = (space, merged[-1][1], start + size)
        else:
            merged.append((space, start, start + size))
    return merged


def _same_block(holder: ShardedParameter, wanted: ShardedParameter) -> int | None:
    """The element of `holder` at which `wanted` begins, if it holds all of it, in the same order and with the same padding."""
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
    """What lies in rows `start` to `stop`, counted from `start`: (first, end, tensor and columns, the tensor's row); neighbours joined."""
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

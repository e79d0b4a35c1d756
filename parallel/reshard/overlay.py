"""One copy of the weights: the destination's parameters lie over the source's memory, and a reshard is a permutation in place.

`share`: a destination parameter that is one contiguous block of a source parameter of its rank is that block; nothing moves.
`swap`: the others lie over the source's memory, too, as far as there is room. Whatever is overwritten was packed before, in the same
window or an earlier one; the way back restores what was overwritten. Pure Python: the same result on every rank.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod

import networkx

from parallel.reshard.plan import Plan, compile_plan, matrix_shape
from parallel.reshard.transfer import Place, Transfer, Window
from parallel.weights.shard import ShardedParameter

Span = tuple[int, int, int]  # allocation, first byte, end
Key = tuple[int, str]  # model chunk, parameter
Address = tuple[int, int]  # which of a rank's allocations, first byte in it
Addresses = dict[Key, Address]
Shards = Mapping[int, Sequence[ShardedParameter]]
ALIGNMENT = 256  # bytes, of a parameter in a gap
VECTOR = 16  # bytes; vLLM's kernels read so many at a time, so that no parameter may begin between
_NO_LIMIT = 2**62
_PIECES = 16  # a window holds at least so many pieces of a long permutation


@dataclass(frozen=True, slots=True)
class Overlay:
    """Where destination parameters lie in the source's memory, and the plans between the two."""

    addresses: Mapping[int, Addresses]  # by rank; a parameter that is not named has memory of its own
    forth: Plan
    back: Plan | None  # None: the source's memory is never overwritten

    def own_bytes(self, destination: Shards) -> dict[int, int]:
        """Bytes of each rank's parameters that have memory of their own."""
        return {rank: sum(_bytes(p, self.forth.element_bytes) for p in shards if (p.chunk, p.name) not in self.addresses[rank]) for rank, shards in destination.items()}


def overlay(
    *,
    source: Shards,
    destination: Shards,
    memory: Mapping[int, Addresses],
    element_bytes: int,
    window_bytes: int,
    in_place: bool,
    host_of: Callable[[int], int] | None = None,
    peer_memory: bool = False,
) -> Overlay:
    """Lay `destination` over `source` and plan both ways.

    Args:
        memory: where each rank's source parameters lie.
        in_place: False only shares (`share`); True also overwrites (`swap`).
        peer_memory: all ranks read each other's memory.

    Raises:
        ValueError: as `compile_plan`.
    """
    common = dict(element_bytes=element_bytes, window_bytes=_NO_LIMIT, host_of=host_of)  # whole transfers: the pieces of a circle have to meet
    forth = compile_plan(source=source, destination=destination, peer_memory=peer_memory, **common)
    back = compile_plan(source=destination, destination=source, **common) if in_place else None
    layers = {rank: _Layer(source.get(rank, ()), parameters, memory.get(rank, {}), element_bytes) for rank, parameters in destination.items()}
    homes = {block.tensor: (p.chunk, p.name) for shards in source.values() for p in shards if p.owner for block in p.blocks}
    for layer in layers.values():
        layer.share()
        if in_place:
            layer.fill(homes)
    while True:
        addresses = {rank: layer.addresses for rank, layer in layers.items()}
        ends = _Ends(source, destination, memory, addresses, element_bytes)
        outward = _Schedule(ends, window_bytes, pulled=peer_memory, backwards=False)
        planned = outward.plan(forth)
        homeward, restored = None, None
        if back is not None:
            overwritten = {rank: layer.overwritten() for rank, layer in layers.items()}
            homeward = _Schedule(ends, window_bytes, pulled=peer_memory, backwards=True)
            restored = homeward.plan(back, only=partial(_is_overwritten, overwritten))
        too_large = outward.too_large | (homeward.too_large if homeward else set())
        if not too_large:
            return Overlay(addresses, planned, restored)
        for rank, key in too_large:
            layers[rank].evict(key)


def _bytes(parameter: ShardedParameter, element_bytes: int) -> int:
    return prod(parameter.shape) * element_bytes


class _Layer:
    """One rank's destination parameters over its source memory."""

    def __init__(self, source: Sequence[ShardedParameter], destination: Sequence[ShardedParameter], memory: Addresses, element_bytes: int):
        self.source, self.destination, self.memory, self.element_bytes = source, destination, memory, element_bytes
        self.addresses: Addresses = {}
        self.sizes = {(p.chunk, p.name): _bytes(p, element_bytes) for p in destination}
        self.shared: set[Key] = set()
        self.source_sizes = {(p.chunk, p.name): _bytes(p, element_bytes) for p in source}
        self.free = _merged((*memory[key], size) for key, size in self.source_sizes.items())

    def share(self) -> None:
        """Parameters that are one contiguous block of a source parameter."""
        holders = {block.tensor: parameter for parameter in self.source if parameter.owner for block in parameter.blocks}
        for parameter in self.destination:
            holder = holders.get(_first_tensor(parameter))
            start = holder and _same_block(holder, parameter)
            if start is not None and holder is not None:
                space, offset = self.memory[holder.chunk, holder.name]
                address = space, offset + start * self.element_bytes
                if self._take(address, self.sizes[parameter.chunk, parameter.name]):
                    self.addresses[parameter.chunk, parameter.name] = address
                    self.shared.add((parameter.chunk, parameter.name))

    def fill(self, homes: Mapping[str, Key]) -> None:
        """The others, largest first: where their elements come from here, then where such elements would be, then wherever they fit.

        What other ranks hold in a parameter of some name goes into this rank's parameter of that name: then whole parameters change
        places, in circles that fit a window.

        Args:
            homes: which source parameter holds a tensor, on whatever rank.
        """
        held = {block.tensor for p in self.source if p.owner for block in p.blocks}
        own_first = sorted(self.destination, key=lambda p: (-self.sizes[p.chunk, p.name], _first_tensor(p) not in held))
        rest = [p for p in own_first if (p.chunk, p.name) not in self.addresses]
        for find in (self._slot, self._spill, self._gap):
            for parameter in rest:
                key = (parameter.chunk, parameter.name)
                if key not in self.addresses and (address := find(homes.get(_first_tensor(parameter)), self.sizes[key])) is not None:
                    self.addresses[key] = address

    def evict(self, key: Key) -> None:
        """Give a parameter memory of its own; what it leaves is not filled again."""
        del self.addresses[key]

    def overwritten(self) -> list[Span]:
        """Intervals (allocation, first byte, end) in which the source's values are lost, sorted."""
        return sorted((space, start, start + self.sizes[key]) for key, (space, start) in self.addresses.items() if key not in self.shared)

    def _slot(self, home: Key | None, size: int) -> Address | None:
        """What is free of the source parameter `home`, from its beginning on."""
        if home not in self.memory:
            return None
        (space, start), end = self.memory[home], self.memory[home][1] + self.source_sizes[home]
        for held, first, stop in self.free:
            if held == space and max(first, start) + size <= min(stop, end) and self._take((space, max(first, start)), size):
                return space, max(first, start)
        return None

    def _spill(self, home: Key | None, size: int) -> Address | None:
        """From the beginning of `home` over what follows."""
        return self.memory[home] if home in self.memory and self._take(self.memory[home], size) else None

    def _gap(self, home: Key | None, size: int) -> Address | None:
        fitting = [(end - _aligned(start), space, _aligned(start)) for space, start, end in self.free if end - _aligned(start) >= size]
        if not fitting:
            return None
        _, space, start = min(fitting)
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
    if width != held_width or any(block.cols[1] - block.cols[0] != width for block in (*wanted.blocks, *holder.blocks)):
        return None
    first = wanted.blocks[0]
    below = next((b for b in holder.blocks if (b.tensor, b.cols) == (first.tensor, first.cols) and b.rows[0] <= first.rows[0] < b.rows[1]), None)
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
            if names and names[-1][1] == first - start and names[-1][2] == what and names[-1][3] + first - start - names[-1][0] == row:
                names[-1] = (names[-1][0], end - start, *names[-1][2:])
            else:
                names.append((first - start, end - start, what, row))
    return names


def _is_overwritten(overwritten: Mapping[int, list[Span]], rank: int, span: Span) -> bool:
    """Whether one of a rank's intervals (sorted, disjoint) overlaps `span`."""
    (space, start, end), spans = span, overwritten.get(rank, [])
    place = bisect_left(spans, (space, end))
    return place > 0 and spans[place - 1][0] == space and spans[place - 1][2] > start


class _Ends:
    """Where the rectangles of both sides lie in the shared memory."""

    def __init__(self, source: Shards, destination: Shards, memory: Mapping[int, Addresses], addresses: Mapping[int, Addresses], element_bytes: int):
        self.element_bytes, self.memory, self.addresses = element_bytes, memory, addresses
        shapes = [{id(shards): {(p.chunk, p.name): matrix_shape(p.shape)[1] for p in shards} for shards in side.values()} for side in (source, destination)]
        self.widths = [{rank: known[id(shards)] for rank, shards in side.items()} for side, known in zip((source, destination), shapes)]

    def at_source(self, rank: int, place: Place, shape: tuple[int, int]) -> Span | None:
        return self._span(self.memory[rank].get(place[:2]), self.widths[0][rank][place[:2]], place, shape)

    def at_destination(self, rank: int, place: Place, shape: tuple[int, int]) -> Span | None:
        """None for a parameter with memory of its own."""
        return self._span(self.addresses[rank].get(place[:2]), self.widths[1][rank][place[:2]], place, shape)

    def same_stride(self, transfer: Transfer, backwards: bool) -> bool:
        ours, theirs = (transfer.destination, transfer.source) if backwards else (transfer.source, transfer.destination)
        rank = transfer.source_rank
        return transfer.shape[0] == 1 or self.widths[0][rank][ours[:2]] == self.widths[1][rank][theirs[:2]]

    def _span(self, address: Address | None, width: int, place: Place, shape: tuple[int, int]) -> Span | None:
        if address is None:
            return None
        first = place[2] * width + place[3]
        last = first + (shape[0] - 1) * width + shape[1]
        return address[0], address[1] + first * self.element_bytes, address[1] + last * self.element_bytes


class _Schedule:
    """Order and windows of one direction, such that nothing is overwritten before it was packed."""

    def __init__(self, ends: _Ends, window_bytes: int, *, pulled: bool, backwards: bool):
        self.ends, self.window_bytes, self.pulled, self.backwards = ends, window_bytes, pulled, backwards
        self.too_large: set[tuple[int, Key]] = set()  # (rank, laid-over parameter) that cannot be permuted within a window

    def plan(self, plan: Plan, only: Callable[[int, Span], bool] | None = None) -> Plan:
        """`plan` again in an order that works in place: without what lies right already and, given `only`, what it leaves out."""
        direct: list[Transfer] = []
        moves: list[Transfer] = []
        order: dict[str, int] = {}
        for number, transfer in enumerate(plan.transfers()):
            order.setdefault(transfer.tensor, len(order))
            read, written = self._spans(transfer)
            if self._stays(transfer, read, written) or (only is not None and written is not None and not only(transfer.destination_rank, written)):
                continue
            if written is None and number < len(plan.direct):
                direct.append(transfer)
            else:
                moves += self._pieces(transfer, plan.element_bytes)
        moves.sort(key=lambda move: order[move.tensor])
        windows = self._windows(moves, plan.element_bytes)
        return replace(plan, window_bytes=self.window_bytes, direct=tuple(direct), windows=tuple(windows), pulled=self.pulled and bool(windows))

    def _spans(self, transfer: Transfer) -> tuple[Span | None, Span | None]:
        """Where a transfer reads and where it writes."""
        at_read, at_written = (self.ends.at_destination, self.ends.at_source) if self.backwards else (self.ends.at_source, self.ends.at_destination)
        return at_read(transfer.source_rank, transfer.source, transfer.shape), at_written(transfer.destination_rank, transfer.destination, transfer.shape)

    def _stays(self, transfer: Transfer, read: Span | None, written: Span | None) -> bool:
        return transfer.source_rank == transfer.destination_rank and read is not None and read == written and self.ends.same_stride(transfer, self.backwards)

    def _pieces(self, transfer: Transfer, element_bytes: int) -> Iterator[Transfer]:
        num_rows, width = transfer.shape
        rows = max(1, self.window_bytes // 2 // _PIECES // (width * element_bytes))
        for start in range(0, num_rows, rows):
            yield transfer if rows >= num_rows else transfer.part(start, min(start + rows, num_rows))

    def _windows(self, moves: list[Transfer], element_bytes: int) -> list[Window]:
        """Deal the moves out, dependencies first; those that wait for each other in a circle share a window."""
        half, windows, filled = self.window_bytes // 2 // element_bytes, [], defaultdict(int)
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(len(moves)))
        graph.add_edges_from(self._dependencies(moves))
        for component in networkx.strongly_connected_components(graph):  # a component comes after those that it depends on
            circle = [moves[index] for index in sorted(component)]
            staged = self._staged(circle)
            need = max(staged.values())
            if need > 2 * half:
                self.too_large.add(self._largest(circle, element_bytes))
                continue
            if not windows or any(filled[rank] + size > half for rank, size in staged.items()):
                if windows and (need > half or max(filled.values()) > half):
                    windows.append({})  # two windows that follow each other share the staging memory: nothing beside a large one
                windows.append({})
                filled.clear()
            for move in circle:
                windows[-1].setdefault((move.source_rank, move.destination_rank), []).append(move)
            for rank, size in staged.items():
                filled[rank] += size
        return windows

    def _dependencies(self, moves: list[Transfer]) -> Iterator[tuple[int, int]]:
        """(a, b): what `a` overwrites `b` reads, so that `b` has to be packed in the same window or an earlier one."""
        readers: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)  # by rank: allocation, first byte, end, move
        for index, move in enumerate(moves):
            read, _ = self._spans(move)
            if read is not None:
                readers[move.source_rank].append((*read, index))
        highest: dict[int, list[tuple[int, int]]] = {}  # by rank: allocation and the largest end so far
        for rank, spans in readers.items():
            spans.sort()
            highest[rank] = list(accumulate(((space, end) for space, _, end, _ in spans), max))
        for index, move in enumerate(moves):
            _, written = self._spans(move)
            if written is None:
                continue
            space, start, end = written
            spans = readers[move.destination_rank]
            place = bisect_left(spans, (space, end)) - 1
            while place >= 0 and highest[move.destination_rank][place] > (space, start):
                if spans[place][0] == space and spans[place][2] > start and spans[place][3] != index:
                    yield index, spans[place][3]
                place -= 1

    def _staged(self, moves: list[Transfer]) -> dict[int, int]:
        staged: dict[int, int] = defaultdict(int)  # elements, by rank
        for move in moves:
            for rank in {move.source_rank} if self.pulled else {move.source_rank, move.destination_rank}:
                staged[rank] += move.elements
        return staged

    def _largest(self, moves: list[Transfer], element_bytes: int) -> tuple[int, Key]:
        """The laid-over parameter that has most of these moves; without one it is a single row that is too long."""
        ends = [(move.source_rank, move.source) if self.backwards else (move.destination_rank, move.destination) for move in moves]
        laid_over = Counter({(rank, place[:2]): 0 for rank, place in ends if place[:2] in self.ends.addresses[rank]})
        if not laid_over:
            need = 2 * max(move.shape[1] for move in moves) * element_bytes
            raise ValueError(f"window_bytes={self.window_bytes} cannot hold two rows of {moves[0].tensor}, {need} bytes; set it to {need} or more")
        for (rank, place), move in zip(ends, moves):
            if (rank, place[:2]) in laid_over:
                laid_over[rank, place[:2]] += move.elements
        return laid_over.most_common(1)[0][0]

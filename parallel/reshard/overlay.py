"""One copy of the weights: the destination's parameters lie over the source's memory, and a reshard is a permutation in place.

`share`: a destination parameter that is one contiguous block of a source parameter of its rank is that block; nothing moves.
`swap`: the others lie over the source's memory, too, as far as there is room. Whatever is overwritten was packed before, in the same
window or an earlier one; the way back restores what was overwritten. What waits for itself in a circle has to fit into one window;
where it does not, it is laid out anew. Pure Python: the same result on every rank.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod

import networkx

from parallel.reshard.arrangement import (
    Address,
    Addresses,
    Arrangement,
    Key,
    Shards,
    Span,
    arrangements,
    excess_bytes,
)
from parallel.reshard.plan import Plan, compile_plan, matrix_shape
from parallel.reshard.transfer import Place, Transfer, Window

Circle = list[
    tuple[int, Key]
]  # (rank, laid-over parameter) of moves that wait for each other, those with most first
_NO_LIMIT = 2**62
_SMALL = 16  # a circle of at most this part of the larger copy moves as a whole
_PIECES = 16  # a window holds at least so many pieces of a long permutation
_SHARES = 4  # and so many pieces of what goes into memory of its own


@dataclass(frozen=True, slots=True)
class Overlay:
    """Where destination parameters lie in the source's memory, and the plans between the two."""

    addresses: Mapping[int, Addresses]  # by rank; a parameter that is not named has memory of its own
    forth: Plan
    back: Plan | None  # None: the source's memory is never overwritten

    def own_bytes(self, destination: Shards) -> dict[int, int]:
        """Bytes of each rank's parameters that have memory of their own."""
        size = self.forth.element_bytes
        return {
            rank: sum(prod(p.shape) * size for p in shards if (p.chunk, p.name) not in self.addresses[rank])
            for rank, shards in destination.items()
        }


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
    common = dict(
        element_bytes=element_bytes, window_bytes=_NO_LIMIT, host_of=host_of
    )  # whole transfers: the pieces of a circle have to meet
    forth = compile_plan(source=source, destination=destination, peer_memory=peer_memory, **common)
    back = compile_plan(source=destination, destination=source, **common) if in_place else None
    best, least = None, _NO_LIMIT
    for laid in arrangements(
        source=source, destination=destination, memory=memory, element_bytes=element_bytes, in_place=in_place
    ):
        while excess_bytes(laid) < least:  # what moves out of a circle never makes it smaller
            ends = _Ends(
                source,
                destination,
                memory,
                {rank: arrangement.addresses for rank, arrangement in laid.items()},
                element_bytes,
            )
            found, circles = _planned(forth, back, ends, laid, window_bytes, pulled=peer_memory)
            if not circles:
                best, least = found, excess_bytes(laid)
            elif best is None:
                _break(circles, laid)
            else:  # the other way is for what has none
                break
    assert best is not None  # nothing is larger than no limit
    return best


def _planned(
    forth: Plan,
    back: Plan | None,
    ends: "_Ends",
    laid: Mapping[int, Arrangement],
    window_bytes: int,
    *,
    pulled: bool,
) -> tuple[Overlay, list[Circle]]:
    """Both ways over one arrangement, and the circles that no window holds: with any the plans are not complete."""
    outward = _Schedule(ends, window_bytes, pulled=pulled, backwards=False)
    planned = outward.plan(forth)
    if back is None:
        return Overlay(ends.addresses, planned, None), outward.too_large
    homeward = _Schedule(ends, window_bytes, pulled=pulled, backwards=True)
    restored = homeward.plan(
        back,
        only=partial(
            _is_overwritten, {rank: arrangement.overwritten() for rank, arrangement in laid.items()}
        ),
    )
    return Overlay(ends.addresses, planned, restored), outward.too_large + homeward.too_large


def _break(circles: list[Circle], laid: Mapping[int, Arrangement]) -> None:
    """Lay circles out anew: each to where the one before it was, and the first in memory of its own.

    So the circles of all layers, which are alike, become one chain for the price of one of them. Of a circle that holds more of the
    model only the parameter with most moves goes.
    """
    moving: Circle = []
    for circle in sorted(
        circles, key=lambda circle: min((rank, laid[rank].addresses[key]) for rank, key in circle)
    ):
        if not set(circle).isdisjoint(moving):
            continue  # one circle, out and back
        held: Counter[int] = Counter()
        for rank, key in circle:
            held[rank] += laid[rank].sizes[key]
        circle = (
            circle
            if all(size * _SMALL <= laid[rank].larger_bytes for rank, size in held.items())
            else circle[:1]
        )
        for rank in held:
            laid[rank].move([key for other, key in circle if other == rank])
        moving += circle


def _is_overwritten(overwritten: Mapping[int, list[Span]], rank: int, span: Span) -> bool:
    """Whether one of a rank's intervals (sorted, disjoint) overlaps `span`."""
    (space, start, end), spans = span, overwritten.get(rank, [])
    place = bisect_left(spans, (space, end))
    return place > 0 and spans[place - 1][0] == space and spans[place - 1][2] > start


class _Ends:
    """Where the rectangles of both sides lie in the shared memory."""

    def __init__(
        self,
        source: Shards,
        destination: Shards,
        memory: Mapping[int, Addresses],
        addresses: Mapping[int, Addresses],
        element_bytes: int,
    ):
        self.element_bytes, self.memory, self.addresses = element_bytes, memory, addresses
        shapes = [
            {
                id(shards): {(p.chunk, p.name): matrix_shape(p.shape)[1] for p in shards}
                for shards in side.values()
            }
            for side in (source, destination)
        ]
        self.widths = [
            {rank: known[id(shards)] for rank, shards in side.items()}
            for side, known in zip((source, destination), shapes)
        ]

    def at_source(self, rank: int, place: Place, shape: tuple[int, int]) -> Span | None:
        return self._span(self.memory[rank].get(place[:2]), self.widths[0][rank][place[:2]], place, shape)

    def at_destination(self, rank: int, place: Place, shape: tuple[int, int]) -> Span | None:
        """None for a parameter with memory of its own."""
        return self._span(self.addresses[rank].get(place[:2]), self.widths[1][rank][place[:2]], place, shape)

    def same_stride(self, transfer: Transfer, backwards: bool) -> bool:
        ours, theirs = (
            (transfer.destination, transfer.source) if backwards else (transfer.source, transfer.destination)
        )
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
        self.too_large: list[Circle] = []

    def plan(self, plan: Plan, only: Callable[[int, Span], bool] | None = None) -> Plan:
        """`plan` again in an order that works in place: without what lies right already and, given `only`, what it leaves out."""
        direct: list[Transfer] = []
        moves: list[Transfer] = []
        order: dict[str, int] = {}
        for number, transfer in enumerate(plan.transfers()):
            order.setdefault(transfer.tensor, len(order))
            read, written = self._spans(transfer)
            if self._stays(transfer, read, written) or (
                only is not None and written is not None and not only(transfer.destination_rank, written)
            ):
                continue
            if written is None and number < len(plan.direct):
                direct.append(transfer)
            else:
                moves += self._pieces(transfer, plan.element_bytes, _PIECES if written else _SHARES)
        moves.sort(key=lambda move: order[move.tensor])
        windows = self._windows(moves, plan.element_bytes)
        return replace(
            plan,
            window_bytes=self.window_bytes,
            direct=tuple(direct),
            windows=tuple(windows),
            pulled=self.pulled and bool(windows),
        )

    def _spans(self, transfer: Transfer) -> tuple[Span | None, Span | None]:
        """Where a transfer reads and where it writes."""
        at_read, at_written = (
            (self.ends.at_destination, self.ends.at_source)
            if self.backwards
            else (self.ends.at_source, self.ends.at_destination)
        )
        return at_read(transfer.source_rank, transfer.source, transfer.shape), at_written(
            transfer.destination_rank, transfer.destination, transfer.shape
        )

    def _stays(self, transfer: Transfer, read: Span | None, written: Span | None) -> bool:
        return (
            transfer.source_rank == transfer.destination_rank
            and read is not None
            and read == written
            and self.ends.same_stride(transfer, self.backwards)
        )

    def _pieces(self, transfer: Transfer, element_bytes: int, pieces: int) -> Iterator[Transfer]:
        num_rows, width = transfer.shape
        rows = max(1, self.window_bytes // 2 // pieces // (width * element_bytes))
        for start in range(0, num_rows, rows):
            yield transfer if rows >= num_rows else transfer.part(start, min(start + rows, num_rows))

    def _windows(self, moves: list[Transfer], element_bytes: int) -> list[Window]:
        """Deal the moves out, dependencies first; those that wait for each other in a circle share a window."""
        room = _Room(self.window_bytes // 2 // element_bytes)
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(len(moves)))
        graph.add_edges_from(self._dependencies(moves))
        dealt: dict[int, int] = {}  # the window of each move
        for component in networkx.strongly_connected_components(
            graph
        ):  # a component comes after those that it depends on
            circle = [moves[index] for index in sorted(component)]
            staged = self._staged(circle)
            if max(staged.values()) > 2 * room.half:
                self.too_large.append(self._laid_over(circle, element_bytes))
                continue
            first = max((dealt.get(needed, 0) for index in component for needed in graph[index]), default=0)
            dealt |= dict.fromkeys(component, room.take(first, staged))
        windows: list[Window] = [{} for _ in range(max(dealt.values(), default=-1) + 1)]
        for index, window in sorted(dealt.items()):
            windows[window].setdefault((moves[index].source_rank, moves[index].destination_rank), []).append(
                moves[index]
            )
        return windows

    def _dependencies(self, moves: list[Transfer]) -> Iterator[tuple[int, int]]:
        """(a, b): what `a` overwrites `b` reads, so that `b` has to be packed in the same window or an earlier one."""
        readers: dict[int, list[tuple[int, int, int, int]]] = defaultdict(
            list
        )  # by rank: allocation, first byte, end, move
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

    def _laid_over(self, moves: list[Transfer], element_bytes: int) -> Circle:
        """The laid-over parameters of these moves; without any it is a single row that is too long."""
        ends = [
            (move.source_rank, move.source) if self.backwards else (move.destination_rank, move.destination)
            for move in moves
        ]
        laid_over = Counter(
            {(rank, place[:2]): 0 for rank, place in ends if place[:2] in self.ends.addresses[rank]}
        )
        if not laid_over:
            need = 2 * max(move.shape[1] for move in moves) * element_bytes
            raise ValueError(
                f"window_bytes={self.window_bytes} cannot hold two rows of {moves[0].tensor}, {need} bytes;"
                f" set it to {need} or more"
            )
        for (rank, place), move in zip(ends, moves):
            if (rank, place[:2]) in laid_over:
                laid_over[rank, place[:2]] += move.elements
        return [found for found, _ in laid_over.most_common()]


class _Room:
    """What is left in each window. Two that follow each other share the staging memory, half of it each."""

    def __init__(self, half: int):
        self.half, self.windows = half, 0  # elements
        self.used: dict[tuple[int, int], int] = defaultdict(int)  # by window and rank
        self.full: dict[int, int] = defaultdict(
            int
        )  # by rank: a bit for each window with almost nothing left
        self.closed = 0  # the same for all ranks

    def take(self, first: int, staged: Mapping[int, int]) -> int:
        """The earliest window from `first` on that has room on every rank; what needs more than half is alone between two empty ones."""
        if max(staged.values()) > self.half:
            window = self.windows + (
                self.closed.bit_length() < self.windows
            )  # the one before may be empty already
            self.closed |= 7 << window >> 1
            self.windows = window + 2
            return window
        taken = self.closed | (1 << first) - 1
        for rank in staged:
            taken |= self.full[rank]
        while True:
            window = (~taken & taken + 1).bit_length() - 1  # the lowest bit that is not set
            if all(self.used[window, rank] + size <= self.half for rank, size in staged.items()):
                break
            taken |= 1 << window
        self.windows = max(self.windows, window + 1)
        for rank, size in staged.items():
            self.used[window, rank] += size
            if self.half - self.used[window, rank] < self.half >> 8:
                self.full[rank] |= 1 << window
        return window

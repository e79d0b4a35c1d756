"""In-place (aliased) reshard plans: one copy of the weights in memory for training and for rollout.

The destination parameters are placed in the memory of the source parameters, and a reshard permutes them
there. Two modes:

`share`: a destination parameter that equals one contiguous block of a source parameter of its rank aliases
    that block; nothing is copied.
`swap`: the other destination parameters overwrite source memory, too, as far as there is room. The plan to
    rollout (`forth`) packs every overwritten value first, in the same window or an earlier one. The plan to
    training (`back`) restores what was overwritten.

A move must be packed no later than the window in which its memory is overwritten. Moves that depend on each
other in a cycle must therefore share one window:

    memory of a rank   | slot 0 | slot 1 | slot 2 |
    training layout    |   A    |   B    |   C    |
    rollout layout     |   C    |   A    |   B    |

    A overwrites B, B overwrites C, C overwrites A:    A -> B -> C -> A
    one window: pack A, B, C into staging memory; then unpack A to slot 1, B to slot 2, C to slot 0

If a cycle is too large for a window, its destination parameters are relocated (`_break`), which costs memory:

    rollout layout     |        |   A    |   B    |   + own memory: C
    A -> B -> C:    a chain; C moves first, then B, then A, each in its own window if need be

Pure Python: the same result on every rank.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

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

# (rank, aliased destination parameter) of the moves in a dependency cycle, most elements first
Circle = list[tuple[int, Key]]
_NO_LIMIT = 2**62
_SMALL = 16  # a cycle of at most 1/16 of the larger copy is relocated as a whole
_PIECES = 16  # a window holds at least this many pieces of a move into shared memory
_SHARES = 4  # and this many pieces of a move into a parameter's own memory


@dataclass(frozen=True, slots=True)
class Overlay:
    """Addresses of the destination parameters in the source's memory, and the plans in both directions."""

    addresses: Mapping[int, Addresses]  # by rank; a parameter without an address has its own memory
    forth: Plan  # to rollout
    back: Plan | None  # to training; None: the source's memory is never overwritten

    def own_bytes(self, destination: Shards) -> dict[int, int]:
        """Bytes of the destination parameters with their own memory, per rank."""
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
    """Place `destination` in the memory of `source` and plan both directions.

    Of the memory layouts that allow a complete plan, the one with the least extra memory is chosen.

    Args:
        memory: addresses of the source parameters, per rank.
        in_place: False only aliases (`share`); True also overwrites (`swap`).
        peer_memory: all ranks can read each other's memory.

    Raises:
        ValueError: as `compile_plan`.
    """
    # Without a window limit transfers stay whole; `_Schedule` cuts them, so that the pieces of a cycle match.
    common: dict[str, Any] = dict(element_bytes=element_bytes, window_bytes=_NO_LIMIT, host_of=host_of)
    forth = compile_plan(source=source, destination=destination, peer_memory=peer_memory, **common)
    back = compile_plan(source=destination, destination=source, **common) if in_place else None
    best, least = None, _NO_LIMIT
    for laid in arrangements(
        source=source, destination=destination, memory=memory, element_bytes=element_bytes, in_place=in_place
    ):
        while excess_bytes(laid) < least:  # breaking a cycle never reduces the excess
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
            else:  # a complete plan exists: no cycle of another layout is broken
                break
    assert best is not None  # the excess is always below _NO_LIMIT
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
    """Plan both directions for one memory layout; also return the cycles that fit into no window.

    The plans are complete only if there are no such cycles.
    """
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
    """Break cycles by relocating their parameters.

    The first cycle's parameters get their own memory; each next cycle moves into the space that earlier ones
    left. Layers have cycles of the same sizes, so all of them form one chain, and the extra memory is that of
    one cycle. From a cycle larger than 1/_SMALL of the model only the parameter with the most elements moves.
    """
    moving: Circle = []
    for circle in sorted(
        circles, key=lambda circle: min((rank, laid[rank].addresses[key]) for rank, key in circle)
    ):
        if not set(circle).isdisjoint(moving):
            continue  # the same cycle in the other direction
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
    """Return whether one of a rank's intervals (sorted, disjoint) overlaps `span`."""
    (space, start, end), spans = span, overwritten.get(rank, [])
    place = bisect_left(spans, (space, end))
    return place > 0 and spans[place - 1][0] == space and spans[place - 1][2] > start


class _Ends:
    """Byte spans of both sides' rectangles in the shared memory."""

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
        """Return the span of a destination rectangle; None if its parameter has its own memory."""
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
    """Order the moves of one direction into windows, such that nothing is overwritten before it is packed."""

    def __init__(self, ends: _Ends, window_bytes: int, *, pulled: bool, backwards: bool):
        self.ends, self.window_bytes, self.pulled, self.backwards = ends, window_bytes, pulled, backwards
        self.too_large: list[Circle] = []

    def plan(self, plan: Plan, only: Callable[[int, Span], bool] | None = None) -> Plan:
        """Return `plan` reordered to work in place, without transfers whose values are already in place.

        Args:
            only: of (rank, written span); transfers into shared memory for which it is False are left out.
        """
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
        """Return the spans that a transfer reads and writes; None for a parameter with its own memory."""
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
        """Assign the moves to windows, dependencies first; the moves of a cycle share one window."""
        room = _Room(self.window_bytes // 2 // element_bytes)
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(len(moves)))
        graph.add_edges_from(self._dependencies(moves))
        dealt: dict[int, int] = {}  # the window of each move
        # A component comes after those that it depends on.
        for component in networkx.strongly_connected_components(graph):
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
        """Yield pairs (a, b): move `a` overwrites what move `b` reads.

        Then `b` must be packed in the same window as `a` or an earlier one.
        """
        # By rank: (allocation, first byte, end, move).
        readers: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
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
        """Return the aliased destination parameters of these moves, most elements first.

        Raises:
            ValueError: there are none, so that a single row exceeds the window.
        """
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
    """The free space of each window. Two consecutive windows share the staging memory, half of it each."""

    def __init__(self, half: int):
        self.half, self.windows = half, 0  # elements
        self.used: dict[tuple[int, int], int] = defaultdict(int)  # by window and rank
        self.full: dict[int, int] = defaultdict(int)  # by rank: a bit for each window that is almost full
        self.closed = 0  # a bit for each window that is closed to all ranks

    def take(self, first: int, staged: Mapping[int, int]) -> int:
        """Reserve and return the earliest window from `first` on that has room on every rank.

        A cycle that needs more than half of the staging memory gets a window alone, between two empty ones:

            window        n - 1   |      n      |   n + 1
            staging       empty   | both halves |   empty
        """
        if max(staged.values()) > self.half:
            # The window before may be closed, and therefore empty, already.
            window = self.windows + (self.closed.bit_length() < self.windows)
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

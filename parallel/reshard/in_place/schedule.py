"""Order the moves of one direction into windows, such that nothing is overwritten before it is packed.

A move must be packed no later than the window in which its memory is overwritten. Moves that depend on each
other in a cycle must therefore share one window:

    memory of a rank   | 0      | 1      | 2      |
    training layout    |   A    |   B    |   C    |
    rollout layout     |   C    |   A    |   B    |

          A overwrites B          A ---> B
          B overwrites C          ^      |
          C overwrites A          +- C <-+

    one window: pack A, B, C into staging memory; then unpack A to 1, B to 2, C to 0
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import networkx

from parallel.reshard.in_place.memory_layout import Addresses, Interval, Key
from parallel.reshard.plan import Plan, matrix_shape
from parallel.reshard.transfer import Position, Transfer, Window
from parallel.reshard.windows import WindowPacker
from parallel.weights.shard import Shards

# (rank, aliased destination parameter) of the moves in a dependency cycle, most elements first
Cycle = list[tuple[int, Key]]
Widths = dict[int, dict[Key, int]]  # columns of each parameter as a matrix, by rank
_SHARED_PIECES = 16  # a window holds at least this many pieces of a move into shared memory
_OWN_PIECES = 4  # and this many pieces of a move into a parameter's own memory


def widths_of(shards: Shards) -> Widths:
    by_list: dict[int, dict[Key, int]] = {}  # ranks with the same shards share one list
    for parameters in shards.values():
        if id(parameters) not in by_list:
            by_list[id(parameters)] = {(p.chunk, p.name): matrix_shape(p.shape)[1] for p in parameters}
    return {rank: by_list[id(parameters)] for rank, parameters in shards.items()}


@dataclass(frozen=True, slots=True)
class SideMemory:
    """The parameters of one side in the shared memory of every rank."""

    addresses: Mapping[int, Addresses]  # by rank; a parameter without an address has its own memory
    widths: Widths
    element_bytes: int

    def interval(self, rank: int, position: Position, shape: tuple[int, int]) -> Interval | None:
        """Return the bytes from a rectangle's first to its last element; None in a parameter's own memory."""
        chunk, name, row, col = position
        address = self.addresses[rank].get((chunk, name))
        if address is None:
            return None
        space, start = address
        width = self.widths[rank][chunk, name]
        first = row * width + col
        last = first + (shape[0] - 1) * width + shape[1]
        return space, start + first * self.element_bytes, start + last * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """Schedules one direction: `reads` and `writes` are the same memory in two layouts."""

    reads: SideMemory
    writes: SideMemory
    to_rollout: bool  # True: the aliased parameters are written; False: they are read
    window_bytes: int
    one_sided: bool

    def schedule(
        self, plan: Plan, wanted: Callable[[int, Interval], bool] = lambda rank, written: True
    ) -> tuple[Plan, list[Cycle]]:
        """Return `plan` reordered to work in place, without transfers whose values are already in place.

        Args:
            wanted: of (rank, written interval); transfers into shared memory for which it is False are left
                out.

        Returns:
            The plan, and the cycles that fit into no window; with any of these the plan lacks their moves.
        """
        direct: list[Transfer] = []
        moves: list[Transfer] = []
        order: dict[str, int] = {}
        for number, transfer in enumerate(plan.transfers()):
            order.setdefault(transfer.tensor, len(order))
            written = self._written(transfer)
            if self._is_in_place(transfer, written):
                continue
            if written is not None and not wanted(transfer.destination_rank, written):
                continue
            if written is None and number < len(plan.direct):
                direct.append(transfer)
            else:
                pieces = _OWN_PIECES if written is None else _SHARED_PIECES
                moves += self._pieces(transfer, plan.element_bytes, pieces)
        moves.sort(key=lambda move: order[move.tensor])
        windows, too_large = self._windows(moves, plan.element_bytes)
        scheduled = replace(
            plan,
            window_bytes=self.window_bytes,
            direct=tuple(direct),
            windows=tuple(windows),
            one_sided=self.one_sided and bool(windows),
        )
        return scheduled, too_large

    def _read(self, transfer: Transfer) -> Interval | None:
        return self.reads.interval(transfer.source_rank, transfer.source, transfer.shape)

    def _written(self, transfer: Transfer) -> Interval | None:
        return self.writes.interval(transfer.destination_rank, transfer.destination, transfer.shape)

    def _is_in_place(self, transfer: Transfer, written: Interval | None) -> bool:
        rank = transfer.source_rank
        if rank != transfer.destination_rank or written is None or written != self._read(transfer):
            return False
        read_width = self.reads.widths[rank][transfer.source[:2]]
        return transfer.shape[0] == 1 or read_width == self.writes.widths[rank][transfer.destination[:2]]

    def _pieces(self, transfer: Transfer, element_bytes: int, pieces: int) -> Iterator[Transfer]:
        num_rows, width = transfer.shape
        rows = max(1, self.window_bytes // 2 // pieces // (width * element_bytes))
        for start in range(0, num_rows, rows):
            yield transfer if rows >= num_rows else transfer.part(start, min(start + rows, num_rows))

    def _windows(self, moves: Sequence[Transfer], element_bytes: int) -> tuple[list[Window], list[Cycle]]:
        """Assign the moves to windows, dependencies first; also return the cycles that fit into none."""
        packer = WindowPacker(self.window_bytes // 2 // element_bytes)
        graph = networkx.DiGraph()
        graph.add_nodes_from(range(len(moves)))
        graph.add_edges_from(self._dependencies(moves))
        window_of: dict[int, int] = {}  # of each move
        too_large: list[Cycle] = []
        # A component comes after those that it depends on.
        for component in networkx.strongly_connected_components(graph):
            cycle = [moves[index] for index in sorted(component)]
            staged = self._staged(cycle)
            largest = max(staged.values())
            if largest > 2 * packer.capacity:
                too_large.append(self._aliased_parameters(cycle, element_bytes))
                continue
            if largest > packer.capacity:
                window = packer.reserve_both_halves()
            else:
                needed = {other for index in component for other in graph[index]}
                first = max((window_of.get(other, 0) for other in needed), default=0)
                window = _reserve(packer, first, staged)
            window_of |= dict.fromkeys(component, window)
        windows: list[Window] = [{} for _ in range(max(window_of.values(), default=-1) + 1)]
        for index, window in sorted(window_of.items()):
            move = moves[index]
            windows[window].setdefault((move.source_rank, move.destination_rank), []).append(move)
        return windows, too_large

    def _dependencies(self, moves: Sequence[Transfer]) -> Iterator[tuple[int, int]]:
        """Yield pairs (a, b): move `a` overwrites what move `b` reads.

        Then `b` must be packed in the same window as `a` or an earlier one.
        """
        # By rank: (allocation, first byte, end, move).
        readers: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        for index, move in enumerate(moves):
            read = self._read(move)
            if read is not None:
                readers[move.source_rank].append((*read, index))
        highest: dict[int, list[tuple[int, int]]] = {}  # by rank: allocation and the largest end so far
        for rank, intervals in readers.items():
            intervals.sort()
            highest[rank] = list(accumulate(((space, end) for space, _, end, _ in intervals), max))
        for index, move in enumerate(moves):
            written = self._written(move)
            if written is None:
                continue
            space, start, end = written
            intervals = readers[move.destination_rank]
            at = bisect_left(intervals, (space, end)) - 1
            while at >= 0 and highest[move.destination_rank][at] > (space, start):
                if intervals[at][0] == space and intervals[at][2] > start and intervals[at][3] != index:
                    yield index, intervals[at][3]
                at -= 1

    def _staged(self, moves: Sequence[Transfer]) -> dict[int, int]:
        staged: dict[int, int] = defaultdict(int)  # elements, by rank
        for move in moves:
            for rank in {move.source_rank} if self.one_sided else {move.source_rank, move.destination_rank}:
                staged[rank] += move.elements
        return staged

    def _aliased_parameters(self, moves: Sequence[Transfer], element_bytes: int) -> Cycle:
        """Return the aliased destination parameters of these moves, most elements first.

        Raises:
            ValueError: there are none, so that a single row exceeds the window.
        """
        aliased = self.writes if self.to_rollout else self.reads
        elements: Counter[tuple[int, Key]] = Counter()
        for move in moves:
            if self.to_rollout:
                rank, (chunk, name, *_) = move.destination_rank, move.destination
            else:
                rank, (chunk, name, *_) = move.source_rank, move.source
            if (chunk, name) in aliased.addresses[rank]:
                elements[rank, (chunk, name)] += move.elements
        if not elements:
            need = 2 * max(move.shape[1] for move in moves) * element_bytes
            raise ValueError(
                f"window_bytes={self.window_bytes} cannot hold two rows of {moves[0].tensor}, {need} bytes;"
                f" set it to {need} or more"
            )
        return [parameter for parameter, _ in elements.most_common()]


def _reserve(packer: WindowPacker, first: int, staged: Mapping[int, int]) -> int:
    """Reserve and return the earliest window from `first` on that has room on every rank."""
    for window in packer.open_windows(staged, first=first):
        if all(packer.free(window, rank) >= elements for rank, elements in staged.items()):
            packer.reserve(window, staged)
            return window
    raise AssertionError("`open_windows` has no end")

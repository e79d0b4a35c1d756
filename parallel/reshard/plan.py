"""Compile who sends which slice to whom, as plain data: no torch, no GPU, the same result on every machine.

Both sides describe their parameters as rectangles of Hugging Face tensors (`parallel.weights.shard`). A plan is the
intersection of the two: each destination element is written exactly once, from the nearest rank that holds it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest

from parallel.weights.shard import Block, ShardedParameter

Rect = tuple[int, int, int, int]  # first row, end row, first column, end column
Place = tuple[int, str, int, int]  # model chunk, parameter, first row, first column


@dataclass(frozen=True, slots=True)
class Transfer:
    """A rectangle of a Hugging Face tensor on its way between two parameters (on one rank: a local copy)."""

    tensor: str
    rows: tuple[int, int]  # half-open, in the Hugging Face tensor
    cols: tuple[int, int]
    source_rank: int  # world ranks
    destination_rank: int
    source: Place
    destination: Place

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def elements(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0])

    def part(self, start: int, stop: int) -> "Transfer":
        """Only rows `start` to `stop`, counted from this transfer's first row."""
        first, (chunk, name, row, col), (to_chunk, to_name, to_row, to_col) = self.rows[0], self.source, self.destination
        rows = (first + start, first + stop)
        return replace(self, rows=rows, source=(chunk, name, row + start, col), destination=(to_chunk, to_name, to_row + start, to_col))

    def __str__(self) -> str:
        return f"{self.tensor} rows {self.rows[0]}-{self.rows[1]} columns {self.cols[0]}-{self.cols[1]} from rank {self.source_rank} to rank {self.destination_rank}"


@dataclass(frozen=True, slots=True)
class Padding:
    """A rectangle of a destination parameter that no Hugging Face element reaches: zeros."""

    rank: int
    chunk: int
    name: str
    rows: tuple[int, int]  # half-open, in the parameter
    cols: tuple[int, int]


Window = dict[tuple[int, int], list[Transfer]]  # (source rank, destination rank): the transfers of one message


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a reshard does, in order: local copies, then window after window of messages.

    In a window a rank stages what it sends and what it receives; together at most `window_bytes`.
    """

    ranks: tuple[int, ...]  # every world rank that gives or takes
    element_bytes: int  # of an element on its way (the destination's dtype)
    window_bytes: int
    local: tuple[Transfer, ...]
    windows: tuple[Window, ...]
    padding: tuple[Padding, ...]
    lower_bound_bytes: int  # what the busiest rank must receive under any plan: elements it needs and does not hold
    gather_all_bytes: int  # what the busiest rank would receive if whole tensors were rebuilt on every destination rank

    def transfers(self) -> Iterator[Transfer]:
        """Every transfer, always in the same order: a transfer's number is its place in it."""
        yield from self.local
        for window in self.windows:
            for message in window.values():
                yield from message

    @property
    def messages(self) -> int:
        return sum(len(window) for window in self.windows)

    @property
    def received_bytes(self) -> dict[int, int]:
        """Bytes each rank receives from others."""
        return self._bytes(1)

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes each rank sends to others."""
        return self._bytes(0)

    @property
    def local_bytes(self) -> dict[int, int]:
        """Bytes each rank copies from its own parameters into its own parameters."""
        total = dict.fromkeys(self.ranks, 0)
        for transfer in self.local:
            total[transfer.source_rank] += transfer.elements * self.element_bytes
        return total

    @property
    def staged_bytes(self) -> dict[int, int]:
        """Each rank's staging memory: what it sends and receives in its fullest window."""
        peak = dict.fromkeys(self.ranks, 0)
        for window in self.windows:
            staged: dict[int, int] = defaultdict(int)
            for pair, message in window.items():
                elements = sum(transfer.elements for transfer in message)
                for rank in pair:
                    staged[rank] += elements * self.element_bytes
            for rank, size in staged.items():
                peak[rank] = max(peak[rank], size)
        return peak

    @property
    def peak_extra_bytes(self) -> int:
        """The largest staging memory of any rank."""
        return max(self.staged_bytes.values(), default=0)

    def _bytes(self, side: int) -> dict[int, int]:
        total = dict.fromkeys(self.ranks, 0)
        for window in self.windows:
            for pair, message in window.items():
                total[pair[side]] += sum(transfer.elements for transfer in message) * self.element_bytes
        return total

    def __str__(self) -> str:
        received, local = max(self.received_bytes.values(), default=0), max(self.local_bytes.values(), default=0)
        return (
            f"{len(self.ranks)} ranks, {self.messages} messages in {len(self.windows)} windows; busiest rank receives {received / 2**20:.1f} MiB"
            f" (lower bound {self.lower_bound_bytes / 2**20:.1f}, gathering all {self.gather_all_bytes / 2**20:.1f})"
            f", copies {local / 2**20:.1f} MiB, stages {self.peak_extra_bytes / 2**20:.1f} MiB"
        )


def compile_plan(
    *,
    source: Mapping[int, Sequence[ShardedParameter]],
    destination: Mapping[int, Sequence[ShardedParameter]],
    element_bytes: int,
    window_bytes: int,
    host_of: Callable[[int], int] | None = None,
) -> Plan:
    """Plan how the parameters of `source` fill those of `destination`; both map world ranks to parameters.

    A slice comes from the rank itself if it holds it, else from a rank of its host (`host_of`; None: one host), else
    from any other; among equals from the one that has sent the least.

    Raises:
        ValueError: an element that no source holds, destination blocks that overlap or leave their parameter, or a
            window that cannot hold one row.
    """
    host_of = host_of or (lambda rank: 0)
    sources = _Sources(source, host_of)
    windows = _Windows(window_bytes, element_bytes)
    local: list[Transfer] = []
    padding: list[Padding] = []
    ranks = sorted(destination)
    # Position by position over all ranks, so that a window holds work for every rank and not for the first ones only.
    for parameters in zip_longest(*(destination[rank] for rank in ranks)):
        for rank, parameter in zip(ranks, parameters):
            if parameter is None:
                continue
            padding += [Padding(rank, parameter.chunk, parameter.name, rect[:2], rect[2:]) for rect in _padding_of(parameter)]
            for block in parameter.blocks:
                for transfer in sources.serve(block, parameter, rank):
                    if transfer.source_rank == rank:
                        local.append(transfer)
                    else:
                        windows.place(transfer)
    return Plan(
        ranks=tuple(sorted({*source, *destination})),
        element_bytes=element_bytes,
        window_bytes=window_bytes,
        local=tuple(local),
        windows=tuple(windows.windows),
        padding=tuple(padding),
        lower_bound_bytes=max(sources.minimum.values(), default=0) * element_bytes,
        gather_all_bytes=(sources.total - min((sources.held[rank] for rank in ranks), default=0)) * element_bytes,
    )


@dataclass(slots=True)
class _Replicas:
    """The ranks that hold the same rectangle of a tensor."""

    place: dict[int, Place] = field(default_factory=dict)  # by rank
    on_host: dict[int, list[int]] = field(default_factory=dict)


class _Sources:
    """Source rectangles by tensor, and the choice among them."""

    def __init__(self, source: Mapping[int, Sequence[ShardedParameter]], host_of: Callable[[int], int]):
        self.host_of = host_of
        self.replicas: dict[str, dict[Rect, _Replicas]] = defaultdict(dict)
        self.sent: dict[int, int] = dict.fromkeys(source, 0)  # elements, for the balance
        self.held: dict[int, int] = defaultdict(int)  # elements a rank holds as a source
        self.minimum: dict[int, int] = defaultdict(int)  # elements a rank needs and does not hold
        self.fetched: dict[tuple[int, str], list[Rect]] = defaultdict(list)  # by rank and tensor: what came from others
        for rank in sorted(source):
            for parameter in source[rank]:
                if parameter.owner:
                    self._add(rank, parameter)
        # The sources cover a tensor, so its size is where the last of them ends.
        self.total = sum(max(rect[1] for rect in rects) * max(rect[3] for rect in rects) for rects in self.replicas.values())

    def _add(self, rank: int, parameter: ShardedParameter) -> None:
        for block in parameter.blocks:
            replicas = self.replicas[block.tensor].setdefault((*block.rows, *block.cols), _Replicas())
            if rank not in replicas.place:
                replicas.place[rank] = (parameter.chunk, parameter.name, block.row, block.col)
                replicas.on_host.setdefault(self.host_of(rank), []).append(rank)
                self.held[rank] += _area((*block.rows, *block.cols))

    def serve(self, block: Block, parameter: ShardedParameter, rank: int) -> Iterator[Transfer]:
        """Transfers that fill `block` of rank `rank`, each element once."""
        missing: list[Rect] = [(*block.rows, *block.cols)]
        for distance, rect, replicas in self._nearest(block, rank):
            if not missing:
                return
            rest: list[Rect] = []
            for wanted in missing:
                rest += _subtract(wanted, rect)
                piece = _intersect(wanted, rect)
                if piece:
                    giver = rank if distance == 0 else self._choose(piece, block.tensor, replicas, rank)
                    place = (parameter.chunk, parameter.name, block.row, block.col)
                    taken, written = _at(replicas.place[giver], rect, piece), _at(place, (*block.rows, *block.cols), piece)
                    yield Transfer(block.tensor, piece[:2], piece[2:], giver, rank, taken, written)
            missing = rest
        if missing:
            first, end, left, right = missing[0]
            raise ValueError(
                f"{block.tensor} rows {first}-{end} columns {left}-{right} are needed for {parameter.name} of rank {rank} and no source rank holds them;"
                " both sides must describe the same model"
            )

    def _nearest(self, block: Block, rank: int) -> list[tuple[int, Rect, _Replicas]]:
        """The rectangles that meet `block` with their distance: 0 own rank, 1 own host, 2 elsewhere; nearest first."""
        wanted, host = (*block.rows, *block.cols), self.host_of(rank)
        found = []
        for rect, replicas in self.replicas.get(block.tensor, {}).items():
            if _intersect(wanted, rect):
                found.append((0 if rank in replicas.place else 1 if host in replicas.on_host else 2, rect, replicas))
        return sorted(found, key=lambda entry: entry[:2])

    def _choose(self, piece: Rect, tensor: str, replicas: _Replicas, rank: int) -> int:
        """The rank that sends `piece`: of the same host if one is there, and of these the one that has sent the least."""
        giver = min(replicas.on_host.get(self.host_of(rank), replicas.place), key=self.sent.__getitem__)
        self.sent[giver] += _area(piece)
        # A tied copy beside its owner needs the same elements twice; they count once.
        fresh = [piece]
        for earlier in self.fetched[rank, tensor]:
            fresh = [part for rect in fresh for part in _subtract(rect, earlier)]
        self.fetched[rank, tensor].append(piece)
        self.minimum[rank] += sum(map(_area, fresh))
        return giver


class _Windows:
    """Deals transfers into windows: the first one with room on both ranks, cut by rows where a window ends."""

    def __init__(self, window_bytes: int, element_bytes: int):
        self.capacity = window_bytes // element_bytes  # elements
        self.element_bytes = element_bytes
        self.windows: list[Window] = []
        self.used: list[dict[int, int]] = []  # by window and rank, elements
        self.first: dict[int, int] = defaultdict(int)  # by rank: the earliest window that may have room

    def place(self, transfer: Transfer) -> None:
        num_rows, width = transfer.shape
        if width > self.capacity:
            need = width * self.element_bytes
            raise ValueError(f"window_bytes={self.capacity * self.element_bytes} cannot hold a row of {transfer.tensor}, {need} bytes; set it to {need} or more")
        pair = (transfer.source_rank, transfer.destination_rank)
        window, row = max(self.first[rank] for rank in pair), 0
        while True:
            if window == len(self.windows):
                self.windows.append({})
                self.used.append(defaultdict(int))
            used = self.used[window]
            rows = min(num_rows - row, (self.capacity - max(used[rank] for rank in pair)) // width)
            if rows:
                self.windows[window].setdefault(pair, []).append(transfer if rows == num_rows else transfer.part(row, row + rows))
                for rank in pair:
                    used[rank] += rows * width
                row += rows
            if row == num_rows:
                return
            for rank in pair:
                if self.first[rank] == window and self.capacity - used[rank] < width:
                    self.first[rank] += 1
            window += 1


def _padding_of(parameter: ShardedParameter) -> list[Rect]:
    written = tuple((b.row, b.row + b.rows[1] - b.rows[0], b.col, b.col + b.cols[1] - b.cols[0]) for b in parameter.blocks)
    height, width = matrix_shape(parameter.shape)
    holes = _holes((0, height, 0, width), written)
    if holes is None:
        raise ValueError(f"the blocks of {parameter.name} with shape {parameter.shape} overlap or leave it: {parameter.blocks}")
    return holes


@cache  # layers repeat the same few shapes
def _holes(whole: Rect, written: tuple[Rect, ...]) -> list[Rect] | None:
    """What `written` leaves of `whole`; None if they overlap or reach outside."""
    holes = [whole]
    for rect in written:
        holes = [part for hole in holes for part in _subtract(hole, rect)]
    return holes if sum(map(_area, holes)) + sum(map(_area, written)) == _area(whole) else None


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter's shape as rows and columns: a vector is one column, further axes join the columns."""
    width = 1
    for size in shape[1:]:
        width *= size
    return shape[0], width


def _at(place: Place, whole: Rect, piece: Rect) -> Place:
    """Where `piece` lies in the parameter that holds `whole` at `place`."""
    chunk, name, row, col = place
    return chunk, name, row + piece[0] - whole[0], col + piece[2] - whole[2]


def _area(rect: Rect) -> int:
    return (rect[1] - rect[0]) * (rect[3] - rect[2])


def _intersect(a: Rect, b: Rect) -> Rect | None:
    first, end, left, right = max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])
    return (first, end, left, right) if first < end and left < right else None


def _subtract(rect: Rect, hole: Rect) -> list[Rect]:
    """What is left of `rect` without `hole`: above, below, left and right of it."""
    cut = _intersect(rect, hole)
    if cut is None:
        return [rect]
    if cut == rect:
        return []
    first, end, left, right = cut
    parts = [(rect[0], first, rect[2], rect[3]), (end, rect[1], rect[2], rect[3]), (first, end, rect[2], left), (first, end, right, rect[3])]
    return [part for part in parts if part[0] < part[1] and part[2] < part[3]]

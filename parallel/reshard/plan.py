"""Compile a reshard plan: which rank sends which slice to which rank.

Plain data and pure Python: no torch, no GPU, the same result on every machine.

Both sides describe their parameters as rectangles of Hugging Face tensors (`parallel.weights.shard`). A plan
is the intersection of the two: each destination element is written exactly once, from the nearest rank that
holds it. Example: 1024 rows of a tensor from tp2 to tp4, all on one host:

    rows        source (tp2)      destination (tp4)
       0- 255   rank 0       ---> rank 0    copy within the rank
     256- 511   rank 0       ---> rank 1    message, or a read of rank 0's memory (`peer_memory`)
     512- 767   rank 1       ---> rank 2    likewise
     768-1023   rank 1       ---> rank 3    likewise
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter

from parallel.reshard.rectangles import Rect, area, holes, intersect, subtract
from parallel.reshard.transfer import Padding, Position, Transfer, Window
from parallel.reshard.windows import Windows
from parallel.weights.shard import ShardedParameter


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps of a reshard in order: direct copies between parameters, then windows of staged messages.

    In a window a rank stages what it sends. It also stages what it receives, unless it reads from its peers'
    staging memory (`one_sided`). Two consecutive windows together stage at most `window_bytes` per rank. A
    message of a rank to itself is staged when it overwrites memory that is still to be read.
    """

    ranks: tuple[int, ...]  # every world rank that sends or receives
    element_bytes: int  # of a transferred element (the destination's dtype)
    window_bytes: int
    direct: tuple[Transfer, ...]  # within one rank, or between ranks that can read each other's memory
    windows: tuple[Window, ...]
    one_sided: bool  # messages are not sent: the destination rank reads the source rank's staging memory
    padding: tuple[Padding, ...]
    # What the busiest rank must receive under any plan: elements that it needs and does not hold.
    lower_bound_bytes: int
    # What the busiest rank would receive if every destination rank gathered whole tensors.
    gather_all_bytes: int

    def transfers(self) -> Iterator[Transfer]:
        """Iterate over all transfers in a fixed order; a transfer's number is its index in this order."""
        yield from self.direct
        for window in self.windows:
            for message in window.values():
                yield from message

    @property
    def messages(self) -> int:
        return sum(giver != taker for window in self.windows for giver, taker in window)

    @property
    def received_bytes(self) -> dict[int, int]:
        """Bytes that each rank receives from other ranks."""
        return self._sum((taker, size) for (giver, taker), size in self._flows() if giver != taker)

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each rank sends to other ranks."""
        return self._sum((giver, size) for (giver, taker), size in self._flows() if giver != taker)

    @property
    def local_bytes(self) -> dict[int, int]:
        """Bytes that each rank copies from its own parameters to its own parameters."""
        return self._sum((giver, size) for (giver, taker), size in self._flows() if giver == taker)

    @property
    def staged_bytes(self) -> dict[int, int]:
        """Staging memory of each rank: the most that it stages in two consecutive windows."""
        peak, before = dict.fromkeys(self.ranks, 0), dict.fromkeys(self.ranks, 0)
        for window in self.windows:
            staged = {
                rank: elements * self.element_bytes for rank, elements in self.staged_elements(window).items()
            }
            for rank, size in staged.items():
                peak[rank] = max(peak[rank], before.get(rank, 0) + size)
            before = staged
        return peak

    def staged_elements(self, window: Window) -> dict[int, int]:
        """Elements that each rank stages in `window`."""
        staged: dict[int, int] = defaultdict(int)
        for pair, message in window.items():
            elements = sum(transfer.elements for transfer in message)
            for rank in pair[:1] if self.one_sided else set(pair):
                staged[rank] += elements
        return staged

    @property
    def peak_extra_bytes(self) -> int:
        """The largest staging memory of any rank."""
        return max(self.staged_bytes.values(), default=0)

    def _bytes_of(self, transfers: Iterable[Transfer]) -> int:
        return sum(transfer.elements for transfer in transfers) * self.element_bytes

    def _flows(self) -> Iterator[tuple[tuple[int, int], int]]:
        for transfer in self.direct:
            yield (transfer.source_rank, transfer.destination_rank), transfer.elements * self.element_bytes
        for window in self.windows:
            for pair, message in window.items():
                yield pair, self._bytes_of(message)

    def _sum(self, sizes: Iterable[tuple[int, int]]) -> dict[int, int]:
        total = dict.fromkeys(self.ranks, 0)
        for rank, size in sizes:
            total[rank] += size
        return total

    def __str__(self) -> str:
        received, local = (
            max(self.received_bytes.values(), default=0),
            max(self.local_bytes.values(), default=0),
        )
        return (
            f"{len(self.ranks)} ranks, {self.messages} messages in {len(self.windows)} windows; busiest rank"
            f" receives {received / 2**20:.1f} MiB"
            f" (lower bound {self.lower_bound_bytes / 2**20:.1f}, gathering all"
            f" {self.gather_all_bytes / 2**20:.1f})"
            f", copies {local / 2**20:.1f} MiB, stages {self.peak_extra_bytes / 2**20:.1f} MiB"
        )


def compile_plan(
    *,
    source: Mapping[int, Sequence[ShardedParameter]],
    destination: Mapping[int, Sequence[ShardedParameter]],
    element_bytes: int,
    window_bytes: int,
    host_of: Callable[[int], int] | None = None,
    peer_memory: bool = False,
) -> Plan:
    """Plan how the parameters of `source` fill those of `destination`; both map world ranks to parameters.

    A slice comes from the destination rank itself if it holds the slice, else from a rank of the same host
    (`host_of`; None: one host), else from any rank. Among equally near ranks the one that has sent the least
    so far is chosen. With `peer_memory` the ranks of one host read each other's memory, so their slices need
    neither messages nor staging.

    Raises:
        ValueError: no source holds an element, destination blocks overlap or exceed their parameter, or a
            window cannot hold one row.
    """
    host_of = host_of or (lambda rank: 0)
    sources = _Sources(source, _repeated(destination), host_of)
    windows = Windows(window_bytes, element_bytes)
    direct: list[Transfer] = []
    padding: list[Padding] = []
    ranks = sorted(destination)
    # Iterate by parameter index over all ranks, so that each window holds work for all ranks.
    for parameters in zip_longest(*(destination[rank] for rank in ranks)):
        # Replicas need the same slices, so each parameter is cut once. It is looked up by identity where
        # ranks share the object, else by value.
        same: dict[int, _Wanted] = {}
        equal: dict[ShardedParameter, _Wanted] = {}
        for rank, parameter in zip(ranks, parameters):
            if parameter is None:
                continue
            wanted = same.get(id(parameter))
            if wanted is None:
                wanted = equal.get(parameter) or equal.setdefault(parameter, sources.wanted(parameter))
                same[id(parameter)] = wanted
            padding += [
                Padding(rank, parameter.chunk, parameter.name, rect[:2], rect[2:]) for rect in wanted.padding
            ]
            for transfer in sources.serve(wanted, rank):
                if transfer.source_rank == rank or (
                    peer_memory and host_of(transfer.source_rank) == host_of(rank)
                ):
                    direct.append(transfer)
                else:
                    windows.place(transfer)
    return Plan(
        ranks=tuple(sorted({*source, *destination})),
        element_bytes=element_bytes,
        window_bytes=window_bytes,
        direct=tuple(direct),
        windows=tuple(windows.windows),
        one_sided=False,
        padding=tuple(padding),
        lower_bound_bytes=max(sources.minimum.values(), default=0) * element_bytes,
        gather_all_bytes=(sources.total - min((sources.held[rank] for rank in ranks), default=0))
        * element_bytes,
    )


def _repeated(destination: Mapping[int, Sequence[ShardedParameter]]) -> set[str]:
    """Return the tensors of which some rank needs several blocks.

    Only these can be needed twice on one rank, for example a tied output layer and its embedding.
    """
    repeated: set[str] = set()
    for parameters in {id(parameters): parameters for parameters in destination.values()}.values():
        counts = Counter(block.tensor for parameter in parameters for block in parameter.blocks)
        repeated |= {tensor for tensor, count in counts.items() if count > 1}
    return repeated


@dataclass(slots=True)
class _Replicas:
    """The ranks that hold the same rectangle of a tensor."""

    place: dict[int, Position] = field(default_factory=dict)  # by rank
    on_host: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Piece:
    """The part of a destination block that comes from one source rectangle, from any of its replicas."""

    rect: Rect
    whole: Rect  # the source's rectangle
    replicas: _Replicas
    own: bool  # the destination rank itself holds a replica
    destination: Position
    rows: tuple[int, int]
    cols: tuple[int, int]
    # The place of `whole` in a replica -> the place of `rect` in it.
    taken: dict[Position, Position] = field(default_factory=dict)


@dataclass(slots=True)
class _WantedBlock:
    tensor: str
    rect: Rect
    place: Position
    holders: list[tuple[Rect, _Replicas]]  # the source rectangles that overlap it
    # The distances of the holders -> the pieces that the block is cut into.
    cuts: dict[tuple[int, ...], list[_Piece]] = field(default_factory=dict)


@dataclass(slots=True)
class _Wanted:
    """A destination parameter, cut along the source rectangles once for all its replicas."""

    padding: list[Rect]
    blocks: list[_WantedBlock]


class _Sources:
    """The source rectangles of each tensor, and the choice of a source rank for each slice."""

    def __init__(
        self,
        source: Mapping[int, Sequence[ShardedParameter]],
        repeated: set[str],
        host_of: Callable[[int], int],
    ):
        self.host_of, self.repeated = host_of, repeated
        self.replicas: dict[str, dict[Rect, _Replicas]] = defaultdict(dict)
        self.sent: dict[int, int] = dict.fromkeys(source, 0)  # elements, to balance the load
        self.held: dict[int, int] = defaultdict(int)  # elements that a rank holds as a source
        self.minimum: dict[int, int] = defaultdict(int)  # elements that a rank needs and does not hold
        # By rank and repeated tensor: the rectangles received from other ranks.
        self.fetched: dict[tuple[int, str], list[Rect]] = defaultdict(list)
        for rank in sorted(source):
            for parameter in source[rank]:
                if parameter.owner:
                    self._add(rank, parameter)
        # The sources cover each tensor, so their largest row and column ends are its size.
        self.total = sum(
            max(rect[1] for rect in rects) * max(rect[3] for rect in rects)
            for rects in self.replicas.values()
        )

    def _add(self, rank: int, parameter: ShardedParameter) -> None:
        for block in parameter.blocks:
            replicas = self.replicas[block.tensor].setdefault((*block.rows, *block.cols), _Replicas())
            if rank not in replicas.place:
                replicas.place[rank] = (parameter.chunk, parameter.name, block.row, block.col)
                replicas.on_host.setdefault(self.host_of(rank), []).append(rank)
                self.held[rank] += area((*block.rows, *block.cols))

    def wanted(self, parameter: ShardedParameter) -> _Wanted:
        blocks = []
        for block in parameter.blocks:
            rect = (*block.rows, *block.cols)
            holders = sorted(
                (
                    (held, replicas)
                    for held, replicas in self.replicas.get(block.tensor, {}).items()
                    if intersect(rect, held)
                ),
                key=itemgetter(0),
            )
            blocks.append(
                _WantedBlock(
                    block.tensor, rect, (parameter.chunk, parameter.name, block.row, block.col), holders
                )
            )
        return _Wanted(_padding_of(parameter), blocks)

    def serve(self, wanted: _Wanted, rank: int) -> Iterator[Transfer]:
        """Yield the transfers that fill a parameter of rank `rank`, each element once."""
        host = self.host_of(rank)
        for block in wanted.blocks:
            # 0: the rank itself, 1: its host, 2: another host.
            distances = tuple(
                [
                    0 if rank in replicas.place else 1 if host in replicas.on_host else 2
                    for _, replicas in block.holders
                ]
            )
            pieces = block.cuts.get(distances)
            if pieces is None:
                pieces = block.cuts[distances] = _cut(block, distances, rank)
            for piece in pieces:
                giver = rank if piece.own else self._choose(piece, block.tensor, rank, host)
                place = piece.replicas.place[giver]
                taken = piece.taken.get(place) or piece.taken.setdefault(
                    place, _at(place, piece.whole, piece.rect)
                )
                yield Transfer(block.tensor, piece.rows, piece.cols, giver, rank, taken, piece.destination)

    def _choose(self, piece: _Piece, tensor: str, rank: int, host: int) -> int:
        """Return the source rank of `piece`: on the same host if possible, and with the least sent so far."""
        giver = min(piece.replicas.on_host.get(host, piece.replicas.place), key=self.sent.__getitem__)
        elements = fresh = area(piece.rect)
        self.sent[giver] += elements
        if tensor in self.repeated:  # an element that is needed twice counts once in the lower bound
            parts = [piece.rect]
            for earlier in self.fetched[rank, tensor]:
                parts = [part for rect in parts for part in subtract(rect, earlier)]
            self.fetched[rank, tensor].append(piece.rect)
            fresh = sum(map(area, parts))
        self.minimum[rank] += fresh
        return giver


def _cut(block: _WantedBlock, distances: tuple[int, ...], rank: int) -> list[_Piece]:
    """Cut `block` into pieces that cover it exactly once, preferring the nearest holders."""
    missing, pieces = [block.rect], []
    for distance, (whole, replicas) in sorted(
        zip(distances, block.holders), key=lambda entry: (entry[0], entry[1][0])
    ):
        rest: list[Rect] = []
        for rect in missing:
            rest += subtract(rect, whole)
            piece = intersect(rect, whole)
            if piece:
                pieces.append(
                    _Piece(
                        piece,
                        whole,
                        replicas,
                        distance == 0,
                        _at(block.place, block.rect, piece),
                        piece[:2],
                        piece[2:],
                    )
                )
        missing = rest
    if missing:
        first, end, left, right = missing[0]
        raise ValueError(
            f"{block.tensor} rows {first}-{end} columns {left}-{right} are needed for {block.place[1]} of"
            f" rank {rank} and no source rank holds them;"
            " both sides must describe the same model"
        )
    return pieces


def _padding_of(parameter: ShardedParameter) -> list[Rect]:
    written = tuple(
        (b.row, b.row + b.rows[1] - b.rows[0], b.col, b.col + b.cols[1] - b.cols[0]) for b in parameter.blocks
    )
    height, width = matrix_shape(parameter.shape)
    padding = holes((0, height, 0, width), written)
    if padding is None:
        raise ValueError(
            f"the blocks of {parameter.name} with shape {parameter.shape} overlap or leave it:"
            f" {parameter.blocks}"
        )
    return padding


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return a shape as (rows, columns): a vector has one column, further axes join the columns."""
    width = 1
    for size in shape[1:]:
        width *= size
    return shape[0], width


def _at(place: Position, whole: Rect, piece: Rect) -> Position:
    """Return the place of `piece` in the parameter that holds `whole` at `place`."""
    chunk, name, row, col = place
    return chunk, name, row + piece[0] - whole[0], col + piece[2] - whole[2]

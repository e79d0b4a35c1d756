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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from parallel.reshard.rectangles import Rect, area, intersect, subtract, uncovered
from parallel.reshard.transfer import Padding, Position, Transfer, Window
from parallel.reshard.windows import Windows
from parallel.runtime.refusal import counted
from parallel.weights.shard import ShardedParameter, Shards


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
        return sum(src != dst for window in self.windows for src, dst in window)

    @property
    def received_bytes(self) -> dict[int, int]:
        """Bytes that each rank receives from other ranks."""
        return self._sum((dst, size) for (src, dst), size in self._flows() if src != dst)

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each rank sends to other ranks."""
        return self._sum((src, size) for (src, dst), size in self._flows() if src != dst)

    @property
    def local_bytes(self) -> dict[int, int]:
        """Bytes that each rank copies from its own parameters to its own parameters."""
        return self._sum((src, size) for (src, dst), size in self._flows() if src == dst)

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
            f"{counted(len(self.ranks), 'rank')}, {self.messages} messages in "
            f"{len(self.windows)} windows; busiest rank receives {received / 2**20:.1f} MiB"
            f" (lower bound {self.lower_bound_bytes / 2**20:.1f}, gathering all"
            f" {self.gather_all_bytes / 2**20:.1f})"
            f", copies {local / 2**20:.1f} MiB, stages {self.peak_extra_bytes / 2**20:.1f} MiB"
        )


def compile_plan(
    *,
    source: Shards,
    destination: Shards,
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
        for rank, parameter, wanted in zip(ranks, parameters, sources.wanted(parameters)):
            if parameter is None or wanted is None:
                continue
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
        gather_all_bytes=(sources.total - min((sources.elements[rank] for rank in ranks), default=0))
        * element_bytes,
    )


def _repeated(destination: Shards) -> set[str]:
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

    positions: dict[int, Position] = field(default_factory=dict)  # by rank
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
    # The position of `whole` in a replica -> the position of `rect` in it.
    sources: dict[Position, Position] = field(default_factory=dict)


@dataclass(slots=True)
class _WantedBlock:
    tensor: str
    rect: Rect
    position: Position
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

    def __init__(self, source: Shards, repeated: set[str], host_of: Callable[[int], int]):
        self.host_of, self.repeated = host_of, repeated
        self.replicas: dict[str, dict[Rect, _Replicas]] = defaultdict(dict)
        self.sent: dict[int, int] = dict.fromkeys(source, 0)  # elements, to balance the load
        self.elements: dict[int, int] = defaultdict(int)  # that a rank holds as a source
        self.minimum: dict[int, int] = defaultdict(int)  # elements that a rank needs and does not hold
        # By rank and repeated tensor: the rectangles received from other ranks.
        self.fetched: dict[tuple[int, str], list[Rect]] = defaultdict(list)
        for rank in sorted(source):
            for parameter in source[rank]:
                if parameter.owner:
                    self._add(rank, parameter)
        self.total = 0  # elements of all tensors
        for rects in self.replicas.values():
            # The sources cover each tensor, so their largest row and column ends are its size.
            _, ends, _, rights = zip(*rects)
            self.total += max(ends) * max(rights)

    def _add(self, rank: int, parameter: ShardedParameter) -> None:
        for block in parameter.blocks:
            replicas = self.replicas[block.tensor].setdefault((*block.rows, *block.cols), _Replicas())
            if rank not in replicas.positions:
                replicas.positions[rank] = (parameter.chunk, parameter.name, block.row, block.col)
                replicas.on_host.setdefault(self.host_of(rank), []).append(rank)
                self.elements[rank] += area((*block.rows, *block.cols))

    def wanted(self, parameters: Sequence[ShardedParameter | None]) -> list[_Wanted | None]:
        """Return the parameters cut along the source rectangles: equal ones, of replicas, only once."""
        # Looked up by identity where ranks share the object, else by value.
        by_id: dict[int, _Wanted | None] = {id(None): None}
        by_value: dict[ShardedParameter, _Wanted] = {}
        for parameter in parameters:
            if parameter is None or id(parameter) in by_id:
                continue
            if parameter not in by_value:
                by_value[parameter] = self._wanted(parameter)
            by_id[id(parameter)] = by_value[parameter]
        return [by_id[id(parameter)] for parameter in parameters]

    def _wanted(self, parameter: ShardedParameter) -> _Wanted:
        blocks: list[_WantedBlock] = []
        for block in parameter.blocks:
            rect = (*block.rows, *block.cols)
            replicas = self.replicas.get(block.tensor, {})
            holders = [(whole, replicas[whole]) for whole in sorted(replicas) if intersect(rect, whole)]
            position = (parameter.chunk, parameter.name, block.row, block.col)
            blocks.append(_WantedBlock(block.tensor, rect, position, holders))
        return _Wanted(_padding_of(parameter), blocks)

    def serve(self, wanted: _Wanted, rank: int) -> Iterator[Transfer]:
        """Yield the transfers that fill a parameter of rank `rank`, each element once."""
        host = self.host_of(rank)
        for block in wanted.blocks:
            # 0: the rank itself, 1: its host, 2: another host.
            distances = tuple(
                [
                    0 if rank in replicas.positions else 1 if host in replicas.on_host else 2
                    for _, replicas in block.holders
                ]
            )
            pieces = block.cuts.get(distances)
            if pieces is None:
                pieces = block.cuts[distances] = _cut(block, distances, rank)
            for piece in pieces:
                src_rank = rank if piece.own else self._choose(piece, block.tensor, rank, host)
                whole = piece.replicas.positions[src_rank]
                source = piece.sources.get(whole)
                if source is None:
                    source = piece.sources[whole] = _at(whole, piece.whole, piece.rect)
                yield Transfer(
                    block.tensor, piece.rows, piece.cols, src_rank, rank, source, piece.destination
                )

    def _choose(self, piece: _Piece, tensor: str, rank: int, host: int) -> int:
        """Return the source rank of `piece`: on the same host if possible, and with the least sent so far."""
        replicas = piece.replicas
        src_rank = min(replicas.on_host.get(host, replicas.positions), key=self.sent.__getitem__)
        elements = fresh = area(piece.rect)
        self.sent[src_rank] += elements
        if tensor in self.repeated:  # an element that is needed twice counts once in the lower bound
            parts = [piece.rect]
            for earlier in self.fetched[rank, tensor]:
                parts = [part for rect in parts for part in subtract(rect, earlier)]
            self.fetched[rank, tensor].append(piece.rect)
            fresh = sum(map(area, parts))
        self.minimum[rank] += fresh
        return src_rank


def _cut(block: _WantedBlock, distances: tuple[int, ...], rank: int) -> list[_Piece]:
    """Cut `block` into pieces that cover it exactly once, preferring the nearest holders."""
    missing = [block.rect]
    pieces: list[_Piece] = []
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
                        _at(block.position, block.rect, piece),
                        piece[:2],
                        piece[2:],
                    )
                )
        missing = rest
    if missing:
        first, end, left, right = missing[0]
        raise ValueError(
            f"{block.tensor} rows {first}-{end} columns {left}-{right} are needed for {block.position[1]} of"
            f" rank {rank} and no source rank holds them;"
            " both sides must describe the same model"
        )
    return pieces


def _padding_of(parameter: ShardedParameter) -> list[Rect]:
    written = tuple(
        (b.row, b.row + b.rows[1] - b.rows[0], b.col, b.col + b.cols[1] - b.cols[0]) for b in parameter.blocks
    )
    height, width = matrix_shape(parameter.shape)
    padding = uncovered((0, height, 0, width), written)
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


def _at(position: Position, whole: Rect, piece: Rect) -> Position:
    """Return the position of `piece` in the parameter that holds `whole` at `position`."""
    chunk, name, row, col = position
    return chunk, name, row + piece[0] - whole[0], col + piece[2] - whole[2]

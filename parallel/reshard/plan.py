"""Compile who sends which slice to whom, as plain data: no torch, no GPU, the same result on every machine.

Both sides describe their parameters as rectangles of Hugging Face tensors (`parallel.weights.shard`). A plan is the
intersection of the two: each destination element is written exactly once, from the nearest rank that holds it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter

from parallel.reshard.rectangles import Rect, area, holes, intersect, subtract
from parallel.reshard.transfer import Padding, Place, Transfer, Window
from parallel.reshard.windows import Windows
from parallel.weights.shard import ShardedParameter


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a reshard does, in order: copies straight from parameter to parameter, then window after window of staged messages.

    In a window a rank stages what it sends and, unless it reads from its peers' staging memory, what it receives; in two windows that
    follow each other, together, at most `window_bytes`. A message of a rank to itself is staged because it writes over what is still
    being read.
    """

    ranks: tuple[int, ...]  # every world rank that gives or takes
    element_bytes: int  # of an element on its way (the destination's dtype)
    window_bytes: int
    direct: tuple[Transfer, ...]  # on one rank, or between ranks that reach each other's memory
    windows: tuple[Window, ...]
    pulled: bool  # a window's messages are not sent: the taker copies them out of the giver's staging memory
    padding: tuple[Padding, ...]
    lower_bound_bytes: (
        int  # what the busiest rank must receive under any plan: elements it needs and does not hold
    )
    gather_all_bytes: (
        int  # what the busiest rank would receive if whole tensors were rebuilt on every destination rank
    )

    def transfers(self) -> Iterator[Transfer]:
        """Every transfer, always in the same order: a transfer's number is its place in it."""
        yield from self.direct
        for window in self.windows:
            for message in window.values():
                yield from message

    @property
    def messages(self) -> int:
        return sum(giver != taker for window in self.windows for giver, taker in window)

    @property
    def received_bytes(self) -> dict[int, int]:
        """Bytes each rank receives from others."""
        return self._sum((taker, size) for (giver, taker), size in self._flows() if giver != taker)

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes each rank sends to others."""
        return self._sum((giver, size) for (giver, taker), size in self._flows() if giver != taker)

    @property
    def local_bytes(self) -> dict[int, int]:
        """Bytes each rank copies from its own parameters into its own parameters."""
        return self._sum((giver, size) for (giver, taker), size in self._flows() if giver == taker)

    @property
    def staged_bytes(self) -> dict[int, int]:
        """Each rank's staging memory: what it stages in the two fullest windows that follow each other."""
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
        """What each rank stages in a window."""
        staged: dict[int, int] = defaultdict(int)
        for pair, message in window.items():
            elements = sum(transfer.elements for transfer in message)
            for rank in pair[:1] if self.pulled else set(pair):
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

    A slice comes from the rank itself if it holds it, else from a rank of its host (`host_of`; None: one host), else
    from any other; among equals from the one that has sent the least. With `peer_memory` ranks of one host read each other's
    memory, so that their slices need neither messages nor staging.

    Raises:
        ValueError: an element that no source holds, destination blocks that overlap or leave their parameter, or a
            window that cannot hold one row.
    """
    host_of = host_of or (lambda rank: 0)
    sources = _Sources(source, _repeated(destination), host_of)
    windows = Windows(window_bytes, element_bytes)
    direct: list[Transfer] = []
    padding: list[Padding] = []
    ranks = sorted(destination)
    # Position by position over all ranks, so that a window holds work for every rank and not for the first ones only.
    for parameters in zip_longest(*(destination[rank] for rank in ranks)):
        # Replicas need the same: cut once for each parameter, found by identity where ranks share one and else by value.
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
        pulled=False,
        padding=tuple(padding),
        lower_bound_bytes=max(sources.minimum.values(), default=0) * element_bytes,
        gather_all_bytes=(sources.total - min((sources.held[rank] for rank in ranks), default=0))
        * element_bytes,
    )


def _repeated(destination: Mapping[int, Sequence[ShardedParameter]]) -> set[str]:
    """Tensors of which some rank needs several blocks: only these can be needed twice, as a tied copy beside its owner is."""
    repeated: set[str] = set()
    for parameters in {id(parameters): parameters for parameters in destination.values()}.values():
        counts = Counter(block.tensor for parameter in parameters for block in parameter.blocks)
        repeated |= {tensor for tensor, count in counts.items() if count > 1}
    return repeated


@dataclass(slots=True)
class _Replicas:
    """The ranks that hold the same rectangle of a tensor."""

    place: dict[int, Place] = field(default_factory=dict)  # by rank
    on_host: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Piece:
    """What a destination block takes from one source rectangle, whichever of its replicas gives it."""

    rect: Rect
    whole: Rect  # the source's rectangle
    replicas: _Replicas
    own: bool  # the destination rank is one of the replicas
    destination: Place
    rows: tuple[int, int]
    cols: tuple[int, int]
    taken: dict[Place, Place] = field(
        default_factory=dict
    )  # by a replica's place of `whole`: its place of `rect`


@dataclass(slots=True)
class _WantedBlock:
    tensor: str
    rect: Rect
    place: Place
    holders: list[tuple[Rect, _Replicas]]  # the source rectangles that meet it
    cuts: dict[tuple[int, ...], list[_Piece]] = field(
        default_factory=dict
    )  # by distances of the holders: what comes from whom


@dataclass(slots=True)
class _Wanted:
    """A destination parameter, cut along the sources once for all ranks that need the same."""

    padding: list[Rect]
    blocks: list[_WantedBlock]


class _Sources:
    """Source rectangles by tensor, and the choice among them."""

    def __init__(
        self,
        source: Mapping[int, Sequence[ShardedParameter]],
        repeated: set[str],
        host_of: Callable[[int], int],
    ):
        self.host_of, self.repeated = host_of, repeated
        self.replicas: dict[str, dict[Rect, _Replicas]] = defaultdict(dict)
        self.sent: dict[int, int] = dict.fromkeys(source, 0)  # elements, for the balance
        self.held: dict[int, int] = defaultdict(int)  # elements a rank holds as a source
        self.minimum: dict[int, int] = defaultdict(int)  # elements a rank needs and does not hold
        self.fetched: dict[tuple[int, str], list[Rect]] = defaultdict(
            list
        )  # by rank and repeated tensor: what came from others
        for rank in sorted(source):
            for parameter in source[rank]:
                if parameter.owner:
                    self._add(rank, parameter)
        # The sources cover a tensor, so its size is where the last of them ends.
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
        """Transfers that fill a parameter of rank `rank`, each element once."""
        host = self.host_of(rank)
        for block in wanted.blocks:
            # 0 own rank, 1 own host, 2 elsewhere; nearest first.
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
        """The rank that sends `piece`: of the same host if one is there, and of these the one that has sent the least."""
        giver = min(piece.replicas.on_host.get(host, piece.replicas.place), key=self.sent.__getitem__)
        elements = fresh = area(piece.rect)
        self.sent[giver] += elements
        if tensor in self.repeated:  # what is needed twice counts once
            parts = [piece.rect]
            for earlier in self.fetched[rank, tensor]:
                parts = [part for rect in parts for part in subtract(rect, earlier)]
            self.fetched[rank, tensor].append(piece.rect)
            fresh = sum(map(area, parts))
        self.minimum[rank] += fresh
        return giver


def _cut(block: _WantedBlock, distances: tuple[int, ...], rank: int) -> list[_Piece]:
    """Pieces that cover `block` once, from the nearest holders first."""
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
    """A parameter's shape as rows and columns: a vector is one column, further axes join the columns."""
    width = 1
    for size in shape[1:]:
        width *= size
    return shape[0], width


def _at(place: Place, whole: Rect, piece: Rect) -> Place:
    """Where `piece` lies in the parameter that holds `whole` at `place`."""
    chunk, name, row, col = place
    return chunk, name, row + piece[0] - whole[0], col + piece[2] - whole[2]

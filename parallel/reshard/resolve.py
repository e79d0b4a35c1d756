"""Resolve a plan on one rank: names become views of tensors, windows become copies and messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel.reshard.ipc_tensors import NamedTensors, map_tensors
from parallel.reshard.plan import Plan
from parallel.reshard.transfer import Position, Transfer, Window
from parallel.reshard.transport import Message, Parameters, Transport

Pairs = list[tuple[Tensor, Tensor]]  # destinations and sources of copies


@dataclass(frozen=True, slots=True)
class Slices:
    """Views of this rank's parameters that a plan reads and writes."""

    transfers: list[Transfer]  # all of the plan, in its order
    reads: dict[int, Tensor]  # by transfer number, [R, C]
    writes: dict[int, Tensor]
    padding: list[Tensor]


@dataclass(slots=True)
class DirectCopies:
    """Copies from parameter to parameter, of this rank or of a peer whose memory it reads."""

    pairs: Pairs = field(default_factory=list)
    src_ranks: list[int] = field(default_factory=list)  # source rank of each pair


@dataclass(slots=True)
class RankWindow:
    """The copies and messages of one window on this rank."""

    pack: Pairs = field(default_factory=list)  # parameters to staging memory
    unpack: Pairs = field(default_factory=list)  # staging memory (a peer's if one-sided) to parameters
    src_ranks: list[int] = field(default_factory=list)  # source rank of each pair in `unpack`
    messages: list[Message] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)


def resolve_slices(plan: Plan, source: Parameters, destination: Parameters, transport: Transport) -> Slices:
    """Look up every slice of this rank.

    Raises:
        ValueError: a parameter that the plan names is missing or of another dtype.
    """
    rank, dtype, transfers = transport.rank, transport.dtype, list(plan.transfers())
    if plan.element_bytes != dtype.itemsize:
        raise ValueError(
            f"the plan counts {plan.element_bytes} bytes an element and {dtype} has {dtype.itemsize};"
            f" compile it with element_bytes={dtype.itemsize}"
        )
    reads, writes = {}, {}
    for number, transfer in enumerate(transfers):
        if transfer.source_rank == rank:
            reads[number] = _view(source, transfer.source, transfer.shape)
        if transfer.destination_rank == rank:
            writes[number] = _view(destination, transfer.destination, transfer.shape)
    for number, write in writes.items():
        if write.dtype != dtype:
            raise ValueError(
                f"destination parameter {transfers[number].destination[1]} is {write.dtype} and the"
                f" reshard carries {dtype}; both must be the same"
            )
    padding = [
        _view(destination, (part.chunk, part.name, part.rows[0], part.cols[0]), part.shape)
        for part in plan.padding
        if part.rank == rank
    ]
    return Slices(transfers, reads, writes, padding)


def resolve_direct(plan: Plan, slices: Slices, transport: Transport) -> DirectCopies:
    copies, ipc_tensors = DirectCopies(), transport.ipc_tensors or {}
    for number, transfer in enumerate(plan.direct):
        if transfer.destination_rank != transport.rank:
            continue
        if transfer.source_rank == transport.rank:
            source = slices.reads[number]
        else:
            source = _view(ipc_tensors[transfer.source_rank], transfer.source, transfer.shape)
        copies.pairs.append((slices.writes[number], source))
        copies.src_ranks.append(transfer.source_rank)
    return copies


def resolve_windows(plan: Plan, slices: Slices, transport: Transport) -> list[RankWindow]:
    """Resolve every window on this rank; collective over the group if the plan is one-sided.

    A window in which this rank has no part still counts, so that even and odd windows agree on all ranks.
    """
    return _WindowResolver(plan, slices, transport).windows()


class _WindowResolver:
    def __init__(self, plan: Plan, slices: Slices, transport: Transport):
        self.plan, self.slices, self.rank, self.group = plan, slices, transport.rank, transport.group
        self.offsets = _StagingOffsets(
            {rank: size // transport.dtype.itemsize for rank, size in plan.staged_bytes.items()}
        )
        elements = self.offsets.sizes.get(self.rank, 0)
        if transport.staging is None:
            own = torch.empty(elements, dtype=transport.dtype, device=transport.device)
        else:
            own = transport.staging[:elements]
        self.staging = {self.rank: own}  # by rank
        if plan.one_sided:
            mapped = map_tensors({(0, "staging"): own}, self.group) or {}
            self.staging |= {rank: tensors[0, "staging"] for rank, tensors in mapped.items() if tensors}

    def windows(self) -> list[RankWindow]:
        windows, first = [], len(self.plan.direct)
        for number, window in enumerate(self.plan.windows):
            self.offsets.begin(number, self.plan.staged_elements(window))
            windows.append(self._window(window, first))
            first += sum(map(len, window.values()))
        return windows

    def _window(self, planned: Window, number: int) -> RankWindow:
        """Resolve a window whose first transfer has this number."""
        window = RankWindow()
        for (src_rank, dst_rank), message in planned.items():
            elements = sum(transfer.elements for transfer in message)
            stagers = {src_rank} if self.plan.one_sided else {src_rank, dst_rank}
            starts = {rank: self.offsets.reserve(rank, elements) for rank in stagers}
            if self.rank in (src_rank, dst_rank):
                stager = src_rank if self.plan.one_sided else self.rank
                buffer = self.staging[stager][starts[stager] :][:elements]
                self._add_copies(window, message, number, buffer)
                if src_rank != dst_rank:
                    self._add_message(window, src_rank, dst_rank, buffer)
            number += len(message)
        return window

    def _add_copies(
        self, window: RankWindow, message: Sequence[Transfer], number: int, buffer: Tensor
    ) -> None:
        end = 0
        for transfer_number, transfer in enumerate(message, number):
            part = buffer[end : end + transfer.elements].view(transfer.shape)
            end += transfer.elements
            if self.rank == transfer.source_rank:
                window.pack.append((part, self.slices.reads[transfer_number]))
            if self.rank == transfer.destination_rank:
                window.unpack.append((self.slices.writes[transfer_number], part))
                window.src_ranks.append(transfer.source_rank)

    def _add_message(self, window: RankWindow, src_rank: int, dst_rank: int, buffer: Tensor) -> None:
        sends = self.rank == src_rank
        peer = dst_rank if sends else src_rank
        window.peers.append(peer)
        if not self.plan.one_sided:
            window.messages.append(Message(buffer, peer, sends))


@dataclass(slots=True)
class _StagingOffsets:
    """Offsets of a window's slices in every rank's staging memory.

    Even windows start at the beginning of the memory, odd ones finish at its end:

        | even window ...  |  free  |  odd window ... |
    """

    sizes: Mapping[int, int]  # elements, by rank
    ends: dict[int, int] = field(default_factory=dict)  # of what is reserved in this window, by rank

    def begin(self, number: int, elements: Mapping[int, int]) -> None:
        """Begin window `number`, in which the ranks stage so many elements."""
        self.ends = {
            rank: 0 if number % 2 == 0 else self.sizes[rank] - size for rank, size in elements.items()
        }

    def reserve(self, rank: int, elements: int) -> int:
        """Reserve elements; return the first one's offset."""
        self.ends[rank] += elements
        return self.ends[rank] - elements


def _view(parameters: NamedTensors, position: Position, shape: tuple[int, int]) -> Tensor:
    chunk, name, row, col = position
    if (chunk, name) not in parameters:
        raise ValueError(
            f"the reshard plan names parameter {name} of model chunk {chunk}, which this rank's model does"
            " not have; compile the plan for this model"
        )
    tensor_RC = parameters[chunk, name].detach()
    return tensor_RC.view(len(tensor_RC), -1)[row : row + shape[0], col : col + shape[1]]

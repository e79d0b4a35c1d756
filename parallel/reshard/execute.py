"""Carry out a plan: pack, one message a pair of ranks and window, unpack, prove. All names are resolved once, beforehand."""

import time
import zlib
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.device import synchronize
from parallel.reshard.plan import Place, Plan, Transfer
from parallel.reshard.proof import SAMPLE, checksum, compare

Parameters = dict[tuple[int, str], Tensor]  # by (model chunk, name)


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What one run did on this rank."""

    seconds: float  # with the proof
    bytes_received: int  # from other ranks
    bytes_sent: int
    bytes_local: int  # copied from own parameters
    checked_slices: int  # on all ranks


@dataclass(slots=True)
class _Window:
    """One window on this rank: views to copy from and to, and a flat buffer for each peer."""

    pack_to: list[Tensor] = field(default_factory=list)  # slices of the buffers
    pack_from: list[Tensor] = field(default_factory=list)  # slices of parameters
    unpack_to: list[Tensor] = field(default_factory=list)
    unpack_from: list[Tensor] = field(default_factory=list)
    messages: list[dist.P2POp] = field(default_factory=list)


class Resharder:
    """Moves the values of one engine's parameters into another's, in place, again and again.

    Constructing it and `run()` are collective over `group`. The parameters have to stay where they are.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        source: Parameters,
        destination: Parameters,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        device: torch.device,
        verify: Literal["sample", "all", "none"] = "sample",
    ):
        """Resolve every slice and set the padding of the destination's parameters to zero.

        Args:
            rank: this process's world rank. It may give, take, do both or neither.
            source: this rank's parameters that the plan reads, on `device`; empty if it gives nothing.
            destination: those that it writes, on `device` and of type `dtype`; others in it are left alone.
            dtype: of an element on its way; the source casts before it sends.
            group: spans every rank of the plan; None is the world.

        Raises:
            ValueError: a parameter that the plan names is missing or of another type, or the ranks hold different plans.
        """
        self.plan, self.rank, self.dtype, self.group, self.device, self.verify = plan, rank, dtype, group, device, verify
        if plan.element_bytes != dtype.itemsize:
            raise ValueError(f"the plan counts {plan.element_bytes} bytes an element and {dtype} has {dtype.itemsize}; compile it with element_bytes={dtype.itemsize}")
        self.syncs = 0
        self.transfers: list[Transfer] = list(plan.transfers())
        # By a transfer's number: the slice of this rank's parameter that it reads, or writes.
        self.reads = {number: _view(source, t.source, t.shape) for number, t in enumerate(self.transfers) if t.source_rank == rank}
        self.writes = {number: _view(destination, t.destination, t.shape) for number, t in enumerate(self.transfers) if t.destination_rank == rank}
        for number, write in self.writes.items():
            if write.dtype != dtype:
                raise ValueError(f"destination parameter {self.transfers[number].destination[1]} is {write.dtype} and the reshard carries {dtype}; both must be the same")
        local = [number for number in range(len(plan.local)) if number in self.reads]
        self.local_reads, self.local_writes = [self.reads[number] for number in local], [self.writes[number] for number in local]
        self.bytes = {name: getattr(plan, f"{name}_bytes").get(rank, 0) for name in ("received", "sent", "local")}
        self._agree()
        self.windows = self._resolve()
        for hole in plan.padding:
            if hole.rank == rank:
                shape = (hole.rows[1] - hole.rows[0], hole.cols[1] - hole.cols[0])
                _view(destination, (hole.chunk, hole.name, hole.rows[0], hole.cols[0]), shape).zero_()

    def run(self) -> ReshardReport:
        """Write the source's present values into the destination, then prove it.

        Raises:
            ReshardError: on every rank of the group, if a checked slice differs.
        """
        synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            self.move()
            checked = self.prove()
        synchronize()
        return ReshardReport(time.perf_counter() - start, self.bytes["received"], self.bytes["sent"], self.bytes["local"], checked)

    def move(self) -> None:
        """Only the copies and messages."""
        if self.local_writes:
            torch._foreach_copy_(self.local_writes, self.local_reads)
        for window in self.windows:
            if window.pack_to:
                torch._foreach_copy_(window.pack_to, window.pack_from)
            for message in dist.batch_isend_irecv(window.messages):
                message.wait()
            if window.unpack_to:
                torch._foreach_copy_(window.unpack_to, window.unpack_from)

    def prove(self) -> int:
        """Compare this sync's share of the slices at both ends, as the parameters hold them; returns how many."""
        if self.verify == "none":
            return 0
        stride = 1 if self.verify == "all" else SAMPLE
        phase = self.syncs % stride
        self.syncs += 1
        checked = self.transfers[phase::stride]
        sent = {number // stride: checksum(read.to(self.dtype)) for number, read in self.reads.items() if number % stride == phase}
        received = {number // stride: checksum(write) for number, write in self.writes.items() if number % stride == phase}
        compare(checked, sent, received, group=self.group, device=self.device)
        return len(checked)

    def _resolve(self) -> list[_Window]:
        """This rank's part of each window that it has a part in; the windows share one staging buffer."""
        staging = torch.empty(self.plan.staged_bytes.get(self.rank, 0) // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        windows, number = [], len(self.plan.local)
        for planned in self.plan.windows:
            window, start = _Window(), 0
            for (giver, taker), message in planned.items():
                if self.rank in (giver, taker):
                    end = start
                    for place, transfer in enumerate(message, number):
                        slot = staging[end : end + transfer.elements].view(transfer.shape)
                        end += transfer.elements
                        if self.rank == giver:
                            window.pack_to.append(slot)
                            window.pack_from.append(self.reads[place])
                        else:
                            window.unpack_to.append(self.writes[place])
                            window.unpack_from.append(slot)
                    operation, peer = (dist.isend, taker) if self.rank == giver else (dist.irecv, giver)
                    window.messages.append(dist.P2POp(operation, staging[start:end], peer, self.group))
                    start = end
                number += len(message)
            if window.messages:
                windows.append(window)
        return windows

    def _agree(self) -> None:
        """Different plans would wait for each other for ever. The collective also makes NCCL's communicator before the first message."""
        messages = [(pair, sum(transfer.elements for transfer in message)) for window in self.plan.windows for pair, message in window.items()]
        mark = zlib.crc32(repr([len(self.transfers), messages]).encode())
        marks = torch.tensor([mark, -mark], dtype=torch.int64, device=self.device)
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self.group)
        if marks[0] != -marks[1]:
            raise ValueError("the ranks compiled different reshard plans; give every rank the same layouts, window_bytes and parameters")


def _view(parameters: Parameters, place: Place, shape: tuple[int, int]) -> Tensor:
    chunk, name, row, col = place
    if (chunk, name) not in parameters:
        raise ValueError(f"the reshard plan names parameter {name} of model chunk {chunk}, which this rank's model does not have; compile the plan for this model")
    tensor_RC = parameters[chunk, name].detach()
    return tensor_RC.view(len(tensor_RC), -1)[row : row + shape[0], col : col + shape[1]]

"""Settings of a transfer: how slices travel between ranks, and how many of them are verified."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.reshard.ipc_tensors import IpcTensors

Parameters = dict[tuple[int, str], Tensor]  # by (model chunk, name)


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor to send to a rank of the plan, or to receive from it."""

    buffer: Tensor
    peer: int
    sends: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Transport:
    """Settings that a plan's transfers share on this rank."""

    dtype: torch.dtype  # of a transferred element; the source rank casts before it sends
    group: dist.ProcessGroup  # spans every rank of the plan
    device: torch.device  # of the parameters and the staging memory
    verify: str = "sample"  # slices that each run checks: "sample" (a rotating share), "all" or "none"
    # All other ranks' sources, from `map_tensors`; required by a plan compiled with `peer_memory`.
    ipc_tensors: IpcTensors | None = None
    # [N] of `dtype` on `device`; other plans may use it at other times. None: allocated by each `Resharder`.
    staging: Tensor | None = None
    # The plan's ranks in the order of a group that spans several torchrun worlds (`parallel.bridge`). None:
    # those of the group, as numbered by torchrun.
    ranks: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        """This process's rank in the plan."""
        if self.ranks is not None:
            return self.ranks[self.group.rank()]
        return dist.get_global_rank(self.group, dist.get_rank(self.group))

    @property
    def all_ranks(self) -> list[int]:
        """The plan's ranks in the order of the group."""
        return dist.get_process_group_ranks(self.group) if self.ranks is None else list(self.ranks)

    def all_max(self, x: Tensor) -> None:
        """Replace `x` by the maximum over the group."""
        self._all_reduce(x, dist.ReduceOp.MAX)

    def all_sum(self, x: Tensor) -> None:
        """Replace `x` by the sum over the group."""
        self._all_reduce(x, dist.ReduceOp.SUM)

    def _all_reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        if self.ranks is None:
            dist.all_reduce(x, op=operation, group=self.group)
        else:  # torch.distributed would hide errors of a group that it does not know
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(operation)
            self.group.allreduce([x], options).wait()

    def exchange(self, messages: Sequence[Message]) -> list[dist.Work]:
        """Start to send and receive; return what to wait for."""
        if not messages:
            return []
        if self.ranks is None:
            operations = (dist.isend if message.sends else dist.irecv for message in messages)
            return dist.batch_isend_irecv(
                [
                    dist.P2POp(operation, message.buffer, message.peer, self.group)
                    for operation, message in zip(operations, messages)
                ]
            )
        places = {rank: place for place, rank in enumerate(self.ranks)}
        together = self.device.type == "cuda"  # NCCL: else two ranks that both send first would wait forever
        if together:
            self.group._start_coalescing(self.device)
        works = [
            (self.group.send if message.sends else self.group.recv)([message.buffer], places[message.peer], 0)
            for message in messages
        ]
        return [self.group._end_coalescing(self.device)] if together else works

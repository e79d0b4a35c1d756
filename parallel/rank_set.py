"""The ranks that work together, and the collective operations among them.

Code receives a `RankSet`, or a process group of a `Layout`, as an argument. Nothing outside this file uses
torch's default group, so that a role may run in a world of its own.
"""

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.runtime.refusal import RefusalError, readable

T = TypeVar("T")
_made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}  # by ranks and backend


@dataclass(frozen=True, slots=True)
class RankSet:
    """Ranks with a group for CPU tensors and objects, and one for tensors on their devices.

    The operations are collective over the set: every rank of it calls them, in the same order, and no other
    rank does. Numbers of ranks count within the set, from 0, unless they are called global.
    """

    ranks: tuple[int, ...]  # global ranks (of the torchrun world), increasing
    cpu_group: dist.ProcessGroup
    device_group: dist.ProcessGroup

    @property
    def global_rank(self) -> int:
        """Number of this process in its torchrun world."""
        return dist.get_rank()

    @property
    def is_member(self) -> bool:
        return self.global_rank in self.ranks

    @property
    def rank(self) -> int:
        """Index of this process in the set; a ValueError on a rank outside it."""
        return self.ranks.index(self.global_rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.global_rank == self.ranks[0]

    def group_for(self, where: torch.device | str) -> dist.ProcessGroup:
        """Return the group that carries tensors of this device."""
        return self.cpu_group if torch.device(where).type == "cpu" else self.device_group

    # ---- collective operations

    def all_sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, on the CPU."""
        total = x.detach().cpu().clone()
        dist.all_reduce(total, group=self.cpu_group)
        return total

    def all_max(self, x: Tensor) -> Tensor:
        """Return the maximum over the ranks, on the CPU."""
        largest = x.detach().cpu().clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.cpu_group)
        return largest

    def union(self, names: Iterable[str]) -> list[str]:
        """Return the union of the ranks' names, in the same order on every rank."""
        gathered = self.all_gather_object(list(names))
        return list(dict.fromkeys(name for part in gathered for name in part))

    def all_gather_object(self, value: Any) -> list:
        """Return the values of all ranks, on every rank."""
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def gather_object(self, value: Any) -> list | None:
        """Return the values of all ranks on the first one, None on the others."""
        values: list | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, group=self.cpu_group, group_dst=0)
        return values

    def broadcast_object(self, value: Any, *, src: int = 0) -> Any:
        """Return the value of rank `src` of the set; the other ranks' values are ignored."""
        values = [value]
        dist.broadcast_object_list(values, group=self.cpu_group, group_src=src)
        return values[0]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        dist.barrier(group=self.cpu_group)

    # ---- what belongs to a set

    def store(self, name: str) -> dist.Store:
        """Return a store that the ranks share, under keys of this name and these ranks; not collective."""
        prefix = f"{name}/{','.join(map(str, self.ranks))}"
        return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    def duplicate(self) -> "RankSet":
        """Return the same ranks with a gloo group of their own, for collectives of another thread.

        Every rank of the torchrun world must call this.
        """
        group = new_group(self.ranks, "gloo")
        return RankSet(self.ranks, group, group)


def world() -> RankSet:
    """Return all ranks of the torchrun world that this process has joined.

    Only the top of a program calls this, and passes the result on.
    """
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)  # made with a backend for either kind of tensors
    return RankSet(tuple(range(dist.get_world_size())), everyone, everyone)


def rank_set(ranks: Iterable[int]) -> RankSet:
    """Return the set of these global ranks; its groups are created on the first call.

    Every rank of the torchrun world must call this, in the same order.
    """
    members = tuple(sorted(ranks))
    return RankSet(members, group_of(members, "gloo"), group_of(members))


def group_of(ranks: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
    """Return the process group of these global ranks, created on the first call.

    Every rank of the torchrun world must call this, in the same order.

    Args:
        backend: by default that of the tensors of a model.
    """
    key = ranks, backend or device.backend()
    if key not in _made:
        _made[key] = new_group(*key)
    return _made[key]


def new_group(
    ranks: Iterable[int], backend: str, *, timeout: timedelta | None = device.COLLECTIVE_TIMEOUT
) -> dist.ProcessGroup:
    """Create a process group; every rank of the torchrun world must call this, in the same order.

    Args:
        timeout: of its collectives; None: torch's default for the backend.
    """
    default = cast(dist.ProcessGroup, dist.group.WORLD)
    gpu = default.bound_device_id
    # With a GPU bound to the default group, torch has ranks outside a new group take part in splitting NCCL's
    # communicator, also for a gloo group. Its members split nothing, so those ranks would wait for ever.
    if backend == "gloo":
        default.bound_device_id = None
    try:
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), backend=backend, timeout=timeout))
    finally:
        default.bound_device_id = gpu


def agree(check: Callable[[], T], ranks: RankSet) -> T:
    """Run `check` on all of `ranks` and return its result; all ranks fail if one does. Collective.

    Raises:
        RefusalError: the ValueError of rank 0 if it has one, else that of the first failing rank, with rank
            and host. The same text on every rank.
    """
    result: Any = None
    problem = ""
    try:
        result = check()
    except ValueError as error:
        problem = readable(str(error)) or type(error).__name__
    found = ranks.all_gather_object((problem, socket.gethostname()))
    for rank, (problem, host) in zip(ranks.ranks, found):
        if problem:
            raise RefusalError(problem + f" (rank {rank} on {host})" * (rank != ranks.ranks[0]))
    return result

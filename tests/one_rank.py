"""A world of one rank: a RankSet without a process group, and the real one of this process alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from parallel import device, rank_set
from parallel.rank_set import RankSet


class OneRank:
    """Every operation returns what this rank gave."""

    ranks, rank, global_rank, size, is_first, is_member = (0,), 0, 0, 1, True, True

    def all_sum(self, x: Tensor) -> Tensor:
        return x

    def all_max(self, x: Tensor) -> Tensor:
        return x

    def union(self, names):
        return list(dict.fromkeys(names))

    def all_gather_object(self, value):
        return [value]

    def gather_object(self, value):
        return [value]

    def broadcast_object(self, value, *, src=0):
        return value

    def barrier(self):
        pass


ONE_RANK = OneRank()


def join_alone() -> RankSet:
    """Make this process the only rank of its world, if it is in none."""
    os.environ |= dict(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(device._free_port()),
    )
    device.initialize()
    return rank_set.world()


@contextmanager
def world_of_one() -> Iterator[RankSet]:
    """`join_alone` within a block; afterwards the environment is as before."""
    joined, former = dist.is_initialized(), dict(os.environ)
    try:
        yield join_alone()
    finally:
        if not joined:
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(former)

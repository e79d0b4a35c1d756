"""Small collectives over the whole world, of CPU tensors and names."""

import torch.distributed as dist
from torch import Tensor


def all_sum(x: Tensor) -> Tensor:
    """Return the sum over the ranks of the world, on the CPU."""
    total = x.detach().cpu().clone()
    dist.all_reduce(total)
    return total


def all_max(x: Tensor) -> Tensor:
    """Return the maximum over the ranks of the world, on the CPU."""
    largest = x.detach().cpu().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def all_names(names: list[str]) -> list[str]:
    """Return the union of the ranks' names, in the same order on every rank."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return list(dict.fromkeys(name for names in gathered for name in names))

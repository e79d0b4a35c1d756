"""The source side of a reshard: a model's tensors on this rank and the shards of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel.reshard.transport import Parameters
from parallel.weights.architecture import Architecture
from parallel.weights.shard import Shards


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A model's weights as the source of a reshard."""

    arch: Architecture
    tensors: Parameters  # on this rank; empty on ranks without a part of the model
    shards: Shards
    dtype: torch.dtype
    gather: Callable[[], None]  # brings `tensors` up to date on every rank after optimizer steps

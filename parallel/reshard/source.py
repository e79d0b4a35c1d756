"""What a reshard takes from a model: its tensors here, what every rank holds, and how to make them up to date."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallel.reshard.execute import Parameters
from parallel.weights.architecture import Architecture
from parallel.weights.shard import ShardedParameter

Shards = dict[int, list[ShardedParameter]]  # by world rank; ranks that hold the same share one list


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A model's weights, as far as moving them goes."""

    arch: Architecture
    tensors: Parameters  # on this rank; empty on ranks without a part of the model
    shards: Shards
    dtype: torch.dtype
    gather: Callable[[], None]  # makes `tensors` up to date on every rank after updates

"""What both worlds tell each other: orders of the training world, collected samples of the rollout world."""

from dataclasses import dataclass

from torch import Tensor

from parallel.weights.shard import Shards
from verl_megatron.rollout.sampler import Draw

STOP = "stop"  # key of the store: the training world has ended
SHARDS, ENGINE = "shards", "engine"  # keys: `SourceShards`, and the cache of a replica in tokens
FIRST = "first"  # key: number of the first order of this bridge


@dataclass(frozen=True, kw_only=True)
class SourceShards:
    """The trained model's shards by rank of the bridge."""

    shards: Shards
    source_dtype: str


@dataclass(frozen=True, kw_only=True)
class Order:
    """A collection to make, with weights of this version and no other.

    Orders are numbered, and the rollout world carries them out in this order.
    """

    iteration: int  # that trains on the samples; 0: the validation prompts
    version: int
    draw: Draw
    cursor: dict[str, int] | None = None  # where to draw from; None: where the order before ended


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What a rollout replica has made for an order."""

    batch: dict[str, Tensor]  # fields of `RolloutBatch`
    rewards_B: Tensor | None  # float32; None without a reward function
    sums: dict[str, dict]  # state of `Sums`


def order_key(number: int) -> str:
    return f"order/{number}"


def cursor_key(number: int) -> str:
    """Key of the cursor's state after an order."""
    return f"cursor/{number}"

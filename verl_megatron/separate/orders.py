"""What both worlds tell each other: orders of the training world, collected samples of the rollout world."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from parallel.weights.shard import Shards
from verl_megatron.model_specs import ServingWorld
from verl_megatron.rollout.sampler import Draw

STOP = "stop"  # key of the store: the training world has ended
SHARDS, ENGINE = "shards", "engine"  # keys: `SourceShards`, and the cache of a replica in tokens


@dataclass(frozen=True, kw_only=True)
class SourceShards:
    """The trained model's shards by rank of the bridge."""

    shards: Shards
    source_dtype: str


@dataclass(frozen=True, kw_only=True)
class Share:
    """Part of a collection's prompts, in proportion to the replicas of a rollout world."""

    first: int  # replica, counted over all rollout worlds
    stop: int
    of: int  # replicas of all worlds

    def groups(self, num_prompts: int) -> range:
        """Return the numbers of the share's prompts."""
        return range(num_prompts * self.first // self.of, num_prompts * self.stop // self.of)


def shares_of(worlds: Sequence[ServingWorld], tp: int) -> list[Share]:
    """Return each rollout world's share of a collection; replicas have `tp` ranks."""
    starts = [0, *accumulate(len(world.ranks) // tp for world in worlds)]
    return [Share(first=first, stop=stop, of=starts[-1]) for first, stop in pairwise(starts)]


def owner_of(first: int, replica: int, num_training: int) -> int:
    """Return the training rank that owns what a replica makes.

    Args:
        first: replica of the share, counted over all rollout worlds.
        replica: of the world that makes it, from 0.
    """
    return (first + replica) % num_training


@dataclass(frozen=True, kw_only=True)
class Order:
    """A share of a collection to make, with weights of this version and no other.

    Orders of a bridge are numbered from 0, and the rollout world carries them out in this order.
    """

    iteration: int  # that trains on the samples; 0: the validation prompts
    version: int
    sync: int  # number of the weight sync that brings this version, from 1 on each bridge
    draw: Draw
    share: Share
    cursor: dict[str, Any] | None = None  # where to draw from; None: where the order before ended


@dataclass(frozen=True, kw_only=True)
class Samples:
    """What a rollout replica has made for an order."""

    batch: dict[str, Tensor]  # fields of `RolloutBatch`
    rewards_B: Tensor | None  # float32; None without a reward function
    sums: dict[str, dict]  # state of `Sums`
    num_dropped: int = 0  # samples that dynamic sampling has left out
    dropped_tokens: int = 0  # response tokens of these
    replica: int = 0  # of the world that made them
    seconds: float = 0.0  # for which that generated and scored

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return int(self.batch["response_mask"].sum())


# ---- async.buffer=window ----------------------------------------------------------------------------------

VALIDATION = 1 << 40  # numbers of groups from here on are of validation prompts


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive prompts; each is the group of number `first` + its index."""

    first: int
    count: int
    draw: Draw
    cursor: dict[str, Any] | None  # where to draw from; None: the validation prompts

    def seed_of(self, index: int, sample: int) -> tuple[int, int]:
        """Return iteration and number of a sample for its seed, as if iterations took prompts in order."""
        width = self.draw.most_samples
        if self.cursor is None:
            return 0, index * width + sample
        iteration, place = divmod(self.first + index, self.draw.num_prompts)
        return iteration + 1, place * width + sample


@dataclass(frozen=True, kw_only=True)
class StreamOrder:
    """Groups of a block to make, once the weights of a sync are there."""

    block: Block
    sync: int
    indices: tuple[tuple[int, ...], ...]  # in the block, for each replica of the world


@dataclass(frozen=True, kw_only=True)
class GroupSamples:
    """The samples of a group."""

    number: int
    batch: dict[str, Tensor]  # fields of `RolloutBatch`, with samples numbered from 0
    rewards_B: Tensor | None  # float32; None without a reward function
    sums: dict[str, dict]  # state of `Sums`: metrics of the rewards
    failed: int  # samples that no function gave a score
    complaint: str  # about them, or about too many metrics

    @property
    def num_samples(self) -> int:
        return len(self.batch["sample_id"])

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return int(self.batch["response_mask"].sum())


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a replica has completed since its last reply."""

    groups: list[GroupSamples]
    sums: dict[str, dict]  # state of `Sums`: the engine's load
    interrupted: int  # samples that went on with other weights
    aborted_tokens: int  # response tokens of these whose cache is computed again
    idle_s: float
    busy_s: float


WAITS = b"waits"  # value of `fetch_key`: the reply may wait for samples


def fetch_key(replica: int, number: int) -> str:
    """Key with which the owner rank of a replica's samples asks for reply `number`."""
    return f"fetch/{replica}/{number}"


def version_key(sync: int) -> str:
    """Key of the version that a weight sync brings."""
    return f"version/{sync}"


# ---- keys --------------------------------------------------------------------------------------------------


def order_key(number: int) -> str:
    return f"order/{number}"


def cursor_key(number: int) -> str:
    """Key of the cursor's state after an order."""
    return f"cursor/{number}"

"""The training world's side: weights that leave for the rollout world, and samples that come from it."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallel.bridge import Bridge, Parcels
from parallel.rank_set import RankSet
from parallel.reshard.execute import ReshardReport
from parallel.reshard.plan import Plan
from parallel.reshard.source import WeightSource
from parallel.reshard.versions import VersionedReshard
from verl_megatron.config import TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import TrainingPrompts
from verl_megatron.model_specs import rollout_devices
from verl_megatron.observe.metrics import Sums
from verl_megatron.residency import Tag
from verl_megatron.rewards.pool import RewardPool
from verl_megatron.rollout.sampler import Draw, KeepGroup, PromptSource
from verl_megatron.separate.orders import (
    ENGINE,
    SHARDS,
    STOP,
    Order,
    Samples,
    SourceShards,
    cursor_key,
    order_key,
)
from verl_megatron.separate.weights import send_versions


class RemoteSampler:
    """Stands for the rollout world's sampler: orders collections ahead of time, and receives their samples.

    The samples of iteration k are made with version max(first, k - 1 - max_staleness), whatever the speed of
    either world: so a run gives the same numbers each time.

    Args:
        max_staleness: updates that the weights of samples may lag behind those that train on them.
        last: the last iteration of the run.
    """

    pool: RewardPool | None = None  # the reward workers are in the rollout world

    def __init__(
        self, bridge: Bridge, parcels: Parcels, draw: Draw, *, tp: int, max_staleness: int, last: int
    ):
        self._bridge, self._parcels, self._draw = bridge, parcels, draw
        self._max_staleness, self._last = max_staleness, last
        owners = list(bridge.rollout_ranks)[::tp]
        self._owners = owners[bridge.rank :: bridge.num_training]  # whose samples come to this rank
        self._newest = 0  # published version
        self._first: int | None = None  # of the versions that samples may have
        self._orders: dict[int, tuple[int, int]] = {}  # iteration -> number and version; not collected yet
        self._num_orders = self._ordered = 0  # orders given; the last ordered iteration
        self._arrived: dict[int, list[Samples]] = {}  # by order, not collected yet
        self._num_arrived = 0  # orders whose samples have arrived
        self._received: list[Samples] = []  # of the last collection
        self._staleness = (0, 0)  # of the last collection: versions behind, and samples

    def needs(self, version: int) -> bool:
        """Whether samples will be made with this version."""
        return version + 1 + self._max_staleness <= self._last

    def published(self, version: int) -> None:
        """Order what this version is for."""
        self._newest = version
        if self._first is not None:
            self._order_until(version + 1 + self._max_staleness)

    def collect(
        self,
        source: PromptSource,
        draw: Draw,
        *,
        iteration: int,
        version: int,
        keep_group: KeepGroup | None = None,
    ) -> RolloutBatch:
        """Receive this rank's share of an iteration's samples; arguments and result as of `Sampler.collect`.

        Args:
            source: the training prompts; any other stands for the validation prompts.
            version: of the weights that validation uses.
        """
        cursor = source.cursor if isinstance(source, TrainingPrompts) else None
        if cursor is None:
            number = self._give(Order(iteration=0, version=version, draw=draw))
        else:
            if self._first is None:
                self._first, self._ordered = self._newest, iteration - 1
                self._order_until(iteration, cursor=cursor.state_dict())
                self._order_until(iteration + self._max_staleness)
            number, version = self._orders.pop(iteration)
            self._staleness = iteration - 1 - version, 0
        self._received = self._samples_of(number)
        if cursor is not None:
            cursor.load_state_dict(pickle.loads(self._bridge.value(cursor_key(number))))
        parts = [RolloutBatch(**samples.batch) for samples in self._received]
        return RolloutBatch.concatenate(parts) if parts else RolloutBatch.from_lists([], [], [], [])

    def score(self, batch: RolloutBatch, sums: Sums) -> Tensor:
        """Return the rewards of the last collection, [B] float32; 0 without a reward function."""
        for samples in self._received:
            sums.merge(Sums.from_state(samples.sums))
        behind, _ = self._staleness
        sums.add("async/staleness_mean", behind * len(batch), len(batch))
        sums.max("async/staleness_max", behind)
        sums.add("async/iterations_in_flight", len(self._orders), 1)
        rewards = [samples.rewards_B for samples in self._received if samples.rewards_B is not None]
        return torch.cat(rewards) if rewards else torch.zeros(len(batch))

    def _samples_of(self, number: int) -> list[Samples]:
        """Return this rank's part of an order; parts of orders before it are kept for later."""
        while self._num_arrived <= number:
            label = str(self._num_arrived)
            self._arrived[self._num_arrived] = [
                self._parcels.receive(source=owner, label=label) for owner in self._owners
            ]
            self._num_arrived += 1
        return self._arrived.pop(number)

    def _order_until(self, iteration: int, *, cursor: dict[str, int] | None = None) -> None:
        assert self._first is not None
        for wanted in range(self._ordered + 1, min(iteration, self._last) + 1):
            version = max(self._first, wanted - 1 - self._max_staleness)
            order = Order(iteration=wanted, version=version, draw=self._draw, cursor=cursor)
            self._orders[wanted], self._ordered = (self._give(order), version), wanted

    def _give(self, order: Order) -> int:
        """Give an order and return its number."""
        number = self._num_orders
        self._num_orders += 1
        if self._bridge.rank == 0:
            self._bridge.put(order_key(number), pickle.dumps(order))
        return number


class SeparateChannel:
    """Publishes weights to the rollout world, which adopts each version when it needs it.

    Args:
        is_validated: whether validation will ask for a version.
    """

    def __init__(
        self,
        versions: VersionedReshard,
        gather: Callable[[], None],
        sampler: RemoteSampler,
        *,
        is_validated: Callable[[int], bool],
    ):
        self._versions, self._gather, self._sampler = versions, gather, sampler
        self._is_validated = is_validated
        self._version = 0
        self._is_published = False

    @property
    def report(self) -> ReshardReport:
        """Report of the latest transfer that has ended."""
        return self._versions.report or ReshardReport()

    def publish(self, version: int) -> None:
        """Start to send a version if it will be asked for; the weights may change at once."""
        first, self._version, self._is_published = not self._is_published, version, True
        if first or self._sampler.needs(version) or self._is_validated(version):
            self._gather()
            self._versions.publish(version + 1)  # they count from 1
        self._sampler.published(version)

    def adopt(self) -> int:
        """Return the newest version; the first one is published now."""
        if not self._is_published:
            self.publish(self._version)
        return self._version


class RemoteEngine:
    """Stands for the rollout world's engine where training makes room for one: there is nothing to do."""

    def __init__(self, bridge: Bridge, versions: VersionedReshard, own: RankSet):
        self._bridge, self._versions, self._own = bridge, versions, own
        self.kv_cache_tokens = int(bridge.value(ENGINE))  # of a replica

    def sleep(self) -> None:
        pass

    def wake(self, tag: Tag) -> None:
        pass

    def has_room(self, tag: Tag) -> bool:
        return True

    def run(self, meanwhile: Callable[[], None]) -> ReshardReport:
        raise AssertionError("the rollout world's weights go over the bridge")

    def restore(self) -> bool:
        return False

    def close(self) -> None:
        """Let the rollout world end. Collective over the training world."""
        self._own.barrier()
        if self._bridge.rank == 0:
            self._bridge.put(STOP, b"")
        self._versions.close()


@dataclass(frozen=True, kw_only=True)
class RolloutSide:
    """What training needs of the rollout world."""

    engine: RemoteEngine
    sampler: RemoteSampler
    channel: SeparateChannel
    plan: Plan


def _is_validated(config: TrainerConfig, version: int) -> bool:
    interval = config.run.validate_interval
    is_due = version in (0, config.run.iterations) or (interval > 0 and version % interval == 0)
    return bool(config.data.validation) and is_due


def join_rollout_world(
    config: TrainerConfig,
    world: RankSet,
    source: WeightSource,
    draw: Draw,
    *,
    dtype: torch.dtype,
    wait: Callable[[], None],
) -> RolloutSide:
    """Join the world that generates. Collective over both worlds.

    Args:
        source: the actor's weights.
        dtype: of vLLM's weights.
        wait: called again and again while this rank waits for the other world.
    """
    bridge = Bridge.join(world, trains=True, num_other=len(rollout_devices(config)), wait=wait)
    if bridge.rank == 0:
        shards = SourceShards(shards=dict(source.shards), source_dtype=str(source.dtype))
        bridge.put(SHARDS, pickle.dumps(shards))
    parcels = Parcels(bridge, "samples")
    versions = send_versions(config, bridge, source, dtype)
    sampler = RemoteSampler(
        bridge,
        parcels,
        draw,
        tp=config.rollout.tp,
        max_staleness=config.async_.max_staleness,
        last=config.run.iterations,
    )
    return RolloutSide(
        engine=RemoteEngine(bridge, versions, world),
        sampler=sampler,
        channel=SeparateChannel(
            versions, source.gather, sampler, is_validated=partial(_is_validated, config)
        ),
        plan=versions.resharder.plan,
    )

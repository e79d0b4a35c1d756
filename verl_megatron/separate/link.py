"""The training world's link to one rollout world: a bridge with its weight syncs, orders and samples."""

import gc
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from parallel.bridge import POLL_S, Bridge, BridgeLostError
from parallel.parcels import Parcels
from parallel.rank_set import RankSet
from parallel.reshard.execute import ReshardReport
from parallel.reshard.source import WeightSource
from parallel.reshard.transport import Parameters
from parallel.sealed_store import SealedStore
from verl_megatron.config import TrainerConfig
from verl_megatron.model_specs import ServingWorld
from verl_megatron.separate.identity import PublishedWeights
from verl_megatron.separate.orders import (
    ENGINE,
    SHARDS,
    STOP,
    WAITS,
    Order,
    Reply,
    Samples,
    SourceShards,
    StreamOrder,
    cursor_key,
    fetch_key,
    order_key,
    owner_of,
    version_key,
)
from verl_megatron.separate.weights import end_exchange, send_versions

Keep = Callable[[int, Parameters], None]  # version, snapshot
KEPT = 4  # questions for samples that stay in the store; no replica looks at one as old


@dataclass(frozen=True, kw_only=True)
class TrainingEnd:
    """What the training world has for all its links."""

    config: TrainerConfig
    world: RankSet  # all training ranks
    store: SealedStore  # of the bridges
    settings: Mapping[str, str]  # that the other worlds must have, too
    source: WeightSource  # the trained model's weights
    dtype: torch.dtype  # of vLLM's weights
    wait: Callable[[], None]  # called again and again while this rank waits for another world


class RolloutLink:
    """The exchange with a rollout world over one bridge, until either world ends.

    Weight syncs are numbered; each brings a version, and an earlier version may come again. Construction is
    collective over both worlds, all else over the training world.

    Args:
        number: of the bridge.
        keep: called in the background with each version that has been sent, and its snapshot.

    Raises:
        BridgeLostError: the rollout world ended meanwhile.
    """

    def __init__(self, end: TrainingEnd, served_by: ServingWorld, *, number: int, keep: Keep | None):
        config, source = end.config, end.source
        self.served_by, self._tp, self._wait = served_by, config.rollout.tp, end.wait
        self.bridge = Bridge.join(
            end.world,
            end.store,
            served_by.name,
            num_other=len(served_by.ranks),
            number=number,
            wait=end.wait,
        )
        with self.bridge.abandoned_if_lost():
            self.bridge.agree_on(end.settings)
            if self.bridge.rank == 0:
                shards = SourceShards(shards=dict(source.shards), source_dtype=str(source.dtype))
                self.bridge.put(SHARDS, pickle.dumps(shards))
            self.kv_cache_tokens = int(self.bridge.value(ENGINE))  # of a replica
            self._parcels = Parcels(self.bridge, "samples")
            self._version_of: dict[int, int] = {}  # by number of the sync
            on_sent = None if keep is None else lambda sync, values: keep(self._version_of[sync], values)
            self._versions = send_versions(config, self.bridge, source, end.dtype, keep=on_sent)
            self.plan = self._versions.resharder.plan
            verifies = config.reshard.verify != "none"
            self._published = PublishedWeights(self.bridge, self._versions) if verifies else None
        self._queue: deque[tuple[int, Parameters]] = deque()  # syncs to make from copies
        self._num_orders = self._num_fetches = 0
        self.has_served = False
        self.received_s = 0.0  # for which the samples that came last were on their way to this rank

    @property
    def report(self) -> ReshardReport:
        """Report of the latest weight sync that has ended."""
        return self._versions.report or ReshardReport()

    @property
    def num_replicas(self) -> int:
        return self.bridge.num_serving // self._tp

    @property
    def is_unchanged(self) -> bool:
        """Whether the last two versions that were sent are the same weights, as far as this rank knows."""
        return self._published is not None and self._published.is_unchanged

    @property
    def transfer_s(self) -> float:
        """Seconds of the latest weight sync, from the end of the update until all slices had arrived."""
        return self._versions.transfer_s

    # ---- weights -------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version of the latest sync; None before the first."""
        return self._version_of.get(len(self._version_of))

    def send(self, version: int, copy: Parameters | None = None) -> None:
        """Begin a sync of the present weights, which may change at once, or of a copy of earlier ones.

        Raises:
            BridgeLostError: the rollout world has ended.
        """
        sync = len(self._version_of) + 1
        self._version_of[sync] = version
        if copy is not None:
            self._queue.append((sync, copy))
            return self.work()
        while self._queue or self._in_flight():
            self.work()
            self.bridge.check()
            self._wait()
            time.sleep(POLL_S)
        self._publish(sync)

    def work(self) -> None:
        """Begin syncs that wait for others to end; called again and again while this rank waits.

        Raises:
            BridgeLostError: the rollout world has ended.
        """
        while self._queue and not self._in_flight():
            self._publish(*self._queue.popleft())

    def unsent(self) -> tuple[int, Parameters] | None:
        """End the weight syncs; return the version that has not been transferred, and its snapshot."""
        left = self._versions.abandon()
        return None if left is None else (self._version_of[left[0]], left[1])

    def _in_flight(self) -> bool:
        try:
            return self._versions.in_flight()
        except RuntimeError as error:
            raise self._lost(error) from None

    def _publish(self, sync: int, copy: Parameters | None = None) -> None:
        try:
            self._versions.publish(sync, copy)
        except RuntimeError as error:
            raise self._lost(error) from None
        if self.bridge.rank == 0:
            self.bridge.put(version_key(sync), str(self._version_of[sync]))
        if self._published is not None:
            self._published.tell(sync, version=self._version_of[sync])

    def _lost(self, error: RuntimeError) -> BridgeLostError:
        """Return the loss that an error means, and tell all ranks, which may have seen none."""
        if isinstance(error, torch.OutOfMemoryError):  # of this rank's snapshots
            raise error
        reason = f"the {self.served_by.name} world has ended ({str(error).splitlines()[0]})"
        with suppress(BridgeLostError):
            self.bridge.give_up(reason)
        return BridgeLostError(reason)

    # ---- orders --------------------------------------------------------------------------------------------

    def give(self, order: Order | StreamOrder) -> int:
        """Give an order of the version of the latest sync, and return its number."""
        number, self._num_orders = self._num_orders, self._num_orders + 1
        if self.bridge.rank == 0:
            order = replace(order, sync=len(self._version_of))
            self.bridge.put(order_key(number), pickle.dumps(order))
        return number

    def fetch(self, replicas: Sequence[int], *, waits: bool) -> list[Reply]:
        """Return what these replicas, whose samples this rank owns, have completed since the last call.

        Args:
            waits: they may wait a moment for something to reply with.

        Raises:
            BridgeLostError: the rollout world has ended.
        """
        number, self._num_fetches = self._num_fetches, self._num_fetches + 1
        for replica in replicas:
            self.bridge.put(fetch_key(replica, number), WAITS if waits else b"")
            if number >= KEPT:
                self.bridge.drop(fetch_key(replica, number - KEPT))
        owners = self.bridge.serving_ranks[:: self._tp]
        replies: list[Reply] = []
        received_s = 0.0
        for each in replicas:
            replies.append(self._parcels.receive(source=owners[each], label=f"reply/{number}"))
            if replies[-1].groups:
                received_s += self._parcels.receive_s
        if received_s:
            self.received_s, self.has_served = received_s, True
        return replies

    def receive(self, number: int, order: Order) -> list[Samples]:
        """Wait for the samples of an order that this rank owns. Orders are received as they were given.

        Raises:
            BridgeLostError: the rollout world has ended.
        """
        sources = self._sources(order)
        samples: list[Samples] = []
        self.received_s = 0.0
        for source in sources:
            samples.append(self._parcels.receive(source=source, label=str(number)))
            self.received_s += self._parcels.receive_s
        self.has_served = True
        return samples

    def forget(self, number: int) -> None:
        """Drop what the store has of an order whose samples all ranks have received.

        Raises:
            BridgeLostError: the rollout world has ended.
        """
        if self.bridge.rank == 0:
            self.bridge.drop(order_key(number))
            self.bridge.drop(cursor_key(number))

    def has_made(self, number: int, order: Order) -> bool:
        """Whether `receive` need not wait for the rollout world; errors as of `receive`."""
        sources = self._sources(order)
        return all(self._parcels.has_come(source=source, label=str(number)) for source in sources)

    def _sources(self, order: Order) -> list[int]:
        """Return the ranks whose samples of an order this rank owns."""
        bridge = self.bridge
        return [
            source
            for replica, source in enumerate(bridge.serving_ranks[:: self._tp])
            if owner_of(order.share.first, replica, bridge.num_training) == bridge.rank
        ]

    # ---- the end -------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Let go of a rollout world that is lost."""
        self._versions.abandon()
        self.bridge.abandon()
        del self._parcels, self._versions, self._published
        gc.collect()  # closes the connections of the old groups

    def close(self) -> None:
        """Let the rollout world end."""
        try:
            if self.bridge.rank == 0:
                self.bridge.put(STOP, b"")
            end_exchange(self._versions, self.bridge)
            self.bridge.await_leaving()
        except BridgeLostError:
            pass  # it has ended, which is what is wanted

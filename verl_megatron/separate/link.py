"""The training world's link to a rollout world: bridge, samples, weights; made anew when that world dies."""

import gc
import pickle
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from parallel.bridge import POLL_S, Bridge, BridgeLostError, Parcels, together
from parallel.rank_set import RankSet
from parallel.reshard.execute import ReshardReport
from parallel.reshard.plan import Plan
from parallel.reshard.source import WeightSource
from parallel.reshard.transport import Parameters
from parallel.reshard.versions import VersionedReshard
from verl_megatron.config import TrainerConfig
from verl_megatron.model_specs import rollout_devices
from verl_megatron.separate.orders import ENGINE, FIRST, SHARDS, SourceShards
from verl_megatron.separate.weights import send_versions

MOST_FRUITLESS = 3  # rollout worlds that may end one after the other without having made a sample


class RolloutLink:
    """The exchange with the rollout world. Construction and `renew` are collective over both worlds.

    With stale samples, it keeps a copy in host memory of each version whose samples may still be missing, so
    that another rollout world makes the same ones.

    Args:
        world: all training ranks.
        source: the trained model's weights.
        dtype: of vLLM's weights.
        wait: called again and again while this rank waits for the other world.
        say: prints a message on one rank.
    """

    def __init__(
        self,
        config: TrainerConfig,
        world: RankSet,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        wait: Callable[[], None],
        say: Callable[[str], None],
    ):
        self._config, self.world, self._source, self._dtype = config, world, source, dtype
        self._wait, self._say = wait, say
        self._keeps = config.async_.max_staleness > 0
        self._kept: dict[int, Parameters] = {}  # host copies of versions
        self._queue: list[int] = []  # versions to send from these copies, oldest first
        self._fruitless = 0
        self.bridge: Bridge
        self.parcels: Parcels
        self._versions: VersionedReshard
        self._report = ReshardReport()
        self.plan: Plan
        self._join(first_order=0)

    @property
    def report(self) -> ReshardReport:
        """Report of the latest transfer that has ended."""
        return self._versions.report or self._report

    @property
    def kv_cache_tokens(self) -> int:
        """Size of a replica's cache."""
        return int(self.bridge.value(ENGINE))

    # ---- weights -------------------------------------------------------------------------------------------

    def send(self, version: int) -> None:
        """Begin to send the present weights, which may change at once.

        If the rollout world is lost, `renew` sends again what is needed.
        """
        try:
            while self._queue or self._versions.in_flight():
                self.work()
                self.bridge.check()
                time.sleep(POLL_S)
            self._versions.publish(version + 1)  # they count from 1
        except (BridgeLostError, RuntimeError):
            if self._keeps:
                self._keep(version + 1, self._source.tensors)

    def work(self) -> None:
        """Go on with what is to be sent; called again and again while this rank waits."""
        self._wait()
        try:
            while self._queue and not self._versions.in_flight():
                version = self._queue.pop(0)
                self._versions.publish(version + 1, self._kept.get(version))
        except RuntimeError:
            self._queue.clear()  # the rollout world is lost

    def _keep(self, version: int, values: Parameters) -> None:
        """Copy a version, counted from 1, to host memory."""
        self._kept[version - 1] = {key: _host_copy(tensor, self._dtype) for key, tensor in values.items()}

    def made_samples(self) -> None:
        """Note that the rollout world works."""
        self._fruitless = 0

    def forget(self, before: int) -> None:
        """Drop the copies of versions before this one, whose samples have all arrived."""
        for version in [version for version in self._kept if version < before]:
            del self._kept[version]

    # ---- another rollout world -----------------------------------------------------------------------------

    def renew(self, reason: str, *, since: float, first_order: int, versions: list[int]) -> None:
        """Join the rollout world that follows one which was lost.

        Args:
            reason: how the loss was noticed.
            since: since when (`time.perf_counter`) training has waited for samples.
            first_order: number of the first order that it has to carry out.
            versions: of the weights that it needs, increasing. Without copies, it is the present one.

        Raises:
            ValueError: no other world joins, or several ended without having made a sample.
        """
        self._fruitless += 1
        if self._fruitless > MOST_FRUITLESS:
            raise ValueError(
                f"the rollout world ended {MOST_FRUITLESS} times without having made a sample ({reason}); "
                "its last lines say why"
            )
        self._report = self.report
        if (left := self._versions.abandon()) is not None and self._keeps:
            self._keep(*left)
        self._join(first_order=first_order, after=self.bridge.number)
        self._queue = list(versions)
        self.work()
        self._say(
            f"rollout world {self.bridge.number} has joined; training has waited "
            f"{time.perf_counter() - since:.1f} s, and missing samples are made again"
        )

    def _join(self, *, first_order: int, after: int = 0) -> None:
        while True:
            try:
                return together(self.world, partial(self._connect, first_order, after))
            except BridgeLostError:
                after = max(after, self.bridge.number if hasattr(self, "bridge") else 0)

    def _connect(self, first_order: int, after: int) -> None:
        if hasattr(self, "bridge"):
            self.bridge.abandon()
            del self.parcels, self._versions
            gc.collect()  # closes the connections of the old groups
        self.bridge = Bridge.join(
            self.world,
            trains=True,
            num_other=len(rollout_devices(self._config)),
            wait=self.work,
            after=after,
        )
        if self.bridge.rank == 0:
            shards = SourceShards(shards=dict(self._source.shards), source_dtype=str(self._source.dtype))
            self.bridge.put(SHARDS, pickle.dumps(shards))
            self.bridge.put(FIRST, str(first_order))
        self.parcels = Parcels(self.bridge, "samples")
        self._versions = send_versions(
            self._config,
            self.bridge,
            self._source,
            self._dtype,
            keep=self._keep if self._keeps else None,
        )
        self.plan = self._versions.resharder.plan

    def close(self) -> None:
        """End the exchange of weights."""
        try:
            self._versions.close()
        except RuntimeError:
            pass  # the rollout world has ended, which is what is wanted


def _host_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)

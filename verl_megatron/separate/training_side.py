"""The training world's side: weights that leave for the rollout world, and samples that come from it."""

import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel.bridge import BridgeLostError, together
from parallel.reshard.execute import ReshardReport
from verl_megatron.config import TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import TrainingPrompts
from verl_megatron.observe.metrics import Sums
from verl_megatron.residency import Tag
from verl_megatron.rewards.pool import RewardPool
from verl_megatron.rollout.sampler import Draw, KeepGroup, PromptSource
from verl_megatron.separate.link import RolloutLink
from verl_megatron.separate.orders import STOP, Order, Samples, cursor_key, order_key


@dataclass(frozen=True, kw_only=True)
class _Arrived:
    """This rank's samples of an order."""

    version: int
    samples: list[Samples]
    cursor: dict[str, int]  # of the training prompts, after the order


class RemoteSampler:
    """Stands for the rollout world's sampler: orders collections ahead of time, and receives their samples.

    The samples of iteration k are made with version max(first, k - 1 - max_staleness), whatever the speed of
    either world: so a run gives the same numbers each time. Orders whose samples are missing are given again
    to a rollout world that follows one which died. All methods are collective over the training world.

    Args:
        tp: tensor-parallel size of a replica.
        max_staleness: updates that the weights of samples may lag behind those that train on them.
        last: the last iteration of the run.
    """

    pool: RewardPool | None = None  # the reward workers are in the rollout world

    def __init__(self, link: RolloutLink, draw: Draw, *, tp: int, max_staleness: int, last: int):
        self._link, self._draw, self._tp = link, draw, tp
        self._max_staleness, self._last = max_staleness, last
        self._newest = 0  # published version
        self._first: int | None = None  # of the versions that samples may have; None: nothing is ordered yet
        self._ordered = 0  # the last ordered iteration
        self._start: dict[str, int] | None = None  # where the next order draws from, if it is the first one
        self._orders: list[Order] = []  # by number
        self._numbers: dict[int, int] = {}  # iteration -> number of its order; not collected yet
        self._arrived: dict[int, _Arrived] = {}  # by number, not collected yet
        self._num_arrived = 0  # orders whose samples have arrived on this rank
        self._cursors: dict[int, dict[str, int]] = {}  # by number, after orders that have arrived
        self._restored: dict[int, _Arrived] = {}  # by iteration, from a checkpoint
        self._received: list[Samples] = []  # of the last collection
        self._behind = 0  # versions, of the last collection

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
        if isinstance(source, TrainingPrompts):
            arrived = self._collect(iteration, source.cursor.state_dict())
            source.cursor.load_state_dict(arrived.cursor)
            self._behind = iteration - 1 - arrived.version
        else:
            number = self._give(Order(iteration=0, version=version, draw=draw))
            self._receive(number)
            arrived = self._arrived.pop(number)
        self._received = arrived.samples
        waiting = [order.version for order in self._orders[self._num_arrived :]]
        self._link.forget(before=min([self._newest, *waiting]))
        parts = [RolloutBatch(**samples.batch) for samples in self._received]
        return RolloutBatch.concatenate(parts) if parts else RolloutBatch.from_lists([], [], [], [])

    def score(self, batch: RolloutBatch, sums: Sums) -> Tensor:
        """Return the rewards of the last collection, [B] float32; 0 without a reward function."""
        for samples in self._received:
            sums.merge(Sums.from_state(samples.sums))
        sums.add("async/staleness_mean", self._behind * len(batch), len(batch))
        sums.max("async/staleness_max", self._behind)
        sums.add("async/iterations_in_flight", len(self._numbers) + len(self._restored), 1)
        rewards = [samples.rewards_B for samples in self._received if samples.rewards_B is not None]
        return torch.cat(rewards) if rewards else torch.zeros(len(batch))

    def begin(self, iteration: int, cursor: dict[str, int]) -> None:
        """Order the first collections.

        Args:
            iteration: the next one to collect.
            cursor: where to draw its prompts from.
        """
        self._first = self._newest
        if iteration not in self._restored:
            self._restored.clear()
        self._restored = {number: found for number, found in self._restored.items() if number >= iteration}
        self._ordered = max(self._restored, default=iteration - 1)
        self._start = self._restored[self._ordered].cursor if self._restored else cursor
        self._order_until(self._newest + 1 + self._max_staleness)

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> list[dict[str, Any]]:
        """Return this rank's samples of the next iterations that were made with earlier weights.

        Waits for those that have not arrived: a checkpoint has the present weights only.
        """
        for iteration in sorted(self._numbers):
            number = self._numbers[iteration]
            if self._orders[number].version < self._newest:
                self._receive(number)
                self._restored[iteration] = self._arrived.pop(number)
                del self._numbers[iteration]
        return [{"iteration": iteration} | asdict(found) for iteration, found in self._restored.items()]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on with these samples, unless they are older than allowed now."""
        for saved in state:
            iteration, version, cursor = saved["iteration"], saved["version"], saved["cursor"]
            samples = [Samples(**part) for part in saved["samples"]]
            self._restored[iteration] = _Arrived(version=version, samples=samples, cursor=cursor)
        if any(
            iteration - 1 - found.version > self._max_staleness for iteration, found in self._restored.items()
        ):
            self._restored.clear()

    # ---- orders --------------------------------------------------------------------------------------------

    def _collect(self, iteration: int, cursor: dict[str, int]) -> _Arrived:
        if self._first is None:
            self.begin(iteration, cursor)
        if iteration in self._restored:
            return self._restored.pop(iteration)
        number = self._numbers[iteration]
        self._receive(number)
        del self._numbers[iteration]
        return self._arrived.pop(number)

    def _order_until(self, iteration: int) -> None:
        assert self._first is not None
        for wanted in range(self._ordered + 1, min(iteration, self._last) + 1):
            version = max(self._first, wanted - 1 - self._max_staleness)
            self._ordered = wanted
            order = Order(iteration=wanted, version=version, draw=self._draw, cursor=self._start)
            self._numbers[wanted], self._start = self._give(order), None

    def _give(self, order: Order) -> int:
        """Give an order and return its number."""
        self._orders.append(order)
        self._tell(len(self._orders) - 1)
        return len(self._orders) - 1

    def _tell(self, number: int) -> None:
        if self._link.bridge.rank == 0:
            self._link.bridge.put(order_key(number), pickle.dumps(self._orders[number]))

    def _receive(self, number: int) -> None:
        """Receive this rank's part of an order, and of those before it."""
        since = time.perf_counter()
        while True:
            try:
                return together(self._link.world, lambda: self._receive_until(number))
            except BridgeLostError as error:
                self._order_again(str(error), since)

    def _receive_until(self, number: int) -> None:
        bridge = self._link.bridge
        owners = list(bridge.rollout_ranks)[:: self._tp]
        while self._num_arrived <= number:
            found, order = self._num_arrived, self._orders[self._num_arrived]
            samples = [
                self._link.parcels.receive(source=owner, label=str(found))
                for owner in owners[bridge.rank :: bridge.num_training]  # those that send to this rank
            ]
            cursor: dict[str, int] = pickle.loads(bridge.value(cursor_key(found)))
            self._arrived[found] = _Arrived(version=order.version, samples=samples, cursor=cursor)
            self._cursors[found] = cursor
            self._num_arrived = found + 1
            self._link.made_samples()

    def _order_again(self, reason: str, since: float) -> None:
        """Give the orders whose samples are missing on some rank to the next rollout world."""
        first = min(self._link.world.all_gather_object(self._num_arrived))
        for number in range(first, self._num_arrived):
            del self._arrived[number]
        self._num_arrived = first
        missing = range(first, len(self._orders))
        if missing and first > 0 and self._orders[first].cursor is None:
            self._orders[first] = replace(self._orders[first], cursor=self._cursors[first - 1])
        self._link.renew(
            reason,
            since=since,
            first_order=first,
            versions=sorted({self._orders[number].version for number in missing}),
        )
        for number in missing:
            self._tell(number)


class SeparateChannel:
    """Publishes weights to the rollout world, which adopts each version when it needs it.

    Args:
        is_validated: whether validation will ask for a version.
    """

    def __init__(
        self,
        link: RolloutLink,
        gather: Callable[[], None],
        sampler: RemoteSampler,
        *,
        is_validated: Callable[[int], bool],
    ):
        self._link, self._gather, self._sampler = link, gather, sampler
        self._is_validated = is_validated
        self._version = 0
        self._is_published = False

    @property
    def report(self) -> ReshardReport:
        """Report of the latest transfer that has ended."""
        return self._link.report

    def publish(self, version: int) -> None:
        """Start to send a version if it will be asked for; the weights may change at once."""
        first, self._version, self._is_published = not self._is_published, version, True
        if first or self._sampler.needs(version) or self._is_validated(version):
            self._gather()
            self._link.send(version)
        self._sampler.published(version)

    def adopt(self) -> int:
        """Return the newest version; the first one is published now."""
        if not self._is_published:
            self.publish(self._version)
        return self._version


class RemoteEngine:
    """Stands for the rollout world's engine where training makes room for one: there is nothing to do."""

    def __init__(self, link: RolloutLink):
        self._link = link

    @property
    def kv_cache_tokens(self) -> int:
        """Size of a replica's cache."""
        return self._link.kv_cache_tokens

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
        self._link.world.barrier()
        if self._link.bridge.rank == 0:
            self._link.bridge.put(STOP, b"")
        self._link.close()


@dataclass(frozen=True, kw_only=True)
class RolloutSide:
    """What training needs of the rollout world."""

    engine: RemoteEngine
    sampler: RemoteSampler
    channel: SeparateChannel


def rollout_side(
    config: TrainerConfig, link: RolloutLink, draw: Draw, *, gather: Callable[[], None]
) -> RolloutSide:
    """Return what stands for the rollout world at the other end of `link`.

    Args:
        gather: makes the trained weights complete before they are sent.
    """
    sampler = RemoteSampler(
        link,
        draw,
        tp=config.rollout.tp,
        max_staleness=config.async_.max_staleness,
        last=config.run.iterations,
    )
    channel = SeparateChannel(link, gather, sampler, is_validated=partial(_is_validated, config))
    return RolloutSide(engine=RemoteEngine(link), sampler=sampler, channel=channel)


def _is_validated(config: TrainerConfig, version: int) -> bool:
    interval = config.run.validate_interval
    is_due = version in (0, config.run.iterations) or (interval > 0 and version % interval == 0)
    return bool(config.data.validation) and is_due

"""async.buffer=in_order: collections are ordered ahead of time, and each iteration trains on its own."""

import pickle
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from parallel.bridge import BridgeLostError, together
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.sampler import Draw, Numbers, batch_of
from verl_megatron.separate.fleet import Fleet
from verl_megatron.separate.link import RolloutLink
from verl_megatron.separate.orders import Order, Samples, cursor_key
from verl_megatron.separate.remote_sampler import NOTHING, Counts, Demand, RemoteSampler, Resumed

LOOK_S = 0.02  # between two looks at what has come


@dataclass(kw_only=True, eq=False)
class _Part:
    """One world's share of a collection."""

    order: Order
    home: int  # place of the world whose share it is
    place: int = -1  # of the world that makes it
    link: RolloutLink | None = None  # to that world; another means that it has ended
    number: int = -1  # of its order there
    samples: list[Samples] | None = None  # this rank's; None: they have not arrived
    early: list[Samples] | None = None  # the same, before all ranks have theirs


@dataclass(kw_only=True)
class _Collection:
    """This rank's samples of an iteration, or of validation."""

    version: int
    parts: list[_Part] = field(default_factory=list)
    restored: list[Samples] = field(default_factory=list)  # from a checkpoint, without parts
    cursor: dict[str, Any] | None = None  # of the training prompts, after it; None: not known yet
    num_deals: int = 0  # shares that were dealt out again: their samples may have other owners

    @property
    def samples(self) -> list[Samples]:
        """What has arrived."""
        return self.restored + [samples for part in self.parts for samples in part.samples or ()]

    @property
    def num_samples(self) -> int:
        """Samples to train on, or of validation."""
        return sum(len(part.batch["sample_id"]) for part in self.samples)

    @property
    def num_tokens(self) -> int:
        """Response tokens of these."""
        return sum(part.num_tokens for part in self.samples)


class OrderedSampler(RemoteSampler):
    """Orders collections ahead of time, and receives their samples.

    The samples of iteration k are made with version max(first, k - 1 - max_staleness), whatever the speed of
    either side: so a run gives the same numbers each time. Each world makes its share of a collection. The
    shares of a world that has ended are dealt out to the others, or to the one that follows it.

    Args:
        keeps_all: without dynamic sampling, each collection draws as many prompts.
    """

    def __init__(self, fleet: Fleet, demand: Demand, *, keeps_all: bool):
        super().__init__(fleet, demand)
        self._cursor, self._keeps_all = demand.cursor, keeps_all
        self._known = demand.cursor.fork()  # knows the scores of the iterations before the newest version
        self._first: int | None = None  # of the versions that samples may have; None: nothing is ordered yet
        self._ordered = 0  # the last ordered iteration
        self._start: dict[str, Any] | None = None  # where the next order draws from, if it is the first one
        self._waiting: list[_Part] = []  # whose samples are missing, in the order in which they were given
        self._collections: dict[int, _Collection] = {}  # ordered and not collected, by iteration
        self._restored: dict[int, _Collection] = {}  # by iteration, from a checkpoint
        self._present: dict[int, _Collection] = {}  # the last one, by iteration, if it is not trained on
        self._received: list[Samples] = []  # of the last collection
        self._behind = 0  # versions, of the last collection
        self._receiving: _Part | None = None
        self._looked_at = 0.0
        if self._max_staleness:
            fleet.chores.append(self._look)

    def needs(self, version: int) -> bool:
        return version + 1 + self._max_staleness <= self._last

    def published(self, version: int, *, is_sent: bool) -> None:
        super().published(version, is_sent=is_sent)
        self._present = {}
        self._known.learn(self._cursor)
        if self._first is not None:
            self._order_until(version + 1 + self._max_staleness)

    def _collect_training(self, cursor: PromptCursor) -> RolloutBatch:
        self._admit()
        collection = self._collection_of(self._iteration, cursor.state_dict())
        assert collection.cursor is not None
        cursor.advance(collection.cursor)
        self._behind = self._iteration - 1 - collection.version
        self._present = {self._iteration: collection}
        batch = self._take(collection, self._draw)
        if self.follower is not None:
            self.follower.collected(self._iteration, batch, collection.num_deals)
        return batch

    def _collect_validation(self, draw: Draw, version: int) -> RolloutBatch:
        self._admit()
        collection = self._order(iteration=0, version=version, draw=draw)
        self._receive(collection)
        return self._take(collection, draw)

    def _take(self, collection: _Collection, draw: Draw) -> RolloutBatch:
        """Return this rank's samples of a collection; `score` gives their rewards."""
        self._received = collection.samples
        self._fleet.forget(before=min([self._newest, *(part.order.version for part in self._waiting)]))
        return _batch_of(self._received, draw, collection.version)

    def score(self, batch: RolloutBatch, sums: Sums) -> Tensor:
        """Return the rewards of the last collection, [B] float32; 0 without a reward function."""
        for samples in self._received:
            sums.merge(Sums.from_state(samples.sums))
        sums.add("async/staleness_mean", self._behind * len(batch), len(batch))
        sums.max("async/staleness_max", self._behind)
        sums.add("async/staleness_min", self._behind, 1)
        sums.add("async/iterations_in_flight", len(self._collections) + len(self._restored), 1)
        self._add_counts(sums)
        numbers = [samples.batch["sample_id"] for samples in self._received]
        rewards = [samples.rewards_B for samples in self._received if samples.rewards_B is not None]
        return torch.cat(rewards)[torch.cat(numbers).argsort()] if rewards else torch.zeros(len(batch))

    def begin(self, iteration: int, cursor: dict[str, Any], resumed: Resumed = NOTHING) -> None:
        self._first = self._newest
        for known in [number for number in self._restored if number < iteration]:
            self._counts.sampled -= self._restored.pop(known).num_samples  # they are in `resumed`
        self._counts.add(resumed)
        is_needed = iteration in self._restored
        self._drop_restored(lambda _: not is_needed)
        self._ordered = max(self._restored, default=iteration - 1)
        self._ahead.load_state_dict(cursor)
        if self._restored and (after := self._restored[self._ordered].cursor) is not None:
            self._ahead.advance(after)
        self._start = self._ahead.state_dict()
        self._ahead.load_state_dict(self._start)  # forgets what it has drawn
        self._order_until(self._newest + 1 + self._max_staleness)

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's samples of the next iterations that were made with earlier weights.

        Waits for those that have not arrived: a checkpoint has the present weights only.
        """
        for iteration in sorted(self._collections):
            if self._collections[iteration].version < self._newest:
                self._receive(self._collections[iteration])
                self._restored[iteration] = self._collections.pop(iteration)
        present = {at: found for at, found in self._present.items() if found.version < self._newest}
        iterations = []
        for iteration, found in (present | self._restored).items():
            samples = [asdict(part) for part in found.samples]
            iterations.append(
                {"iteration": iteration, "version": found.version, "samples": samples, "cursor": found.cursor}
            )
        return {"iterations": iterations, "counts": self._saved_counts()}

    def _emptied(self, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"iterations": []} if "iterations" in state else state

    def load_state_dict(self, state: dict[str, Any], *, usable: bool = True) -> None:
        if "iterations" not in state:  # of a run with async.buffer=window
            return
        self._counts = Counts(**state["counts"])
        # Those of iterations that begin now are made again.
        self._counts.sampled = self._counts.trained + self._counts.dropped
        for saved in state["iterations"]:
            samples = [Samples(**part) for part in saved["samples"]]
            restored = _Collection(version=saved["version"], restored=samples, cursor=saved["cursor"])
            self._restored[saved["iteration"]] = restored
            self._counts.sampled += restored.num_samples
        restored = self._restored.items()
        if not usable or any(at - 1 - found.version > self._max_staleness for at, found in restored):
            self._drop_restored(lambda _: True)

    def _drop_restored(self, is_dropped: Callable[[int], bool]) -> None:
        for iteration in filter(is_dropped, list(self._restored)):
            dropped = self._restored.pop(iteration)
            self._counts.drop(dropped.num_samples, dropped.num_tokens)

    def _in_flight(self) -> int:
        """This rank's training samples that have arrived and wait for their iteration."""
        return sum(found.num_samples for found in [*self._collections.values(), *self._restored.values()])

    # ---- orders --------------------------------------------------------------------------------------------

    def _collection_of(self, iteration: int, cursor: dict[str, Any]) -> _Collection:
        if self._first is None:
            self.begin(iteration, cursor)
        if iteration in self._restored:
            return self._restored.pop(iteration)
        self._receive(self._collections[iteration])
        return self._collections.pop(iteration)

    def _order_until(self, iteration: int) -> None:
        assert self._first is not None
        for wanted in range(self._ordered + 1, min(iteration, self._last) + 1):
            version = max(self._first, wanted - 1 - self._max_staleness)
            self._ordered, cursor = wanted, self._start
            if self._keeps_all:
                self._ahead.learn(self._known)
                cursor = self._ahead.state_dict()
            ordered = self._order(iteration=wanted, version=version, draw=self._draw, cursor=cursor)
            self._collections[wanted], self._start = ordered, None
            if self._keeps_all:
                self._ahead.draw(self._draw.num_prompts)
                ordered.cursor = self._ahead.progress()

    def _order(
        self, *, iteration: int, version: int, draw: Draw, cursor: dict[str, Any] | None = None
    ) -> _Collection:
        collection = _Collection(version=version)
        for home, share in enumerate(self._fleet.shares):
            order = Order(iteration=iteration, version=version, sync=0, draw=draw, share=share, cursor=cursor)
            collection.parts.append(_Part(order=order, home=home))
            self._waiting.append(collection.parts[-1])
            self._give(collection.parts[-1])
        return collection

    def _give(self, part: _Part) -> None:
        """Give an order to the world whose share it is; if that is not there, to the one with least to do."""
        fleet, version, part.place, part.link = self._fleet, part.order.version, -1, None
        while not (able := [place for place in fleet.links if fleet.can_provide(place, version)]):
            self._joined(fleet.admit_able(version))
            self._deal_again()
        load = Counter(other.place for other in self._waiting if not self._is_stranded(other))
        part.place = part.home if part.home in able else min(able, key=lambda each: (load[each], each))
        part.link = fleet.links[part.place]
        try:
            fleet.provide(part.place, version)
            part.number = fleet.links[part.place].give(part.order)
        except BridgeLostError:
            part.number = -1  # on this rank; it is noticed on all when the samples are received

    # ---- samples -------------------------------------------------------------------------------------------

    def _receive(self, collection: _Collection) -> None:
        """Receive this rank's samples of a collection, and of what the same worlds were ordered before it."""
        since = time.perf_counter()
        while (wanted := next((part for part in collection.parts if part.samples is None), None)) is not None:
            same = [part for part in self._waiting if part.place == wanted.place]
            part = min(same, key=lambda part: part.number)
            try:
                part.samples, cursor = together(self.world, partial(self._receive_part, part))
            except BridgeLostError as error:
                self._fleet.lose(part.place, str(error))
                self._admit(since)
                continue
            with suppress(BridgeLostError):  # noticed with the next order
                self._fleet.links[part.place].forget(part.number)
            self._waiting = [other for other in self._waiting if other is not part]
            if part.order.iteration:
                self._arrived(part, cursor)
                self._tell(part.order.iteration)

    def _receive_part(self, part: _Part) -> tuple[list[Samples], dict[str, Any] | None]:
        if part.number < 0:
            raise BridgeLostError(f"the {self._fleet.worlds[part.place].name} world has ended")
        link, cursor = self._fleet.links[part.place], None
        self._receiving = part
        samples = link.receive(part.number, part.order) if part.early is None else part.early
        if part.order.iteration and not self._keeps_all:
            cursor = pickle.loads(link.bridge.value(cursor_key(part.number)))
        return samples, cursor

    def _look(self) -> None:
        """Receive what has come of the next iterations, so that its scores can be computed."""
        now = time.monotonic()
        if self.follower is None or now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        for link in self._fleet.links.values():
            missing = [part for part in self._waiting if part.link is link and part.early is None]
            part = min(missing, key=lambda part: part.number, default=None)
            if part is None or part is self._receiving or part.number < 0 or not part.order.iteration:
                continue
            try:
                if link.has_made(part.number, part.order):
                    part.early = link.receive(part.number, part.order)
                    self._tell(part.order.iteration)
            except BridgeLostError:
                pass  # noticed on all ranks when the samples are needed

    def _tell(self, iteration: int) -> None:
        """Tell of an iteration whose samples are all here."""
        collection = self._collections[iteration]
        found = [part.early if part.samples is None else part.samples for part in collection.parts]
        if self.follower is not None and None not in found:
            samples = list(chain.from_iterable(filter(None, found)))
            batch = _batch_of(samples, self._draw, collection.version)
            self.follower.arrived(iteration, batch, collection.num_deals)

    def _arrived(self, part: _Part, cursor: dict[str, Any] | None) -> None:
        """Count the samples of a part; with dynamic sampling, note where the next order draws from."""
        assert part.samples is not None
        for made in part.samples:
            tokens = made.num_tokens + made.dropped_tokens
            self._add_rate(part.place, made.replica, tokens=tokens, seconds=made.seconds)
        dropped = sum(samples.num_dropped for samples in part.samples)
        self._counts.sampled += dropped + sum(len(samples.batch["sample_id"]) for samples in part.samples)
        self._counts.drop(dropped, sum(samples.dropped_tokens for samples in part.samples))
        if cursor is None:
            return
        self._collections[part.order.iteration].cursor = cursor
        following = next((other for other in self._waiting if other.order.iteration), None)
        if following is not None:  # another world would not know where to draw from
            following.order = replace(following.order, cursor=cursor)

    def _admit(self, since: float | None = None) -> None:
        """Join the worlds that have come; if none is left, wait for one."""
        self._joined(self._fleet.admit_any(), since)
        self._deal_again()

    def _deal_again(self) -> None:
        """Deal the missing shares of worlds that have ended out to others, or to those that follow them."""
        while (part := next(filter(self._is_stranded, self._waiting), None)) is not None:
            part.early = None
            self._dealt_again += len(part.order.share.groups(part.order.draw.num_prompts))
            if (collection := self._collections.get(part.order.iteration)) is not None:
                collection.num_deals += 1
            self._give(part)

    def _is_stranded(self, part: _Part) -> bool:
        return part.link is not None and self._fleet.links.get(part.place) is not part.link


def _batch_of(samples: list[Samples], draw: Draw, version: int) -> RolloutBatch:
    """Return samples as one batch."""
    if samples:
        return RolloutBatch.concatenate([RolloutBatch(**part.batch) for part in samples])
    return batch_of([], [], Numbers(), draw, policy_version=version)

"""async.buffer=window: groups are made without pause, and an iteration trains on those that are there.

A group starts only if its samples can still be used (the capacity of AReaL, Fu et al. 2025): with P prompts
an iteration, v updates done and a staleness of n, at most P · (v + 1 + n) groups have started since the run
began. Most often fewer do: P · (v + 1) plus a lead from P to P · n, which follows the speeds (`Lead`). So
samples are only as stale as it takes to keep training busy.

Iteration k takes those that no later iteration could use, and waits for them: with version k - 1 - n all that
are left, up to version k - n all but P, and so on. Then it takes the first that are complete.

With async.sync_interval=M the weights are sent after each M-th iteration, and a period of M iterations takes
the place of one: at most P · M · (p + 1 + n) groups have started in period p, counted from 0.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch import Tensor

from parallel.bridge import BridgeLostError, together
from parallel.runtime.refusal import RefusalError
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.sampler import Draw, KeepGroup, Numbers, batch_of
from verl_megatron.separate.fleet import Fleet
from verl_megatron.separate.orders import VALIDATION, Block, GroupSamples, StreamOrder, owner_of
from verl_megatron.separate.remote_sampler import NOTHING, Counts, Demand, RemoteSampler, Resumed
from verl_megatron.separate.window.group_table import SHORT, Arrival, Entry, GroupTable, Lead

WAIT_S = 0.01  # between two questions for samples


class WindowSampler(RemoteSampler):
    """Orders groups as staleness allows, and takes the oldest and the first that are complete.

    Args:
        keep_group: which groups to train on; the others are dropped, and further prompts take their place.
    """

    def __init__(self, fleet: Fleet, demand: Demand, *, keep_group: KeepGroup | None):
        super().__init__(fleet, demand)
        self._keep_group = keep_group
        self._begun = False
        self._next = 0  # number of the next group to draw
        self._num_collected = 0  # iterations
        self._dropped: list[int] = []  # numbers of groups, since the last collection
        self._num_dropped = 0  # of them when it ended
        self._table = GroupTable()
        self._before: dict[str, Any] | None = None  # its state before a collection that is not trained on
        self._skipped: set[int] = set()  # numbers that were spent with a checkpoint's collection
        self._num_validations = 0
        self._interval = demand.sync_interval
        self._per_sync = self._draw.num_prompts * self._interval  # groups
        self._lead = Lead(self._per_sync, max_staleness=self._max_staleness)
        self._collected_at = 0.0  # when the lead was last adapted
        self._short_s = 0.0  # for which collections have lacked groups, whichever, since then
        self._received: list[tuple[RolloutBatch, GroupSamples]] = []  # of the last collection
        self._spent: list[int] = []
        self._arrivals: list[Arrival] = []  # of it, on every rank
        self._load, self._seconds = Sums(), [0.0, 0.0]  # of this rank's replicas: load, idle and busy
        self._interrupted = self._aborted_tokens = 0  # samples of these, and tokens

    def needs(self, version: int) -> bool:
        return version < self._last and version % self._interval == 0

    def published(self, version: int, *, is_sent: bool) -> None:
        super().published(version if is_sent else self._newest, is_sent=is_sent)
        self._before = None
        if self._begun:
            self._order_more()

    def spent(self) -> list[int]:
        return self._spent

    # ---- collections ---------------------------------------------------------------------------------------

    def _collect_training(self, cursor: PromptCursor) -> RolloutBatch:
        if not self._begun:
            self.begin(self._iteration, cursor.state_dict())
        self._admit()
        choose = partial(self._table.choose, self._draw.num_prompts, later=self._iterations_left)
        numbers = self._wait_for(choose)
        if self._iteration % self._interval == 0:
            self._adapt_lead()
        cursor.load_state_dict(self._ahead.state_dict())
        self._num_dropped = len(self._dropped)
        self._spent, self._dropped = [*numbers, *self._dropped], []
        self._num_collected, self._before = self._iteration, self._table.state_dict()
        return self._take(numbers, self._draw)

    def _collect_validation(self, draw: Draw, version: int) -> RolloutBatch:
        self._admit()
        first = VALIDATION * (1 + self._num_validations)
        block = Block(first=first, count=draw.num_prompts, draw=draw, cursor=None)
        self._num_validations += 1
        self._give({first + index: block for index in range(block.count)})
        return self._take(self._wait_for(partial(self._table.all_of, block)), draw)

    def _last_use(self, version: int) -> int:
        """Return the last iteration that may train on samples of a version."""
        return self._interval * (version // self._interval + 1 + self._max_staleness)

    def _iterations_left(self, version: int) -> int:
        """Return how many iterations after this one may train on samples of a version."""
        return max(0, self._last_use(version) - self._iteration)

    def _adapt_lead(self) -> None:
        """Let the lead follow the speeds since it last did, as the slowest rank has found them."""
        now = time.perf_counter()
        is_short = self._collected_at > 0 and self._short_s > SHORT * (now - self._collected_at)
        self._collected_at, self._short_s = now, 0.0
        is_short = bool(self.world.all_max(torch.tensor(float(is_short))) > 0)
        self._lead.adapt(is_short=is_short, left=self._table.num_complete - self._draw.num_prompts)

    def _wait_for(self, chosen: Callable[[], list[int] | None]) -> list[int]:
        """Fetch what is complete until `chosen` returns groups."""
        since = time.perf_counter()
        while True:
            self._fetch(since, waits=chosen() is None)
            if (numbers := chosen()) is not None:
                return numbers
            is_short, begin = self._table.num_complete < self._draw.num_prompts, time.perf_counter()
            self._fleet.work()
            time.sleep(WAIT_S)
            if is_short and self._iteration:  # validation lacks none
                self._short_s += time.perf_counter() - begin

    def _take(self, numbers: Sequence[int], draw: Draw) -> RolloutBatch:
        """Return this rank's samples of these groups, numbered without gaps."""
        self._arrivals, own = self._table.take(numbers)
        starts = list(accumulate((arrival.size for arrival in self._arrivals), initial=0))
        self._received = []
        for place, found in own.items():
            batch = RolloutBatch(**found.batch)
            group_id = torch.full_like(batch.sample_id, place)
            batch = replace(batch, sample_id=batch.sample_id + starts[place], group_id=group_id)
            self._received.append((batch, found))
        batches = [batch for batch, _ in self._received]
        return (
            RolloutBatch.concatenate(batches)
            if batches
            else batch_of([], [], Numbers(), draw, policy_version=self._newest)
        )

    def score(self, batch: RolloutBatch, sums: Sums) -> Tensor:
        """Return the rewards of the last collection, [B] float32; 0 without a reward function.

        Raises:
            RefusalError: on every rank, if the function failed on all samples or reports too many metrics.
        """
        every = all(arrival.failed == arrival.size for arrival in self._arrivals)
        for arrival in self._arrivals:
            if arrival.complaint and (every or arrival.failed < arrival.size):
                raise RefusalError(arrival.complaint)
        for _, found in self._received:
            sums.merge(Sums.from_state(found.sums))
        if self._iteration:
            self._add_metrics(batch, sums)
        rewards = [found.rewards_B for _, found in self._received if found.rewards_B is not None]
        return torch.cat(rewards) if rewards else torch.zeros(len(batch))

    def _add_metrics(self, batch: RolloutBatch, sums: Sums) -> None:
        """Add what was counted since the iteration before, validations included."""
        self._add_staleness(batch, sums)
        if self._keep_group is not None:
            taken, dropped = len(self._arrivals), self._num_dropped
            sums.add("rollout/groups_sampled", taken + dropped, 1)
            without = dropped + sum(not arrival.is_kept for arrival in self._arrivals)
            sums.add("rollout/groups_without_variance", without, 1)
        sums.merge(self._load)
        replicas = sum(len(self._own_replicas(place)) for place in self._fleet.links)
        sums.add("async/rollout_wait_s", self._seconds[0], replicas)
        sums.add("async/generation_s", self._seconds[1], replicas)
        sums.add("async/interrupted", self._interrupted, 1 / self.world.size)
        sums.add("async/tokens_aborted", self._aborted_tokens, 1 / self.world.size)
        self._load, self._seconds, self._interrupted, self._aborted_tokens = Sums(), [0.0, 0.0], 0, 0
        self._add_counts(sums)

    def _add_staleness(self, batch: RolloutBatch, sums: Sums) -> None:
        newest = (self._iteration - 1) // self._interval  # weight sync
        if batch.token_versions is not None:
            behind_N = (newest - batch.token_versions // self._interval)[batch.response_mask]
            sums.add("async/staleness_mean", behind_N.sum(), len(behind_N))
            for versions_T, mask_T in zip(batch.token_versions, batch.response_mask):
                sums.add("async/versions_per_sample", len(versions_T[mask_T].unique()), 1)
        oldest = min(arrival.versions[0] for arrival in self._arrivals)
        latest = max(arrival.versions[1] for arrival in self._arrivals)
        sums.max("async/staleness_max", newest - oldest // self._interval)
        sums.add("async/staleness_min", newest - latest // self._interval, 1)
        sums.add("async/groups_in_flight", len(self._table.training), 1)

    # ---- orders --------------------------------------------------------------------------------------------

    def begin(self, iteration: int, cursor: dict[str, Any], resumed: Resumed = NOTHING) -> None:
        self._begun, self._num_collected = True, iteration - 1
        if self._next:
            self._skipped |= set(resumed.groups)
        else:  # nothing was restored; those numbers are not of this count
            self._next = self._draw.num_prompts * (iteration - 1)
            self._ahead.load_state_dict(cursor)
        for number in self._skipped & self._table.entries.keys():
            if (own := self._table.forget(number)) is not None:
                self._counts.sampled -= own.num_samples
        self._counts.add(resumed)
        wanted = self._draw.num_prompts
        self._make_again(self._table.too_old(wanted, last=self._last_use, iteration=iteration))
        self._order_more()

    def _make_again(self, numbers: Iterable[int]) -> None:
        """Drop the samples of groups; they are ordered again."""
        for number in numbers:
            if (own := self._table.make_again(number)) is not None:
                self._counts.drop(own.num_samples, own.num_tokens)

    def _order_more(self) -> None:
        """Order as many groups as training will want, all of which can still be used."""
        period = self._newest // self._interval
        allowed = self._per_sync * (period + 1) + self._lead.groups
        allowed = min(allowed, self._draw.num_prompts * self._last)
        begun = self._draw.num_prompts * self._num_collected + len(self._table.started)
        count = max(0, allowed - begun)
        groups = dict(islice(self._table.waiting.items(), count))
        while (missing := count - len(groups)) > 0:
            block = Block(first=self._next, count=missing, draw=self._draw, cursor=self._ahead.state_dict())
            self._ahead.draw(missing)
            self._next += missing
            numbers = range(block.first, block.first + missing)
            groups |= {number: block for number in numbers if number not in self._skipped}
        self._give(groups)

    def _give(self, groups: dict[int, Block]) -> None:
        """Order groups of the replicas that have least to do."""
        load, places = self._table.load(), []
        for place, link in self._fleet.links.items():
            places += [(place, replica) for replica in range(link.num_replicas)]
        for number, block in groups.items():
            place, replica = min(places, key=lambda each: (load[each], each))
            load[place, replica] += 1
            entry = Entry(block=block, version=self._newest, place=place, replica=replica)
            self._table.entries[number] = entry
        for place in list(self._fleet.links):
            own = [number for number in groups if self._table.entries[number].place == place]
            self._send_orders(place, own)

    def _send_orders(self, place: int, numbers: Iterable[int]) -> None:
        by_block: dict[int, list[int]] = {}
        for number in numbers:
            by_block.setdefault(self._table.entries[number].block.first, []).append(number)
        for own in by_block.values():
            block, indices = (
                self._table.entries[own[0]].block,
                [[] for _ in range(self._fleet.links[place].num_replicas)],
            )
            for number in own:
                indices[self._table.entries[number].replica].append(number - block.first)
            try:
                self._fleet.provide_any(place)
                order = StreamOrder(block=block, sync=0, indices=tuple(map(tuple, indices)))
                self._fleet.links[place].give(order)
            except BridgeLostError:
                pass  # on this rank; it is noticed on all when samples are fetched

    # ---- samples -------------------------------------------------------------------------------------------

    def _own_replicas(self, place: int) -> list[int]:
        """Return the replicas of a world whose samples this rank owns."""
        first, link = self._fleet.shares[place].first, self._fleet.links[place]
        owners = [owner_of(first, replica, self.world.size) for replica in range(link.num_replicas)]
        return [replica for replica, owner in enumerate(owners) if owner == self.world.rank]

    def _fetch(self, since: float, *, waits: bool) -> None:
        """Receive what is complete, and tell all ranks of it; `waits`: training has nothing else to do."""
        new: list[GroupSamples] = []
        lost: dict[int, str] = {}
        for place, link in self._fleet.links.items():
            own = self._own_replicas(place)
            fetch = partial(link.fetch, own, waits=waits)
            try:
                replies = together(self.world, fetch)
            except BridgeLostError as error:
                lost[place] = str(error)
                continue
            for replica, reply in zip(own, replies):
                new += reply.groups
                tokens = sum(group.num_tokens for group in reply.groups)
                self._add_rate(place, replica, tokens=tokens, seconds=reply.busy_s)
                self._load.merge(Sums.from_state(reply.sums))
                self._interrupted += reply.interrupted
                self._aborted_tokens += reply.aborted_tokens
                self._seconds[0] += reply.idle_s
                self._seconds[1] += reply.busy_s
        self._table.own |= {found.number: found for found in new}
        for number in (found.number for found in new if found.number < VALIDATION):
            self._counts.sampled += self._table.own[number].num_samples
        gathered = chain(*self.world.all_gather_object([self._arrival_of(found) for found in new]))
        for arrival in sorted(gathered, key=lambda each: each.number):
            self._table.complete(arrival)
            if not arrival.is_kept and self._may_drop():
                self._drop(arrival.number)
        for place, reason in lost.items():  # once it is known what they have completed
            self._fleet.lose(place, reason)
        if lost:
            self._admit(since)
        if self._begun:
            self._order_more()  # in place of those that were dropped

    def _arrival_of(self, found: GroupSamples) -> Arrival:
        batch, is_kept = RolloutBatch(**found.batch), True
        assert batch.token_versions is not None
        if self._keep_group is not None and found.number < VALIDATION and found.rewards_B is not None:
            is_kept = self._keep_group(found.rewards_B.tolist())
        versions_N = batch.token_versions[batch.response_mask]
        return Arrival(
            number=found.number,
            size=len(batch),
            versions=(int(versions_N.min()), int(versions_N.max())),
            is_kept=is_kept,
            failed=found.failed,
            complaint=found.complaint,
        )

    def _may_drop(self) -> bool:
        """Whether another group may be dropped; if too many were, the rest stays."""
        return len(self._dropped) < self._draw.num_prompts * (self._draw.max_rounds - 1)

    def _drop(self, number: int) -> None:
        self._dropped.append(number)
        if (own := self._table.forget(number)) is not None:
            self._counts.drop(own.num_samples, own.num_tokens)

    def _admit(self, since: float | None = None) -> None:
        """Join the worlds that have come; if none is left, wait for one.

        What those that have ended have not completed is ordered of others, or of the ones that follow them.
        """
        joined = self._joined(self._fleet.admit_any(), since)
        orphans = self._table.stranded(self._fleet.links.keys() - set(joined))
        self._dealt_again += len(orphans)
        self._give(orphans)

    def _in_flight(self) -> int:
        return self._table.num_own_samples

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's complete groups, and which groups are under way; those are made again."""
        return {
            "next": self._next,
            "skipped": sorted(number for number in self._skipped if number >= self._next),
            "lead": self._lead.groups,
            "ahead": self._ahead.state_dict(),
            "table": self._table.state_dict() if self._before is None else self._before,
            "counts": self._saved_counts(),
        }

    def _emptied(self, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"table": GroupTable.emptied(state["table"])} if "table" in state else state

    def load_state_dict(self, state: dict[str, Any], *, usable: bool = True) -> None:
        if "table" not in state:  # of a run with async.buffer=in_order
            return
        self._next, self._skipped = state["next"], set(state.get("skipped", ()))
        self._lead.restore(state["lead"])
        self._ahead.load_state_dict(state["ahead"])
        self._table.load_state_dict(state["table"], self._draw)
        self._counts = Counts(**state["counts"])
        if not usable:
            self._make_again(self._table.started)

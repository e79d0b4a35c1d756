"""A replica of a rollout world with async.buffer=window: generates groups of samples without pause."""

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from parallel.bridge import POLL_S, Bridge, BridgeLostError, Parcels, losing, together
from parallel.rank_set import RankSet
from parallel.reshard.versions import VersionedReshard
from verl_megatron.data.prompts import Prompt, TrainingPrompts
from verl_megatron.data.tokenizer import Tokenizer
from verl_megatron.observe.metrics import REWARD_LATENCY, Sums
from verl_megatron.observe.sources import Sources
from verl_megatron.rewards.pool import RewardPool
from verl_megatron.rollout.engine import RolloutEngine
from verl_megatron.rollout.sampler import Numbers, batch_of, rewards_of
from verl_megatron.rollout.sampling import Generation, Request, sample_seed
from verl_megatron.rollout.stream import FinishedGroup, Group, GroupStream, Partial
from verl_megatron.separate.identity import ServedWeights
from verl_megatron.separate.orders import (
    STOP,
    Block,
    GroupSamples,
    Reply,
    StreamOrder,
    fetch_key,
    order_key,
    version_key,
)

STEPS = 4  # decoding steps between two looks at the store


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What joins this rank to the training world."""

    bridge: Bridge
    parcels: Parcels
    versions: VersionedReshard
    served: ServedWeights | None
    owner: int  # training rank that owns this replica's samples


@dataclass(frozen=True, kw_only=True)
class Replica:
    """An engine, and what it needs to make and score samples."""

    engine: RolloutEngine
    ranks: RankSet  # tensor-parallel
    tokenizer: Tokenizer
    pool: RewardPool | None  # on the first rank
    prompts: TrainingPrompts
    validation: Sequence[Prompt]
    sources: Sources
    seed: int
    beat: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class _News:
    """What the first rank of a replica has found in the store."""

    order: StreamOrder | None
    has_weights: bool
    is_asked: bool  # for a reply
    is_over: bool


@dataclass(kw_only=True)
class _Made:
    """A group that is generated or scored."""

    block: Block
    prompt: Prompt
    requests: list[Request]


class StreamServer:
    """Generates the groups that the training world orders, over one bridge. Collective over a replica's ranks."""

    def __init__(self, replica: Replica, exchange: Exchange, *, partial: Partial):
        self._replica, self._exchange, self._engine = replica, exchange, replica.engine
        self._stream = GroupStream(self._engine, partial=partial, on_finish=self._score)
        self._held: deque[StreamOrder] = deque()  # whose weights have not come
        self._made: dict[int, _Made] = {}  # by sample_id
        self._scoring: list[FinishedGroup] = []
        self._complete: list[GroupSamples] = []  # since the last reply
        self._num_orders = self._num_replies = self._steps = 0
        self._changes = False  # new weights wait for running samples
        self._idle_s, self._since, self._last_look = 0.0, time.perf_counter(), 0.0
        self._sender = ThreadPoolExecutor(1, "replies")
        self._sending: Future | None = None

    @property
    def _is_first(self) -> bool:
        return self._engine.is_owner

    def serve(self) -> None:
        """Generate until the training world ends.

        Raises:
            BridgeLostError: it ended by a fault.
        """
        try:
            with self._engine.session():
                while not self._look():
                    self._work()
        finally:
            self._sender.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        """Take some decoding steps; without samples, wait a moment."""
        for _ in range(STEPS):
            self._replica.beat()
            finished = self._stream.step()
            self._scoring += finished if self._is_first else []
            self._gather_scored()
            if not self._stream.num_running:
                begin = time.perf_counter()
                time.sleep(POLL_S)
                self._idle_s += time.perf_counter() - begin
                return

    # ---- what the training world wants ---------------------------------------------------------------------

    def _look(self) -> bool:
        """Act on what is new in the store; return whether the run is over."""
        news: _News | None = None
        reason = ""
        if self._is_first:
            try:
                news = self._news()
            except BridgeLostError as error:
                reason = str(error)
        if self._replica.ranks.size > 1:
            news, reason = self._replica.ranks.broadcast_object((news, reason))
        if news is None:
            raise BridgeLostError(reason)
        if news.order is not None:
            self._num_orders += 1
            self._held.append(news.order)
        if news.has_weights or self._changes:
            self._change_weights()
        while self._held and self._held[0].sync <= self._exchange.versions.version:
            self._add(self._held.popleft())
        if news.is_asked:
            self._reply()
        return news.is_over

    def _news(self) -> _News:
        bridge = self._exchange.bridge
        if self._sending is not None and self._sending.done():
            self._sending.result()  # raises what went wrong
        key = order_key(self._num_orders)
        with losing("receiving weights"):
            has_weights = self._exchange.versions.ready()
        return _News(
            order=pickle.loads(bridge.value(key)) if bridge.has(key) else None,
            has_weights=has_weights,
            is_asked=bridge.has(fetch_key(self._engine.replica, self._num_replies)),
            is_over=bridge.has(STOP),
        )

    def _change_weights(self) -> None:
        self._changes = not self._stream.begin_change()
        if self._changes:
            return
        self._check("samples")
        sync = together(self._replica.ranks, self._adopt)
        self._stream.end_change(int(self._exchange.bridge.value(version_key(sync))))

    def _adopt(self) -> int:
        with losing("receiving weights"):
            while not self._exchange.versions.ready():  # the first rank's have come
                self._exchange.bridge.check()
                time.sleep(POLL_S)
            sync = self._exchange.versions.adopt()
        if self._exchange.served is not None:
            self._exchange.served.expect(sync)
        return sync

    def _check(self, purpose: str) -> None:
        """Check that vLLM holds the weights that it should."""
        if self._exchange.served is not None and self._exchange.versions.version:
            self._exchange.served.check(self._exchange.versions.version, purpose)

    def _add(self, order: StreamOrder) -> None:
        """Start the groups of an order that are this replica's."""
        block = order.block
        if block.cursor is None:
            prompts = list(self._replica.validation[: block.count])
        else:
            self._replica.prompts.cursor.load_state_dict(block.cursor)
            prompts = self._replica.prompts.draw(block.count)
        for index in order.indices[self._engine.replica]:
            number, samplings = block.first + index, block.draw.samplings_of(prompts[index])
            width = block.draw.most_samples
            requests = [
                Request(
                    number * width + sample,
                    prompts[index].prompt_token_ids,
                    sample_seed(self._replica.seed, *block.seed_of(index, sample)),
                    sampling,
                )
                for sample, sampling in enumerate(samplings)
            ]
            made = _Made(block=block, prompt=prompts[index], requests=requests)
            self._made |= {request.sample_id: made for request in requests}
            self._stream.add(Group(number=number, requests=requests))

    # ---- samples -------------------------------------------------------------------------------------------

    def _score(self, sample: Generation) -> None:
        pool = self._replica.pool
        if pool is None:
            return
        text, prompt = self._replica.tokenizer.decode(sample.token_ids), self._made[sample.sample_id].prompt
        pool.submit(sample.sample_id, prompt.text, text, prompt.answer, prompt.extra, prompt.messages)

    def _gather_scored(self) -> None:
        """Move the groups that are scored to those that are complete."""
        waiting = []
        for group in self._scoring:
            ids = [sample.sample_id for sample in group.samples]
            if self._replica.pool is None or self._replica.pool.are_done(ids):
                self._complete.append(self._samples_of(group))
            else:
                waiting.append(group)
        self._scoring = waiting

    def _samples_of(self, group: FinishedGroup) -> GroupSamples:
        ids = [sample.sample_id for sample in group.samples]
        made, pool, sums = self._made[ids[0]], self._replica.pool, Sums()
        for sample_id in ids:
            del self._made[sample_id]
        rewards_B, failed, complaint = None, 0, ""
        if pool is not None:
            found = pool.results(ids)
            rewards_B = rewards_of([found[sample_id] for sample_id in ids], sums)
            failed, complaint = pool.failed, pool.complaint(pool.failed, pool.calls)
            sums.add(REWARD_LATENCY, pool.total_ms, pool.calls)
        numbers = Numbers()
        numbers.add([len(ids)])
        samples = [replace(sample, sample_id=number) for number, sample in enumerate(group.samples)]
        requests = [replace(request, sample_id=number) for number, request in enumerate(made.requests)]
        batch = batch_of(samples, requests, numbers, made.block.draw, policy_version=0)
        batch.policy_version = torch.tensor(
            [min(own) if own else self._stream.version or 0 for own in group.versions]
        )
        batch.token_versions = torch.zeros_like(batch.generated_ids)
        for b, own in enumerate(group.versions):
            length = int(batch.lengths[b])
            batch.token_versions[b, length - len(own) : length] = torch.tensor(own, dtype=torch.int64)
        batch.source_id = self._replica.sources.numbers([made.prompt.extra] * len(batch))
        return GroupSamples(
            number=group.number,
            batch=batch.tensors(),
            rewards_B=rewards_B,
            sums=sums.state_dict(),
            failed=failed,
            complaint=complaint,
        )

    def _reply(self) -> None:
        """Send what is complete to its owner; the weights that made it are checked before."""
        number, self._num_replies = self._num_replies, self._num_replies + 1
        self._check("samples")
        if not self._is_first:
            return
        sums, now = Sums(), time.perf_counter()
        self._engine.admission.add_load(sums, is_first=self._engine.world.is_first)
        sums.add("async/interrupted", self._stream.num_interrupted, int(self._engine.world.is_first))
        self._stream.num_interrupted = 0
        idle_s, busy_s = self._idle_s, now - self._since - self._idle_s
        reply = Reply(groups=self._complete, sums=sums.state_dict(), idle_s=idle_s, busy_s=busy_s)
        self._complete, self._idle_s, self._since = [], 0.0, now
        send = partial(self._exchange.parcels.send, reply, to=self._exchange.owner, label=f"reply/{number}")
        self._sending = self._sender.submit(send)

"""A replica of a rollout world with async.buffer=window: generates groups of samples without pause."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from parallel.bridge import POLL_S, BridgeLostError, losing, together
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import Prompt
from verl_megatron.observe.metrics import REWARD_LATENCY, Sums
from verl_megatron.observe.timeline import WAITING
from verl_megatron.rollout.sampler import Numbers, batch_of, rewards_of
from verl_megatron.rollout.sampling import Generation, Request, sample_seed
from verl_megatron.rollout.stream import FinishedGroup, Group, GroupStream, Partial
from verl_megatron.separate.orders import (
    WAITS,
    Block,
    GroupSamples,
    Reply,
    StreamOrder,
    owner_of,
    version_key,
)
from verl_megatron.separate.serving import Exchange, Replica
from verl_megatron.separate.window.mailbox import Mailbox

AGREE_S, MOST_STEPS = 0.03, 8  # between two agreements of several ranks: a time, and decoding steps at most
HOLD_S = 0.1  # longest time that training waits for a reply with nothing in it
CHECKED_SHARE = 0.05  # of the time, at most, in which weights are checked for replies


@dataclass(frozen=True, kw_only=True)
class _News:
    """What the first rank of a replica has found out."""

    orders: list[StreamOrder]
    has_weights: bool
    num_steps: int  # until the ranks agree again
    reply: bool  # now
    has_samples: bool  # to reply with
    is_over: bool


@dataclass(kw_only=True)
class _Made:
    """A group that is generated or scored."""

    block: Block
    prompt: Prompt
    requests: list[Request]


class StreamServer:
    """Generates the groups of orders, over one bridge. Collective over a replica's ranks."""

    def __init__(self, replica: Replica, exchange: Exchange, *, partial: Partial):
        self._replica, self._exchange, self._engine = replica, exchange, replica.engine
        bridge = exchange.bridge
        self._owner = owner_of(exchange.first_replica, self._engine.replica, bridge.num_training)
        self._stream = GroupStream(self._engine, partial=partial, on_finish=self._score)
        self._held: deque[StreamOrder] = deque()  # whose weights have not come
        self._made: dict[int, _Made] = {}  # by sample_id
        self._scoring: list[FinishedGroup] = []
        self._complete: list[GroupSamples] = []  # since the last reply
        self._changes = False  # new weights wait for running samples
        self._num_steps, self._step_s = 1, 0.0  # until the ranks agree again, and the seconds of one
        self._idle_s, self._since = 0.0, time.perf_counter()
        self._asked_at: float | None = None  # when training was first seen to wait for the next reply
        self._check_again_at = 0.0
        self._sender = ThreadPoolExecutor(1, "replies")
        self._sending: Future | None = None
        # On the first rank of the replica, which tells the others.
        self._mailbox = Mailbox(bridge, self._engine.replica) if self._engine.is_owner else None

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
            if self._mailbox is not None:
                self._mailbox.close()
            if self._replica.pool is not None:
                self._replica.pool.forget()

    def _work(self) -> None:
        """Take some decoding steps; without samples, wait a moment."""
        start = time.perf_counter()
        for _ in range(self._num_steps):
            self._replica.beat()
            self._scoring += self._stream.step()
            self._gather_scored()
            self._replica.activity.enter("rollout" if self._stream.num_running else WAITING)
            if not self._stream.num_running:
                begin = time.perf_counter()
                time.sleep(POLL_S)
                self._idle_s += time.perf_counter() - begin
                return
        self._step_s = (time.perf_counter() - start) / self._num_steps

    # ---- what the training world wants ---------------------------------------------------------------------

    def _look(self) -> bool:
        """Act on what is new; return whether the run is over."""
        news: _News | None = None
        reason = ""
        if self._mailbox is not None:
            try:
                news = self._news(self._mailbox)
            except BridgeLostError as error:
                reason = str(error)
        if self._replica.ranks.size > 1:
            news, reason = self._replica.ranks.broadcast_object((news, reason))
        if news is None:
            raise BridgeLostError(reason)
        self._num_steps = news.num_steps
        self._held += news.orders
        if news.has_weights or self._changes:
            self._change_weights()
        while self._held and self._held[0].sync <= self._exchange.versions.version:
            self._add(self._held.popleft())
        if news.reply:
            self._reply(has_samples=news.has_samples)
        return news.is_over

    def _news(self, mailbox: Mailbox) -> _News:
        if self._sending is not None and self._sending.done():
            self._sending.result()  # raises what went wrong
        mail = mailbox.take()
        with losing("receiving weights"):
            has_weights = self._exchange.versions.ready()
        has_samples = bool(self._complete) and time.perf_counter() >= self._check_again_at
        agrees = self._replica.ranks.size > 1 and self._step_s > 0
        return _News(
            orders=mail.orders,
            has_weights=has_weights,
            num_steps=min(max(1, int(AGREE_S / self._step_s)), MOST_STEPS) if agrees else 1,
            reply=mail.asked is not None and (has_samples or mail.asked != WAITS or self._has_waited()),
            has_samples=has_samples,
            is_over=mail.is_over,
        )

    def _has_waited(self) -> bool:
        """Whether training, which asks for a reply, has waited for it long enough."""
        now = time.perf_counter()
        self._asked_at = now if self._asked_at is None else self._asked_at
        return now >= self._asked_at + HOLD_S

    def _change_weights(self) -> None:
        self._changes = not self._stream.begin_change()
        if self._changes:
            return
        self._check_weights()
        sync = together(self._replica.ranks, partial(self._exchange.adopt, self._replica.beat))
        self._stream.end_change(int(self._exchange.bridge.value(version_key(sync))))

    def _check_weights(self) -> None:
        """Check that vLLM holds the weights that made the samples since the last look."""
        if sync := self._exchange.versions.version:
            self._exchange.check(sync, "samples")

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
        """Return the samples of a group that is scored."""
        ids = [sample.sample_id for sample in group.samples]
        made = [self._made.pop(sample_id) for sample_id in ids][0]
        pool, sums, rewards_B, failed, complaint = self._replica.pool, Sums(), None, 0, ""
        if pool is not None:
            found = pool.results(ids)
            rewards_B = rewards_of([found[sample_id] for sample_id in ids], sums)
            failed, complaint = pool.failed, pool.complaint(pool.failed, pool.calls)
            sums.add(REWARD_LATENCY, pool.total_ms, pool.calls)
            pool.show_new_failures()
        return GroupSamples(
            number=group.number,
            batch=self._batch_of(group, made).tensors(),
            rewards_B=rewards_B,
            sums=sums.state_dict(),
            failed=failed,
            complaint=complaint,
        )

    def _batch_of(self, group: FinishedGroup, made: _Made) -> RolloutBatch:
        """Return the batch of a group, whose samples are numbered from 0."""
        numbers = Numbers()
        numbers.add([len(group.samples)])
        samples = [replace(sample, sample_id=number) for number, sample in enumerate(group.samples)]
        requests = [replace(request, sample_id=number) for number, request in enumerate(made.requests)]
        batch = batch_of(samples, requests, numbers, made.block.draw, policy_version=0)
        batch.policy_version = torch.tensor([min(own) for own in group.versions])
        batch.token_versions = torch.zeros_like(batch.generated_ids)
        for b, own in enumerate(group.versions):
            length = int(batch.lengths[b])
            batch.token_versions[b, length - len(own) : length] = torch.tensor(own)
        batch.source_id = self._replica.sources.numbers([made.prompt.extra] * len(batch))
        return batch

    def _reply(self, *, has_samples: bool) -> None:
        """Send what is complete to its owner; the weights that made it are checked before."""
        self._asked_at = None
        complete: list[GroupSamples] = []
        if has_samples:
            begin = time.perf_counter()
            self._check_weights()
            end = time.perf_counter()
            self._check_again_at = end + (end - begin) / CHECKED_SHARE
            complete, self._complete = self._complete, []
        if self._mailbox is None:
            return
        number = self._mailbox.reply()
        sums, now = Sums(), time.perf_counter()
        self._engine.admission.add_load(sums, is_first=self._engine.world.is_first)
        sums.max("async/weights_adopt_s", self._exchange.versions.adopt_s)
        interrupted, aborted_tokens = self._stream.num_interrupted, self._stream.aborted_tokens
        self._stream.num_interrupted = self._stream.aborted_tokens = 0
        idle_s, busy_s = self._idle_s, now - self._since - self._idle_s
        reply = Reply(
            groups=complete,
            sums=sums.state_dict(),
            interrupted=interrupted,
            aborted_tokens=aborted_tokens,
            idle_s=idle_s,
            busy_s=busy_s,
        )
        self._idle_s, self._since = 0.0, now
        send = partial(self._exchange.parcels.send, reply, to=self._owner, label=f"reply/{number}")
        self._sending = self._sender.submit(send)

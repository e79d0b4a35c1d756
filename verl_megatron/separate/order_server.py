"""A rollout world with async.buffer=in_order: carries out orders one after the other."""

import pickle
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from parallel.bridge import POLL_S, together
from parallel.rank_set import RankSet
from verl_megatron.data.prompts import GivenPrompts
from verl_megatron.observe.metrics import Sums
from verl_megatron.rewards.shaping import has_variance
from verl_megatron.rollout.sampler import Sampler
from verl_megatron.separate.orders import STOP, Order, Samples, cursor_key, order_key, owner_of
from verl_megatron.separate.serving import Exchange, Replica


class OrderServer:
    """Makes and scores the samples of orders, over one bridge. Collective over the rollout world.

    Args:
        world: all ranks of the rollout world.
        drops: with dynamic sampling, which draws prompts as scores come in.
    """

    def __init__(self, world: RankSet, replica: Replica, exchange: Exchange, *, drops: bool):
        self._world, self._replica, self._exchange, self._drops = world, replica, exchange, drops
        self._sampler = Sampler(
            replica.engine,
            tokenizer=replica.tokenizer,
            pool=replica.pool,
            seed=replica.seed,
            sources=replica.sources,
            on_step=replica.beat,
        )
        self._validation = GivenPrompts(replica.validation)
        self._sender = ThreadPoolExecutor(1, "samples")  # the next order need not wait for the receiver
        self._sending: deque[Future] = deque()

    def serve(self) -> None:
        """Carry out orders until the training world ends.

        Raises:
            BridgeLostError: it ended by a fault.
        """
        number = 0
        try:
            while (order := together(self._world, partial(self._next, number))) is not None:
                self._carry_out(number, *order)
                number += 1
        finally:
            self._sender.shutdown(wait=False, cancel_futures=True)

    def _next(self, number: int) -> tuple[Order, float] | None:
        """Return the next order once its weights are here, and the seconds until then; None at the end."""
        begin, bridge = time.perf_counter(), self._exchange.bridge
        self._replica.activity.enter()
        while not bridge.has(order_key(number)):
            while self._sending and self._sending[0].done():
                self._sending.popleft().result()  # raises what went wrong
            if bridge.has(STOP):
                return None
            self._replica.beat()
            time.sleep(POLL_S)
        order: Order = pickle.loads(bridge.value(order_key(number)))
        while self._exchange.versions.version < order.sync:
            self._exchange.adopt(self._replica.beat)
            self._replica.engine.reset_cache()
        return order, time.perf_counter() - begin

    def _carry_out(self, number: int, order: Order, waited_s: float) -> None:
        begin, sums = time.perf_counter(), Sums()
        self._replica.activity.enter("rollout")
        source, trains = self._replica.prompts, order.iteration > 0
        if order.cursor is not None:
            source.cursor.load_state_dict(order.cursor)
        drops = trains and self._drops
        batch = self._sampler.collect(
            source if trains else self._validation,
            replace(order.draw, share=None if drops else order.share.groups),
            iteration=order.iteration,
            version=order.version,
            keep_group=has_variance if drops else None,
        )
        purpose = f"the samples of iteration {order.iteration}" if trains else "the validation's answers"
        self._exchange.check(order.sync, purpose)
        self._replica.activity.enter("reward")
        rewards_B = self._sampler.score(batch, sums)
        if trains and self._world.is_first:
            sums.add("async/rollout_wait_s", waited_s, 1)
            sums.add("async/generation_s", time.perf_counter() - begin, 1)
            sums.max("async/weights_adopt_s", self._exchange.versions.adopt_s)
        samples = Samples(
            batch=batch.tensors(),
            rewards_B=rewards_B if self._replica.has_rewards else None,
            sums=sums.state_dict(),
            num_dropped=self._sampler.num_dropped,
            dropped_tokens=self._sampler.dropped_tokens,
            replica=self._replica.engine.replica,
            seconds=time.perf_counter() - begin,
        )
        send = partial(self._send, number, order, samples, source.cursor.progress())
        self._sending.append(self._sender.submit(send))

    def _send(self, number: int, order: Order, samples: Samples, cursor: dict[str, Any]) -> None:
        """Send this rank's samples to the training rank that owns them."""
        bridge, engine = self._exchange.bridge, self._replica.engine
        if self._world.is_first and self._drops:
            bridge.put(cursor_key(number), pickle.dumps(cursor))
        if engine.is_owner:
            owner = owner_of(order.share.first, engine.replica, bridge.num_training)
            self._exchange.parcels.send(samples, to=owner, label=str(number))

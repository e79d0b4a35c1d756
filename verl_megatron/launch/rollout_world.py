"""A rollout world: generates and scores what the training world orders, with the weights that it sends."""

import gc
import pickle
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from parallel import device
from parallel.bridge import (
    POLL_S,
    Bridge,
    BridgeLostError,
    Parcels,
    given_address,
    losing,
    open_store,
    together,
)
from parallel.layout import Layout
from parallel.rank_set import RankSet, agree, world
from parallel.reshard.versions import VersionedReshard
from parallel.runtime.refusal import speak_once
from parallel.runtime.run_log import RunLog
from parallel.runtime.watchdog import Watchdog
from parallel.weights.architecture import read_architecture
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.versions import check_versions
from verl_megatron.config import TrainerConfig
from verl_megatron.data.prompts import GivenPrompts, TrainingPrompts
from verl_megatron.data.shared import OncePerHost
from verl_megatron.lifecycle.base_trainer import SLOW_S
from verl_megatron.model_specs import ServingWorld, num_training_ranks, rollout_worlds
from verl_megatron.observe.metrics import Sums
from verl_megatron.preflight import Inputs, inspect_run
from verl_megatron.rewards.shaping import has_variance
from verl_megatron.rollout.sampler import Sampler
from verl_megatron.run import make_reward_pool, make_vllm, rollout_dtype, sources_of
from verl_megatron.separate.identity import ServedWeights
from verl_megatron.separate.link import owner_of
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
from verl_megatron.separate.weights import named, plan_of, receive_versions


class RolloutWorld:
    """The ranks of one world of `rollout.devices`.

    Args:
        role: of --role, "rollout" or, of several worlds, "rollout:1" and so on.

    Raises:
        ValueError: the settings have problems, or the number of ranks is not that of the devices.
    """

    def __init__(self, config: TrainerConfig, role: str):
        speak_once()
        check_versions(vllm=True)
        device.initialize()
        self.config, self.role, self.world, self.inputs = config, role, world(), Inputs()
        self.own: ServingWorld = agree(self._check, self.world)

    def _check(self) -> ServingWorld:
        config, started = self.config, self.world.size
        worlds = {each.name: each for each in rollout_worlds(config)}
        own = worlds.get(self.role) or worlds.get(f"{self.role}:0")
        devices = f"rollout.devices={config.rollout.devices!r}"
        if own is None:
            raise ValueError(
                f"--role {self.role} is none of the rollout worlds of {devices}: "
                f"{', '.join(worlds) or 'there are none'}"
            )
        if len(own.ranks) != started:
            raise ValueError(
                f"{devices} names {len(own.ranks)} ranks of the {own.name} world, and --role {self.role} "
                f"was started on {started}; start as many"
            )
        given_address()
        with OncePerHost(self.world) as self.inputs.once:
            refuse(inspect_run(config, world_size=num_training_ranks(config), inputs=self.inputs))
        return own

    def serve(self) -> None:
        """Carry out orders until the training world ends. Collective over both worlds."""
        run = self.config.run
        folder = Path(run.output_dir, self.own.name.replace(":", ""))
        with (
            RunLog(folder, rank=self.world.global_rank, node=0),
            Watchdog(run.stall_timeout_s, folder, self.world) as watchdog,
        ):
            with watchdog.operation("build", timeout_s=SLOW_S):
                server = _Server(self.config, self.inputs, self.world, self.own, watchdog.beat)
            server.serve()
            server.close()


class _Server:
    def __init__(
        self,
        config: TrainerConfig,
        inputs: Inputs,
        own: RankSet,
        served_by: ServingWorld,
        beat: Callable[[], None],
    ):
        self._config, self._world, self._beat = config, own, beat
        self._name = served_by.name
        self._dtype, self._arch = rollout_dtype(config), read_architecture(config.actor.path)
        self._engine = make_vllm(config, Layout.parse(f"tp{config.rollout.tp}", ranks=own.ranks))
        self._engine.wake("weights")
        self._engine.wake("kv_cache")
        self._pool = make_reward_pool(config, self._engine)
        self._sampler = Sampler(
            self._engine,
            tokenizer=inputs.tokenizer,
            pool=self._pool,
            seed=config.run.seed,
            sources=sources_of(config, inputs),
            on_step=self._beat,
        )
        self._source = TrainingPrompts(inputs.train, inputs.train.cursor(seed=config.run.seed))
        validated = list(inputs.validation or ())[: config.data.validation_samples or None]
        self._validation = GivenPrompts(validated)
        self._sender = ThreadPoolExecutor(1, "samples")  # the next order need not wait for the receiver
        self._sending: deque[Future] = deque()
        self._bridge: Bridge
        self._parcels: Parcels
        self._versions: VersionedReshard
        self._served: ServedWeights | None

    def serve(self) -> None:
        """Carry out all orders; a training world that is started again joins anew."""
        while True:
            self._join()
            number = 0
            try:
                while (order := together(self._world, partial(self._next, number))) is not None:
                    self._carry_out(number, order)
                    number += 1
                return
            except BridgeLostError as error:
                self._leave(str(error))

    # ---- the bridge ----------------------------------------------------------------------------------------

    def _join(self) -> None:
        while True:
            try:
                return together(self._world, self._connect)
            except BridgeLostError:
                continue

    def _connect(self) -> None:
        config = self._config
        self._bridge = Bridge.join(
            self._world,
            open_store(self._world, wait=self._beat),
            self._name,
            num_other=num_training_ranks(config),
            wait=self._beat,
        )
        source: SourceShards = pickle.loads(self._bridge.value(SHARDS))
        self._parcels = Parcels(self._bridge, "samples")
        plan = plan_of(config, self._bridge, self._arch, source.shards, self._dtype)
        self._versions = receive_versions(
            config, self._bridge, plan, self._arch, self._engine.weight_target(), self._dtype
        )
        verifies = config.reshard.verify != "none"
        self._served = (
            ServedWeights(self._bridge, self._versions, named(self._engine.weight_target()))
            if verifies
            else None
        )
        if self._world.is_first:
            self._bridge.put(ENGINE, str(self._engine.kv_cache_tokens).encode())

    def _leave(self, reason: str) -> None:
        """Let go of a bridge that is lost."""
        if self._world.is_first:
            print(f"{self._name}: {reason}; waiting for a training world", flush=True)
        self._versions.abandon()
        self._bridge.abandon()
        self._sending.clear()
        self._sender.shutdown(cancel_futures=True)
        self._sender = ThreadPoolExecutor(1, "samples")
        del self._parcels, self._versions, self._served
        gc.collect()  # closes the connections of the old groups

    # ---- orders --------------------------------------------------------------------------------------------

    def _next(self, number: int) -> tuple[Order, float] | None:
        """Return the next order once its weights are here, and the seconds until then; None at the end."""
        begin = time.perf_counter()
        while not self._bridge.has(order_key(number)):
            while self._sending and self._sending[0].done():
                self._sending.popleft().result()  # raises what went wrong
            if self._bridge.has(STOP):
                return None
            self._beat()
            time.sleep(POLL_S)
        order: Order = pickle.loads(self._bridge.value(order_key(number)))
        while self._versions.version < order.sync:
            self._adopt()
        return order, time.perf_counter() - begin

    def _adopt(self) -> None:
        with losing("receiving weights"):
            while not self._versions.ready():
                self._bridge.check()
                self._beat()
                time.sleep(POLL_S)
            sync = self._versions.adopt()
        self._engine.reset_cache()
        if self._served is not None:
            self._served.expect(sync)

    def _carry_out(self, number: int, given: tuple[Order, float]) -> None:
        order, waited = given
        begin, sums = time.perf_counter(), Sums()
        trains = order.iteration > 0
        if order.cursor is not None:
            self._source.cursor.load_state_dict(order.cursor)
        keeps = trains and self._config.algorithm.dynamic_sampling
        batch = self._sampler.collect(
            self._source if trains else self._validation,
            order.draw,
            iteration=order.iteration,
            version=order.version,
            keep_group=has_variance if keeps else None,
            share=None if keeps else order.share.groups,
        )
        if self._served is not None:
            purpose = f"the samples of iteration {order.iteration}" if trains else "the validation's answers"
            self._served.check(order.sync, purpose)
        rewards_B = self._sampler.score(batch, sums)
        if trains and self._world.is_first:
            sums.add("async/rollout_wait_s", waited, 1)
            sums.add("async/generation_s", time.perf_counter() - begin, 1)
        has_reward = bool(self._config.reward.function)
        samples = Samples(
            batch=batch.tensors(),
            rewards_B=rewards_B if has_reward else None,
            sums=sums.state_dict(),
            num_dropped=self._sampler.num_dropped,
        )
        self._sending.append(
            self._sender.submit(self._send, number, order, samples, self._source.cursor.progress())
        )

    def _send(self, number: int, order: Order, samples: Samples, cursor: dict[str, Any]) -> None:
        """Send this rank's samples to the training rank that owns them."""
        if self._world.is_first and self._config.algorithm.dynamic_sampling:
            self._bridge.put(cursor_key(number), pickle.dumps(cursor))
        if self._engine.is_owner:
            owner = owner_of(order, self._engine.replica, self._bridge.num_training)
            self._parcels.send(samples, to=owner, label=str(number))

    def close(self) -> None:
        """End the exchange of weights and the reward workers."""
        self._versions.close()
        self._sender.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.close()
        self._engine.close()

"""A rollout world: generates and scores what the training world orders, with the weights that it sends."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

from parallel.bridge import BridgeLostError, together
from parallel.layout import Layout
from parallel.rank_set import rank_set
from verl_megatron.config import TrainerConfig
from verl_megatron.data.prompts import TrainingPrompts
from verl_megatron.roles.compute import rollout_dtype
from verl_megatron.rollout.sampler import make_reward_pool
from verl_megatron.rollout.stream import Partial
from verl_megatron.run import make_vllm, sources_of
from verl_megatron.separate.order_server import OrderServer
from verl_megatron.separate.serving import Replica, join_training
from verl_megatron.separate.weights import end_exchange
from verl_megatron.separate.window.stream_server import StreamServer
from verl_megatron.separate.world import ServingRanks


class RolloutWorld(ServingRanks[Replica]):
    """The ranks of one world of `rollout.devices`; arguments and errors as of `ServingRanks`."""

    def __init__(self, config: TrainerConfig, role: str):
        super().__init__(config, role, vllm=True)

    def _build(self, beat: Callable[[], None]) -> Replica:
        config, inputs, tp = self.config, self.inputs, self.config.rollout.tp
        engine = make_vllm(config, Layout.parse(f"tp{tp}", ranks=self.world.ranks))
        engine.wake("weights")
        engine.wake("kv_cache")
        replicas = [rank_set(self.world.ranks[at : at + tp]) for at in range(0, self.world.size, tp)]
        return Replica(
            engine=engine,
            dtype=rollout_dtype(config),
            ranks=replicas[engine.replica],
            tokenizer=inputs.tokenizer,
            pool=make_reward_pool(config, engine),
            has_rewards=bool(config.reward.function),
            prompts=TrainingPrompts(inputs.train, inputs.train.cursor(seed=config.run.seed)),
            validation=list(inputs.validation or ())[: config.data.validation_samples or None],
            sources=sources_of(config, inputs),
            seed=config.run.seed,
            beat=beat,
            activity=self.activity,
        )

    def _close(self, parts: Replica) -> None:
        parts.close()

    def _serve_over_one_bridge(self, parts: Replica) -> bool:
        config, own, replica = self.config, self.world, parts
        try:
            exchange = together(own, partial(join_training, config, own, self.own, replica))
        except BridgeLostError:
            return False
        try:
            server = (
                StreamServer(replica, exchange, partial=cast(Partial, config.async_.partial))
                if config.async_.buffer == "window"
                else OrderServer(own, replica, exchange, drops=config.algorithm.dynamic_sampling)
            )
            server.serve()
        except BridgeLostError as error:
            self._say_lost(error)
            exchange.versions.abandon()
            exchange.bridge.abandon()
            return False
        with suppress(BridgeLostError):  # the run is over
            end_exchange(exchange.versions, exchange.bridge)
        exchange.bridge.leave()
        return True

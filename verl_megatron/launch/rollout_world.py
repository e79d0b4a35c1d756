"""A rollout world: generates and scores what the training world orders, with the weights that it sends."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from parallel import device
from parallel.bridge import BridgeLostError, given_address, together
from parallel.layout import Layout
from parallel.rank_set import agree, rank_set, world
from parallel.runtime.refusal import speak_once
from parallel.runtime.run_log import RunLog
from parallel.runtime.watchdog import Watchdog
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.versions import check_versions
from verl_megatron.config import TrainerConfig
from verl_megatron.data.prompts import TrainingPrompts
from verl_megatron.data.shared import OncePerHost
from verl_megatron.lifecycle.base_trainer import SLOW_S
from verl_megatron.model_specs import ServingWorld, num_training_ranks, rollout_worlds
from verl_megatron.observe.activity import ActivityLog
from verl_megatron.preflight import Inputs, inspect_run
from verl_megatron.rollout.stream import Partial
from verl_megatron.run import make_reward_pool, make_vllm, rollout_dtype, sources_of
from verl_megatron.separate.order_server import OrderServer
from verl_megatron.separate.serving import Replica, join_training
from verl_megatron.separate.stream_server import StreamServer


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
        """Serve training until it ends; one that is started again joins anew. Collective over both worlds."""
        run = self.config.run
        folder = Path(run.output_dir, self.own.name.replace(":", ""))
        with (
            RunLog(folder, rank=self.world.global_rank, node=0),
            Watchdog(run.stall_timeout_s, folder, self.world) as watchdog,
        ):
            with watchdog.operation("build", timeout_s=SLOW_S):
                replica = self._build(watchdog.beat)
            while not self._serve_over_one_bridge(replica):
                gc.collect()  # closes the connections of the old groups
            replica.close()

    def _build(self, beat: Callable[[], None]) -> Replica:
        config, inputs, tp = self.config, self.inputs, self.config.rollout.tp
        engine = make_vllm(config, Layout.parse(f"tp{tp}", ranks=self.world.ranks))
        engine.wake("weights")
        engine.wake("kv_cache")
        activity = ActivityLog(is_kept="timeline" in config.run.track_metrics)
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
            beat=activity.beating(beat),
            activity=activity,
        )

    def _serve_over_one_bridge(self, replica: Replica) -> bool:
        """Serve a training world; return whether it has ended well."""
        config, own = self.config, self.world
        try:
            exchange = together(own, partial(join_training, config, own, self.own, replica))
        except BridgeLostError:
            return False
        server = (
            StreamServer(replica, exchange, partial=cast(Partial, config.async_.partial))
            if config.async_.buffer == "window"
            else OrderServer(own, replica, exchange, drops=config.algorithm.dynamic_sampling)
        )
        try:
            server.serve()
        except BridgeLostError as error:
            if own.is_first:
                print(f"{self.own.name}: {error}; waiting for a training world", flush=True)
            exchange.versions.abandon()
            exchange.bridge.abandon()
            return False
        exchange.versions.close()
        return True

"""The ranks of a world that serves training: checks at its start, and its bridges one after the other."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from parallel import device
from parallel.bridge import BridgeLostError
from parallel.rank_set import agree, world
from parallel.runtime.refusal import speak_once
from parallel.runtime.run_log import RunLog
from parallel.runtime.watchdog import Watchdog
from parallel.sealed_store import given_address
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.remote import fetch_models
from verl_megatron.checks.versions import check_versions
from verl_megatron.config import TrainerConfig
from verl_megatron.data.shared import OncePerHost
from verl_megatron.lifecycle.agreement import agree_on_settings
from verl_megatron.lifecycle.base_trainer import SLOW_S, node_of
from verl_megatron.model_specs import ServingWorld, find_world, named_devices, num_training_ranks
from verl_megatron.observe.activity import ActivityLog
from verl_megatron.preflight import Inputs, inspect_run

Parts = TypeVar("Parts")


class ServingRanks(ABC, Generic[Parts]):
    """The ranks of one world beside training. What a subclass builds outlives a bridge.

    Args:
        role: of --role: the name of the world, such as "rollout", "rollout:1" or "reward".

    Raises:
        ValueError: the settings have problems, or the number of ranks is not that of the devices.
    """

    def __init__(self, config: TrainerConfig, role: str, *, vllm: bool):
        speak_once()
        check_versions(vllm=vllm)
        device.initialize()
        self.config, self.role, self.world, self.inputs = config, role, world(), Inputs()
        agree_on_settings(config, self.world)
        agree(lambda: fetch_models(config), self.world)
        self.own: ServingWorld = agree(self._check, self.world)
        self.activity = ActivityLog(is_kept="timeline" in config.run.track_metrics)

    def _check(self) -> ServingWorld:
        config, started = self.config, self.world.size
        own = find_world(config, self.role)
        if len(own.ranks) != started:
            raise ValueError(
                f"{named_devices(config)} names {len(own.ranks)} ranks of the {own.name} world, and "
                f"--role {self.role} was started on {started}; start as many"
            )
        given_address()
        with OncePerHost(self.world) as self.inputs.once:
            training = num_training_ranks(config)
            refuse(inspect_run(config, world_size=training, inputs=self.inputs, resumes=False))
        return own

    def serve(self) -> None:
        """Serve training until it ends; one that is started again joins anew. Collective over both worlds."""
        run = self.config.run
        folder, rank = Path(run.output_dir, self.own.name.replace(":", "")), self.world.global_rank
        with (
            RunLog(folder, rank=rank, node=node_of(rank)),
            Watchdog(run.stall_timeout_s, folder, self.world) as watchdog,
        ):
            with watchdog.operation("build", timeout_s=SLOW_S):
                parts = self._build(self.activity.beating(watchdog.beat))
            while not self._serve_over_one_bridge(parts):
                gc.collect()  # closes the connections of the old groups
            self._close(parts)

    @abstractmethod
    def _build(self, beat: Callable[[], None]) -> Parts:
        """Build what the world needs.

        Args:
            beat: to be called again and again.
        """

    @abstractmethod
    def _serve_over_one_bridge(self, parts: Parts) -> bool:
        """Serve a training world; return whether it has ended well."""

    def _close(self, parts: Parts) -> None:
        """Free what was built."""

    def _say_lost(self, error: BridgeLostError) -> None:
        """Print on one rank that training has ended by a fault."""
        if self.world.is_first:
            print(f"{self.own.name}: {error}; waiting for a training world", flush=True)

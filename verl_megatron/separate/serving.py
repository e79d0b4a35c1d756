"""What every rollout world has: an engine with its prompts and rewards, and the bridge to training."""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parallel.bridge import POLL_S, Bridge, losing
from parallel.parcels import Parcels
from parallel.rank_set import RankSet
from parallel.reshard.versions import VersionedReshard
from parallel.sealed_store import open_store
from parallel.weights.architecture import read_architecture
from verl_megatron.config import TrainerConfig
from verl_megatron.data.prompts import Prompt, TrainingPrompts
from verl_megatron.data.tokenizer import Tokenizer
from verl_megatron.lifecycle.agreement import agreed_by_worlds
from verl_megatron.model_specs import ServingWorld, num_training_ranks, rollout_worlds
from verl_megatron.observe.activity import ActivityLog
from verl_megatron.observe.sources import Sources
from verl_megatron.rewards.pool import RewardPool
from verl_megatron.rollout.engine import RolloutEngine
from verl_megatron.separate.identity import ServedWeights
from verl_megatron.separate.orders import ENGINE, SHARDS, SourceShards, shares_of
from verl_megatron.separate.weights import plan_of, receive_versions


@dataclass(frozen=True, kw_only=True)
class Replica:
    """An engine, and what it needs to make and score samples."""

    engine: RolloutEngine
    dtype: torch.dtype  # of its weights
    ranks: RankSet  # tensor-parallel
    tokenizer: Tokenizer
    pool: RewardPool | None  # on the first rank
    has_rewards: bool  # whether there is a reward function
    prompts: TrainingPrompts
    validation: Sequence[Prompt]
    sources: Sources
    seed: int
    beat: Callable[[], None]
    activity: ActivityLog

    def close(self) -> None:
        """End the reward workers, and free the engine."""
        if self.pool is not None:
            self.pool.close()
        self.engine.close()


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What joins this rank to the training world."""

    bridge: Bridge
    parcels: Parcels
    versions: VersionedReshard
    served: ServedWeights | None  # None: weights are not verified
    first_replica: int  # of this world, counted over all rollout worlds
    activity: ActivityLog

    def check(self, sync: int, purpose: str) -> None:
        """Check that vLLM holds the weights of a sync; arguments and errors as of `ServedWeights.check`."""
        if self.served is not None:
            self.served.check(sync, purpose)

    def adopt(self, wait: Callable[[], None]) -> int:
        """Wait for the next weights, write them into vLLM and return the number of their sync.

        Args:
            wait: called again and again meanwhile.

        Raises:
            BridgeLostError: the training world has ended.
        """
        with losing("receiving weights"):
            while not self.versions.ready():
                self.bridge.check()
                wait()
                time.sleep(POLL_S)
            self.activity.enter("reshard")
            if self.served is None:
                return self.versions.adopt()
            sync = self.versions.adopt(self.served.record)
        self.served.expect(sync)
        return sync


def join_training(config: TrainerConfig, own: RankSet, served_by: ServingWorld, replica: Replica) -> Exchange:
    """Join the training world. Collective over both worlds.

    Raises:
        ValueError: the training world does not answer, or has other settings.
        BridgeLostError: it ended meanwhile.
    """
    bridge = Bridge.join(
        own,
        open_store(own, wait=replica.beat),
        served_by.name,
        num_other=num_training_ranks(config),
        wait=replica.beat,
    )
    with bridge.abandoned_if_lost():
        bridge.agree_on(agreed_by_worlds(config))
        return _exchange_over(bridge, config, own, served_by, replica)


def _exchange_over(
    bridge: Bridge, config: TrainerConfig, own: RankSet, served_by: ServingWorld, replica: Replica
) -> Exchange:
    """Set up what `join_training` returns, over a bridge that has been joined."""
    arch, dtype = read_architecture(config.actor.path), replica.dtype
    if own.is_first:
        bridge.put(ENGINE, str(replica.engine.kv_cache_tokens).encode())
    source: SourceShards = pickle.loads(bridge.value(SHARDS))
    parcels = Parcels(bridge, "samples")
    plan = plan_of(config, bridge, arch, source.shards, dtype)
    versions, target = receive_versions(config, bridge, plan, arch, replica.engine, dtype)
    served = None
    if config.reshard.verify != "none":
        weights = replica.engine.fp8_target().values()
        converted = [tensor for weight in weights for tensor in (weight.weight_NK, weight.scale_N1)]
        served = ServedWeights(bridge, versions, target, converted)
    replica.activity.answers(bridge)
    worlds = rollout_worlds(config)
    share = shares_of(worlds, config.rollout.tp)[worlds.index(served_by)]
    return Exchange(
        bridge=bridge,
        parcels=parcels,
        versions=versions,
        served=served,
        first_replica=share.first,
        activity=replica.activity,
    )

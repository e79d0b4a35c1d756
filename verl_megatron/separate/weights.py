"""Weights over the bridge: numbered versions of the trained model for the rollout world's engine."""

from collections.abc import Callable

import torch

from parallel import device
from parallel.bridge import Bridge, losing
from parallel.layout import Layout
from parallel.reshard.plan import Plan, compile_plan
from parallel.reshard.source import WeightSource
from parallel.reshard.transport import Parameters, Transport
from parallel.reshard.versions import VersionedReshard
from parallel.weights.architecture import Architecture
from parallel.weights.rules import vllm_shards
from parallel.weights.shard import Shards
from verl_megatron.config import TrainerConfig
from verl_megatron.rollout.engine import RolloutEngine
from verl_megatron.rollout.weights import target_of


def serving_layout(config: TrainerConfig, bridge: Bridge) -> Layout:
    """Return the layout of a rollout world's replicas, on ranks of the bridge."""
    return Layout.parse(f"tp{config.rollout.tp}", ranks=tuple(bridge.serving_ranks))


def plan_of(
    config: TrainerConfig, bridge: Bridge, arch: Architecture, shards: Shards, dtype: torch.dtype
) -> Plan:
    """Compile the plan of the weight sync, the same on all ranks of the bridge.

    Args:
        shards: of the trained model, by rank of the bridge.
        dtype: of the engine's weights.
    """
    return compile_plan(
        source=shards,
        destination=vllm_shards(arch, serving_layout(config, bridge)),
        element_bytes=dtype.itemsize,
        window_bytes=config.reshard.window_mib << 20,
    )


def send_versions(
    config: TrainerConfig,
    bridge: Bridge,
    source: WeightSource,
    dtype: torch.dtype,
    *,
    keep: Callable[[int, Parameters], None] | None = None,
) -> VersionedReshard:
    """Return the training side of the exchange. Collective over the bridge.

    Args:
        keep: as of `VersionedReshard`.

    Raises:
        BridgeLostError: the rollout world ended meanwhile.
    """
    plan = plan_of(config, bridge, source.arch, source.shards, dtype)
    with losing("connecting"):
        return VersionedReshard(plan, source.tensors, {}, _transport(config, bridge, dtype), keep=keep)


def receive_versions(
    config: TrainerConfig,
    bridge: Bridge,
    plan: Plan,
    arch: Architecture,
    engine: RolloutEngine,
    dtype: torch.dtype,
) -> tuple[VersionedReshard, Parameters]:
    """Return the rollout side of the exchange, and vLLM's parameters that it writes as they are.

    Collective over the bridge.

    Raises:
        ValueError: vLLM's parameters are not those of the weight map.
        BridgeLostError: the training world ended meanwhile.
    """
    described = vllm_shards(arch, serving_layout(config, bridge))[bridge.rank]
    target, staged = target_of(engine, described, dtype)
    with losing("connecting"):
        transport = _transport(config, bridge, dtype)
        return VersionedReshard(plan, {}, target, transport, staged=staged), target


def end_exchange(versions: VersionedReshard, bridge: Bridge) -> None:
    """End the exchange, which the other world ends, too.

    Raises:
        BridgeLostError: the other world has ended by a fault.
    """
    with losing("ending"):
        versions.begin_close()
        while not versions.closed:
            bridge.check()  # a rank of it may be stopped
            bridge.pause()
        versions.close()


def _transport(config: TrainerConfig, bridge: Bridge, dtype: torch.dtype) -> Transport:
    return Transport(
        dtype=dtype,
        group=bridge.group("weights"),
        device=device.device(),
        verify=config.reshard.verify,
        ranks=bridge.ranks,
    )

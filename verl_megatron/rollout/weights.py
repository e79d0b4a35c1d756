"""Weight sync from the trained model's shards to the rollout engine's, and back for aliased memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.layout import Layout
from parallel.rank_set import RankSet, group_of
from parallel.reshard.execute import Resharder, ReshardReport
from parallel.reshard.in_place.addresses import addresses_of, views_at
from parallel.reshard.in_place.memory_layout import Addresses
from parallel.reshard.in_place.planner import Sides, plan_in_place
from parallel.reshard.ipc_tensors import IpcTensors, map_tensors
from parallel.reshard.plan import Plan, compile_plan
from parallel.reshard.source import WeightSource
from parallel.reshard.staged import StagedParameters, StagedResharder
from parallel.reshard.transport import Parameters, Transport
from parallel.weights.rules import vllm_shards
from parallel.weights.shard import ShardedParameter
from verl_megatron.config import ReshardConfig
from verl_megatron.residency import Residency
from verl_megatron.rollout.engine import RolloutEngine
from verl_megatron.rollout.vllm_weights.fp8 import staged


class WeightChannel(Protocol):
    """Channel of policy versions, which count updates, to the rollout engine. Collective over the world."""

    def publish(self, version: int, *, was_updated: bool = False) -> None:
        """Announce that the trained model has this version.

        Args:
            was_updated: whether the weights must differ from those of the version before.
        """
        ...

    def adopt(self) -> int:
        """Switch the engine to the newest version; return its number."""
        ...


class ColocatedChannel:
    """Alternating training and rollout on the same GPUs; weights are synced when rollout starts."""

    def __init__(self, residency: Residency):
        self._residency, self._version = residency, 0
        self.report = ReshardReport()  # report of the latest sync

    def publish(self, version: int, *, was_updated: bool = False) -> None:
        """Announce a new version; weights are not moved yet, but training-only state may start to offload."""
        self._version = version
        self._residency.mark_weights_stale()

    def adopt(self) -> int:
        """Give the GPU and the newest weights to the engine; return their version."""
        self.report = self._residency.enter_rollout()
        return self._version


class WeightSync:
    """In-place weight sync into the engine, planned once. All methods are collective over `world`.

    In the modes `share` and `swap`, vLLM must be built with `shared_weights`: views of Megatron's memory.
    """

    def __init__(
        self,
        source: WeightSource,
        rollout: Layout,
        config: ReshardConfig,
        world: RankSet,
        *,
        dtype: torch.dtype,
    ):
        """
        Args:
            rollout: the engine's replicas (dp) and their tensor-parallel ranks, over all of `world`.
            world: all ranks that hold weights of either side.
            dtype: of the engine's weights.
        """
        self.config, self.dtype, self.world, self.gather = config, dtype, world, source.gather
        self.rank = world.global_rank
        self.source, self.destination = source.tensors, vllm_shards(source.arch, rollout)
        self.ipc_tensors = _map_everywhere(self.source, world) if dtype == source.dtype else None
        single_host = device.host_of(world.ranks[0]) == device.host_of(world.ranks[-1])
        common: dict[str, Any] = dict(window_bytes=config.window_mib << 20, host_of=device.host_of)
        self.plan_to_train: Plan | None = None
        self.shared_weights: dict[str, Tensor] = {}
        if config.mode == "keep":
            self.plan = compile_plan(
                source=source.shards,
                destination=self.destination,
                element_bytes=dtype.itemsize,
                peer_memory=self.ipc_tensors is not None,
                **common,
            )
            return
        memory: list[Addresses] = world.all_gather_object(addresses_of(self.source))
        if self.ipc_tensors is not None and not single_host:
            self.ipc_tensors = None  # in-place windows are ordered across all hosts: use messages
        sides = Sides(
            source=source.shards,
            destination=self.destination,
            memory=dict(zip(world.ranks, memory)),
            element_bytes=dtype.itemsize,
        )
        plans = plan_in_place(
            sides, in_place=config.mode == "swap", peer_memory=self.ipc_tensors is not None, **common
        )
        self.plan, self.plan_to_train = plans.to_rollout, plans.to_train
        views = views_at(plans.addresses[self.rank], self.destination[self.rank], self.source, dtype)
        self.shared_weights = {name: tensor for (_, name), tensor in views.items()}

    def attach(self, engine: RolloutEngine) -> None:
        """Bind the plans to the engine's parameters.

        Raises:
            ValueError: vLLM's parameters are not those of the weight map.
        """
        target, fp8 = target_of(engine, self.destination[self.rank], self.dtype)
        staging = None
        if self.plan_to_train is not None:  # shared by both directions, which alternate
            staged = max(plan.staged_bytes.get(self.rank, 0) for plan in (self.plan, self.plan_to_train))
            staging = torch.empty(staged // self.dtype.itemsize, dtype=self.dtype, device=device.device())
        transport = Transport(
            dtype=self.dtype,
            group=self.world.device_group,
            device=device.device(),
            verify=self.config.verify,
            ipc_tensors=self.ipc_tensors,
            staging=staging,
        )
        self.engine = engine
        self.to_rollout: Resharder | StagedResharder
        if fp8.shapes:
            limit_bytes = self.config.window_mib << 20
            self.to_rollout = StagedResharder(
                self.plan, self.source, target, transport, staged=fp8, limit_bytes=limit_bytes
            )
        else:
            self.to_rollout = Resharder(self.plan, self.source, target, transport)
        self.to_train = None
        if self.plan_to_train is not None:
            transport = replace(transport, ipc_tensors=None)  # values come back by way of staging memory
            self.to_train = Resharder(self.plan_to_train, target, self.source, transport)

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> ReshardReport:
        """Sync and verify the weights, and clear vLLM's prefix cache.

        In mode `swap`, Megatron's weights are overwritten until `restore()`.

        Args:
            meanwhile: called on the host while the GPUs transfer weights.
        """
        self.gather()
        self.to_rollout.start()
        meanwhile()
        report = self.to_rollout.finish()
        self.engine.reset_cache()
        return report

    def restore(self) -> bool:
        """Restore weights overwritten by vLLM's; return whether there were any. Call before vLLM sleeps."""
        if self.to_train is None:
            return False
        self.to_train.run()
        return True


def _map_everywhere(source: Parameters, world: RankSet) -> IpcTensors | None:
    """Return IPC tensors of this host's source ranks; None unless all hosts can map theirs.

    All ranks must use the same plan. Collective over `world`.
    """
    ipc_tensors = map_tensors(source, _host_group(world))
    return ipc_tensors if all(world.all_gather_object(ipc_tensors is not None)) else None


def _host_group(world: RankSet) -> dist.ProcessGroup:
    """Return the process group of this host's ranks. Collective over `world`."""
    hosts: dict[int, list[int]] = {}
    for rank in world.ranks:
        hosts.setdefault(device.host_of(rank), []).append(rank)
    groups = {host: group_of(tuple(ranks)) for host, ranks in hosts.items()}
    return groups[device.host_of(world.global_rank)]


def target_of(
    engine: RolloutEngine, described: Sequence[ShardedParameter], dtype: torch.dtype
) -> tuple[Parameters, StagedParameters]:
    """Return what a plan writes in the engine: its parameters, and those that it holds in fp8.

    Raises:
        ValueError: vLLM's parameters are not those of the weight map.
    """
    target = {(0, name): tensor for name, tensor in engine.weight_target().items()}
    fp8 = staged(engine.fp8_target())
    arriving = {key: torch.empty(shape, dtype=dtype, device="meta") for key, shape in fp8.shapes.items()}
    check_parameters(described, target | arriving, dtype)
    return target, fp8


def check_parameters(
    described: Sequence[ShardedParameter], parameters: Parameters, dtype: torch.dtype
) -> None:
    """Check vLLM's parameters against the weight map.

    They differ if they are quantised, repacked or of another architecture.

    Raises:
        ValueError: names the first mismatch and the fraction of bytes that the map covers.
    """
    expected = {(p.chunk, p.name): tuple(p.shape) for p in described}
    known = {
        key
        for key, tensor in parameters.items()
        if expected.get(key) == tuple(tensor.shape) and tensor.dtype == dtype
    }
    if len(known) == len(parameters) == len(expected):
        return
    covered = sum(parameters[key].nbytes for key in known) / max(
        1, sum(tensor.nbytes for tensor in parameters.values())
    )
    (chunk, name) = min({*parameters, *expected} - known)
    stored = (
        f"{tuple(parameters[chunk, name].shape)} {parameters[chunk, name].dtype}"
        if (chunk, name) in parameters
        else "nothing"
    )
    wanted = f"{expected[chunk, name]} {dtype}" if (chunk, name) in expected else "nothing"
    raise ValueError(
        f"vLLM holds {name} as {stored} where the weight map has {wanted}; "
        f"the map covers {covered:.1%} of the bytes of vLLM's weights."
        " It knows dense layers, unquantised or as rollout.weight_dtype=fp8 has them: set rollout.dtype to "
        "bfloat16, float16 or float32, and use a model without quantisation"
    )

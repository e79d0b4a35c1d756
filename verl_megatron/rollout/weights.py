"""Weights from the trained model's shards into the rollout engine's, in place, and back where the latter lie over the former."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.groups import group_of
from parallel.layout import Layout
from parallel.reshard.addresses import Addresses, addresses_of, views_at
from parallel.reshard.execute import Parameters, Resharder, ReshardReport
from parallel.reshard.overlay import overlay
from parallel.reshard.peers import Mapped, map_tensors
from parallel.reshard.plan import Plan, compile_plan
from parallel.reshard.source import Shards, WeightSource
from parallel.weights.architecture import Architecture
from parallel.weights.rules import vllm_parameters
from parallel.weights.shard import ShardedParameter
from verl_megatron.config import ReshardConfig
from verl_megatron.residency import Residency
from verl_megatron.rollout.engine import RolloutEngine


class WeightChannel(Protocol):
    """How the rollout engine gets the policy's versions, which count its updates. Collective over the world."""

    def publish(self, version: int) -> None:
        """The trained model has become this version."""
        ...

    def adopt(self) -> int:
        """The engine runs the newest version from here on; its number."""
        ...


class ColocatedChannel:
    """Training and rollout take turns on the same GPUs: weights move in place when the engine's turn comes."""

    def __init__(self, residency: Residency):
        self._residency, self._version = residency, 0
        self.report = ReshardReport()  # what the latest `adopt` moved

    def publish(self, version: int) -> None:
        """The trained model has become this version; nothing moves yet, and what only training needs may begin to leave the GPU."""
        self._version = version
        self._residency.mark_weights_stale()

    def adopt(self) -> int:
        """Give the GPU and the newest weights to the engine."""
        self.report = self._residency.enter_rollout()
        return self._version


class WeightSync:
    """Planned once; `run()` writes the model's present weights into the engine in place. All methods are collective over the world.

    In the modes `share` and `swap` vLLM has to be built with `shared_weights`, the views of Megatron's memory
    that it uses.
    """

    def __init__(self, source: WeightSource, rollout: Layout, config: ReshardConfig, *, dtype: torch.dtype):
        """
        Args:
            rollout: the engine's replicas (dp) and their tensor-parallel ranks, over the whole world.
            dtype: of the engine's weights.
        """
        self.config, self.dtype, self.rank, self.gather = config, dtype, dist.get_rank(), source.gather
        self.source, self.destination = source.tensors, rollout_shards(source.arch, rollout)
        self.peers = _mapped_everywhere(self.source) if dtype == source.dtype else None
        single_host = device.host_of(dist.get_world_size() - 1) == 0
        common = dict(
            source=source.shards,
            destination=self.destination,
            element_bytes=dtype.itemsize,
            window_bytes=config.window_mib << 20,
            host_of=device.host_of,
        )
        self.back: Plan | None = None
        self.shared_weights: dict[str, Tensor] = {}
        if config.mode == "keep":
            self.plan = compile_plan(**common, peer_memory=self.peers is not None)
            return
        memory: list[Addresses] = [{}] * dist.get_world_size()
        dist.all_gather_object(memory, addresses_of(self.source))
        if self.peers is not None and not single_host:
            self.peers = None  # in place a window's order holds for all ranks together: by messages
        found = overlay(
            **common,
            memory=dict(enumerate(memory)),
            in_place=config.mode == "swap",
            peer_memory=self.peers is not None,
        )
        self.plan, self.back = found.forth, found.back
        views = views_at(found.addresses[self.rank], self.destination[self.rank], self.source, dtype)
        self.shared_weights = {name: tensor for (_, name), tensor in views.items()}

    def attach(self, engine: RolloutEngine) -> None:
        """Resolve the plans on the engine's parameters.

        Raises:
            ValueError: vLLM keeps parameters in a form that the weight map does not know.
        """
        held = {(0, name): tensor for name, tensor in engine.weight_target().items()}
        check_parameters(self.destination[self.rank], held, self.dtype)
        common = dict(
            rank=self.rank, dtype=self.dtype, group=None, device=device.device(), verify=self.config.verify
        )
        if self.back is not None:  # one way at a time
            staged = max(plan.staged_bytes.get(self.rank, 0) for plan in (self.plan, self.back))
            common["staging"] = torch.empty(
                staged // self.dtype.itemsize, dtype=self.dtype, device=device.device()
            )
        self.engine = engine
        self.forward = Resharder(self.plan, source=self.source, destination=held, peers=self.peers, **common)
        self.backward = (
            Resharder(self.back, source=held, destination=self.source, **common)
            if self.back is not None
            else None
        )

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> ReshardReport:
        """Move, prove, and forget what vLLM cached with the old weights. In mode `swap` Megatron's weights are gone until `restore()`.

        Args:
            meanwhile: what the host does while the GPUs move weights.
        """
        self.gather()
        self.forward.start()
        meanwhile()
        report = self.forward.finish()
        self.engine.reset_cache()
        return report

    def restore(self) -> bool:
        """Bring back what vLLM's weights lie over, and say whether there was something; call it before vLLM sleeps."""
        if self.backward is None:
            return False
        self.backward.run()
        return True


def rollout_shards(arch: Architecture, rollout: Layout) -> Shards:
    """The rollout engine's parameters on every rank."""
    by_tp_rank = [vllm_parameters(arch, rollout.tp, tp_rank) for tp_rank in range(rollout.tp)]
    return {rank: by_tp_rank[rollout.coordinates(rank).tp] for rank in rollout.ranks}


def _mapped_everywhere(source: Parameters) -> dict[int, Mapped] | None:
    """The sources of the ranks of this host, if every host can map its own: all ranks have to plan alike. Collective over the world."""
    peers, outcomes = map_tensors(source, _host_group()), [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, peers is not None)
    return peers if all(outcomes) else None


def _host_group() -> dist.ProcessGroup:
    """The ranks of this host. Collective over the world."""
    hosts: dict[int, list[int]] = {}
    for rank in range(dist.get_world_size()):
        hosts.setdefault(device.host_of(rank), []).append(rank)
    groups = {host: group_of(tuple(ranks)) for host, ranks in hosts.items()}
    return groups[device.host_of(dist.get_rank())]


def check_parameters(described: list[ShardedParameter], held: Parameters, dtype: torch.dtype) -> None:
    """Refuse a model whose vLLM parameters are not those that the map describes (quantised, repacked or of another architecture).

    Raises:
        ValueError: names the first of them, with the share of bytes that the map covers.
    """
    expected = {(p.chunk, p.name): tuple(p.shape) for p in described}
    known = {
        key
        for key, tensor in held.items()
        if expected.get(key) == tuple(tensor.shape) and tensor.dtype == dtype
    }
    if len(known) == len(held) == len(expected):
        return
    covered = sum(held[key].nbytes for key in known) / max(1, sum(tensor.nbytes for tensor in held.values()))
    (chunk, name) = min({*held, *expected} - known)
    found = (
        f"{tuple(held[chunk, name].shape)} {held[chunk, name].dtype}" if (chunk, name) in held else "nothing"
    )
    wanted = f"{expected[chunk, name]} {dtype}" if (chunk, name) in expected else "nothing"
    raise ValueError(
        f"vLLM holds {name} as {found} where the weight map has {wanted}; "
        f"the map covers {covered:.1%} of the bytes of vLLM's weights."
        " It knows unquantised dense layers only: set rollout.dtype to bfloat16, float16 or float32, "
        "and use a model without quantisation"
    )

"""The actor's weights: from Megatron's shards into vLLM's shards, and back where vLLM's lie over Megatron's."""

from collections.abc import Callable

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
from parallel.weights.rules import megatron_parameters, vllm_parameters
from parallel.weights.shard import ShardedParameter
from verl_megatron.config import ReshardConfig
from verl_megatron.roles.engine import Engine
from verl_megatron.rollout.vllm import VLLMActor

Shards = dict[int, list[ShardedParameter]]  # by world rank


class WeightSync:
    """Planned once; `run()` writes the actor's present weights into vLLM in place. All methods are collective over the world.

    In the modes `share` and `swap` vLLM has to be built with `shared_weights`, the views of Megatron's memory that it uses.
    """

    def __init__(self, actor: Engine, rollout: Layout, config: ReshardConfig, *, dtype: torch.dtype):
        """
        Args:
            rollout: vLLM's replicas (dp) and their tensor-parallel ranks, over the whole world.
            dtype: of vLLM's weights.
        """
        self.actor, self.config, self.dtype, self.rank = actor, config, dtype, dist.get_rank()
        self.source: Parameters = actor.tensors if actor.groups.is_member else {}
        source, self.destination = trained_shards(actor), served_shards(actor, rollout)
        self.peers = _mapped_everywhere(self.source) if dtype == actor.compute.dtype else None
        single_host = device.host_of(dist.get_world_size() - 1) == 0
        common = dict(source=source, destination=self.destination, element_bytes=dtype.itemsize, window_bytes=config.window_mib << 20, host_of=device.host_of)
        self.back: Plan | None = None
        self.shared_weights: dict[str, Tensor] = {}
        if config.mode == "keep":
            self.plan = compile_plan(**common, peer_memory=self.peers is not None)
            return
        memory: list[Addresses] = [{}] * dist.get_world_size()
        dist.all_gather_object(memory, addresses_of(self.source))
        if self.peers is not None and not single_host:
            self.peers = None  # in place a window's order holds for all ranks together: by messages
        found = overlay(**common, memory=dict(enumerate(memory)), in_place=config.mode == "swap", peer_memory=self.peers is not None)
        self.plan, self.back = found.forth, found.back
        views = views_at(found.addresses[self.rank], self.destination[self.rank], self.source, dtype)
        self.shared_weights = {name: tensor for (_, name), tensor in views.items()}

    def attach(self, vllm: VLLMActor) -> None:
        """Resolve the plans on vLLM's parameters.

        Raises:
            ValueError: vLLM keeps parameters in a form that the weight map does not know.
        """
        held = {(0, name): tensor for name, tensor in vllm.parameters().items()}
        check_parameters(self.destination[self.rank], held, self.dtype)
        common = dict(rank=self.rank, dtype=self.dtype, group=None, device=device.device(), verify=self.config.verify)
        if self.back is not None:  # one way at a time
            staged = max(plan.staged_bytes.get(self.rank, 0) for plan in (self.plan, self.back))
            common["staging"] = torch.empty(staged // self.dtype.itemsize, dtype=self.dtype, device=device.device())
        self.vllm = vllm
        self.forward = Resharder(self.plan, source=self.source, destination=held, peers=self.peers, **common)
        self.backward = Resharder(self.back, source=held, destination=self.source, **common) if self.back is not None else None

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> ReshardReport:
        """Move, prove, and forget what vLLM cached with the old weights. In mode `swap` Megatron's weights are gone until `restore()`.

        Args:
            meanwhile: what the host does while the GPUs move weights.
        """
        self.actor.gather_weights()
        self.forward.start()
        meanwhile()
        report = self.forward.finish()
        self.vllm.reset_prefix_cache()
        return report

    def restore(self) -> bool:
        """Bring back what vLLM's weights lie over, and say whether there was something; call it before vLLM sleeps."""
        if self.backward is None:
            return False
        self.backward.run()
        return True


def trained_shards(actor: Engine) -> Shards:
    """Megatron's parameters on every rank; ranks that hold the same share one list."""
    layout, known, shards = actor.layout, {}, {}
    for rank in layout.ranks:
        place = layout.coordinates(rank)
        if (place.tp, place.pp) not in known:
            known[place.tp, place.pp] = megatron_parameters(actor.arch, layout, rank, spec=actor.compute.spec)
        shards[rank] = known[place.tp, place.pp]
    return shards


def served_shards(actor: Engine, rollout: Layout) -> Shards:
    """vLLM's parameters on every rank."""
    slots = [vllm_parameters(actor.arch, rollout.tp, slot) for slot in range(rollout.tp)]
    return {rank: slots[rollout.coordinates(rank).tp] for rank in rollout.ranks}


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
    known = {key for key, tensor in held.items() if expected.get(key) == tuple(tensor.shape) and tensor.dtype == dtype}
    if len(known) == len(held) == len(expected):
        return
    covered = sum(held[key].nbytes for key in known) / max(1, sum(tensor.nbytes for tensor in held.values()))
    (chunk, name) = min({*held, *expected} - known)
    found = f"{tuple(held[chunk, name].shape)} {held[chunk, name].dtype}" if (chunk, name) in held else "nothing"
    wanted = f"{expected[chunk, name]} {dtype}" if (chunk, name) in expected else "nothing"
    raise ValueError(
        f"vLLM holds {name} as {found} where the weight map has {wanted}; the map covers {covered:.1%} of the bytes of vLLM's weights."
        " It knows unquantised dense layers only: set rollout.dtype to bfloat16, float16 or float32, and use a model without quantisation"
    )

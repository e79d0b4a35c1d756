"""The optimizer's shard of each parameter of a model, found in Megatron-Core's optimizers, read and written.

In a data-parallel group each parameter has one owner rank, which alone writes it to disk, or reads and
broadcasts it.

Only the model's sharded state dict comes from Megatron-Core. Those of its optimizers differ between plain and
distributed ones, and with torch's AdamW the latter share one step between parameters.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups

device.prepare()

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from parallel.megatron import megatron_globals

VALUE, MOMENTS = "value", ("exp_avg", "exp_avg_sq")
_PIECE = 2**24  # elements converted to float64 at a time


@dataclass(frozen=True, kw_only=True)
class Described:
    """One parameter of this rank, and Megatron-Core's description of the whole parameter for checkpoints."""

    name: str
    weight: Tensor  # this rank's copy, or, fully sharded, the rows that it holds and steps on
    shape: torch.Size  # of the whole parameter
    sharded: ShardedTensor | ShardedTensorFactory
    start: int = 0  # first element of `weight` in the flat parameter


@dataclass(kw_only=True)
class OptimizerShard:
    """One parameter of this rank: its sharded description, and the part that the optimizer steps on here."""

    name: str
    weight: Tensor  # this rank's copy or, fully sharded, its rows
    shape: torch.Size  # of the whole parameter
    sharded: ShardedTensor | ShardedTensorFactory
    owner: int  # owner's rank within the data-parallel group
    inner: torch.optim.Optimizer | None = None  # None: the part is empty
    value: Tensor | None = None  # what `inner` steps on: elements `start` to `stop` of the flat parameter
    start: int = 0
    stop: int = 0  # with a distributed optimizer that of its range, else of what this rank has of the weight

    @property
    def replica_id(self) -> tuple[int, ...]:
        """Megatron-Core's replica id as on the owner; it distinguishes tensor-parallel and tied copies."""
        assert isinstance(self.sharded.replica_id, tuple)
        return (*self.sharded.replica_id[:-1], 0)

    def part(self, kind: str) -> Tensor | None:
        """Return the optimizer's part of the value or of a moment on this rank."""
        if kind == VALUE or self.value is None or self.inner is None:
            return self.value
        return self.inner.state.get(self.value, {}).get(kind)

    @torch.no_grad()
    def put(self, kind: str, whole: Tensor) -> None:
        """Copy this rank's part from the flat parameter [N] float32; for the value, the weight as well."""
        if kind == VALUE:
            is_whole = self.weight.shape == self.shape
            mine = whole if is_whole else whole[self.start : self.stop]
            self.weight.copy_(mine.view(self.weight.shape))
        if self.value is None or self.inner is None:
            return
        part, state = whole[self.start : self.stop].view(self.value.shape), self.inner.state
        if kind == VALUE:
            self.value.copy_(part)
        elif kind in state[self.value]:
            state[self.value][kind].copy_(part)
        else:
            state[self.value][kind] = part.clone()

    def put_step(self, step: int) -> None:
        """Set the optimizer's number of steps; 0 leaves a new optimizer as it is."""
        if self.inner is None or self.value is None or not step:
            return
        if isinstance(self.inner, torch.optim.Adam | torch.optim.AdamW):
            # one per parameter, on the CPU wherever the parameter is
            self.inner.state[self.value]["step"] = torch.tensor(float(step))
        else:
            for group in self.inner.param_groups:
                group["step"] = step


# ---- finding them ------------------------------------------------------------------------------------------


def optimizer_shards(chunks: list, optimizer, groups: ProcessGroups) -> list[OptimizerShard]:
    """Return all parameters of a member's chunks, in the same order on the ranks of a data-parallel group."""
    found, loads = {}, [0] * groups.dp_cp.size()
    for number, chunk in enumerate(chunks):
        for one in chunk.row_parts() if is_fully_sharded(chunk) else describe(chunk.module, groups):
            owner = loads.index(min(loads))
            loads[owner] += one.shape.numel()
            found[one.weight] = OptimizerShard(
                name=f"{number}.{one.name}",
                weight=one.weight,
                shape=one.shape,
                sharded=one.sharded,
                owner=owner,
                start=one.start,
                stop=one.start + one.weight.numel(),
            )
    for part in _parts(optimizer):
        _add_ranges(part, found)
    return list(found.values())


def describe(module, groups: ProcessGroups) -> list[Described]:
    """Return all parameters of a Megatron-Core module that holds them whole, in a fixed order."""
    with megatron_globals(groups):
        described = module.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
    found = {
        sharded.data: Described(name=name, weight=sharded.data, shape=sharded.data.shape, sharded=sharded)
        for name, sharded in described.items()
        if isinstance(sharded, ShardedTensor | ShardedTensorFactory)
        and isinstance(sharded.data, torch.nn.Parameter)
    }
    missing = [name for name, parameter in module.named_parameters() if parameter not in found]
    assert not missing, f"Megatron-Core describes no checkpoint of {missing}"
    return list(found.values())


def is_fully_sharded(chunk) -> bool:
    """Return whether a chunk's weights are divided among data-parallel ranks; it then has `row_parts`."""
    return hasattr(chunk, "row_parts")


def is_split(chunks: list, optimizer) -> bool:
    """Return whether the data-parallel ranks share the optimizer's state."""
    return any(map(is_fully_sharded, chunks)) or any(
        isinstance(part, DistributedOptimizer) for part in _parts(optimizer)
    )


def _parts(optimizer) -> list:
    """Return Megatron-Core's optimizers that have parameters, from one that may be a chain."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if part.optimizer is not None]


def _add_ranges(optimizer, found: dict[Tensor, OptimizerShard]) -> None:
    """Fill in which part of each parameter this Megatron optimizer steps on."""
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        for weight, (group, place) in optimizer.model_param_group_index_map.items():
            span, shard = optimizer._get_model_param_range_map(weight)["param"], found[weight]
            shard.inner, shard.value = inner, inner.param_groups[group]["params"][place]
            shard.start, shard.stop = span.start, span.end
        return
    stepped = {id(value) for group in inner.param_groups for value in group["params"]}
    for weight, shard in found.items():
        candidates = (getattr(weight, "main_param", None), weight)
        value = next((value for value in candidates if id(value) in stepped), None)
        if value is not None:
            shard.inner, shard.value = inner, value


# ---- over the ranks of the layout --------------------------------------------------------------------------


def optimizer_step(shards: list[OptimizerShard], groups: ProcessGroups) -> int:
    """Return the number of steps so far, the same on every member.

    Megatron's FusedAdam counts them per group, torch's AdamW per parameter.
    """
    steps = [0]
    for inner in {id(shard.inner): shard.inner for shard in shards if shard.inner is not None}.values():
        steps += [
            int(counter["step"])
            for counter in (*inner.param_groups, *inner.state.values())
            if "step" in counter
        ]
    most = torch.tensor(max(steps), device=device.device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.members.device_group)
    return int(most)


def gather_whole(shard: OptimizerShard, kind: str, groups: ProcessGroups) -> Tensor:
    """Gather one parameter of a data-parallel group: [N] float32 on its owner rank; undefined elsewhere."""
    whole = torch.zeros(shard.shape.numel(), dtype=torch.float32, device=shard.weight.device)
    part = shard.part(kind)
    if part is not None:
        whole[shard.start : shard.stop] = part.detach().flatten()
    # Summed as integers: each element is 0 on all ranks but one, so the bits are preserved.
    owner = dist.get_global_rank(groups.dp_cp, shard.owner)
    dist.reduce(whole.view(torch.int32), owner, group=groups.dp_cp)
    return whole


def broadcast_whole(shard: OptimizerShard, tensor: Tensor | None, groups: ProcessGroups) -> Tensor:
    """Broadcast the owner rank's flattened tensor; returns [N] float32 on the weight's device."""
    if tensor is None:
        whole = torch.empty(shard.shape.numel(), dtype=torch.float32, device=shard.weight.device)
    else:
        whole = tensor.to(shard.weight.device).flatten()
    if groups.dp_cp.size() > 1:
        dist.broadcast(whole, dist.get_global_rank(groups.dp_cp, shard.owner), group=groups.dp_cp)
    return whole


def norms(chunks: list, optimizer, groups: ProcessGroups) -> dict[str, float]:
    """Return Euclidean norms of the values and of Adam's moments of the whole model.

    Each element counts once, whatever the layout. A collective over the layout's ranks; the same result on
    each.
    """
    is_shared = is_split(chunks, optimizer)
    squares = torch.zeros(1 + len(MOMENTS), dtype=torch.float64, device=device.device())
    for shard in optimizer_shards(chunks, optimizer, groups):
        is_counted = is_main_replica(shard.replica_id) and (is_shared or shard.owner == groups.dp_cp.rank())
        for place, kind in enumerate((VALUE, *MOMENTS)):
            if is_counted and (part := shard.part(kind)) is not None:
                # converting all at once to float64 may take gigabytes
                for piece in part.detach().flatten().split(_PIECE):
                    squares[place] += torch.linalg.vector_norm(piece, dtype=torch.float64).square()
    dist.all_reduce(squares, group=groups.members.device_group)
    return {f"norm/{kind}": value for kind, value in zip((VALUE, *MOMENTS), squares.sqrt().tolist())}

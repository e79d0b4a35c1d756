"""A trained model on disk: a folder in Megatron-Core's torch_dist format, for any layout and optimizer.

A parameter is saved as three float32 tensors of its full shape: the optimizer's master value (the weight is
this or its rounding) and Adam's two moments. In a data-parallel group each parameter has one owner rank,
which alone writes it, or reads and broadcasts it.

Only the model's sharded state dict comes from Megatron-Core. Those of its optimizers differ between plain and
distributed ones, and with torch's AdamW the latter share one step between parameters. Its asynchronous
writer, which starts processes, is not used either.
"""

import json
import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from parallel import device
from parallel.checkpoint.folders import writing_threads
from parallel.checkpoint.metadata import read_tensor_table
from parallel.checkpoint.sealed import shortened
from parallel.groups import ProcessGroups
from parallel.rank_set import RankSet

device.prepare()

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from parallel.megatron import megatron_globals

VALUE, MOMENTS = "value", ("exp_avg", "exp_avg_sq")
_PIECE = 2**24  # elements converted to float64 at a time


@dataclass(kw_only=True)
class Learned:
    """One parameter of this rank: its sharded description, and the part that the optimizer steps on here."""

    name: str
    weight: Tensor
    sharded: ShardedTensor | ShardedTensorFactory
    holder: int  # owner's rank within the data-parallel group
    inner: torch.optim.Optimizer | None = None  # None: the part is empty
    value: Tensor | None = (
        # what `inner` steps on: elements `start` to `stop` of the flattened parameter
        None
    )
    start: int = 0
    stop: int = 0

    def part(self, kind: str) -> Tensor | None:
        """Return the optimizer's part of the value or of a moment on this rank."""
        return (
            self.value
            if kind == VALUE or self.value is None
            else self.inner.state.get(self.value, {}).get(kind)
        )


def learned(chunks: list, optimizer, groups: ProcessGroups) -> list[Learned]:
    """Return all parameters of a member's chunks, in the same order on the ranks of a data-parallel group."""
    found, loads = {}, [0] * groups.dp_cp.size()
    for number, chunk in enumerate(chunks):
        with megatron_globals(groups):
            described = chunk.module.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        for name, sharded in described.items():
            if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and isinstance(
                sharded.data, torch.nn.Parameter
            ):
                holder = loads.index(min(loads))
                loads[holder] += sharded.data.numel()
                found[sharded.data] = Learned(
                    name=f"{number}.{name}", weight=sharded.data, sharded=sharded, holder=holder
                )
    missing = [
        name
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
        if parameter not in found
    ]
    assert not missing, f"Megatron-Core describes no checkpoint of {missing}"
    for part in _parts(optimizer):
        _add_ranges(part, found)
    return list(found.values())


def _parts(optimizer) -> list:
    """Return Megatron-Core's optimizers that have parameters, from one that may be a chain."""
    return [
        part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None
    ]


def _add_ranges(optimizer, found: dict[Tensor, Learned]) -> None:
    """Fill in which part of each parameter this Megatron optimizer steps on."""
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        for weight, (group, place) in optimizer.model_param_group_index_map.items():
            span, known = optimizer._get_model_param_range_map(weight)["param"], found[weight]
            known.inner, known.value, known.start, known.stop = (
                inner,
                inner.param_groups[group]["params"][place],
                span.start,
                span.end,
            )
        return
    stepped = {id(value) for group in inner.param_groups for value in group["params"]}
    for weight, known in found.items():
        value = next(
            (value for value in (getattr(weight, "main_param", None), weight) if id(value) in stepped), None
        )
        if value is not None:
            known.inner, known.value, known.start, known.stop = inner, value, 0, weight.numel()


def optimizer_step(parameters: list[Learned], groups: ProcessGroups) -> int:
    """Return the number of steps so far, the same on every member.

    Megatron's FusedAdam counts them per group, torch's AdamW per parameter.
    """
    steps = [0]
    for inner in {id(one.inner): one.inner for one in parameters if one.inner is not None}.values():
        steps += [
            int(holder["step"]) for holder in (*inner.param_groups, *inner.state.values()) if "step" in holder
        ]
    most = torch.tensor(max(steps), device=device.device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.members.device_group)
    return int(most)


class HostCopies:
    """Host copies of the parameters that a rank owns.

    They are in new memory each time or, after `reserve`, in the same memory, pinned on GPU machines for the
    lifetime of this object.
    """

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(place.nbytes for place in self._places.values())

    def reserve(self, chunks: list, optimizer, groups: ProcessGroups) -> None:
        """Allocate the memory for everything that `gather` will return, once.

        Raises:
            ValueError: it cannot be pinned.
        """
        mine = [one for one in learned(chunks, optimizer, groups) if one.holder == groups.dp_cp.rank()]
        shapes = {f"{one.name}/{kind}": one.weight.shape for one in mine for kind in (VALUE, *MOMENTS)}
        memory = device.host_memory(
            sum(shape.numel() for shape in shapes.values()) * torch.float32.itemsize, owner=self
        )
        parts = memory.view(torch.float32).split([shape.numel() for shape in shapes.values()])
        self._places = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a float32 copy on the host; a GPU fills reserved memory on its current stream."""
        place = self._places[name] if self._places else torch.empty(tensor.shape, dtype=torch.float32)
        return place.copy_(tensor, non_blocking=True)


def gather(
    chunks: list, optimizer, groups: ProcessGroups, copies: HostCopies
) -> tuple[dict[str, Tensor], int]:
    """Return float32 host tensors of all parameters that this rank owns, and the optimizer's step.

    Before the first step there are no moments. On a GPU the current stream may
    still be filling the tensors.
    """
    parameters = learned(chunks, optimizer, groups)
    step = optimizer_step(parameters, groups)
    is_split = groups.dp_cp.size() > 1 and any(
        isinstance(part, DistributedOptimizer) for part in _parts(optimizer)
    )
    tensors = {}
    for one in parameters:
        is_mine = one.holder == groups.dp_cp.rank()
        for kind in (VALUE, *MOMENTS) if step else (VALUE,):
            if not (is_mine or is_split):
                continue
            whole = _whole(one, kind, groups) if is_split else one.part(kind)
            if is_mine:
                # None: the parameter never had a gradient
                whole = torch.zeros_like(one.weight, dtype=torch.float32) if whole is None else whole.detach()
                tensors[f"{one.name}/{kind}"] = copies.copy(
                    f"{one.name}/{kind}", whole.view(one.weight.shape)
                )
    return tensors, step


def _whole(one: Learned, kind: str, groups: ProcessGroups) -> Tensor:
    """Gather one parameter of a data-parallel group: [N] float32 on its owner rank; undefined elsewhere."""
    whole, part = (
        torch.zeros(one.weight.numel(), dtype=torch.float32, device=one.weight.device),
        one.part(kind),
    )
    if part is not None:
        whole[one.start : one.stop] = part.detach().flatten()
    # Summed as integers: each element is 0 on all ranks but one, so the bits are preserved.
    dist.reduce(whole.view(torch.int32), dist.get_global_rank(groups.dp_cp, one.holder), group=groups.dp_cp)
    return whole


def norms(chunks: list, optimizer, groups: ProcessGroups) -> dict[str, float]:
    """Return Euclidean norms of the values and of Adam's moments of the whole model.

    Each element counts once, whatever the layout. A collective over the layout's ranks; the same result on
    each.
    """
    is_split = any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))
    squares = torch.zeros(1 + len(MOMENTS), dtype=torch.float64, device=device.device())
    for one in learned(chunks, optimizer, groups):
        is_counted = is_main_replica((*one.sharded.replica_id[:-1], 0)) and (
            is_split or one.holder == groups.dp_cp.rank()
        )
        for place, kind in enumerate((VALUE, *MOMENTS)):
            if is_counted and (part := one.part(kind)) is not None:
                # converting all at once to float64 may take gigabytes
                for piece in part.detach().flatten().split(_PIECE):
                    squares[place] += torch.linalg.vector_norm(piece, dtype=torch.float64).square()
    dist.all_reduce(squares, group=groups.members.device_group)
    return {f"norm/{kind}": value for kind, value in zip((VALUE, *MOMENTS), squares.sqrt().tolist())}


def _describe(parameters: list[Learned], tensors: dict[str, Tensor]) -> dict:
    """Return Megatron-Core's description of `tensors`, which this rank owns.

    Replica ids distinguish tensor-parallel and tied copies.
    """
    described = {}
    for one in parameters:
        for kind in (VALUE, *MOMENTS):
            tensor, sharded = tensors.get(f"{one.name}/{kind}"), one.sharded
            if tensor is not None:
                key = sharded.key if kind == VALUE else f"optimizer.state.{kind}.{sharded.key}"
                dtype = {"dtype": tensor.dtype} if isinstance(sharded, ShardedTensor) else {}
                described[f"{one.name}/{kind}"] = replace(
                    sharded, key=key, data=tensor, replica_id=(*sharded.replica_id[:-1], 0), **dtype
                )
    return described


class Snapshot:
    """Result of `gather`, ready to be written, also by another thread; empty on a rank without the model."""

    def __init__(self, tensors: dict[str, Tensor], chunks: list, optimizer, groups: ProcessGroups):
        state = _describe(learned(chunks, optimizer, groups), tensors) if groups.is_member else {}
        apply_factories(state)
        shards = defaultdict(list)
        for sharded in nested_values(state):
            if is_main_replica(sharded.replica_id):
                shards[sharded.key].append(sharded)
        self._state = mcore_to_pyt_state_dict(shards)
        self._is_copied = torch.cuda.current_stream().record_event() if device.is_gpu() else None

    def write(self, folder: Path, ranks: RankSet) -> None:
        """Write the snapshot. Collective over `ranks`, whose groups carry objects.

        Raises:
            torch.distributed.checkpoint.api.CheckpointException: on every rank, if one could not write.
        """
        if self._is_copied is not None:
            self._is_copied.synchronize()
        save_state(
            self._state,
            storage_writer=_Writer(folder, sync_files=False),
            planner=MCoreSavePlanner(flatten_state_dict=False),
            process_group=ranks.cpu_group,
        )


class _Writer(FileSystemWriter):
    """Writes a rank's host tensors without copies; torch's writer copies each and holds all copies at once.

    Each thread writes one file. `folders.save` syncs them to the disk.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        count, largest_first = (
            writing_threads(),
            sorted(plan.items, key=lambda item: -math.prod(item.tensor_data.chunk.sizes)),
        )
        shares = {
            f"{plan.storage_data.prefix}{i}.distcp": share
            for i in range(count)
            if (share := largest_first[i::count])
        }
        with ThreadPoolExecutor(count) as pool:
            written = list(pool.map(partial(self._write_file, planner), shares, shares.values()))
        future = Future()
        future.set_result([result for results in written for result in results])
        return future

    def _write_file(self, planner: SavePlanner, name: str, items: list[WriteItem]) -> list[WriteResult]:
        results = []
        with (Path(self.path) / name).open("wb") as file:
            for item in items:
                begin = file.tell()
                torch.save(_alone(planner.resolve_data(item)), file)
                length = file.tell() - begin
                results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
        return results

    def finish(self, metadata, results) -> None:
        """Finish on the first rank after all have written; its error reaches every rank, as theirs do."""
        super().finish(metadata, results)
        # Megatron-Core's own `load` looks for these two files first
        torch.save({}, Path(self.path) / "common.pt")
        (Path(self.path) / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )


def _alone(tensor: Tensor) -> Tensor:
    """Return the same memory as a separate storage, because torch.save writes the whole storage."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.from_numpy(flat.numpy()).view(tensor.dtype).view(tensor.shape)


def read(folder: Path, chunks: list, optimizer, groups: ProcessGroups, *, step: int) -> None:
    """Load a folder's values and moments in place. Collective over `groups.world`.

    Megatron-Core reads over torch's default group, so `groups.world` spans it.

    Args:
        step: the optimizer's, as `gather` returned it.

    Raises:
        ValueError: the folder's table is broken or has entries that no checkpoint needs, or a tensor of this
            model is missing.
    """
    read_tensor_table(folder)  # torch's reader unpickles it without a check
    parameters = learned(chunks, optimizer, groups) if groups.is_member else []
    kinds = (VALUE, *MOMENTS) if step else (VALUE,)
    mine = [one for one in parameters if one.holder == groups.dp_cp.rank()]
    wanted = _describe(
        mine, {f"{one.name}/{kind}": torch.empty(one.weight.shape) for one in mine for kind in kinds}
    )
    merges = dict(wanted)
    apply_factories(wanted)
    loaded = {}
    try:
        loaded, cause = TorchDistLoadShardedStrategy().load(wanted, folder), None
    except (
        CheckpointException
        # not a subclass of Exception; Megatron-Core 0.19 raises it only on the affected ranks
    ) as error:
        cause = str(next(iter(error.failures.values()))[0])
    except Exception as error:  # its readers raise nearly anything for broken files
        cause = f"{type(error).__name__}: {error}"
    if cause := next(filter(None, groups.world.all_gather_object(cause)), None):
        raise ValueError(
            f"{folder} does not fit this model ({shortened(cause)}); resume with the version of "
            "megatron-core that wrote it, or set run.resume=never"
        )
    factories = {
        name: sharded for name, sharded in merges.items() if isinstance(sharded, ShardedTensorFactory)
    }
    loaded = apply_factory_merges(loaded, factories)
    for one in parameters:
        for kind in kinds:
            _put(one, kind, _handed_round(one, loaded.pop(f"{one.name}/{kind}", None), groups))
        _set_step(one, step)


def _handed_round(one: Learned, tensor: Tensor | None, groups: ProcessGroups) -> Tensor:
    """Broadcast the owner rank's flattened tensor; returns [N] float32 on the weight's device."""
    if tensor is None:
        whole = torch.empty(one.weight.numel(), dtype=torch.float32, device=one.weight.device)
    else:
        whole = tensor.to(one.weight.device).flatten()
    if groups.dp_cp.size() > 1:
        dist.broadcast(whole, dist.get_global_rank(groups.dp_cp, one.holder), group=groups.dp_cp)
    return whole


@torch.no_grad()
def _put(one: Learned, kind: str, whole: Tensor) -> None:
    if kind == VALUE:
        one.weight.copy_(whole.view(one.weight.shape))
    if one.value is None:
        return
    part, state = whole[one.start : one.stop].view(one.value.shape), one.inner.state
    if kind == VALUE:
        one.value.copy_(part)
    elif kind in state[one.value]:
        state[one.value][kind].copy_(part)
    else:
        state[one.value][kind] = part.clone()


def _set_step(one: Learned, step: int) -> None:
    if one.inner is None or not step:
        return
    if isinstance(one.inner, torch.optim.Adam | torch.optim.AdamW):
        # one per parameter, on the CPU wherever the parameter is
        one.inner.state[one.value]["step"] = torch.tensor(float(step))
    else:
        for group in one.inner.param_groups:
            group["step"] = step

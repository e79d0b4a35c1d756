"""A trained model on disk: a folder in Megatron-Core's torch_dist format, for any layout and optimizer.

A parameter is saved as three float32 tensors of its full shape: the optimizer's master value (the weight is
this or its rounding) and Adam's two moments. Megatron-Core's asynchronous writer, which starts processes, is
not used.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
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
from parallel.checkpoint.optimizer_shards import (
    MOMENTS,
    VALUE,
    OptimizerShard,
    broadcast_whole,
    gather_whole,
    is_split,
    optimizer_shards,
    optimizer_step,
)
from parallel.checkpoint.sealed import shortened, torch_save
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
        shapes = {
            f"{shard.name}/{kind}": shard.shape
            for shard in optimizer_shards(chunks, optimizer, groups)
            for kind in (VALUE, *MOMENTS)
            if shard.owner == groups.dp_cp.rank()
        }
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

    Before the first step there are no moments. On a GPU the current stream may still be filling the tensors.
    """
    shards = optimizer_shards(chunks, optimizer, groups)
    step = optimizer_step(shards, groups)
    is_shared = groups.dp_cp.size() > 1 and is_split(chunks, optimizer)
    tensors = {}
    for shard in shards:
        is_mine = shard.owner == groups.dp_cp.rank()
        for kind in (VALUE, *MOMENTS) if step else (VALUE,):
            if not (is_mine or is_shared):
                continue
            whole = gather_whole(shard, kind, groups) if is_shared else shard.part(kind)
            if is_mine:
                if whole is None:  # the parameter never had a gradient
                    whole = torch.zeros(shard.shape, device=shard.weight.device)
                name = f"{shard.name}/{kind}"
                tensors[name] = copies.copy(name, whole.detach().view(shard.shape))
    return tensors, step


def _describe(shards: list[OptimizerShard], tensors: dict[str, Tensor]) -> dict:
    """Return Megatron-Core's description of `tensors`, which this rank owns.

    Replica ids distinguish tensor-parallel and tied copies.
    """
    described = {}
    for shard in shards:
        for kind in (VALUE, *MOMENTS):
            tensor, sharded = tensors.get(f"{shard.name}/{kind}"), shard.sharded
            if tensor is not None:
                key = sharded.key if kind == VALUE else f"optimizer.state.{kind}.{sharded.key}"
                dtype = {"dtype": tensor.dtype} if isinstance(sharded, ShardedTensor) else {}
                described[f"{shard.name}/{kind}"] = replace(
                    sharded, key=key, data=tensor, replica_id=shard.replica_id, **dtype
                )
    return described


class Snapshot:
    """Result of `gather`, ready to be written, also by another thread; empty on a rank without the model."""

    def __init__(self, tensors: dict[str, Tensor], chunks: list, optimizer, groups: ProcessGroups):
        state = _describe(optimizer_shards(chunks, optimizer, groups), tensors) if groups.is_member else {}
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


def _sizes(item: WriteItem) -> Sequence[int]:
    assert item.tensor_data is not None, f"{item.index} is no tensor"
    return item.tensor_data.chunk.sizes


class _Writer(FileSystemWriter):
    """Writes a rank's host tensors without copies; torch's writer copies each and holds all copies at once.

    Each thread writes one file. `folders.save` syncs them to the disk.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        count, largest_first = (
            writing_threads(),
            sorted(plan.items, key=lambda item: -math.prod(_sizes(item))),
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
                torch_save(_alone(cast(Tensor, planner.resolve_data(item))), file)
                length = file.tell() - begin
                results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
        return results

    def finish(self, metadata, results) -> None:
        """Finish on the first rank after all have written; its error reaches every rank, as theirs do."""
        super().finish(metadata, results)
        # Megatron-Core's own `load` looks for these two files first
        with (Path(self.path) / "common.pt").open("wb") as file:
            torch_save({}, file)
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
    shards = optimizer_shards(chunks, optimizer, groups) if groups.is_member else []
    kinds = (VALUE, *MOMENTS) if step else (VALUE,)
    mine = [shard for shard in shards if shard.owner == groups.dp_cp.rank()]
    wanted = _describe(
        mine, {f"{shard.name}/{kind}": torch.empty(shard.shape) for shard in mine for kind in kinds}
    )
    merges = dict(wanted)
    apply_factories(wanted)
    loaded = {}
    try:
        loaded, cause = TorchDistLoadShardedStrategy().load(wanted, folder), None
    # not a subclass of Exception; Megatron-Core 0.19 raises it only on the affected ranks
    except CheckpointException as error:
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
    for shard in shards:
        for kind in kinds:
            shard.put(kind, broadcast_whole(shard, loaded.pop(f"{shard.name}/{kind}", None), groups))
        shard.put_step(step)

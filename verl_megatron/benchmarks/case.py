"""Case of `bench/reshard.py` and `bench/weight_sync.py`: a model under two layouts, with computable weights.

Each rank can compute the weights for itself, and so verify what it receives.
"""

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.reshard.plan import matrix_shape
from parallel.reshard.transport import Parameters
from parallel.weights.architecture import Architecture
from parallel.weights.rules import megatron_parameters, megatron_shards, vllm_parameters, vllm_shards
from parallel.weights.shard import Block, ShardedParameter

# Letters: R rows, C columns.

MIB, GIB = 2**20, 2**30
LEVELS = 2**14  # number of quantiles that small weights are drawn from
_PIECE = 2**24  # elements computed at a time in int64
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardCase:
    """A model, its two layouts over the whole world, and the transfer settings."""

    model: str
    arch: Architecture
    train: Layout
    rollout: Layout
    dtype: torch.dtype
    window_bytes: int
    spec: Literal["te", "local"]  # of Megatron's layers; decides the names of the norms
    hardware: str  # description of the ranks' hardware

    def train_shards(self, rank: int, layout: Layout | None = None) -> list[ShardedParameter]:
        """Return Megatron's parameters on a rank, in layout `train` unless another is given."""
        return megatron_parameters(self.arch, layout or self.train, rank, spec=self.spec)

    def rollout_shards(self, rank: int) -> list[ShardedParameter]:
        """Return vLLM's parameters on a rank."""
        return vllm_parameters(self.arch, self.rollout.tp, self.rollout.coordinates(rank).tp)

    def sides(self) -> dict[str, Any]:
        """Return both sides, the input of every plan."""
        return dict(
            source=megatron_shards(self.arch, self.train, spec=self.spec),
            destination=vllm_shards(self.arch, self.rollout),
            element_bytes=self.dtype.itemsize,
            window_bytes=self.window_bytes,
            host_of=device.host_of,
        )

    def __str__(self) -> str:
        return (
            f"{self.model} ({self.arch.num_layers} layers, {str(self.dtype)[6:]}), {self.train} -> "
            f"{self.rollout}"
        )


def check_room(arch: Architecture, layout: Layout, *, bytes_per_parameter: int) -> None:
    """Check that a rank's part of a model fits, on a CPU, where a rank that takes too much is killed.

    Raises:
        ValueError: it does not.
    """
    if device.is_gpu():
        return
    parameters = sum(prod(each.shape) for each in megatron_parameters(arch, layout, 0, spec="local"))
    needed, free = bytes_per_parameter * parameters, device.free_memory_bytes()
    if needed > free:
        raise ValueError(
            f"the first rank's part of the model takes at least {needed / GIB:.1f} GiB, and "
            f"{free / GIB:.1f} are free for a rank; name a smaller model with --hf, or fewer --layers"
        )


def bytes_of(parameters: Parameters) -> int:
    return sum(tensor.nbytes for tensor in parameters.values())


def part(matrix_RC: Tensor, block: Block) -> Tensor:
    """Return the view of `block` in a parameter's matrix."""
    return matrix_RC[
        block.row : block.row + block.rows[1] - block.rows[0],
        block.col : block.col + block.cols[1] - block.cols[0],
    ]


def weights_of(parameter: ShardedParameter, dtype: torch.dtype) -> Tensor:
    """Return the parameter as its blocks of the Hugging Face tensors fill it, with zeros for padding."""
    tensor = torch.zeros(parameter.shape, dtype=dtype, device=device.device())
    matrix_RC = tensor.view(matrix_shape(parameter.shape))
    for block in parameter.blocks:
        step = max(1, _PIECE // (block.cols[1] - block.cols[0]))
        for first in range(*block.rows, step):
            piece_RC = _content(
                block.tensor, range(first, min(first + step, block.rows[1])), range(*block.cols), dtype
            )
            part(matrix_RC, block)[first - block.rows[0] :][: len(piece_RC)] = piece_RC
    return tensor


def _content(name: str, rows: range, cols: range, dtype: torch.dtype) -> Tensor:
    """Hash (tensor, row, column) to the bits of numbers in (-2, 2).

    With the exponent's highest bit off, none is infinite or NaN.
    """
    seed, bits = zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 % 2**63, 8 * dtype.itemsize
    row_R = torch.arange(rows.start + 1, rows.stop + 1, device=device.device()) * 0x5851F42D4C957F2D + seed
    col_C = torch.arange(cols.start + 1, cols.stop + 1, device=device.device()) * 0x2545F4914F6CDD1D
    mixed_RC = row_R[:, None] + col_C
    mixed_RC = ((mixed_RC ^ mixed_RC >> 29) * 0x369DEA0F31A53F85 >> 64 - bits) & ~(1 << bits - 2)
    return mixed_RC.to(_BITS[dtype.itemsize]).view(dtype)


def small_weights(parameter: ShardedParameter, dtype: torch.dtype, spread: float) -> Tensor:
    """Return the parameter with normally distributed values; norms are ones.

    The bits of `weights_of` choose one of LEVELS quantiles and the sign.

    Args:
        spread: standard deviation.
    """
    if parameter.blocks[0].tensor.endswith("norm.weight"):
        return torch.ones(parameter.shape, dtype=dtype, device=device.device())
    tensor = weights_of(parameter, dtype)
    # the first is 0: padding stays 0
    magnitudes = (spread * sqrt(2) * torch.erfinv(torch.arange(LEVELS, device=device.device()) / LEVELS)).to(
        dtype
    )
    for values_N in tensor.view(-1).split(_PIECE):
        bits_N = values_N.view(_BITS[dtype.itemsize])
        chosen_N = magnitudes[(bits_N & LEVELS - 1).int()]
        values_N.copy_(torch.where(bits_N < 0, -chosen_N, chosen_N))
    return tensor


def trained_weights(case: ReshardCase) -> Parameters:
    """Return this rank's source, contiguous in one allocation as in Megatron's distributed optimizer."""
    parameters, ends = case.train_shards(dist.get_rank()), [0]
    for parameter in parameters:
        ends.append(ends[-1] + -(-prod(parameter.shape) // 64) * 64)
    memory = torch.zeros(ends[-1], dtype=case.dtype, device=device.device())
    source = {
        (p.chunk, p.name): memory[start:][: prod(p.shape)].view(p.shape) for start, p in zip(ends, parameters)
    }
    for parameter in parameters:
        source[parameter.chunk, parameter.name].copy_(weights_of(parameter, case.dtype))
    return source


def holds_the_weights(described: list[ShardedParameter], tensors: Parameters) -> bool:
    """Return whether all ranks' parameters have the bits of `weights_of`; uses one parameter's memory."""
    wrong = 0
    for parameter in described:
        tensor = tensors[parameter.chunk, parameter.name]
        bits, expected = _BITS[tensor.element_size()], weights_of(parameter, tensor.dtype)
        wrong += not torch.equal(tensor.view(bits), expected.view(bits))
    return not world().all_max(torch.tensor(wrong)).item()


@contextmanager
def model_folder(arch: Architecture, config: Mapping[str, object]) -> Iterator[str]:
    """Yield a folder with only a config.json, of the same name on every host during the block.

    Collective over the world.
    """
    path: list = [tempfile.mkdtemp(prefix="bench_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    folder, is_first_here = Path(path[0]), int(os.environ.get("LOCAL_RANK", "0")) == 0
    if is_first_here:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(arch.to_hf(carry=config)))
    dist.barrier()
    try:
        yield str(folder)
    finally:
        if is_first_here:
            shutil.rmtree(folder, ignore_errors=True)


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)

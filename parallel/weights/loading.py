"""Weights of a rank's parameters, read from a Hugging Face folder or copied from another model."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import Parameter

from parallel.weights.files import VALUE_HEAD, CheckpointFolder, listed
from parallel.weights.shard import ShardedParameter


def load_parameters(
    folder: CheckpointFolder,
    parameters: Sequence[ShardedParameter],
    tensors: Mapping[tuple[int, str], Tensor],
) -> list[str]:
    """Load a rank's parts of the folder into `tensors`, in place; padding becomes zero.

    Args:
        tensors: by (chunk, name), of any floating dtype and device, each of its parameter's shape. Quantized
            ones are first put together in the dtype that they stand for, one at a time.

    Returns:
        Names of the value head's parameters that the folder lacks; their values are unchanged.

    Raises:
        ValueError: the folder lacks another tensor, or a tensor is smaller than its parameter needs.
    """
    needed = {block.tensor for parameter in parameters for block in parameter.blocks}
    absent = needed - folder.names
    if missing := sorted(name for name in absent if not name.startswith(VALUE_HEAD)):
        raise ValueError(
            f"{folder.path} lacks tensors of the model that its config.json describes: {listed(missing)}"
        )
    left = []
    blocks = [block for parameter in parameters for block in parameter.blocks]
    folder.announce((block.tensor, *block.rows) for block in blocks)
    with torch.no_grad():
        for parameter in parameters:
            if any(block.tensor in absent for block in parameter.blocks):
                left.append(parameter.name)
                continue
            tensor = tensors[parameter.chunk, parameter.name]
            assert tensor.shape == parameter.shape, (
                f"{parameter.name} is {tuple(tensor.shape)} and described as {parameter.shape}"
            )
            _fill(tensor, parameter, folder)
    return left


def copy_same(
    parameters: Sequence[ShardedParameter],
    tensors: Mapping[tuple[int, str], Tensor],
    other_parameters: Sequence[ShardedParameter],
    other_tensors: Mapping[tuple[int, str], Tensor],
) -> list[ShardedParameter]:
    """Copy a rank's parameters from another model that has them in the same dtype; return those it lacks.

    Args:
        tensors: by (chunk, name), as of `load_parameters`.
        other_tensors: likewise, of the other model.
    """
    theirs, absent = {(each.chunk, each.name): each for each in other_parameters}, []
    for parameter in parameters:
        key = parameter.chunk, parameter.name
        if theirs.get(key) == parameter and other_tensors[key].dtype == tensors[key].dtype:
            with torch.no_grad():
                tensors[key].copy_(other_tensors[key])
        else:
            absent.append(parameter)
    return absent


def _fill(tensor: Tensor, parameter: ShardedParameter, folder: CheckpointFolder) -> None:
    if type(tensor) not in (Tensor, Parameter):  # quantized, with scales of many elements
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        _fill(whole, parameter, folder)
        tensor.copy_(whole)
        return
    matrix = tensor.view(tensor.shape[0], prod(tensor.shape[1:]))
    covered = sum((b.rows[1] - b.rows[0]) * (b.cols[1] - b.cols[0]) for b in parameter.blocks)
    if covered < matrix.numel():
        matrix.zero_()
    for block in parameter.blocks:
        part = folder.read(block, tensor.dtype)
        matrix[block.row : block.row + part.shape[0], block.col : block.col + part.shape[1]].copy_(part)

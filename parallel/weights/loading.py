"""Weights of a rank's parameters, read from a Hugging Face folder or copied from another model."""

import contextlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor
from torch.nn import Parameter

from parallel import device
from parallel.weights.files import VALUE_HEAD, CheckpointFolder, listed
from parallel.weights.shard import ShardedParameter

READERS = 4  # threads of a rank that read weights for a GPU
PIECE_BYTES = 1 << 25  # of a copy to it


def load_parameters(
    folder: CheckpointFolder,
    parameters: Sequence[ShardedParameter],
    tensors: Mapping[tuple[int, str], Tensor],
    *,
    readers: int | None = None,
) -> list[str]:
    """Load a rank's parts of the folder into `tensors`, in place; padding becomes zero.

    Args:
        tensors: by (chunk, name), of any floating dtype and device, each of its parameter's shape. Quantized
            ones are first put together in the dtype that they stand for, one at a time.
        readers: threads that read at the same time; None: several for much memory of a GPU.

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
    blocks = [block for parameter in parameters for block in parameter.blocks]
    folder.announce((block.tensor, *block.rows) for block in blocks)
    present, left = [], []
    for parameter in parameters:
        if any(block.tensor in absent for block in parameter.blocks):
            left.append(parameter.name)
            continue
        present.append(parameter)
        tensor = tensors[_key(parameter)]
        assert tensor.shape == parameter.shape, (
            f"{parameter.name} is {tuple(tensor.shape)} and described as {parameter.shape}"
        )
    plain = {key: tensors[key] for key in map(_key, present) if _is_plain(tensors[key])}
    if many := _Readers.of(plain.values(), folder, count=readers):
        many.fill(tensors, [each for each in present if _key(each) in plain], folder)
        present = [each for each in present if _key(each) not in plain]
    with torch.no_grad():
        for parameter in present:
            _fill(tensors[_key(parameter)], parameter, folder)
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
    theirs, absent = {_key(each): each for each in other_parameters}, []
    for parameter in parameters:
        key = _key(parameter)
        if theirs.get(key) == parameter and other_tensors[key].dtype == tensors[key].dtype:
            with torch.no_grad():
                tensors[key].copy_(other_tensors[key])
        else:
            absent.append(parameter)
    return absent


class _Readers:
    """Threads that fill tensors, each by way of host memory of its own.

    For a GPU that is pinned, and each thread has a stream. One thread's copies from the pages of files use a
    tenth of the link.
    """

    def __init__(self, count: int):
        self._memory = device.host_memory(count * PIECE_BYTES, self).split(PIECE_BYTES)

    @classmethod
    def of(
        cls, tensors: Collection[Tensor], folder: CheckpointFolder, *, count: int | None
    ) -> "_Readers | None":
        """Return readers for tensors; None if one thread does it.

        Args:
            count: as of `load_parameters`.
        """
        if count is None:
            on_gpu = all(tensor.is_cuda for tensor in tensors)
            is_much = sum(tensor.nbytes for tensor in tensors) > READERS * PIECE_BYTES
            count = READERS if on_gpu and is_much and not folder.is_arriving else 1
        count = min(count, len(tensors))
        try:
            return cls(count) if count > 1 else None
        except (ValueError, OSError):  # there is no memory that can be pinned
            return None

    def fill(
        self,
        tensors: Mapping[tuple[int, str], Tensor],
        parameters: Sequence[ShardedParameter],
        folder: CheckpointFolder,
    ) -> None:
        """Fill the tensors of all parameters, and wait until they are there; errors as of `read`."""
        waiting, ways = deque(parameters), [contextlib.nullcontext() for _ in self._memory]
        if device.is_gpu():
            streams = [torch.cuda.Stream() for _ in self._memory]
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())  # which still initializes the tensors
            ways = list(map(torch.cuda.stream, streams))

        def work(memory: Tensor, way: AbstractContextManager) -> None:
            with torch.no_grad(), way:
                try:
                    while (parameter := _taken(waiting)) is not None:
                        _fill(tensors[_key(parameter)], parameter, folder, memory)
                finally:
                    waiting.clear()  # after an error, nothing is left to do
                    device.synchronize_stream()

        with device.threads(len(self._memory), "weights") as threads:
            try:
                list(threads.map(work, self._memory, ways))
            finally:
                waiting.clear()  # after Ctrl-C


def _key(parameter: ShardedParameter) -> tuple[int, str]:
    return parameter.chunk, parameter.name


def _taken(waiting: deque[ShardedParameter]) -> ShardedParameter | None:
    """Take the next parameter; None if other threads have taken all."""
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is not quantized, with scales of many elements."""
    return type(tensor) in (Tensor, Parameter)


def _fill(
    tensor: Tensor, parameter: ShardedParameter, folder: CheckpointFolder, memory: Tensor | None = None
) -> None:
    """Fill a tensor on the current stream, by way of `memory` if it is given."""
    if not _is_plain(tensor):
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
        place = matrix[block.row : block.row + part.shape[0], block.col : block.col + part.shape[1]]
        if memory is None:
            place.copy_(part)
        else:
            _copy_by_way_of(memory, part, place)


def _copy_by_way_of(memory: Tensor, part: Tensor, place: Tensor) -> None:
    """Copy a matrix on the CPU to its place, as many rows at once as `memory` [N] uint8 holds."""
    held = memory.view(part.dtype)
    rows = max(1, len(held) // part.shape[1])
    for piece, target in zip(part.split(rows), place.split(rows)):
        copied = held[: piece.numel()].view(piece.shape)
        copied.copy_(piece)
        target.copy_(copied, non_blocking=True)
        device.synchronize_stream()  # before the memory holds the next piece

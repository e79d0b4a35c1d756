"""Export a sharded model as a Hugging Face folder; no process ever holds the whole model."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from parallel.checkpoint.folders import together
from parallel.reshard.execute import Parameters, Resharder
from parallel.reshard.plan import compile_plan, matrix_shape
from parallel.weights.architecture import Architecture
from parallel.weights.files import INDEX
from parallel.weights.rules import Head, hf_shapes
from parallel.weights.shard import Block, ShardedParameter
from parallel.weights.writing import carry_files, deal_into_files, write_index, write_safetensors

WINDOW_BYTES = 2**28


def export_folder(
    *,
    arch: Architecture,
    source: Parameters,
    parameters_of: Mapping[int, Sequence[ShardedParameter]],
    folder: Path,
    template_folder: Path,
    head: Head = "lm",
    dtype: torch.dtype,
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    config: dict | None = None,
    max_file_bytes: int = 4 * 2**30,
) -> None:
    """Write the model to `folder`; collective over the ranks of its layout, each of which writes some files.

    Padding rows of the vocabulary are not written, and a tied output layer is not written twice.

    Args:
        source: this rank's parameters.
        parameters_of: the sharded parameters of every rank of the layout, by world rank.
        template_folder: the folder from which configuration and tokenizer files are copied.
        dtype: of the tensors in the files.
        group: spans the layout's ranks.
        config: replaces the template's config.json (another head or dtype).
        max_file_bytes: largest size of a file, and of a rank's memory in addition to its shard; only a
            single larger tensor exceeds it.

    Raises:
        ValueError: `folder` is the template folder, or a rank could not write.
        ReshardError: a tensor differs from its source.
    """
    folder = Path(folder)
    if folder.resolve() == Path(template_folder).resolve():
        raise ValueError(
            f"export folder {folder} is the folder the model came from; choose another, so that a broken"
            " export does not cost the original"
        )
    action = f"the model was not exported to {folder}; make room or make the folder writable"
    with together(action, group):
        folder.mkdir(parents=True, exist_ok=True)
    shapes = hf_shapes(arch, head)
    files = deal_into_files(
        {name: _elements(shape) * dtype.itemsize for name, shape in shapes.items()}, max_file_bytes
    )
    names = _file_names(len(files))
    writers = sorted(parameters_of)
    for start in range(0, len(files), len(writers)):
        turn = dict(zip(writers, range(start, len(files))))
        targets = {
            writer: [_whole(name, shapes[name]) for name in files[number]] for writer, number in turn.items()
        }
        plan = compile_plan(
            source=parameters_of,
            destination=targets,
            element_bytes=dtype.itemsize,
            window_bytes=_window_bytes(shapes, dtype),
        )
        tensors: dict[str, Tensor] = {
            target.name: torch.empty(target.shape, dtype=dtype, device=device)
            for target in targets.get(rank, ())
        }
        assembled = {(0, name): tensor for name, tensor in tensors.items()}
        Resharder(
            plan,
            rank=rank,
            source=source,
            destination=assembled,
            dtype=dtype,
            group=group,
            device=device,
            verify="all",
        ).run()
        with together(action, group):
            if rank in turn:
                _write(folder / names[turn[rank]], tensors)
    with together(action, group):  # after it the folder is complete on every rank
        if rank == writers[0]:
            carry_files(template_folder, folder, config=config)
            # Files of an earlier export under other names, which a reader would take for this one's.
            for old in {*folder.glob("model*.safetensors"), folder / INDEX} - {
                folder / name for name in names
            }:
                old.unlink(missing_ok=True)
            if len(files) > 1:
                total = sum(_elements(shape) for shape in shapes.values()) * dtype.itemsize
                write_index(
                    folder, {name: names[number] for number, file in enumerate(files) for name in file}, total
                )


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        write_safetensors(path, {name: tensor.cpu() for name, tensor in tensors.items()})
    except SafetensorError as error:  # raised for a full disk, for example
        raise OSError(str(error)) from None


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _whole(name: str, shape: tuple[int, ...]) -> ShardedParameter:
    rows, cols = matrix_shape(shape)
    return ShardedParameter(
        name=name, shape=shape, blocks=(Block(tensor=name, rows=(0, rows), cols=(0, cols)),)
    )


def _window_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    return max(WINDOW_BYTES, *(2 * matrix_shape(shape)[1] * dtype.itemsize for shape in shapes.values()))


def _elements(shape: tuple[int, ...]) -> int:
    rows, cols = matrix_shape(shape)
    return rows * cols

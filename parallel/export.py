"""Export a sharded model as a Hugging Face folder; no process ever holds the whole model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from parallel import device
from parallel.checkpoint.folders import together
from parallel.rank_set import RankSet
from parallel.reshard.execute import Resharder
from parallel.reshard.plan import compile_plan, matrix_shape
from parallel.reshard.transport import Parameters, Transport
from parallel.weights.architecture import Architecture
from parallel.weights.files import INDEX
from parallel.weights.rules import Head, hf_shapes
from parallel.weights.shard import Block, ShardedParameter
from parallel.weights.writing import carry_files, deal_into_files, write_index, write_safetensors

WINDOW_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """A model on the ranks of its layout, as one of them sees it."""

    arch: Architecture
    head: Head = "lm"
    dtype: torch.dtype  # of the exported tensors
    tensors: Parameters  # this rank's parameters
    shards: Mapping[int, Sequence[ShardedParameter]]  # those of every rank of the layout, by global rank


def export_folder(
    model: ShardedModel,
    folder: Path,
    *,
    template_folder: Path,
    ranks: RankSet,
    config: dict | None = None,
    max_file_bytes: int = 4 * 2**30,
) -> None:
    """Write the model to `folder`; collective over `ranks`, each of which writes some files.

    Padding rows of the vocabulary are not written, and a tied output layer is not written twice.
    config.json is removed first and written last: a folder that has it is complete.

    Args:
        template_folder: the folder from which configuration and tokenizer files are copied.
        ranks: those of the layout.
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
    with together(action, ranks):
        folder.mkdir(parents=True, exist_ok=True)
        if ranks.is_first:  # nobody loads a mixture of an earlier export and this one
            for name in ("config.json", INDEX):
                (folder / name).unlink(missing_ok=True)
    sizes = {
        name: _elements(shape) * model.dtype.itemsize
        for name, shape in hf_shapes(model.arch, model.head).items()
    }
    contents = deal_into_files(sizes, max_file_bytes)
    files = dict(zip(_file_names(len(contents)), contents))
    for turn in _turns(list(files), ranks):
        assembled = _assemble(model, {rank: files[name] for rank, name in turn.items()}, ranks)
        with together(action, ranks):
            if ranks.global_rank in turn:
                _write(folder / turn[ranks.global_rank], assembled)
    with together(action, ranks):  # after it the folder is complete on every rank
        if ranks.is_first:
            _remove_others(folder, files)
            if len(files) > 1:
                places = {name: file for file, names in files.items() for name in names}
                write_index(folder, places, sum(sizes.values()))
            carry_files(template_folder, folder, config=config)


def _turns(files: list[str], ranks: RankSet) -> list[dict[int, str]]:
    """Return the file that each global rank writes, turn by turn, until all are written."""
    return [
        dict(zip(ranks.ranks, files[start : start + ranks.size]))
        for start in range(0, len(files), ranks.size)
    ]


def _assemble(model: ShardedModel, names: Mapping[int, Sequence[str]], ranks: RankSet) -> dict[str, Tensor]:
    """Gather whole tensors, on each rank those of its `names`; returns this rank's, by name."""
    shapes, here = hf_shapes(model.arch, model.head), device.device()
    targets: dict[int, list[ShardedParameter]] = {}
    for rank, whole in names.items():
        targets[rank] = [_whole(name, shapes[name]) for name in whole]
    plan = compile_plan(
        source=model.shards,
        destination=targets,
        element_bytes=model.dtype.itemsize,
        window_bytes=_window_bytes(shapes, model.dtype),
    )
    tensors = {
        target.name: torch.empty(target.shape, dtype=model.dtype, device=here)
        for target in targets.get(ranks.global_rank, ())
    }
    destination = {(0, name): tensor for name, tensor in tensors.items()}
    transport = Transport(dtype=model.dtype, group=ranks.group_for(here), device=here, verify="all")
    Resharder(plan, model.tensors, destination, transport).run()
    return tensors


def _remove_others(folder: Path, files: Iterable[str]) -> None:
    """Remove files of an earlier export under other names, which a reader would take for this one's."""
    for old in {*folder.glob("model*.safetensors"), folder / INDEX} - {folder / name for name in files}:
        old.unlink(missing_ok=True)


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

"""Conversion of a Megatron-Core distributed checkpoint, saved under any layout, to a Hugging Face folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.convert.hugging_face import write_safetensors
from parallel.convert.journal import DigestedFile, Journal
from parallel.convert.megatron_checkpoint import MegatronCheckpoint
from parallel.convert.staging import conversion_of, staged
from parallel.convert.workers import Budget, run_jobs
from parallel.weights.architecture import HEADS, read_config
from parallel.weights.files import SINGLE
from parallel.weights.writing import carry_files, deal_into_files, with_dtype, write_index


@dataclass(frozen=True, slots=True)
class CheckpointArguments:
    """Arguments with which a process opens the checkpoint."""

    path: Path
    template: Path | None = None
    skip_extra: bool = False


@dataclass(frozen=True, slots=True)
class SafetensorsJob:
    """One file to write."""

    source: CheckpointArguments
    path: Path
    names: tuple[str, ...]
    dtype: torch.dtype | None  # None: as stored
    budget: Budget


def convert(
    source: CheckpointArguments, target: Path, *, dtype: torch.dtype | None, budget: Budget, file_bytes: int
) -> MegatronCheckpoint:
    """Write `target`, which appears when complete; an interrupted run is continued. Returns the source.

    Args:
        dtype: of all tensors written; None keeps the stored dtypes.
        file_bytes: maximum size of a file; a larger tensor gets its own file.

    Raises:
        ValueError: the source is not a complete checkpoint of a supported model, a number does not fit
            `dtype`, or `target` is in use.
    """
    checkpoint = MegatronCheckpoint(source.path, source.template, skip_extra=source.skip_extra)
    sizes = {
        name: prod(shape) * (dtype or checkpoint.dtypes[name]).itemsize
        for name, shape in checkpoint.shapes.items()
    }
    files = deal_into_files(sizes, file_bytes)
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    )
    with staged(target) as scratch:
        journal = Journal(
            scratch,
            conversion_of(
                checkpoint,
                what="mcore-to-hf",
                dtype=str(dtype),
                file_bytes=file_bytes,
                skip_extra=source.skip_extra,
            ),
        )
        jobs = [
            SafetensorsJob(source, scratch / name, tuple(file), dtype, budget)
            for name, file in zip(names, files)
            if name not in journal.finished
        ]
        # largest first, so that processes finish together
        jobs.sort(key=lambda job: -sum(sizes[name] for name in job.names))
        total = sum(sizes[name] for job in jobs for name in job.names)
        for entry in run_jobs(
            write_file, jobs, workers=budget.workers, total_bytes=total, title="mcore-to-hf"
        ):
            journal.add(entry)
        if len(files) > 1:
            write_index(
                scratch,
                {name: file for file, tensors in zip(names, files) for name in tensors},
                sum(sizes.values()),
            )
        carry_files(checkpoint.config_folder, scratch, config=_config(checkpoint, dtype))
        journal.remove()
    return checkpoint


def write_file(job: SafetensorsJob, report: Callable[[int], object]) -> dict[str, Any]:
    """Write one file part by part, and return its entry for the journal."""
    checkpoint = _opened(job.source)
    file = DigestedFile(job.path)
    header = [(name, job.dtype or checkpoint.dtypes[name], checkpoint.shapes[name]) for name in job.names]
    write_safetensors(file, header, _parts(job, checkpoint, report))
    return file.complete()


def slabs(source, name: str, budget: Budget) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor in parts [rows, columns], each with its first row; the next part reuses the memory."""
    rows, cols = (*source.shapes[name], 1)[:2]
    dtype = source.dtypes[name]
    step = budget.rows(cols * max(dtype.itemsize, torch.float32.itemsize), name)
    memory = torch.empty(min(step, rows), cols, dtype=dtype)
    for start in range(0, rows, step):
        part = memory[: min(step, rows - start)]
        source.read(name, start, start + len(part), part)
        yield start, part


def _parts(
    job: SafetensorsJob, checkpoint: MegatronCheckpoint, report: Callable[[int], object]
) -> Iterator[Tensor]:
    for name in job.names:
        for _, part in slabs(checkpoint, name, job.budget):
            converted = part.to(job.dtype or part.dtype)
            if converted is not part and converted.isinf().sum() > part.isinf().sum():
                raise ValueError(
                    f"{name} in {checkpoint.path} holds numbers beyond {job.dtype}; choose another --dtype"
                )
            yield converted
            report(converted.nbytes)


@lru_cache(maxsize=1)
def _opened(source: CheckpointArguments) -> MegatronCheckpoint:
    return MegatronCheckpoint(source.path, source.template, skip_extra=source.skip_extra)


def _config(checkpoint: MegatronCheckpoint, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the template's config.json, with the checkpoint's head and the dtype of all tensors written."""
    config = read_config(checkpoint.config_folder)
    if not str((config.get("architectures") or [""])[0]).endswith(HEADS[checkpoint.head]):
        config = checkpoint.arch.to_hf(head=checkpoint.head, carry=config)
    dtypes = set(checkpoint.dtypes.values()) if dtype is None else {dtype}
    is_said = dtype is not None or "dtype" in config or "torch_dtype" in config
    return with_dtype(config, *dtypes) if len(dtypes) == 1 and is_said else config

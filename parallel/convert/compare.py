"""Tensor-by-tensor comparison of two folders of either kind, and a summary of one folder."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import torch

from parallel.convert.hugging_face import HuggingFace
from parallel.convert.megatron_checkpoint import CONFIG, TRACKER, MegatronCheckpoint
from parallel.convert.staging import Source
from parallel.convert.to_hugging_face import CheckpointArguments, slabs
from parallel.convert.workers import Budget, run_jobs

# integer types by size in bytes: compared as bits, NaNs included
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class CompareJob:
    """One tensor of both folders."""

    name: str
    sides: tuple[CheckpointArguments, CheckpointArguments]
    budget: Budget


def open_source(arguments: CheckpointArguments) -> Source:
    """Open a folder of either kind; ValueError if it is neither or broken."""
    path = arguments.path
    if not path.is_dir():
        raise ValueError(
            f"{path} does not exist; give a Hugging Face folder or a distributed checkpoint of Megatron-Core"
        )
    if (path / CONFIG).is_file() or (path / TRACKER).is_file():
        return MegatronCheckpoint(path, arguments.template, skip_extra=arguments.skip_extra)
    return HuggingFace(path)


def _check_template(template: Path | None, *sources: Source) -> None:
    if template is not None and not any(isinstance(source, MegatronCheckpoint) for source in sources):
        raise ValueError(
            f"--template {template} belongs to distributed checkpoints, and {sources[0].path} is a Hugging "
            "Face folder; leave it out"
        )


def differences(a: CheckpointArguments, b: CheckpointArguments, budget: Budget) -> list[str]:
    """Return the differences between two folders, one line per tensor, in the model's order.

    The list is empty if every tensor has the same bits.
    """
    first, second = open_source(a), open_source(b)
    _check_template(a.template, first, second)
    lines = {name: f"{name} is only in {first.path}" for name in first.shapes if name not in second.shapes}
    lines |= {name: f"{name} is only in {second.path}" for name in second.shapes if name not in first.shapes}
    common = [name for name in first.shapes if name in second.shapes]
    for name in common:
        one, other = ((side.dtypes[name], list(side.shapes[name])) for side in (first, second))
        if one != other:
            lines[name] = (
                f"{name} is {one[0]} {one[1]} in {first.path} and {other[0]} {other[1]} in {second.path}"
            )
    jobs = [CompareJob(name, (a, b), budget) for name in common if name not in lines]
    total = sum(prod(first.shapes[job.name]) * first.dtypes[job.name].itemsize for job in jobs)
    lines |= {
        job: line
        for job, line in run_jobs(compare, jobs, workers=budget.workers, total_bytes=total, title="verify")
        if line
    }
    names = first.shapes | second.shapes  # in the first one's order, then what only the second has
    return [lines[name] for name in names if name in lines]


def compare(job: CompareJob, report: Callable[[int], object]) -> tuple[str, str]:
    """Return the tensor's name and how the two sides differ, or ""."""
    sides = [_opened(side) for side in job.sides]
    first_row = None
    for (start, one), (_, other) in zip(*(slabs(side, job.name, job.budget) for side in sides), strict=True):
        one, other = (part.view(BITS[part.itemsize]) for part in (one, other))
        if first_row is None and not torch.equal(one, other):
            rows = (row for row in range(len(one)) if not torch.equal(one[row], other[row]))
            first_row = start + next(rows)
        report(one.nbytes)
    if first_row is None:
        return job.name, ""
    digests = [f"sha256 {_digest(side, job)[:16]} in {side.path}" for side in sides]
    return job.name, f"{job.name} differs, first in row {first_row}: {' and '.join(digests)}"


def _digest(side: Source, job: CompareJob) -> str:
    digest = hashlib.sha256()
    for _, part in slabs(side, job.name, job.budget):
        digest.update(part.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def describe(arguments: CheckpointArguments) -> str:
    """Return a summary: one line per key or tensor; of a Hugging Face folder only the first layer."""
    source = open_source(arguments)
    _check_template(arguments.template, source)
    total = sum(prod(shape) * source.dtypes[name].itemsize for name, shape in source.shapes.items())
    elements = sum(map(prod, source.shapes.values()))
    lines = [
        f"{source.path}: {source.kind}",
        (
            f"model      {source.arch.model_type}, {source.head} head, {source.arch.num_layers} layers, "
            f"{elements:,} parameters{', tied' if source.arch.tied else ''}"
        ),
        (
            f"weights    {total:,} bytes in {len(source.shapes)} Hugging Face tensors of "
            f"{', '.join(sorted({str(d).removeprefix('torch.') for d in source.dtypes.values()}))}"
        ),
        f"files      {len(source.source_files)}",
    ]
    if isinstance(source, MegatronCheckpoint):
        for keys, what in (
            (source.training_keys, "training state, not read"),
            (source.extra_keys, "unknown, left out"),
        ):
            lines += [f"{what}: {len(keys)} keys, such as {keys[0]}"] if keys else []
        lines += [
            f"  {key:<60}{str(list(tensor.full_shape)):<24}{len(source.chunks[key])} chunks"
            for key, tensor in source.tensors.items()
        ]
    else:
        lines += [
            f"  {name:<60}{str(list(shape)):<24}{source.dtypes[name]}"
            for name, shape in source.shapes.items()
            if ".layers." not in name or ".layers.0." in name
        ]
    return "\n".join(lines)


@lru_cache(maxsize=4)
def _opened(arguments: CheckpointArguments) -> Source:
    return open_source(arguments)

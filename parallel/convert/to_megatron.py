"""Conversion of a Hugging Face folder to a distributed checkpoint that Megatron-Core loads under any layout.

DST/latest_checkpointed_iteration.txt   "release", as Megatron-LM's tracker file
DST/release/                            .metadata, metadata.json, common.pt, __0_0.distcp, ...
DST/hf/                                 config.json and tokenizer of the source
"""

import hashlib
import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.utils.serialization import config

from parallel.checkpoint.metadata import write_metadata
from parallel.checkpoint.sealed import torch_save
from parallel.convert.hugging_face import HuggingFace
from parallel.convert.journal import DigestedFile, Journal
from parallel.convert.keys import GlobalTensor, Spec, extra_states, global_tensors
from parallel.convert.megatron_checkpoint import CONFIG, HF_FOLDER, TRACKER
from parallel.convert.staging import conversion_of, staged
from parallel.convert.workers import Budget, run_jobs
from parallel.weights.architecture import Architecture
from parallel.weights.rules import Head
from parallel.weights.writing import carry_files

RELEASE = "release"


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Rows of one layer of a global tensor, written as one chunk."""

    key: str
    layer: int
    rows: tuple[int, int]


@dataclass(frozen=True, slots=True)
class DistcpJob:
    """One file to write."""

    source: Path
    path: Path
    chunks: tuple[ChunkPlan, ...]
    objects: tuple[str, ...] = ()


def convert(source: Path, target: Path, *, spec: Spec, budget: Budget, file_bytes: int) -> None:
    """Write `target`, which appears when complete; an interrupted run is continued.

    Args:
        spec: which `_extra_state` objects to write; the weights are the same.
        file_bytes: target size of a file.

    Raises:
        ValueError: the source is not a folder of a supported model, parts of a tensor differ in dtype, or
            `target` is in use.
    """
    folder = HuggingFace(source)
    tensors = global_tensors(folder.arch, folder.head)
    dtypes = {key: _dtype(tensor, folder) for key, tensor in tensors.items()}
    files = list(_files(tensors, dtypes, budget, file_bytes))
    with staged(target) as scratch:
        journal = Journal(scratch, conversion_of(folder, what="hf-to-mcore", spec=spec, plan=_digest(files)))
        release = scratch / RELEASE
        release.mkdir(exist_ok=True)
        names = [f"{RELEASE}/__0_{number}.distcp" for number in range(len(files))]
        objects = [
            tuple(extra_states(folder.arch, spec)) if number == 0 else () for number in range(len(files))
        ]
        jobs = [
            DistcpJob(folder.path, scratch / name, tuple(file), o)
            for name, file, o in zip(names, files, objects)
            if name not in journal.finished
        ]
        total = sum(_chunk_bytes(chunk, tensors, dtypes) for job in jobs for chunk in job.chunks)
        for entry in run_jobs(
            write_distcp, jobs, workers=budget.workers, total_bytes=total, title="hf-to-mcore"
        ):
            journal.add({**entry, "name": f"{RELEASE}/{entry['name']}"})
        entries = [entry for name in names for entry in journal.finished[name]["entries"]]
        carry_files(folder.path, scratch / HF_FOLDER)
        write_metadata(
            release, {key: (dtypes[key], tensor.full_shape) for key, tensor in tensors.items()}, entries
        )
        with (release / "common.pt").open("wb") as file:
            torch_save(common_state(folder.arch, folder.head, dtypes), file)
        (release / CONFIG).write_text(
            json.dumps(
                {
                    "sharded_backend": "torch_dist",
                    "sharded_backend_version": 1,
                    "common_backend": "torch",
                    "common_backend_version": 1,
                }
            )
        )
        (scratch / TRACKER).write_text(RELEASE)
        journal.remove()


def write_distcp(job: DistcpJob, report: Callable[[int], object]) -> dict[str, Any]:
    """Write one file chunk by chunk, and return its entry for the journal and the table."""
    folder, tensors, dtypes = _opened(job.source)
    file, entries = DigestedFile(job.path), []

    def save(content, key: str, offset=None, shape=None) -> None:
        start = file.position
        # torch.load checks no CRC, and computing them takes longer than writing
        with config.patch("save.compute_crc32", False):  # pyright: ignore[reportAttributeAccessIssue]
            torch_save(content, cast(IO[bytes], file))
        entries.append(
            {
                "key": key,
                "offset": offset,
                "shape": shape,
                "file": job.path.name,
                "start": start,
                "length": file.position - start,
            }
        )

    for key in job.objects:
        save([None], key)
    for chunk in job.chunks:
        tensor = tensors[chunk.key]
        matrix = read_rows(folder, tensor, chunk.layer, chunk.rows, dtypes[chunk.key])
        leading = (1,) if tensor.stacked else ()
        shape = (*leading, len(matrix), *tensor.shape[1:])
        save(
            matrix.view(shape),
            chunk.key,
            (*((chunk.layer,) if tensor.stacked else ()), chunk.rows[0], *(0 for _ in tensor.shape[1:])),
            shape,
        )
        report(matrix.nbytes)
        del matrix  # before the next allocation
    return file.complete() | {"entries": entries}


def read_rows(
    folder: HuggingFace, tensor: GlobalTensor, layer: int, rows: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return rows of one layer of a global tensor, [rows, columns]; padding is zero."""
    matrix = torch.empty(rows[1] - rows[0], tensor.cols, dtype=dtype)
    matrix[max(0, tensor.needed_rows - rows[0]) :] = 0
    for block in tensor.blocks[layer]:
        top, bottom = max(rows[0], block.row), min(rows[1], block.row + block.rows[1] - block.rows[0])
        if top < bottom:
            first = block.rows[0] + top - block.row
            folder.read(block.tensor, first, first + bottom - top, matrix[top - rows[0] : bottom - rows[0]])
    return matrix


def common_state(arch: Architecture, head: Head, dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
    """Return the state that Megatron-LM saves with the tensors; it loads no checkpoint without `args`.

    `content_metadata` describes the keys (layers stacked, `linear_fc1` in one), which newer versions read.
    """
    args = dict(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.intermediate_size,
        num_attention_heads=arch.num_heads,
        group_query_attention=arch.num_kv_heads != arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        max_position_embeddings=arch.max_positions,
        padded_vocab_size=-(-arch.vocab_size // 64) * 64,
        position_embedding_type="rope",
        rotary_base=int(arch.rope_theta),
        normalization="RMSNorm",
        norm_epsilon=arch.norm_eps,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        untie_embeddings_and_output_weights=not (arch.tied and head == "lm"),
        bf16=torch.bfloat16 in dtypes.values(),
        fp16=torch.float16 in dtypes.values(),
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        ckpt_format="torch_dist",
        no_save_optim=True,
        no_save_rng=True,
    )
    content = {"singleton_local_shards": False, "non_homogeneous_layers": False}
    return {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 0, "content_metadata": content}


@lru_cache(maxsize=1)
def _opened(source: Path):
    folder = HuggingFace(source)
    tensors = global_tensors(folder.arch, folder.head)
    return folder, tensors, {key: _dtype(tensor, folder) for key, tensor in tensors.items()}


def _dtype(tensor: GlobalTensor, folder: HuggingFace) -> torch.dtype:
    """Return the dtype of a global tensor, which all its Hugging Face tensors must have."""
    names = [block.tensor for blocks in tensor.blocks for block in blocks]
    first = folder.dtypes[names[0]]
    if other := next((name for name in names if folder.dtypes[name] != first), None):
        remedy = "save the model in one dtype first"
        raise ValueError(
            f"{other} in {folder.path} is {folder.dtypes[other]} and {names[0]} is {first}; Megatron keeps "
            f"both in {tensor.key}, {remedy}"
        )
    return first


def _files(
    tensors: dict[str, GlobalTensor], dtypes: dict[str, torch.dtype], budget: Budget, file_bytes: int
) -> Iterator[list[ChunkPlan]]:
    """Yield the chunks of each file, layer by layer.

    The files are about equally large, so that processes finish together.
    """
    chunks = list(_chunks(tensors, dtypes, budget))
    ends = list(accumulate(_chunk_bytes(chunk, tensors, dtypes) for chunk in chunks))
    count = -(-ends[-1] // file_bytes)
    for _, file in groupby(zip(chunks, [0, *ends]), key=lambda item: item[1] * count // ends[-1]):
        yield [chunk for chunk, _ in file]


def _digest(files: list[list[ChunkPlan]]) -> str:
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _chunks(
    tensors: dict[str, GlobalTensor], dtypes: dict[str, torch.dtype], budget: Budget
) -> Iterator[ChunkPlan]:
    ordered = sorted(
        (
            (layer, number, tensor)
            for number, tensor in enumerate(tensors.values())
            for layer in range(tensor.layers)
        ),
        key=lambda item: item[:2],
    )
    for layer, _, tensor in ordered:
        step = budget.rows(tensor.cols * dtypes[tensor.key].itemsize, tensor.key)
        for start in range(0, tensor.rows, step):
            yield ChunkPlan(tensor.key, layer, (start, min(tensor.rows, start + step)))


def _chunk_bytes(chunk: ChunkPlan, tensors: dict[str, GlobalTensor], dtypes: dict[str, torch.dtype]) -> int:
    return (chunk.rows[1] - chunk.rows[0]) * tensors[chunk.key].cols * dtypes[chunk.key].itemsize

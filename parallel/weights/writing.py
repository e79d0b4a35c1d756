"""Writers of Hugging Face folders: every file appears under its name only when complete."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel.weights.architecture import read_config
from parallel.weights.files import INDEX

PARTIAL = ".partial"  # end of the name of a file that is not complete
# Files of a model other than its weights and config.json.
COMPANIONS = (
    *(
        "generation_config.json",
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template*",
    ),
    *("vocab.*", "merges.txt", "spiece.model", "tekken.json"),
)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one weight file atomically: it appears under its name only when complete."""
    with _complete(Path(path)) as partial:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            partial,
            metadata={"format": "pt"},
        )


def write_index(folder: Path, file_of: Mapping[str, str], total_size: int) -> None:
    """Write the index of a folder with several weight files.

    Args:
        file_of: file name of each tensor.
        total_size: bytes of all tensors together.
    """
    write_json(
        Path(folder) / INDEX,
        {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(file_of.items()))},
    )


def carry_files(
    source_folder: str | Path, target_folder: str | Path, *, config: Mapping[str, Any] | None = None
) -> None:
    """Copy a model's files other than weights; config.json (or `config`) comes last.

    Files that killed writers of the folder have left are removed.
    """
    source, target = Path(source_folder), Path(target_folder)
    target.mkdir(parents=True, exist_ok=True)
    for left in target.glob(f".*{PARTIAL}"):
        left.unlink()
    for path in sorted({path for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()}):
        if path.resolve() != (target / path.name).resolve():
            with _complete(target / path.name) as partial:
                shutil.copyfile(path, partial)
    write_json(target / "config.json", read_config(source) if config is None else config)


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a config.json that gives this dtype under each of its keys for it."""
    name = str(dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, name)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as JSON atomically: the file appears under its name only when complete."""
    with _complete(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")  # ASCII: half a surrogate is no UTF-8


def deal_into_files(sizes: Mapping[str, int], file_bytes: int) -> list[list[str]]:
    """Return the tensor names of each file: files are filled one after the other in the model's order.

    A tensor larger than `file_bytes` gets a file of its own.

    Args:
        sizes: bytes of each tensor.
        file_bytes: the largest size of a file.
    """
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= size
    return files


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `path` at the end or removed after an error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # a power failure leaves no empty file of this name
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)

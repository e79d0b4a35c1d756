"""Output folder that is written under another name and renamed when complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel.checkpoint.folders import sync
from parallel.weights.architecture import Architecture
from parallel.weights.rules import Head


class Source(Protocol):
    """Source of weights: a folder of either kind."""

    kind: str
    path: Path
    config_folder: Path
    arch: Architecture
    head: Head
    shapes: dict[str, tuple[int, ...]]  # of the Hugging Face tensors, by name
    dtypes: dict[str, torch.dtype]

    @property
    def source_files(self) -> list[Path]: ...

    def read(self, name: str, start: int, stop: int, out: Tensor) -> None: ...


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield `target`.partial, which is renamed to `target` at the end.

    After an error or a kill it stays, and the next run continues with it.

    Raises:
        ValueError: `target` is there, and is no empty folder, or one that cannot be replaced.
    """
    target = Path(target).absolute()
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} exists already; remove it or name another folder")
    target = target.resolve()  # a link stays, and the work is on the disk of its folder
    if os.path.ismount(target):
        raise ValueError(f"{target} is a mount point, which cannot be replaced; name a folder in it")
    scratch = target.with_name(target.name + ".partial")
    yield scratch
    for written in (scratch, *scratch.rglob("*")):  # a power failure leaves no folder of empty files
        sync(written)
    os.replace(scratch, target)


def conversion_of(source: Source, **options: Any) -> dict[str, Any]:
    """Return the identity of a conversion: the current state of the source's files, and the options."""
    files = [*source.source_files, source.config_folder / "config.json"]
    stats = [(str(path.resolve()), path.stat()) for path in files]
    return {"files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats], **options}

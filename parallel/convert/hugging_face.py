"""A Hugging Face folder as a source of rows, and a row-by-row writer of safetensors files."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel.convert.open_files import OpenFiles
from parallel.weights.architecture import read_architecture
from parallel.weights.files import INDEX, SINGLE, CheckpointFolder
from parallel.weights.rules import Head, hf_shapes
from parallel.weights.values import check_tied

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HuggingFace:
    """An open folder, checked against its config.json; its tensors are read by rows.

    Raises:
        ValueError: the folder, a file or a tensor is missing, broken, unknown, quantised or of another shape,
            or a tied model has a separate head.
    """

    kind = "Hugging Face folder"

    def __init__(self, path: Path):
        self.path = self.config_folder = Path(path)
        self.arch = read_architecture(self.path)
        with CheckpointFolder(self.path) as folder:
            self.head: Head = (
                "token"
                if "score.bias" in folder.names
                else "sequence"
                if "score.weight" in folder.names
                else "lm"
            )
            self.shapes = hf_shapes(self.arch, self.head)
            folder.check_shapes(self.shapes)
            if self.head == "lm" and self.arch.tied:
                check_tied(folder)
            self.dtypes = {name: DTYPES[folder.dtype(name)] for name in self.shapes}
        self._files = OpenFiles(self.path)
        self._starts = self._locate()

    @property
    def source_files(self) -> list[Path]:
        names = {file for file, _ in self._starts.values()}
        return [self.path / name for name in sorted(names)]

    def read(self, name: str, start: int, stop: int, out: Tensor) -> None:
        """Read these rows into `out` [stop - start, columns], contiguous and of the tensor's own dtype."""
        file, first = self._starts[name]
        self._files.read_into(file, first + start * (out.nbytes // max(1, stop - start)), out)

    def _locate(self) -> dict[str, tuple[str, int]]:
        """Return the file and first byte of each tensor; `CheckpointFolder` has validated the headers."""
        single = (self.path / SINGLE).is_file()
        weight_map = (
            dict.fromkeys(self.shapes, SINGLE)
            if single
            else json.loads((self.path / INDEX).read_text())["weight_map"]
        )
        headers = {}
        for file in {weight_map[name] for name in self.shapes}:
            length = int.from_bytes(self._files.bytes_at(file, 0, 8), "little")
            headers[file] = (8 + length, json.loads(self._files.bytes_at(file, 8, length)))
        return {
            name: (file := weight_map[name], headers[file][0] + headers[file][1][name]["data_offsets"][0])
            for name in self.shapes
        }


class Writable(Protocol):
    def write(self, data: Any, /) -> int: ...


def write_safetensors(
    file: Writable, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], rows_of: Iterator[Tensor]
) -> None:
    """Write one file: its header, then the data that `rows_of` yields.

    Args:
        tensors: name, dtype and shape, in the order of the header.
        rows_of: contiguous parts of the tensors, in the same order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of eight
    file.write(len(text).to_bytes(8, "little") + text)
    for part in rows_of:
        file.write(part.view(-1).view(torch.uint8).numpy().data)
        at -= part.nbytes
    assert at == 0, f"{at} bytes of the header's tensors were not written"

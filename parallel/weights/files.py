"""Readers of Hugging Face folders: rectangles of tensors by byte range."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel.runtime.refusal import short_repr
from parallel.weights.architecture import read_config
from parallel.weights.json_files import (
    is_count,
    is_file_name,
    parse_object,
    read_object,
    reason_of,
    shown_key,
)
from parallel.weights.remote.arriving import arriving, stored
from parallel.weights.shard import Block

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}
OLD_BUFFER = ".rotary_emb.inv_freq"  # recomputed by all readers
HEAD = "lm_head.weight"  # not used by a tied model or a value model
SUFFIX = ".safetensors"
MOST_HEADER_BYTES = 100_000_000  # the format's own limit
VALUE_HEAD = "score."  # if a folder lacks it, the model keeps its initial values


class CheckpointFolder:
    """An open Hugging Face folder with one or more safetensors files, checked before tensors are read.

    `read` reads only the bytes that it returns. Also a context manager that closes the files. Weights of a
    URL (`remote`) that have not arrived yet are fetched as they are read.

    Raises:
        ValueError: the folder, its config.json or a weight file is missing, a file is truncated or garbled,
            or the index and the files do not hold the same tensors, each once. The message names the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        read_config(self.path)
        weight_map = _weight_map(self.path)
        self._files = (
            {name: _open(self.path / name) for name in sorted(set(weight_map.values()))}
            if weight_map
            else {SINGLE: _open(self.path / SINGLE)}
        )
        present = {name: set(file.keys()) for name, file in self._files.items()}
        if weight_map:
            _check_index(self.path / INDEX, weight_map, present)
        self._file_of = weight_map or {tensor: SINGLE for tensor in present[SINGLE]}
        paths = {name: self.path / name for name in self._files}
        # Of files that still arrive: the file, and each tensor's bytes in it.
        self._arriving = {
            name: (file, _ranges(path))
            for name, path in paths.items()
            if (file := arriving(path)) is not None
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        for arrives, _ in self._arriving.values():
            with contextlib.suppress(ValueError) if any(error) else contextlib.nullcontext():
                arrives.forget()
        for file in self._files.values():
            file.__exit__(*error)

    @property
    def is_arriving(self) -> bool:
        """Whether weights are fetched from a URL as they are read."""
        return bool(self._arriving)

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    @property
    def file_names(self) -> set[str]:
        """Names of the files that hold the weights, and of their index if it counts."""
        return {*self._files, *(() if SINGLE in self._files else (INDEX,))}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return safetensors' name of the dtype: "F32", "BF16", ..."""
        return self._slice(name).get_dtype()

    def file(self, name: str) -> Path:
        """Return the path of the file that holds the tensor."""
        return self.path / self._file_of[name]

    def rows(self, name: str, at_most: int = 1 << 24) -> Iterator[Tensor]:
        """Yield the tensor as stored, in parts of whole rows with about `at_most` elements."""
        source = self._slice(name)
        shape = source.get_shape()
        step = max(1, at_most // max(1, prod(shape[1:])))
        for start in range(0, shape[0], step):
            self._await(name, start, min(start + step, shape[0]))
            yield source[start : start + step]

    def read(self, block: Block, dtype: torch.dtype) -> Tensor:
        """Return the rectangle as a matrix [rows, cols] of `dtype` on the CPU.

        `block.row` and `block.col` are ignored.

        Raises:
            ValueError: the tensor is not in the folder, not of a floating dtype, or smaller than the
                rectangle.
        """
        if block.tensor not in self._file_of:
            raise ValueError(
                f"{self.path} has no tensor {block.tensor}; its weights do not belong to its config.json"
            )
        (top, bottom), (left, right) = block.rows, block.cols
        source = self._slice(block.tensor)
        shape = source.get_shape()
        rows, cols = (*shape, 1)[:2]
        if len(shape) > 2 or bottom > rows or right > cols:
            raise ValueError(
                f"{block.tensor} in {self.path} has shape {shape}, too small for rows {top}-{bottom} and"
                f" columns {left}-{right} of config.json's model"
            )
        if source.get_dtype() not in FLOATS:
            raise ValueError(
                f"{block.tensor} in {self.path} is of dtype {source.get_dtype()}; quantised weights are not"
                " supported, convert them to bfloat16"
            )
        self._await(block.tensor, top, bottom)
        matrix = source[top:bottom, left:right] if len(shape) == 2 else source[top:bottom][:, None]
        return matrix.to(dtype)

    def check_shapes(
        self, expected: Mapping[str, tuple[int, ...]], *, optional: Collection[str] = ()
    ) -> None:
        """Compare the folder's tensors with those that its configuration describes (`rules.hf_shapes`).

        Args:
            optional: tensors that may be absent, such as a value head that is not trained yet.

        Raises:
            ValueError: lists the tensors that are missing, unknown, of another shape, or not of a floating
                dtype.
        """
        missing = [name for name in expected if name not in self._file_of and name not in optional]
        shapes = {
            name: (self.shape(name), tuple(shape))
            for name, shape in expected.items()
            if name in self._file_of
        }
        wrong = [
            _mismatch(name, stored, wanted) for name, (stored, wanted) in shapes.items() if stored != wanted
        ]
        extra = sorted(
            name
            for name in self._file_of
            if name not in expected and name != HEAD and not name.endswith(OLD_BUFFER)
        )
        dtypes = {name: self.dtype(name) for name in expected if name in self._file_of}
        quantised = [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
        by_kind = {
            "missing": missing,
            "shapes": wrong,
            "unknown": list(map(shown_key, extra)),
            "quantised (convert them to bfloat16)": quantised,
        }
        if problems := [f"{kind}: {listed(names)}" for kind, names in by_kind.items() if names]:
            raise ValueError(
                f"the weights in {self.path} do not belong to its config.json:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
            )

    def announce(self, rows: Iterable[tuple[str, int, int]]) -> None:
        """Say which rows [top, bottom) of which tensors will be read, in that order: they begin to arrive.

        Tensors that the folder lacks are left out.
        """
        for name, top, bottom in rows if self._arriving else ():
            if found := self._arriving.get(self._file_of.get(name, "")):
                file, ranges = found
                file.ask(*self._bytes_of(name, ranges[name], top, bottom))

    def _await(self, name: str, top: int, bottom: int) -> None:
        """Return once these rows of a tensor are in its file."""
        if found := self._arriving.get(self._file_of[name]):
            file, ranges = found
            file.fetch(*self._bytes_of(name, ranges[name], top, bottom))

    def _bytes_of(self, name: str, place: tuple[int, int], top: int, bottom: int) -> tuple[int, int]:
        start, end = place
        row_bytes = (end - start) // max(1, self.shape(name)[0])
        return start + top * row_bytes, start + bottom * row_bytes

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)


def has_weights(folder: str | Path) -> bool:
    """Return whether a folder holds weights or an index of them."""
    return any(stored(Path(folder) / name).exists() for name in (SINGLE, INDEX))


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor from the index; empty for a single file, which has no index."""
    if stored(folder / SINGLE).is_file():
        return {}
    path = folder / INDEX
    if not path.is_file():
        if broken := [name for name in (SINGLE, INDEX) if _is_broken_link(folder / name)]:
            raise ValueError(
                f"{folder} lacks {_named(folder, broken)}; copy it again, with what its links name"
            )
        others = sorted(
            file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern)
        )
        hint = f" (found {listed(others)}: save the model with transformers as safetensors)" if others else ""
        raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}{hint}")
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{path} is not an index of safetensors files; copy it again from its source")
    if not weight_map:
        raise ValueError(f"{path} names no tensors; copy it again from its source")
    files = sorted(set(weight_map.values()))
    if wrong := [short_repr(name) for name in files if not is_file_name(name, SUFFIX)]:
        raise ValueError(
            f"{path} names {listed(wrong)}: only safetensors files of its own folder are read; name one,"
            " without a folder"
        )
    if missing := [name for name in files if not stored(folder / name).is_file()]:
        raise ValueError(
            f"{folder} lacks weight files that its index names: {_named(folder, missing)}; copy them again"
            " from their source"
        )
    return weight_map


def _is_broken_link(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _named(folder: Path, names: Iterable[str]) -> str:
    """List files, and where those lead that are links to nothing."""
    return listed(
        [
            f"{name} (a link to {(folder / name).readlink()}, which does not exist)"
            if _is_broken_link(folder / name)
            else name
            for name in names
        ]
    )


def _check_index(path: Path, weight_map: Mapping[str, str], stored: Mapping[str, set[str]]) -> None:
    """Check that each tensor of the index is in its file, and that the files hold no other tensors.

    Readers differ in how they treat other tensors.
    """
    if wrong := [
        f"{shown_key(tensor)} in {name}" for tensor, name in weight_map.items() if tensor not in stored[name]
    ]:
        raise ValueError(
            f"{path} names tensors that their files do not hold: {listed(wrong)}; copy the folder again from"
            " its source"
        )
    if stray := [
        f"{shown_key(tensor)} in {name}"
        for name, tensors in stored.items()
        for tensor in sorted(tensors)
        if not tensor.endswith(OLD_BUFFER) and weight_map.get(tensor) != name
    ]:
        raise ValueError(
            f"{path} leaves out tensors that its files hold, or names another file for them:"
            f" {listed(stray)}; copy the folder again from its source"
        )


def _open(path: Path) -> Any:
    """Check a safetensors file's length against its header (8 bytes of length, JSON, data) and open it."""
    again = "copy it again from its source"
    if (file := arriving(path)) is not None:
        file.fetch_header(MOST_HEADER_BYTES)
    path = stored(path)
    try:
        actual = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = file.read(header_bytes) if header_bytes <= min(actual - 8, MOST_HEADER_BYTES) else b""
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); make it readable") from None
    if not header:
        raise ValueError(
            f"{path} is truncated or no safetensors file: its header should take {header_bytes} bytes and the"
            f" file has {actual}; {again}"
        )
    try:
        table = parse_object(header)
        expected = (
            8
            + header_bytes
            + max((_end(entry) for name, entry in table.items() if name != "__metadata__"), default=0)
        )
    except ValueError as error:
        raise ValueError(
            f"{path} is garbled: its header of {header_bytes} bytes is not a table of tensors"
            f" ({reason_of(error)}); {again}"
        ) from None
    if actual != expected:
        raise ValueError(
            f"{path} is truncated or garbled: its header describes {short_repr(expected)} bytes and the "
            f"file has {actual}; {again}"
        )
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is garbled ({reason_of(error)}); {again}") from None


def _ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Return the first byte and the one behind the last of each tensor of a checked file."""
    with stored(path).open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        table = parse_object(file.read(header_bytes))
    offsets = {name: entry["data_offsets"] for name, entry in table.items() if name != "__metadata__"}
    return {
        name: (8 + header_bytes + start, 8 + header_bytes + end) for name, (start, end) in offsets.items()
    }


def _end(entry: Any) -> int:
    """Return the end offset of a tensor's bytes, from its entry in a header."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise ValueError(f"it describes a tensor as {short_repr(entry)}")
    return offsets[1]


def _mismatch(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    reason = ""
    if stored[:1] != wanted[:1] and name.endswith(("embed_tokens.weight", "lm_head.weight")):
        reason = f" (vocab_size={wanted[0]}, but {stored[0] if stored else 0} rows)"
    elif stored[:1] != wanted[:1] and name.startswith(VALUE_HEAD):
        reason = " (a value head has one label)"
    return f"{name} is {list(stored)} and config.json describes {list(wanted)}{reason}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Join names, the first ones of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

"""`.metadata` of torch.distributed.checkpoint: a pickle, read with an allow-list of its record types."""

import pickle
from collections import OrderedDict
from enum import Enum
from pathlib import Path, PurePosixPath

import torch
from torch.distributed._shard.sharded_tensor import metadata as shard_metadata
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

FILE = ".metadata"


class _Ignored:
    """Placeholder for plans that writers keep in the file."""

    def __init__(self, *_, **__): ...

    def __setstate__(self, state): ...


def _member(kind: type, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError("getattr of something else than an enumeration")
    return kind[name]


_RECORDS = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
    "StorageMeta",
)
_PLANS = ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")
ADMITTED = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _RECORDS},
    **{(filesystem.__name__, name): getattr(filesystem, name) for name in ("_StorageInfo", "_StoragePrefix")},
    **{(planner.__name__, name): _Ignored for name in _PLANS},
    (planner.__name__, "WriteItemType"): planner.WriteItemType,
    **{
        (shard_metadata.__name__, name): getattr(shard_metadata, name)
        for name in ("TensorProperties", "MEM_FORMAT_ENCODING")
    },
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"): _Ignored,
    **{
        ("torch", name): getattr(torch, name)
        for name in dir(torch)
        if isinstance(getattr(torch, name), torch.dtype | torch.layout)
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: {"torch.strided": torch.strided}[name],
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "getattr"): _member,  # Python 3.11's pickling of enumeration members
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PurePosixPath,
}


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that resolves the names of `ADMITTED` and no others."""

    def find_class(self, module: str, name: str):
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which such a file has no use for")
        return ADMITTED[module, name]


def read_metadata(folder: Path) -> Metadata:
    """Read the checkpoint's table of tensors and objects, constructing nothing but its record types.

    Raises:
        ValueError: no such file, another kind of pickle, one that names anything else, or invalid records.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; the checkpoint is incomplete, copy it again with its hidden files"
        )
    try:
        with path.open("rb") as file:
            found = RestrictedUnpickler(file).load()
        _check(found)
    except Exception as error:  # a broken pickle raises nearly anything
        raise ValueError(
            f"{path} is not the table of a distributed checkpoint ({error or type(error).__name__}); copy it "
            "again from its source"
        ) from None
    return found


def read_tensor_table(folder: Path) -> Metadata:
    """Read a table that has tensors only; torch's reader would unpickle objects without a check.

    Raises:
        ValueError: as `read_metadata`, or the table has objects.
    """
    found = read_metadata(folder)
    objects = [
        key
        for key, entry in found.state_dict_metadata.items()
        if isinstance(entry, metadata.BytesStorageMetadata)
    ]
    if objects:
        raise ValueError(
            f"{folder / FILE} is refused: it holds objects ({objects[0][:100]!r}), and a run saves none there"
        )
    return found


def _check(found: Metadata) -> None:
    """Raise some exception if a record contains a value that no writer puts there."""
    if not (
        isinstance(found, Metadata)
        and isinstance(found.state_dict_metadata, dict)
        and isinstance(found.storage_data, dict)
    ):
        raise TypeError("it holds something else")
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(
            entry, TensorStorageMetadata | metadata.BytesStorageMetadata
        ):
            raise TypeError("an entry is neither of a tensor nor of an object")
        if isinstance(entry, TensorStorageMetadata):
            places = [(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
            ranks = {len(_sizes(entry.size)), *(len(part) for place in places for part in place)}
            if not isinstance(entry.properties.dtype, torch.dtype) or len(ranks) > 1:
                raise TypeError(f"{key[:100]!r} is no tensor")
    for index, info in found.storage_data.items():
        path = PurePosixPath(info.relative_path)
        if not isinstance(index.fqn, str) or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{str(path)[:100]!r} lies outside the folder")
        _sizes((info.offset, info.length))


def _sizes(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or any(
        type(number) is not int or not 0 <= number < 2**63 for number in numbers
    ):
        raise TypeError("a size or an offset is no number")
    return numbers


def write_metadata(
    folder: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], entries: list[dict]
) -> None:
    """Write the table.

    Args:
        tensors: dtype and shape by key, in the order of the table.
        entries: one per chunk or object: "key", "offset" and "shape" (None for an object), "file", "start",
            "length".
    """
    state: dict = {
        key: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
        for key, (dtype, shape) in tensors.items()
    }
    storage = {}
    for entry in entries:
        key, offset = entry["key"], entry["offset"]
        if offset is None:
            state[key] = metadata.BytesStorageMetadata()
        else:
            state[key].chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(entry["shape"])))
        storage[MetadataIndex(key, offset)] = filesystem._StorageInfo(
            entry["file"], entry["start"], entry["length"]
        )
    table = Metadata(state_dict_metadata=state, storage_data=storage, storage_meta=metadata.StorageMeta())
    with (folder / FILE).open("wb") as file:
        pickle.dump(table, file, protocol=4)

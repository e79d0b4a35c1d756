"""One chunk of a .distcp file: a tensor written by `torch.save`, whose data is located without loading it."""

import io
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass

import torch

from parallel.convert.open_files import OpenFiles

_STORAGES = {
    name: dtype
    for name, dtype in dict(
        FloatStorage=torch.float32,
        DoubleStorage=torch.float64,
        HalfStorage=torch.float16,
        BFloat16Storage=torch.bfloat16,
    ).items()
}
_LOCAL_HEADER_BYTES = 30  # of a zip member, before its name and extra field


@dataclass(frozen=True, slots=True)
class ChunkData:
    """Location of a chunk's elements in its file, row-major and contiguous."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file


class _Section(io.RawIOBase):
    """Byte range of a file, as a readable and seekable file."""

    def __init__(self, files: OpenFiles, name: str, start: int, length: int):
        self._files, self._name, self._start, self._length, self._at = files, name, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = self._files.bytes_at(self._name, self._start + self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler for the description of one dense tensor; refuses anything else that a pickle may contain."""

    def find_class(self, module: str, name: str):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, stride, *_: (storage, offset, tuple(size), tuple(stride))
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid):
        _, dtype, member, _, _ = pid
        return dtype, str(member)


def locate(files: OpenFiles, name: str, start: int, length: int) -> ChunkData:
    """Locate the elements of the chunk in these bytes of the file, reading only a few kilobytes.

    Raises:
        ValueError: the bytes are not a dense floating-point tensor that `torch.save` wrote.
    """
    try:
        with zipfile.ZipFile(_Section(files, name, start, length)) as archive:
            pickled = next(member for member in archive.infolist() if member.filename.endswith("data.pkl"))
            description = files.bytes_at(name, _content(files, name, start, pickled), pickled.file_size)
            (dtype, member), offset, shape, stride = _TensorUnpickler(io.BytesIO(description)).load()
            info = archive.getinfo(pickled.filename.removesuffix("data.pkl") + f"data/{member}")
            at = _content(files, name, start, info)
        if min(offset, *shape, *stride) < 0:
            raise ValueError("a size below 0")
        expected = torch.empty(shape, device="meta")
    except Exception as error:  # a broken archive or pickle raises nearly anything
        raise ValueError(
            f"{files.folder / name} has no tensor at bytes {start}-{start + length} "
            f"({error or type(error).__name__}); copy it again from its source"
        ) from None
    if (
        stride != expected.stride()
        and expected.numel() > 1
        or info.compress_type != zipfile.ZIP_STORED
        or (offset + expected.numel()) * dtype.itemsize > info.file_size
    ):
        raise ValueError(
            f"{files.folder / name} holds a tensor at byte {start} that is not stored row by row; save the "
            "checkpoint again with Megatron-Core"
        )
    return ChunkData(dtype, shape, at + offset * dtype.itemsize)


def _content(files: OpenFiles, name: str, start: int, member: zipfile.ZipInfo) -> int:
    """Return the offset in the file of a stored member's data.

    `zipfile` would check a CRC, which `torch.save` can be configured to omit.
    """
    at = start + member.header_offset
    header = files.bytes_at(name, at, _LOCAL_HEADER_BYTES)
    return (
        at
        + _LOCAL_HEADER_BYTES
        + int.from_bytes(header[26:28], "little")
        + int.from_bytes(header[28:30], "little")
    )

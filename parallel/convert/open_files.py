"""Reads byte ranges of files directly into tensors; without mmap only the requested data is resident.

Pages are dropped from the page cache after the read: each is needed once, and its memory is reused.
"""

import os
from pathlib import Path

from torch import Tensor, uint8


class OpenFiles:
    """Files of a folder, each opened at its first read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._descriptors: dict[str, int] = {}

    def bytes_at(self, name: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes, fewer at the end of the file."""
        return os.pread(self._descriptor(name), length, offset)

    def read_into(self, name: str, offset: int, out: Tensor) -> None:
        """Fill a contiguous CPU tensor of any dtype with the bytes from `offset` on.

        Raises:
            ValueError: the file ends before the tensor is full.
        """
        view = out.view(-1).view(uint8).numpy().data
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor(name), [view[done:]], offset + done)
            if not count:
                raise ValueError(
                    f"{self.folder / name} ends at byte {offset + done}, inside a tensor; copy it again from "
                    "its source"
                )
            done += count
        os.posix_fadvise(self._descriptor(name), offset, done, os.POSIX_FADV_DONTNEED)

    def _descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            self._descriptors[name] = os.open(self.folder / name, os.O_RDONLY)
        return self._descriptors[name]

    def __del__(self):
        for descriptor in self._descriptors.values():
            os.close(descriptor)

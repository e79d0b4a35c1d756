"""Items of a data set, pickled: in memory while they are few, then in a temporary file without a name."""

import contextlib
import io
import os
import pickle
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast, overload

IN_MEMORY = 64 << 20  # bytes; more are written to a file in $TMPDIR, which ends with the process


@contextlib.contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the copy of the data in {tempfile.gettempdir()} cannot be written ({error.strerror}); "
            "set TMPDIR to a folder with more room"
        ) from None


@dataclass(frozen=True, slots=True)
class Handle:
    """Where a process has a file of items open, and where the file's description of them is."""

    process: int
    descriptor: int
    file: tuple[int, int]  # device and inode: the process may be another by now
    start: int  # bytes
    num_bytes: int


class ItemStore(Sequence):
    """A list to which items are appended, with memory that does not grow with them (8 bytes each).

    Items that are read are new objects: changing one changes nothing here.
    """

    def __init__(self):
        self._file: BinaryIO = io.BytesIO()
        self._ends = array("Q", [0])  # byte offsets
        self._is_at_end = True  # seeking flushes what is buffered

    def append(self, item: Any) -> None:
        """Add an item at the end; ValueError without room for it."""
        data = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        with _room():
            if isinstance(self._file, io.BytesIO) and self._ends[-1] + len(data) > IN_MEMORY:
                self._file = self._moved(self._file)
            if not self._is_at_end:
                self._file.seek(self._ends[-1])
            self._file.write(data)
        self._is_at_end = True
        self._ends.append(self._ends[-1] + len(data))

    def flush(self) -> None:
        """Write what is buffered; ValueError without room for it."""
        with _room():
            self._file.flush()

    def share(self, state: Any) -> Handle:
        """Write the items and `state` to the file, for `opened`; ValueError without room for it.

        Nothing can be appended from then on.
        """
        data = pickle.dumps((self._ends, state), protocol=pickle.HIGHEST_PROTOCOL)
        with _room():
            if isinstance(self._file, io.BytesIO):
                self._file = self._moved(self._file)
            self._file.seek(self._ends[-1])
            self._file.write(data)
            self._file.flush()
        self._is_at_end = False
        about = os.fstat(self._file.fileno())
        return Handle(
            os.getpid(), self._file.fileno(), (about.st_dev, about.st_ino), self._ends[-1], len(data)
        )

    @classmethod
    def opened(cls, handle: Handle) -> "tuple[ItemStore, Any] | None":
        """Return items and state that a process shares; None if it has ended or is of another host."""
        try:
            file = open(f"/proc/{handle.process}/fd/{handle.descriptor}", "rb")
        except OSError:
            return None
        about = os.fstat(file.fileno())
        if (about.st_dev, about.st_ino) != handle.file:
            file.close()
            return None
        file.seek(handle.start)
        items = cls()
        items._ends, state = pickle.loads(file.read(handle.num_bytes))
        items._file, items._is_at_end = file, False
        return items, state

    @staticmethod
    def _moved(memory: io.BytesIO) -> BinaryIO:
        """Return a file with what was in memory, at its end."""
        file = cast(BinaryIO, tempfile.TemporaryFile())
        file.write(memory.getbuffer())
        return file

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        self._file.seek(self._ends[at])
        self._is_at_end = False
        return pickle.loads(self._file.read(self._ends[at + 1] - self._ends[at]))

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

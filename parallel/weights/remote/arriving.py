"""A file of a cache folder that arrives in parts, in the order in which processes ask for them.

Beside NAME lie, until it is complete, NAME.incomplete (as long as NAME, with holes), NAME.parts (a byte for
each part: 1 once it is there) and NAME.source (where it is from). Any number of processes may fetch at once:
a lock on its byte of NAME.parts gives each part to one of them. A killed process loses the part in flight.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from parallel.runtime.refusal import short_repr
from parallel.weights.json_files import parse_object
from parallel.weights.remote.source import RemoteFile, open_source, shown

PART_BYTES = 8 << 20  # of one request; whole pages, since readers map the file
CONNECTIONS = 8  # at once, in each process
WHOLE, LOOK_AGAIN_S = -1, 0.05  # a file that comes in one stream, and how often its marks are looked at
INCOMPLETE, PARTS, SOURCE = ".incomplete", ".parts", ".source"

_opened: dict[tuple[int, int, int], "ArrivingFile"] = {}  # by process, device and inode
_listeners: list[Callable[[int], None]] = []


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process: a forked child has none of its parent's."""
    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="weights")


@contextlib.contextmanager
def telling(listener: Callable[[int], None]) -> Iterator[None]:
    """Call `listener`, in the thread that reads, with the bytes that this process has fetched since."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a file's companion."""
    return path.with_name(path.name + suffix)


def stored(path: Path) -> Path:
    """Return where the bytes of a file lie: in itself, or in its incomplete form if it still arrives."""
    incomplete = beside(path, INCOMPLETE)
    return incomplete if not path.exists() and incomplete.exists() else path


def expect(path: Path, url: str, remote: RemoteFile, *, sha256: str = "") -> None:
    """Make room for a file of which nothing has arrived; an earlier one stays until this one is complete."""
    description = {"url": url, "size": remote.size, "version": remote.version, "sha256": sha256}
    description |= {"has_ranges": remote.has_ranges, "part_bytes": PART_BYTES}
    for suffix in (SOURCE, PARTS, INCOMPLETE):
        beside(path, suffix).unlink(missing_ok=True)
    with said_in_words(path):
        for suffix, size in ((INCOMPLETE, remote.size), (PARTS, -(-remote.size // PART_BYTES))):
            with beside(path, suffix).open("wb") as file:
                file.truncate(size)
        partial = beside(path, f"{SOURCE}.{os.getpid()}")
        partial.touch(mode=0o600)  # a URL may carry a password
        partial.write_text(json.dumps(description))
        partial.replace(beside(path, SOURCE))


def arriving(path: Path) -> "ArrivingFile | None":
    """Return the file `path` if it still arrives, else None."""
    try:
        status = beside(path, INCOMPLETE).stat()
        key = (os.getpid(), status.st_dev, status.st_ino)
        if key not in _opened:
            _opened[key] = ArrivingFile(path)
        return _opened[key]
    except FileNotFoundError:  # complete, perhaps since a moment ago
        return None


@contextlib.contextmanager
def said_in_words(path: Path) -> Iterator[None]:
    """Turn errors of the cache's disk into a ValueError with the remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "its disk is full" if full else error.strerror
        raise ValueError(
            f"the cache folder {path.parent} cannot take {path.name} ({reason}); make room there, or name "
            "another folder by the environment variable VERL_MEGATRON_CACHE"
        ) from None


class ArrivingFile:
    """A file that is not complete yet."""

    def __init__(self, path: Path):
        self.path = path
        source = parse_object(beside(path, SOURCE).read_bytes())
        self._url, self.size, self._version = source["url"], source["size"], source["version"]
        self._sha256, self._has_ranges = source["sha256"], source["has_ranges"]
        self._part_bytes = source["part_bytes"]
        self._source = open_source(self._url)
        self._data = os.open(beside(path, INCOMPLETE), os.O_RDWR)
        self._parts = os.open(beside(path, PARTS), os.O_RDWR)
        self._guard = threading.Lock()
        self._asked: dict[int, Future[None]] = {}  # by part, or WHOLE
        self._arrived = 0  # bytes of which no listener knows

    def ask(self, start: int, end: int) -> None:
        """Begin to fetch the bytes [start, end), behind what was asked for before, and return at once."""
        with self._guard:
            for part in self._missing(start, end):
                key, act = (part, self._fetch_part) if self._has_ranges else (WHOLE, self._fetch_whole)
                if key not in self._asked:
                    self._asked[key] = _pool(os.getpid()).submit(act, key)

    def forget(self) -> None:
        """Give up what was asked for and has not begun, and wait for what has; errors as in `fetch`."""
        with self._guard:
            asked, self._asked = self._asked, {}
        wait([future for future in asked.values() if not future.cancel()])
        self._look_around()

    def fetch(self, start: int, end: int) -> None:
        """Return once the bytes [start, end) are there.

        Raises:
            ValueError: the server does not answer as it should, the disk is full, or the complete file is
                not the one that its checksum describes.
        """
        while missing := self._missing(start, end):
            self.ask(start, end)
            with self._guard:
                key = missing[0] if self._has_ranges else WHOLE
                future = self._asked.get(key)
            if future is None:  # it has come in between
                continue
            try:
                with contextlib.suppress(TimeoutError):
                    future.result(timeout=None if self._has_ranges else LOOK_AGAIN_S)
            finally:
                with self._guard:
                    if future.done():  # a part that failed may be asked for again
                        self._asked.pop(key, None)
            self._look_around()
        self._look_around()

    def _look_around(self) -> None:
        """Tell listeners what has arrived since the last call, and give the file its name if that was all."""
        with self._guard:
            arrived, self._arrived = self._arrived, 0
        for listener in _listeners if arrived else ():
            listener(arrived)
        if b"\0" not in os.pread(self._parts, self._count, 0):
            self._complete()

    def fetch_header(self, most_bytes: int) -> None:
        """Fetch a safetensors file's table of tensors: 8 bytes with its length, and the table."""
        self.fetch(0, min(8, self.size))
        header_bytes = int.from_bytes(os.pread(self._data, 8, 0), "little")
        if header_bytes <= min(self.size - 8, most_bytes):  # else it is garbled, as its reader says
            self.fetch(8, 8 + header_bytes)

    @property
    def _count(self) -> int:
        return -(-self.size // self._part_bytes)

    def _missing(self, start: int, end: int) -> list[int]:
        first, last = start // self._part_bytes, -(-end // self._part_bytes)
        return [part for part in range(first, last) if not self._has(part)]

    def _has(self, part: int) -> bool:
        return os.pread(self._parts, 1, part) == b"\1"

    def _fetch_part(self, part: int) -> None:
        with self._locked(part):
            if self._has(part):  # from another process
                return
            start = part * self._part_bytes
            end = min(start + self._part_bytes, self.size)
            content = self._source.read(self.path.name, start, end, version=self._version)
            self._write(start, content)
            self._mark(part)

    def _fetch_whole(self, part: int) -> None:
        """Read the file from its start, for servers without ranges, whichever part is asked for."""
        with self._locked(self._count):
            marked = 0

            def write(position: int, piece: bytes) -> None:
                nonlocal marked
                self._write(position, piece)
                arrived = position + len(piece)
                there = self._count if arrived == self.size else arrived // self._part_bytes
                for part in range(marked, there):
                    self._mark(part)
                marked = max(marked, there)

            if b"\0" in os.pread(self._parts, self._count, 0):  # else it came from another process
                self._source.copy(self.path.name, write)

    def _write(self, position: int, content: bytes) -> None:
        view = memoryview(content)
        with said_in_words(self.path):
            while view:
                written = os.pwrite(self._data, view, position)
                view, position = view[written:], position + written
        with self._guard:
            self._arrived += len(content)

    def _mark(self, part: int) -> None:
        with said_in_words(self.path):
            os.fdatasync(self._data)  # a crash of the machine must not leave a mark without its part
            os.pwrite(self._parts, b"\1", part)

    def _complete(self) -> None:
        """Give the file its name, after a look at its checksum."""
        with self._locked(self._count), said_in_words(self.path):
            incomplete = beside(self.path, INCOMPLETE)
            try:
                if incomplete.stat().st_ino != os.fstat(self._data).st_ino:
                    return  # a newer version is on its way
            except FileNotFoundError:  # another process was quicker
                return
            if self._sha256 and (digest := self._digest()) != self._sha256:
                os.pwrite(self._parts, bytes(self._count), 0)
                raise ValueError(
                    f"{shown(self._url)}/{self.path.name} has arrived with the SHA-256 {digest}, and its "
                    f"server's SHA256SUMS says {short_repr(self._sha256)}; start again to fetch it anew, "
                    "or mend the server's file"
                )
            incomplete.replace(self.path)
            for suffix in (SOURCE, PARTS):
                beside(self.path, suffix).unlink(missing_ok=True)

    def _digest(self) -> str:
        with beside(self.path, INCOMPLETE).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextlib.contextmanager
    def _locked(self, byte: int) -> Iterator[None]:
        """Hold a byte of the parts' file among processes; the system frees it when its holder ends."""
        self._lock(byte, fcntl.F_WRLCK)
        try:
            yield
        finally:
            self._lock(byte, fcntl.F_UNLCK)

    def _lock(self, byte: int, kind: int) -> None:
        # struct flock: type, whence, start, length, pid. Such a lock belongs to the open file, not to the
        # process, where the kernel would take waiting threads for a deadlock.
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
        fcntl.fcntl(self._parts, fcntl.F_OFD_SETLKW, request)

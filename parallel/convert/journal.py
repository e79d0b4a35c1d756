"""Journal of an unfinished conversion: a rerun recognises finished files by size and digest."""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = ".convert.jsonl"
READ_BYTES = 2**22


class Journal:
    """Record in the folder of the files, one line per file; locked by one process at a time.

    Args:
        conversion: source and options of the conversion; a journal of any other is refused.

    Raises:
        ValueError: the folder contains part of another conversion, or another process is using it.
    """

    def __init__(self, folder: Path, conversion: Mapping[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / NAME
        self._file = self.path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is converting into {folder}; wait for it") from None
        self._file.seek(0)
        try:
            # a kill may have truncated the last line
            whole = [line for line in self._file if line.endswith("\n")]
            lines = [json.loads(line) for line in whole]
            if not all(isinstance(line, dict) for line in lines):
                raise ValueError("a line is no object")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is not what a conversion writes ({str(error)[:200]}); remove the folder "
                f"{folder}"
            ) from None
        self._file.truncate(sum(len(line.encode()) for line in whole))
        if not lines:
            self._append({"conversion": conversion})
        elif lines[0] != {"conversion": json.loads(json.dumps(conversion))}:
            raise ValueError(
                f"{folder} holds the beginning of another conversion (other source files or options); remove "
                "the folder or finish that one"
            )
        self.finished = {entry["name"]: entry for entry in lines[1:] if self._is_whole(entry)}

    def add(self, entry: dict[str, Any]) -> None:
        """Record a finished file: its "name", "bytes", "sha256" and whatever else a rerun needs."""
        self._append(entry)
        # as a rerun would read it, so that files derived from it have the same bytes
        self.finished[entry["name"]] = json.loads(json.dumps(entry))

    def remove(self) -> None:
        self._file.close()
        self.path.unlink()

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _is_whole(self, entry: Mapping[str, Any]) -> bool:
        name = entry.get("name")
        path = self.folder / name if isinstance(name, str) else self.folder
        return (
            path.is_file()
            and path.stat().st_size == entry.get("bytes")
            and digest_of(path) == entry.get("sha256")
        )


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


class DigestedFile:
    """File written sequentially, which gets its final name when complete."""

    def __init__(self, path: Path):
        self.path, self._partial = path, path.with_name(path.name + ".part")
        self._file, self._digest, self.position = self._partial.open("wb"), hashlib.sha256(), 0

    def write(self, data) -> int:
        self._digest.update(data)
        self._file.write(data)
        self.position += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None: ...

    def complete(self) -> dict[str, Any]:
        """Close the file and rename it; return its entry for the journal."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)
        return {"name": str(self.path.name), "bytes": self.position, "sha256": self._digest.hexdigest()}

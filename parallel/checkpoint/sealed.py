"""Files verified before use: JSON with its own digest, files with a digest elsewhere, pickles of tensors.

Not collective. Anything else in place of a file (a pipe, a device, a folder) is reported in a sentence, and
never blocks the reader.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO

import torch

FORMAT = 2  # of the sealed JSON; format 1 had no digest
SEAL = "sha256"  # key of the digest over all other entries
MOST_JSON_BYTES = 2**26  # a checkpoint of 10,000 ranks needs about a tenth of it


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file.
    """
    # without O_NONBLOCK, opening a pipe blocks
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is no regular file")
        with open(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def shortened(text: object, length: int = 200) -> str:
    """Return `text` as one line of at most `length` characters."""
    line = " ".join(str(text)[: 10 * length].split())
    return line if len(line) <= length else line[: length - 3] + "..."


def read_json(path: Path) -> dict:
    """Read a JSON object.

    Raises:
        ValueError: a clause that names the file and the problem.
    """
    try:
        with opened(path) as file:
            data = file.read(MOST_JSON_BYTES + 1)
        if len(data) > MOST_JSON_BYTES:
            raise ValueError(f"it has more than {MOST_JSON_BYTES} bytes")
        content = json.loads(data.decode(), object_pairs_hook=_told_once)
    except RecursionError:
        raise ValueError(f"{path.name} cannot be read (it is nested too deeply)") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read ({shortened(error)})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


# ---- JSON with its digest ----------------------------------------------------------------------------------


def sealed(content: dict) -> str:
    """Return JSON of `content` with the format's number and a digest that `read_sealed` verifies."""
    content = json.loads(json.dumps({"format": FORMAT, **content}))
    return json.dumps({**content, SEAL: _seal_of(content)}, indent=1)


def read_sealed(path: Path) -> dict:
    """Read what `sealed` returned: its content, format and digest.

    Raises:
        ValueError: a clause that names the file and how it differs from what was written.
    """
    content = read_json(path)
    if content.get("format") != FORMAT:
        found = (
            f"is of format {shortened(content['format'], 40)}"
            if "format" in content
            else "tells no format and no digest"
        )
        raise ValueError(
            f"{path.name} {found}, this version reads format {FORMAT}: it was written by another version"
        )
    if content.get(SEAL) != _seal_of({key: value for key, value in content.items() if key != SEAL}):
        raise ValueError(f"{path.name} is not what was written: its SHA-256 differs")
    return content


def _seal_of(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _told_once(pairs: list[tuple[str, object]]) -> dict:
    told = dict(pairs)
    if len(told) != len(pairs):
        raise ValueError("a key is there twice")
    return told


# ---- other files -------------------------------------------------------------------------------------------


def described(path: Path) -> dict:
    """Return the size and digest of a file."""
    with opened(path) as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def file_damage(path: Path, written: dict) -> str | None:
    """Return how a file differs from its description by `described`; None if it does not."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != written["bytes"]:
                return f"{path} has {size} bytes of {written['bytes']}"
            same = hashlib.file_digest(file, "sha256").hexdigest() == written["sha256"]
        return None if same else f"{path} is not what was written: its SHA-256 differs"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error})"
    except ValueError as error:
        return str(error)


def files_problem(files: object) -> str | None:
    """Return an error message for invalid descriptions of files by relative name; None if they are valid."""
    if not isinstance(files, dict) or not files:
        return "it lists no files"
    for name, written in files.items():
        if name.startswith("/") or ".." in name.split("/"):
            return f"it lists {shortened(name)!r}, which lies outside the folder"
        size, digest = (
            (written.get("bytes"), written.get("sha256")) if isinstance(written, dict) else (None, None)
        )
        if (
            type(size) is not int
            or size < 0
            or not re.fullmatch("[0-9a-f]{64}", digest if isinstance(digest, str) else "")
        ):
            return f"it tells no size and SHA-256 of {shortened(name)!r}"
    return None


def torch_save(content: object, file: IO[bytes]) -> None:
    """Write to an open file by `torch.save`.

    Raises:
        OSError: the file cannot be written; torch itself says only at which position.
    """
    try:
        torch.save(content, file)
    except RuntimeError as error:
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def load_tensors(path: Path) -> dict:
    """Load a dictionary of numbers, strings and tensors, written by `torch.save`, to the CPU.

    Raises:
        ValueError: it is something else, or would run code.
    """
    try:
        with opened(path) as file:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises nearly anything
        said = str(error) or type(error).__name__
        # torch's message goes on to explain how to load it anyway
        cause = re.search(r"(?:WeightsUnpickler error:|Trying to load)\s*([^\n]+)", said)
        why = shortened(cause[1] if cause else said.removeprefix("Weights only load failed."))
        raise ValueError(f"{path} is refused: it is not what a run saves ({why})") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{path} is refused: it is not what a run saves (a {kind} in place of a dictionary)")
    return found

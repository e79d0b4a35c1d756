"""Files that are proven before they are believed: JSON with its own digest, files with one elsewhere, pickles of tensors.

Not collective. Whatever lies in the place of a file (a pipe, a device, a folder) is told in a sentence, and nothing
here waits for it.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch

FORMAT = 2  # of what is sealed; the first had no digest
SEAL = "sha256"  # the key of the digest over all the others
MOST_JSON_BYTES = 2**26  # a checkpoint of 10,000 ranks tells about a tenth of it


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, or a link to one, to read.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is something else.
    """
    handle = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    )  # without O_NONBLOCK a pipe keeps who opens it
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is no regular file")
        with open(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def shortened(text: object, length: int = 200) -> str:
    """One line of at most `length` characters."""
    line = " ".join(str(text)[: 10 * length].split())
    return line if len(line) <= length else line[: length - 3] + "..."


def read_json(path: Path) -> dict:
    """A JSON object.

    Raises:
        ValueError: a clause that names the file and says why there is none.
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


# ---- JSON that carries its digest ------------------------------------------------------------------------


def sealed(content: dict) -> str:
    """JSON of `content` with the number of the format and a digest of all that, which `read_sealed` compares."""
    content = json.loads(json.dumps({"format": FORMAT, **content}))
    return json.dumps({**content, SEAL: _seal_of(content)}, indent=1)


def read_sealed(path: Path) -> dict:
    """What `sealed` was given, with the format and the digest.

    Raises:
        ValueError: a clause that names the file and says why it is not what was written.
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


# ---- other files -----------------------------------------------------------------------------------------


def described(path: Path) -> dict:
    """Size and digest of a file."""
    with opened(path) as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def file_damage(path: Path, written: dict) -> str | None:
    """In which way a file is not the one that `described` told of; None: it is."""
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
    """What is wrong with descriptions of files by their relative names; None: nothing."""
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


def load_tensors(path: Path) -> dict:
    """A dictionary of numbers, texts and tensors on the CPU, as `torch.save` wrote it.

    Raises:
        ValueError: it is something else, or would run code.
    """
    try:
        with opened(path) as file:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises nearly anything
        said = str(error) or type(error).__name__
        cause = re.search(
            r"(?:WeightsUnpickler error:|Trying to load)\s*([^\n]+)", said
        )  # torch goes on to say how it can be loaded nonetheless
        why = shortened(cause[1] if cause else said.removeprefix("Weights only load failed."))
        raise ValueError(f"{path} is refused: it is not what a run saves ({why})") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{path} is refused: it is not what a run saves (a {kind} in place of a dictionary)")
    return found

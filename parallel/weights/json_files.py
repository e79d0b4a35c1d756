"""Strict reading of JSON objects, with errors that name the fault."""

import json
import stat
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr

MOST_BYTES = 256 << 20  # of a file: tokenizers take tens of MiB, configurations some KiB


def read_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that holds an object.

    Raises:
        ValueError: the file cannot be read, is too large, or is refused by `parse_object`; the message names
            the file.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for its writer
            raise ValueError("it is no regular file")
        if (size := status.st_size) > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
        return parse_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a JSON object ({reason_of(error)}); copy it again from its source"
        ) from None


def parse_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in UTF-8 `text`.

    Raises:
        ValueError: not JSON, not an object, a duplicate key, NaN or an infinity, or too deeply nested.
    """
    try:
        content = json.loads(text.decode("utf-8"), parse_constant=_Constant, object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds {short_repr(content)}")
    return content


def is_file_name(name: str, suffix: str) -> bool:
    """Return whether an index may name such a file: a name with this suffix, no path.

    Nothing outside the folder is read then, except through the folder's own symbolic links.
    """
    return name.endswith(suffix) and len(name) < 200 and name.isprintable() and not set(name) & {"/", "\\"}


def is_count(value: Any) -> bool:
    """Return whether a JSON value is a non-negative integer; true and false are not."""
    return type(value) is int and value >= 0


def shown_key(key: str) -> str:
    """Return a key for messages: unchanged, or as by `short_repr` if it is long or not printable."""
    return key if len(key) <= 60 and key.isprintable() else short_repr(key)


def reason_of(error: BaseException, most: int = 200) -> str:
    """Return the message of another library's error in one line of at most `most` characters."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= most else said[:most] + " ..."


class _Constant(str):
    """NaN, Infinity or -Infinity, which Python's parser accepts although JSON has no such numbers."""


def _constant_in(value: Any) -> str:
    """Return the first `_Constant` in a value or its lists, else "". Nested objects are already checked."""
    if isinstance(value, list):
        return next(filter(None, map(_constant_in, value)), "")
    return value if isinstance(value, _Constant) else ""


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    for name, value in pairs:
        if constant := _constant_in(value):
            raise ValueError(f"its {shown_key(name)} is {constant}, which is no JSON number")
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in content if names.count(name) > 1)
        raise ValueError(f"it gives {shown_key(twin)} twice")
    return content

"""JSON objects that other programs wrote, every fault of which is named, and values as messages show them."""

import json
import reprlib
from pathlib import Path
from typing import Any

MOST_BYTES = 256 << 20  # of a file: tokenizers take tens of MiB, configurations some KiB


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object.

    Raises:
        ValueError: the file cannot be read, is too large, or holds something else (as `parse_object`); the message names it.
    """
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
        return parse_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a JSON object ({reason_of(error)}); copy it again from its source"
        ) from None


def parse_object(text: bytes) -> dict[str, Any]:
    """The object that UTF-8 `text` holds.

    Raises:
        ValueError: no JSON, no object, a key given twice, NaN or an infinity, or too deeply nested.
    """
    try:
        content = json.loads(text.decode("utf-8"), parse_constant=_Constant, object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds {shown(content)}")
    return content


def is_count(value: Any) -> bool:
    """Whether a JSON value is a whole number from 0 on; true and false are none."""
    return type(value) is int and value >= 0


def shown(value: Any) -> str:
    """A value as messages show it: long and deep ones are cut."""
    return _SHORT.repr(value)


def shown_key(key: str) -> str:
    """A key as messages show it: as it is, unless it is long or odd."""
    return key if len(key) <= 60 and key.isprintable() else shown(key)


def reason_of(error: BaseException, most: int = 200) -> str:
    """What an error of another library says, in one line and not without end."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= most else said[:most] + " ..."


def _short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    short.maxlevel, short.maxdict, short.maxlist = 3, 6, 6
    return short


_SHORT = _short()


class _Constant(str):
    """NaN, Infinity or -Infinity, which Python reads and JSON does not have."""


def _constant_in(value: Any) -> str:
    """The first such constant that is the value or stands in its lists; or nothing. Objects have refused theirs."""
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

"""JSON-lines files: one object per line, parsed strictly within limits; errors name the line."""

import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from parallel.runtime.refusal import short_repr

MAX_LINE_BYTES = 16 << 20  # a row is parsed, stored and sent to reward workers as a whole
MAX_DEPTH = 64  # pickle and json recurse, and the stack may already be deep
UTF8_MARK = b"\xef\xbb\xbf"

# First bytes of files mistaken for JSON lines, their format, and the remedy.
_TO_LINES = (
    "write its rows as JSON lines, such as with pandas: to_json('train.jsonl', orient='records', lines=True)"
)
_UNPACK = "unpack it first"
_FORMATS = (
    (b"PAR1", "a Parquet file", _TO_LINES),
    (b"PARE", "an encrypted Parquet file", "write it without encryption"),
    (b"ARROW1", "an Arrow file", _TO_LINES),
    (b"\xff\xff\xff\xff", "an Arrow stream", _TO_LINES),
    (b"ORC", "an ORC file", _TO_LINES),
    (b"Obj\x01", "an Avro file", _TO_LINES),
    (b"\x89HDF", "an HDF5 file", _TO_LINES),
    (b"\x93NUMPY", "a NumPy array", _TO_LINES),
    (b"SQLite format 3\0", "an SQLite database", _TO_LINES),
    (b"\x80\x02", "a pickle", _TO_LINES),
    (b"\x80\x03", "a pickle", _TO_LINES),
    (b"\x80\x04", "a pickle", _TO_LINES),
    (b"\x80\x05", "a pickle", _TO_LINES),
    (b"\x1f\x8b", "compressed with gzip", _UNPACK),
    (b"BZh", "compressed with bzip2", _UNPACK),
    (b"\xfd7zXZ\0", "compressed with xz", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed with lz4", _UNPACK),
    (b"7z\xbc\xaf", "a 7-Zip archive", _UNPACK),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"PK\x05\x06", "an empty zip archive", _UNPACK),
    (b"\xff\xfe", "UTF-16 or UTF-32 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 or UTF-32 text", "save it as UTF-8"),
    (b"{\0", "UTF-16 or UTF-32 text", "save it as UTF-8"),
    (b"\0{", "UTF-16 or UTF-32 text", "save it as UTF-8"),
    (b"\0\0\0\0", "zeros, as of a copy that was never finished", "copy it again"),
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file itself with git lfs pull"),
    (b"%PDF", "a PDF", "write its rows as JSON lines"),
    (b"<", "HTML or XML", "write its rows as JSON lines, or download the file itself"),
    (b"[", "a JSON array", "write one object a line, such as with jq -c '.[]'"),
)
_KINDS = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a named pipe"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISREG, ""),
)


def file_problem(path: str | Path) -> str:
    """Return why `path` cannot be read, by its kind and first bytes ("does not exist; ..."), or ""."""
    try:
        with opened(path) as file:
            return _other_format(path, file.peek(512))
    except (OSError, ValueError) as error:
        return read_problem(error)


def numbered_rows(path: str | Path) -> Iterator[tuple[int, dict]]:
    """Yield line numbers (from 1) and objects of a JSON-lines file; empty lines are skipped.

    Raises:
        ValueError: not a readable regular file, another format, or a line that is not a JSON object; the
            message names file and line.
    """
    if problem := file_problem(path):
        raise ValueError(f"data file {name_of(path)} {problem}")
    line = 0
    try:
        with opened(path) as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                line += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise ValueError(
                        f"longer than {MAX_LINE_BYTES >> 20} MiB;"
                        " each line must be one JSON object, and a row has to be smaller"
                    )
                if line == 1:
                    raw = raw.removeprefix(UTF8_MARK)
                if raw.strip():
                    yield line, _parsed(raw)
    except OSError as error:
        raise ValueError(f"data file {name_of(path)} {read_problem(error)}") from None
    except ValueError as error:
        raise ValueError(f"{name_of(path)}, line {line}: {error}") from None


def read_rows(path: str | Path) -> list[dict]:
    """Return all objects of a JSON-lines file; errors as in `numbered_rows`."""
    return [row for _, row in numbered_rows(path)]


# ---- files ---------------------------------------------------------------------------------------------


def opened(path: str | Path) -> io.BufferedReader:
    """Open `path` if it is a regular file. Without O_NONBLOCK, opening a pipe would wait for a writer.

    Raises:
        OSError, ValueError: no regular file that can be read; `read_problem` words both.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # an impossible file name, such as one with a zero byte
        raise FileNotFoundError from None
    try:
        mode = os.fstat(descriptor).st_mode
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "is a device")
        if kind:
            raise ValueError(f"{kind}; name a .jsonl file")
        return cast(io.BufferedReader, open(descriptor, "rb", buffering=1 << 20))
    except BaseException:
        os.close(descriptor)
        raise


def read_problem(error: OSError | ValueError) -> str:
    """Describe an error of `opened` as a clause ("does not exist; ...")."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "does not exist; name a .jsonl file"
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror}); name a .jsonl file that can be"
    return str(error)


def name_of(path: str | Path) -> str:
    """Return a file's name for a message, cut if it is very long."""
    text = str(path)
    return text if len(text) <= 300 else short_repr(text)


def _other_format(path: str | Path, head: bytes) -> str:
    """Describe the other format that a file seems to have; empty: JSON lines, or unknown."""
    if problem := magic_problem(head):
        return problem
    suffix = Path(path).suffix.lower()
    if suffix in (".csv", ".tsv") and not head.removeprefix(UTF8_MARK).lstrip().startswith(b"{"):
        return f"is a {suffix} table, not JSON lines; {_TO_LINES}"
    return ""


def magic_problem(head: bytes, *, expected: str = "JSON lines") -> str:
    """Describe the binary or markup format that a file with these first bytes has; empty: none is known."""
    start = head.removeprefix(UTF8_MARK)
    text = start.lstrip()
    for magic, kind, remedy in _FORMATS:
        if (text if magic in (b"<", b"[") else start).startswith(magic):
            return f"is {kind}, not {expected}; {remedy}"
    return ""


# ---- lines ---------------------------------------------------------------------------------------------


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {short_repr(twice)} stands twice in an object; keep one of them")
    return row


def _no_number(name: str) -> float:
    raise ValueError(f"not valid JSON ({name} is no JSON number); use null or leave the key out")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"number {digits:.40} is beyond the range of float64; write it as a string")
    return number


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite)


def _parsed(raw: bytes) -> dict:
    try:
        row = DECODER.decode(raw.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not valid JSON (byte {error.object[error.start]:#04x} at {error.start} is not UTF-8);"
            " save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not valid JSON ({error.msg} at character {error.pos + 1}); each line must be one JSON object"
        ) from None
    except RecursionError:
        raise ValueError(_too_deep()) from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("an integer has thousands of digits; write it as a string") from None
        raise
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth(row) > MAX_DEPTH:
        raise ValueError(_too_deep())
    if (b"\\ud" in raw or b"\\uD" in raw) and (lone := _lone_surrogate(row)):
        raise ValueError(
            f"has half a surrogate pair ({lone!r}), which is no character; write both halves or remove it"
        )
    return row


def _too_deep() -> str:
    return f"nested deeper than {MAX_DEPTH} levels; flatten the row"


def _depth(row: Any) -> int:
    """Nesting depth of lists and objects, `row` included, computed without recursion."""
    level, depth = [row], 0
    while level:
        depth += 1
        below = []
        for holder in level:
            values = holder.values() if isinstance(holder, dict) else holder
            below += [value for value in values if isinstance(value, dict | list)]
        level = below
    return depth


def _lone_surrogate(row: dict) -> str:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return error.object[error.start]
    return ""

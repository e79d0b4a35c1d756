"""CSV and TSV files: a header, then records of texts, read strictly within limits; errors name the line."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.data.formats.json_lines import (
    DECODER,
    MAX_LINE_BYTES,
    UTF8_MARK,
    name_of,
    opened,
    read_problem,
)

OBJECTS = ("reward_model", "extra_info")  # verl's columns, whose cells may hold a JSON object
_PYTHON_NOTATION = ("[{'role'", "[{'content'", "[array(", "array([{", "{'role'", "{'content'")


def numbered_rows(path: str | Path, *, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers (from 1, of a record's first line) and records as dicts; empty lines are skipped.

    Cells are texts. Two kinds are not: a list of chat messages, and an object in one of OBJECTS, as JSON.

    Raises:
        ValueError: not a readable regular file, no usable header, or a record that does not fit it; the
            message names file and line.
    """
    lines, first = None, 1
    try:
        with opened(path) as file:
            lines = _Lines(file)
            csv.field_size_limit(MAX_LINE_BYTES)
            records = csv.reader(lines, delimiter=delimiter, strict=True)
            header = _checked(next(records, []), delimiter)
            first = lines.number + 1
            for cells in records:
                if cells:
                    yield first, _row(header, cells)
                first = lines.number + 1
    except OSError as error:
        raise ValueError(f"data file {name_of(path)} {read_problem(error)}") from None
    except UnicodeDecodeError as error:
        assert lines is not None
        raise ValueError(
            f"{name_of(path)}, line {lines.number}: byte {error.object[error.start]:#04x} at {error.start} is"
            " not UTF-8; save the file as UTF-8"
        ) from None
    except csv.Error as error:
        raise ValueError(f"{name_of(path)}, line {first}: {_said(error)}") from None
    except ValueError as error:
        raise ValueError(f"{name_of(path)}, line {first}: {error}") from None


class _Lines:
    """The lines of a file as text; `number` counts those that were read."""

    def __init__(self, file: io.BufferedReader):
        self._file, self.number = file, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw = self._file.readline(MAX_LINE_BYTES + 1)
        if not raw:
            raise StopIteration
        self.number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise ValueError(f"longer than {MAX_LINE_BYTES >> 20} MiB; a row has to be smaller")
        return (raw.removeprefix(UTF8_MARK) if self.number == 1 else raw).decode()


def _said(error: csv.Error) -> str:
    text = str(error)
    if "field limit" in text:
        return f"a cell is longer than {MAX_LINE_BYTES >> 20} MiB, or its quote is never closed; close it"
    if "end of data" in text:
        return "a quote is never closed; close it, and write a quote inside a cell twice"
    return f'no CSV ({text}); quote such cells and write a quote inside them twice: "say ""hi"""'


def _checked(header: list[str], delimiter: str) -> list[str]:
    """Return the names of the columns; ValueError for a header that names none or one of them twice."""
    names = [name.strip() for name in header]
    if not any(names):
        raise ValueError("it has no header; the first line must name the columns, such as prompt,answer")
    for number, name in enumerate(names, start=1):
        if not name:
            raise ValueError(f"column {number} of the header has no name; name it")
        if names.index(name) < number - 1:
            raise ValueError(f"the header names the column {short_repr(name)} twice; keep one of them")
    other = next((sign for sign in ";\t," if sign != delimiter and sign in names[0]), "")
    if len(names) == 1 and other:
        raise ValueError(
            f"the header {short_repr(names[0])} is separated by {other!r}, not by {delimiter!r}; "
            "write the file with commas as .csv, or with tabs as .tsv"
        )
    return names


def _row(header: list[str], cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(header):
        raise ValueError(
            f"{len(cells)} cells, and the header names {len(header)} columns; "
            "quote cells that hold separators or line breaks"
        )
    return {name: _value(name, cell) if cell[:1] in "[{a" else cell for name, cell in zip(header, cells)}


def _value(name: str, cell: str) -> Any:
    """Return the messages or the object that a cell holds as JSON, or else its text."""
    start = "".join(cell[:40].split())
    if start.startswith(tuple("".join(sign.split()) for sign in _PYTHON_NOTATION)):
        raise ValueError(
            f"column {short_repr(name)} holds messages in Python's notation, {short_repr(cell, limit=60)}; "
            "write them as JSON (json.dumps), or save the table as Parquet"
        )
    if start.startswith("[{"):
        value = _parsed(cell)
        are_messages = isinstance(value, list) and all(
            isinstance(part, dict) and "role" in part for part in value
        )
        return value if are_messages else cell
    if start.startswith("{") and name in OBJECTS:
        value = _parsed(cell)
        return value if isinstance(value, dict) else cell
    return cell


def _parsed(cell: str) -> Any:
    try:
        return DECODER.decode(cell)
    except (ValueError, RecursionError):
        return None

"""Parquet and Arrow files as rows of plain values, batch by batch; errors name row and column.

pyarrow is imported when the first of them is read. Files are read, not mapped: a file that is cut short
while it is read is an error then, and not the end of the process.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.runtime.refusal import short_repr
from verl_megatron.data.formats.json_lines import MAX_DEPTH, MAX_LINE_BYTES, name_of

if TYPE_CHECKING:
    import pyarrow

PARQUET, ARROW, STREAM = "Parquet", "Arrow", "Arrow stream"
BATCH_ROWS = 1024  # converted to Python objects at a time
_READ_BYTES = 1 << 20

Converter = Callable[[Any], Any]


def numbered_rows(
    path: str | Path, kind: str, unread: dict[str, str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield row numbers (from 1) and rows of a PARQUET, ARROW or STREAM file.

    Values are those of JSON: NaN, which pandas writes for missing numbers, becomes None, times and decimals
    become texts. Columns of other types are left out: `unread` receives their names and types.

    Raises:
        ValueError: the file is damaged or of another format, names a column twice, or has a row that is too
            large or not valid; the message names file and row.
    """
    import pyarrow as pa

    number = 0
    try:
        with contextlib.closing(pa.OSFile(str(path))) as file:
            schema, batches = _opened(file, kind)
            columns = _columns(schema, unread)
            for batch in batches:
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    part = batch.slice(start, BATCH_ROWS)
                    _check_size(part, number)
                    rows = _rows(part, columns, number)
                    for row in rows:
                        number += 1
                        yield number, row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"data file {name_of(path)} is a damaged {kind} file, after row {number} "
            f"({short_repr(said)[1:-1]}); copy it again"
        ) from None
    except _RowError as error:
        raise ValueError(f"{name_of(path)}, {error}") from None


class _RowError(ValueError):
    """A problem with the schema or a row; the message names it but not the file."""


def _opened(
    file: "pyarrow.NativeFile", kind: str
) -> tuple["pyarrow.Schema", Iterator["pyarrow.RecordBatch"]]:
    import pyarrow as pa

    if kind == PARQUET:
        from pyarrow import parquet

        table = parquet.ParquetFile(file, buffer_size=_READ_BYTES, pre_buffer=False)
        names = table.schema_arrow.names
        _check_names(names)
        return table.schema_arrow, table.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
    if kind == ARROW:
        reader = pa.ipc.open_file(file)
        return reader.schema, (reader.get_batch(index) for index in range(reader.num_record_batches))
    stream = pa.ipc.open_stream(file)
    return stream.schema, iter(stream)


def _check_names(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise _RowError(f"column {short_repr(twice[0])} stands twice in the schema; keep one of them")


def _columns(schema: "pyarrow.Schema", unread: dict[str, str]) -> dict[str, Converter | None]:
    """Return the columns that are read, with what makes plain values of theirs (None: they are plain)."""
    _check_names(schema.names)
    columns = {}
    for field in schema:
        try:
            columns[field.name] = _converter(field.type)
        except TypeError:
            unread[field.name] = short_repr(str(field.type), limit=60)[1:-1]
    return columns


def _converter(kind: "pyarrow.DataType", depth: int = 0) -> Converter | None:
    """Return the function that makes JSON values of a column's; None: they are. TypeError: there is none."""
    import pyarrow as pa
    from pyarrow import types

    if depth > MAX_DEPTH:
        raise _RowError(f"a column is nested deeper than {MAX_DEPTH} levels; flatten it")
    if types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind):
        return None
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return None
    if types.is_floating(kind):
        return _finite if types.is_float64(kind) else _shortest(kind.to_pandas_dtype())
    if types.is_temporal(kind) or types.is_decimal(kind):
        return _text
    if isinstance(kind, pa.BaseExtensionType):
        return _converter(kind.storage_type, depth + 1)
    if types.is_dictionary(kind):
        return _converter(kind.value_type, depth + 1)
    if types.is_map(kind):
        if not types.is_string(kind.key_type):
            raise TypeError
        return _of_map(_converter(kind.item_type, depth + 1))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _converter(kind.value_type, depth + 1)
        return None if inner is None else _of_list(inner)
    if types.is_struct(kind):
        _check_names([kind.field(index).name for index in range(kind.num_fields)])
        fields = [kind.field(index) for index in range(kind.num_fields)]
        inners = {field.name: _converter(field.type, depth + 1) for field in fields}
        return _of_struct({name: inner for name, inner in inners.items() if inner is not None})
    raise TypeError


def _finite(value: float | None) -> float | None:
    if value is None or value != value:
        return None
    if math.isinf(value):
        raise _RowError("a number is infinite; use null or a finite one")
    return value


def _shortest(number: Callable[[float], Any]) -> Converter:
    """Return a function that gives the shortest decimal of a narrow float: 0.1 and not 0.10000000149."""

    def convert(value: float | None) -> float | None:
        finite = _finite(value)
        return None if finite is None else float(str(number(finite)))

    return convert


def _text(value: Any) -> str | None:
    return None if value is None else value.isoformat() if hasattr(value, "isoformat") else str(value)


def _of_list(inner: Converter) -> Converter:
    return lambda values: None if values is None else [inner(value) for value in values]


def _of_map(inner: Converter | None) -> Converter:
    def convert(pairs: Any) -> Any:
        if pairs is None:
            return None
        named = dict(pairs)
        if len(named) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _RowError(f"a map has the key {short_repr(twice)} twice; keep one of them")
        return named if inner is None else {name: inner(value) for name, value in named.items()}

    return convert


def _of_struct(inners: dict[str, Converter]) -> Converter | None:
    if not inners:
        return None

    def convert(value: Any) -> Any:
        return (
            value if value is None else value | {name: inner(value[name]) for name, inner in inners.items()}
        )

    return convert


def _check_size(batch: "pyarrow.RecordBatch", before: int) -> None:
    """Refuse a batch with a row of more than MAX_LINE_BYTES before Python objects are made of it."""
    if batch.nbytes <= MAX_LINE_BYTES:
        return
    for index in range(batch.num_rows):
        if batch.slice(index, 1).nbytes > MAX_LINE_BYTES:
            raise _RowError(
                f"row {before + index + 1}: larger than {MAX_LINE_BYTES >> 20} MiB; make it smaller"
            )


def _rows(
    batch: "pyarrow.RecordBatch", columns: dict[str, Converter | None], before: int
) -> list[dict[str, Any]]:
    batch.validate(full=True)  # offsets and UTF-8 of a damaged file may point anywhere
    values = [
        _values(batch.column(name), convert, f"column {short_repr(name)}", before)
        for name, convert in columns.items()
    ]
    return (
        [dict(zip(columns, row)) for row in zip(*values)] if columns else [{} for _ in range(batch.num_rows)]
    )


def _values(column: "pyarrow.Array", convert: Converter | None, name: str, before: int) -> list[Any]:
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError):  # such as a time with nanoseconds, or of the year 20000
        values = [_plain(column, index, name, before) for index in range(len(column))]
    if convert is None:
        return values
    converted = []
    for value in values:
        try:
            converted.append(convert(value))
        except _RowError as error:
            raise _RowError(f"row {before + len(converted) + 1}, {name}: {error}") from None
    return converted


def _plain(column: "pyarrow.Array", index: int, name: str, before: int) -> Any:
    try:
        return column[index].as_py()
    except (ValueError, OverflowError) as error:
        raise _RowError(
            f"row {before + index + 1}, {name}: {error}; write it as text, or leave the column out"
        ) from None

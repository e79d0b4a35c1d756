"""Columns of Parquet and Arrow files whose values are no JSON: what is wrong is named with row and column."""

import json
import uuid

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.characters import characters
from verl_megatron.commands import data
from verl_megatron.config import DataConfig
from verl_megatron.data.prompts import PromptDataset

FAR = 10**12  # as days, seconds or milliseconds: beyond what Python's types hold


def write(path, table: pa.Table) -> str:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def read(path: str) -> PromptDataset:
    return PromptDataset(path, characters(), DataConfig(train=path))


def of_storage(storage: pa.DataType, values: list[int], kind: pa.DataType) -> pa.Array:
    return pa.array(values, storage).view(kind)


@pytest.mark.parametrize(
    "column",
    [
        of_storage(pa.int32(), [1, 5 * 10**6], pa.date32()),
        of_storage(pa.int64(), [0, 86_400_000 * 5 * 10**6], pa.date64()),
        of_storage(pa.int64(), [0, FAR], pa.timestamp("s")),
        of_storage(pa.int64(), [0, FAR * 1000], pa.duration("s")),
        pa.ListArray.from_arrays([0, 1, 2], of_storage(pa.int32(), [1, 5 * 10**6], pa.date32())),
    ],
    ids=lambda column: str(column.type),
)
def test_times_beyond_those_of_python_are_named(tmp_path, column):
    path = write(tmp_path / "a.arrow", pa.table({"prompt": ["a", "b"], "answer": ["a", "b"], "when": column}))
    with pytest.raises(ValueError, match="row 2, column 'when': .*; write it as text, or leave the column"):
        read(path)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([b"a"]), "binary"),
        (pa.array([uuid.uuid4().bytes], pa.binary(16)), r"fixed_size_binary\[16\]"),
        (pa.array([["a"]], pa.list_view(pa.string())), "list_view<"),
    ],
    ids=["binary", "fixed", "list_view"],
)
def test_a_column_that_is_not_read_is_not_said_to_be_missing(tmp_path, column, kind):
    path = write(tmp_path / "a.arrow", pa.table({"prompt": column, "answer": ["a"]}))
    said = f"column 'prompt' \\(data.prompt_key\\) is of the type {kind}.*, which is not read; write it as"
    with pytest.raises(ValueError, match=said):
        read(path)
    with pytest.raises(ValueError, match=said):
        data.run(["check", path, "--kind", "prompts"])


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_floats_are_the_decimals_that_were_written(tmp_path, kind):
    numbers = [0.1, 1.5, None, 3.0, 0.0002]
    narrow = [None if number is None else kind.to_pandas_dtype()(number) for number in numbers]
    scores = pa.array([[number] for number in narrow], pa.list_(kind))
    table = pa.table({"prompt": ["a"] * 5, "answer": ["a"] * 5, "scores": scores})
    found = [prompt.extra["scores"] for prompt in read(write(tmp_path / "a.arrow", table))]
    assert json.dumps(found) == json.dumps([[number] for number in numbers])


def test_a_map_has_each_key_once(tmp_path):
    kind = pa.map_(pa.string(), pa.int64())
    column = pa.array([[("a", 1)], [("a", 1), ("b", 2), ("a", 3)]], kind)
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pa.table({"prompt": ["a", "b"], "answer": ["a", "b"], "extra": column}), path)
    with pytest.raises(ValueError, match="row 2, column 'extra': a map has the key 'a' twice; keep one"):
        read(path)


def test_a_note_of_unread_columns_is_shown_once(tmp_path, capsys):
    path = write(tmp_path / "a.arrow", pa.table({"prompt": ["a"], "answer": ["b"], "image": [b"x"]}))
    assert data.run(["check", path]) == 0
    assert capsys.readouterr().out.count("columns of types that are not read: 'image' (binary)") == 1

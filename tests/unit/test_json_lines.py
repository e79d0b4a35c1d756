"""JSON-lines files: what is read, and that everything else is refused by name, at once."""

import gzip
import io
import json
import os
import socket
import tarfile
import zipfile

import pytest

from verl_megatron.data.formats.json_lines import (
    MAX_DEPTH,
    MAX_LINE_BYTES,
    file_problem,
    numbered_rows,
    read_rows,
    short_repr,
)

ROW = b'{"prompt": "a", "answer": 5}\n'


def packed(kind: str) -> bytes:
    """ROW inside an archive."""
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("train.jsonl", ROW)
    else:
        with tarfile.open(fileobj=buffer, mode="w:bz2") as archive:
            archive.addfile(tarfile.TarInfo("train.jsonl"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b"\xef\xbb\xbf" + ROW, [(1, {"prompt": "a", "answer": 5})]),
        (ROW.replace(b"\n", b"\r\n") * 2,
         [(1, {"prompt": "a", "answer": 5}), (2, {"prompt": "a", "answer": 5})]),
        (b"\n \t\n" + ROW.strip(), [(3, {"prompt": "a", "answer": 5})]),
        (rb'{"a": "\ud83d\ude00\ud55c", "b": 1e300, "c": 123456789012345678901234567890}',
         [(1, {"a": "\U0001f600\ud55c", "b": 1e300, "c": 123456789012345678901234567890})]),
        (b'{"a": "[[{{' + b"[" * 500 + b'"}', [(1, {"a": "[[{{" + "[" * 500})]),
        (b"", []),
    ],
)  # fmt: skip
def test_files_that_are_read(tmp_path, content, rows):
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert list(numbered_rows(tmp_path / "rows.jsonl")) == rows


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PAR1\x15\x04", "is a Parquet file, not JSON lines; write its rows as JSON lines"),
        (b"ARROW1\0\0", "an Arrow file"),
        (gzip.compress(ROW, mtime=0), "compressed with gzip, not JSON lines; unpack it first"),
        (packed("zip"), "a zip archive"),
        (packed("bz2"), "compressed with bzip2"),
        (ROW.decode().encode("utf-16"), "UTF-16 or UTF-32 text, not JSON lines; save it as UTF-8"),
        (ROW.decode().encode("utf-16-le"), "UTF-16 or UTF-32"),
        (ROW.decode().encode("utf-32"), "UTF-16 or UTF-32"),
        (bytes(4096), "zeros"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\n<!DOCTYPE html>", "HTML"),
        (b"[\n" + ROW + b"]", "a JSON array, not JSON lines; write one object a line"),
    ],
)
def test_other_formats_are_named(tmp_path, content, said):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="rows.jsonl is .*") as error:
        read_rows(tmp_path / "rows.jsonl")
    assert said in str(error.value)


def test_a_table_of_text_is_named_by_its_suffix(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\na,5\n")
    assert "is a .csv table" in file_problem(tmp_path / "rows.csv")
    (tmp_path / "rows.csv").write_bytes(ROW)
    assert file_problem(tmp_path / "rows.csv") == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": [-Infinity]}', "-Infinity is no JSON number"),
        (b'{"a": 1e400}', "number 1e400 is beyond"),
        (b'{"a": ' + b"9" * 5000 + b"}", "thousands of digits"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' stands twice"),
        (rb'{"a": "x\ud800"}', "half a surrogate pair"),
        (rb'{"a": {"b\uDFFF": 1}}', "half a surrogate pair"),
        (b'{"a": "\xed\xa0\x80"}', "byte 0xed at 7 is not UTF-8"),
        (b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}", f"nested deeper than {MAX_DEPTH} levels"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b"{1: 2}", "not valid JSON"),
        (b"{'a': 2}", "not valid JSON"),
        (b'{"a": "x\0y"}', "Invalid control character"),
        (b"null", "expected a JSON object, got NoneType"),
        (b'{"a": 1} {"a": 2}', "Extra data"),
        (b" " * (MAX_LINE_BYTES + 2), "longer than 16 MiB"),
    ],
)
def test_bad_lines_are_named_in_a_short_line(tmp_path, line, said):
    (tmp_path / "rows.jsonl").write_bytes(ROW + line + b"\n" + ROW)
    with pytest.raises(ValueError, match="rows.jsonl, line 2: ") as error:
        read_rows(tmp_path / "rows.jsonl")
    assert said in str(error.value) and len(str(error.value)) < 500


def test_only_regular_files_are_opened_and_nothing_waits(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    said = {
        tmp_path: "is a folder",
        tmp_path / "pipe": "is a named pipe",
        tmp_path / "socket": "cannot be read",
        tmp_path / "loop": "cannot be read",
        "/dev/zero": "is a device",
        tmp_path / "gone": "does not exist",
        f"{tmp_path}/a\0b": "does not exist",
        tmp_path / ("x" * 5000): "cannot be read",
        "": "does not exist",
    }
    for path, problem in said.items():
        assert file_problem(path).startswith(problem)
        with pytest.raises(ValueError, match=problem) as error:
            read_rows(path)
        assert len(str(error.value)) < 500


def test_what_is_shown_is_one_short_line():
    for value in (
        "x" * 10**7,
        list(range(10**6)),
        {str(i): "y" * 1000 for i in range(1000)},
        [[[[[[["deep"]]]]]]],
        "\n\ud800",
    ):
        text = short_repr(value)
        assert len(text) <= 300 and text.isprintable()
    assert short_repr("short") == "'short'" and json.loads(short_repr([1, 2])) == [1, 2]

"""Prompts in Parquet, Arrow and CSV: right ones, columns of other projects, files that are cut or changed."""

import csv
import io
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.data import SFT, TRAIN, Program, Rows
from tests.fuzz.job import Job


def _parquet(rows: Rows) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), sink, row_group_size=7)
    return sink.getvalue()


def _arrow(rows: Rows, new: Callable[..., Any] = pa.ipc.new_file) -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return sink.getvalue()


def _cells(row: dict) -> list[str]:
    return [value if isinstance(value, str) else json.dumps(value) for value in row.values()]


def _csv(rows: Rows) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(rows[0])
    writer.writerows(map(_cells, rows))
    return text.getvalue().encode()


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "data.parquet": _parquet,
    "data.arrow": _arrow,
    "data.feather": partial(_arrow, new=pa.ipc.new_stream),
    "data.csv": _csv,
}


def _verls(rows: Rows) -> Rows:
    return [
        {"prompt": row["prompt"], "data_source": "toy", "reward_model": {"ground_truth": row["answer"]}}
        for row in rows
    ]


COLUMNS: dict[str, Callable[[Rows], Rows]] = {
    "its own": lambda rows: rows,
    "verl's": _verls,
    "with an image": lambda rows: [row | {"note": None, "level": float("nan")} for row in rows],
}
# What is wrong with a table, and a word of the message.
WRONG: dict[str, tuple[Callable[[Rows], Rows], str]] = {
    "no answer": (lambda rows: [{"prompt": row["prompt"]} for row in rows], "answer"),
    "an empty prompt": (lambda rows: [*rows, rows[0] | {"prompt": ""}], "empty"),
    "a long prompt": (lambda rows: [*rows, rows[0] | {"prompt": "fig " * 300}], "max_prompt_tokens"),
    "other columns": (lambda rows: [{"question": row["prompt"]} for row in rows], "question"),
}
BAD_CSV = (
    b"prompt;answer\na;b\n",
    b"prompt,answer\na,b,c\n",
    b"prompt,prompt\na,b\n",
    b'prompt,answer\n"a,b\n',
    b"prompt,answer\ncaf\xe9,b\n",
    b"\xff\xfep\0r\0",
    b",\n1,2\n",
    b"prompt,answer\n" + b'"' * 100_000,
    b"\0\0\0\0",
)
# Weights of two files, as texts behind their names.
WEIGHTS = (
    (("", ""), ACCEPTED),
    ((":0.7", ":0.3"), ACCEPTED),
    ((":2", ":5e1"), ACCEPTED),
    ((":1", ""), REFUSED),
    ((":0", ":1"), REFUSED),
    ((":nan", ":1"), REFUSED),
    ((":-1", ":1"), REFUSED),
    ((":a", ":b"), REFUSED),
)


def mutations() -> list[Mutation]:
    found: list[Mutation] = []
    for name in WRITERS:
        found += [partial(same_rows, name=name, columns=columns) for columns in COLUMNS]
        found += [partial(wrong, name=name, what=what) for what in WRONG]
        found += [partial(changed, name=name)] * 4 + [partial(cut, name=name)] * 2
    found += [partial(weights, texts=texts, expected=expected) for texts, expected in WEIGHTS]
    return found + [partial(bad_csv, content=content) for content in BAD_CSV]


def _case(job: Job, rng: random.Random, what: str, path: Path, *, expected: str, names: tuple = ()) -> Case:
    return TRAIN.case(job, rng, f"{path.name}: {what}", path, expected=expected, names=names)


def same_rows(job: Job, rng: random.Random, *, name: str, columns: str) -> Case:
    program: Program = rng.choice((TRAIN, SFT)) if columns == "its own" else TRAIN
    path = job.write(name, WRITERS[name](COLUMNS[columns](job.rows(program.sample))))
    return program.case(job, rng, f"{name} with {columns} columns", path, expected=ACCEPTED)


def wrong(job: Job, rng: random.Random, *, name: str, what: str) -> Case:
    change, word = WRONG[what]
    path = job.write(name, WRITERS[name](change(job.rows("train"))))
    return _case(job, rng, what, path, expected=REFUSED, names=(str(path), word))


def changed(job: Job, rng: random.Random, *, name: str) -> Case:
    """Some bytes changed: no process may die of it."""
    content = bytearray(WRITERS[name](job.rows("train")))
    for _ in range(rng.choice((1, 3, 30))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return _case(job, rng, "bytes changed", job.write(name, bytes(content)), expected=EITHER)


def cut(job: Job, rng: random.Random, *, name: str) -> Case:
    content = WRITERS[name](job.rows("train"))
    at = rng.randrange(len(content))
    expected = REFUSED if name in ("data.parquet", "data.arrow") else EITHER  # others may end at a row
    return _case(job, rng, f"cut after {at} bytes", job.write(name, content[:at]), expected=expected)


def bad_csv(job: Job, rng: random.Random, *, content: bytes) -> Case:
    path = job.write("data.csv", content)
    return _case(job, rng, repr(content[:40]), path, expected=REFUSED, names=(str(path),))


def weights(job: Job, rng: random.Random, *, texts: tuple[str, str], expected: str) -> Case:
    names = rng.sample(list(WRITERS), 2)
    paths = [job.write(name, WRITERS[name](job.rows("train"))) for name in names]
    given = ",".join(f"{path}{text}" for path, text in zip(paths, texts))
    return Case(
        name=f"files with weights {texts}",
        expected=expected,
        names=("data.train",) if expected == REFUSED else (),
        act=job.dry_run(f"data.train=[{given}]"),
    )

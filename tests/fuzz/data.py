"""Prompts: broken JSON lines, rows that lack something, odd chat messages, files of other formats."""

import copy
import gzip
import json
import os
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.job import Job, clear

Rows = list[dict[str, Any]]
# Lines that are no JSON object.
BAD_LINES = (
    *(
        b"{",
        b"}",
        b'{"prompt": "a", "answer": "b"',
        b'{"prompt": "a" "answer": "b"}',
        b"{'prompt': 'a', 'answer': 'b'}",
        b'{"prompt": "a", "answer": "b",}',
        b"prompt,answer",
        b"# comment",
    ),
    *(
        b"[]",
        b"3",
        b'"text"',
        b"null",
        b"true",
        b"[1, 2]",
        b'{"prompt": "a"} {"prompt": "b"}',
        b'{"prompt": "caf\xe9", "answer": "b"}',
        b"\xff\xfe",
        b"\x00\x00",
        b'{"prompt": "a\tb\x01", "answer": "c"}',
    ),
    *(
        b'{"prompt": "' + b"a" * 200_000,
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b"[" * 100_000,
        b'{"prompt": "a", "answer": ' + b"9" * 10_000 + b"}",
    ),
)
# What no prompt is.
BAD_PROMPTS: tuple[Any, ...] = (
    *(
        None,
        3,
        2.5,
        True,
        [],
        {},
        [[]],
        ["text"],
        [None],
        {"role": "user", "content": "a"},
        [{"role": "user"}],
        [{"content": "a"}],
        [{}],
        [3],
    ),
    *(
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": {"text": "a"}}],
        [{"role": 3, "content": "a"}],
    ),
    *(
        [{"role": None, "content": "a"}],
        [{"role": "user", "content": "a"}, "b"],
        "\ud800",
        "a\udfffb",
        [{"role": "user", "content": "\ud800"}],
        [{"role": ["user"], "content": "a"}],
    ),
)
# What may be read in more than one way: an answer in the prompt is cut, with a word about it, or refused.
OPEN_PROMPTS: tuple[tuple[Any, str], ...] = (
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "assistant"),
    ([{"role": "assistant", "content": "b"}], "assistant"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], ""),
    ([{"role": "user", "content": ""}], ""),
    ([{"role": "nobody", "content": "a"}], ""),
    ("", ""),
    (" ", ""),
    ("a\0b", ""),
)
FINE_PROMPTS: tuple[Any, ...] = (
    *(
        "sort fig :",
        "ünïcödé ☃ 😀",
        "a\nb\tc",
        "a\u2028b",
        "\\",
        '"',
        "\ufeffa",
        [{"role": "user", "content": "a"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    ),
    *(
        [{"role": "user", "content": "a", "name": "x"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
    ),
)
FINE_ANSWERS: tuple[Any, ...] = ("a", 3, 2.5, ["a", "b"], {"a": 1}, "", "ü", True)


def mutations() -> list[Mutation]:
    found = of_files()
    found += [partial(of_a_row, key="prompt", value=value, expected=REFUSED) for value in BAD_PROMPTS]
    found += [
        partial(of_a_row, key="prompt", value=value, expected=EITHER, word=word)
        for value, word in OPEN_PROMPTS
    ]
    found += [partial(of_a_row, key="prompt", value=value, expected=ACCEPTED) for value in FINE_PROMPTS]
    found += [partial(of_a_row, key="answer", value=value, expected=ACCEPTED) for value in FINE_ANSWERS]
    more = [missing] * 4 + [too_long] * 4 + [dropped] * 2 + [flipped] * 8 + [other_key] * 4
    return found + more + [few, number, unpaired]


def of_files(**programs: Any) -> list[Mutation]:
    """Of whatever rows are in the file; `programs=` that read it."""
    found: list[Mutation] = [partial(bad_line, line=line, **programs) for line in BAD_LINES]
    found += [partial(other_format, what=what, make=make, **programs) for what, make in FORMATS.items()]
    found += [partial(same_rows, what=what, make=make, **programs) for what, make in WAYS.items()]
    return found + [partial(no_file, what=what, make=make, **programs) for what, make in NO_FILES.items()]


@dataclass(frozen=True)
class Program:
    """A command line that reads a data file."""

    name: str
    settings: tuple[str, ...]  # that name the file
    sample: str  # of the toy's files, the rows that it reads
    more: tuple[str, ...] = ()

    def case(
        self, job: Job, rng: random.Random, what: str, path: Path, *, expected: str, names: tuple = ()
    ) -> Case:
        """A run on this file of training or validation data."""
        setting = rng.choice(self.settings)
        return Case(
            name=f"{setting}: {what}"[:160],
            expected=expected,
            names=names,
            act=job.dry_run(f"{setting}={path}", *self.more, program=self.name),
        )

    def refused_row(
        self, job: Job, rng: random.Random, what: str, row: tuple[Path, int], *, word: str
    ) -> Case:
        """A run on a file with one wrong row (its path and line), which is refused with this word."""
        path, line = row
        return self.case(job, rng, what, path, expected=REFUSED, names=(*line_names(path, line), word))


TRAIN = Program("train", ("data.train", "data.validation"), "train", ("data.max_prompt_tokens=128",))
SFT = Program("sft", ("data.train",), "sft")


Programs = tuple[Program, ...]  # of which a case takes one


def dropping(program: Program) -> Program:
    """The program with settings under which it leaves out rows that are too long."""
    return replace(program, more=("data.overlong=drop", *program.more))


def with_row(
    job: Job, rng: random.Random, change: Callable[[dict], dict], *, sample: str = "train"
) -> tuple[Path, int]:
    """A file with one row changed, and its line."""
    rows = copy.deepcopy(job.rows(sample))
    at = rng.randrange(len(rows))
    rows[at] = change(rows[at])
    return job.write_rows(rows), at + 1


def line_names(path: Path, line: int) -> tuple[str, str]:
    return str(path), f"line {line}"


def bad_line(job: Job, rng: random.Random, *, line: bytes, programs: Programs = (TRAIN, TRAIN, SFT)) -> Case:
    program = rng.choice(programs)
    lines = [json.dumps(row).encode() for row in job.rows(program.sample)]
    at = rng.randrange(len(lines) + 1)
    path = job.write("data.jsonl", b"\n".join([*lines[:at], line, *lines[at:]]) + b"\n")
    return program.case(
        job,
        rng,
        f"line {at + 1} is {line[:40]!r}",
        path,
        expected=REFUSED,
        names=(str(path), (f"line {at + 1}", "JSON array")),  # a file that begins with one is taken for one
    )


def of_a_row(job: Job, rng: random.Random, *, key: str, value: Any, expected: str, word: str = "") -> Case:
    path, line = with_row(job, rng, lambda row: row | {key: value})
    names = line_names(path, line) if expected == REFUSED else (word,) if word else ()
    return TRAIN.case(job, rng, f"{key}={value!a}", path, expected=expected, names=names)


def missing(job: Job, rng: random.Random) -> Case:
    key = rng.choice(("prompt", "answer"))
    row = with_row(job, rng, lambda row: {name: value for name, value in row.items() if name != key})
    return TRAIN.refused_row(job, rng, f"no {key}", row, word=key)


def too_long(job: Job, rng: random.Random) -> Case:
    words = rng.choice((200, 5000, 200_000))
    row = with_row(job, rng, lambda row: row | {"prompt": "fig " * words})
    return TRAIN.refused_row(job, rng, f"a prompt of {words} words", row, word="max_prompt_tokens")


def dropped(job: Job, rng: random.Random) -> Case:
    is_all = rng.random() < 0.5
    path = job.write_rows(
        [row | {"prompt": "fig " * 300} for row in job.rows("train")[: 24 if is_all else 5]]
        + job.rows("train")[: 0 if is_all else 24]
    )
    names = (str(path), "max_prompt_tokens") if is_all else ()
    expected = REFUSED if is_all else ACCEPTED
    return dropping(TRAIN).case(
        job,
        rng,
        f"{'all' if is_all else 'five'} too long, overlong=drop",
        path,
        expected=expected,
        names=names,
    )


def other_key(job: Job, rng: random.Random) -> Case:
    setting = rng.choice(("prompt_key", "answer_key"))
    key = rng.choice(("question", "Prompt", "prompt ", "ü", "prompt.text"))
    return Case(
        name=f"data.{setting}={key!r}",
        expected=REFUSED,
        names=(f"data.{setting}", key.strip()),
        act=job.dry_run(f"data.{setting}='{key}'"),
    )


def few(job: Job, rng: random.Random) -> Case:
    return TRAIN.case(job, rng, "one row", job.write_rows(job.rows("train")[:1]), expected=ACCEPTED)


def number(job: Job, rng: random.Random) -> Case:
    """A number beyond float64, which JSON allows and Python reads as infinity."""
    path = job.write(
        "data.jsonl",
        '{"prompt": "a", "answer": ' + rng.choice(("1e999", "NaN", "-Infinity", "1" * 400)) + "}\n",
    )
    return TRAIN.case(job, rng, "a number beyond all", path, expected=EITHER)


def unpaired(job: Job, rng: random.Random) -> Case:
    """Half of a surrogate pair in what the reward is handed."""
    path, _ = with_row(job, rng, lambda row: row | {rng.choice(("answer", "extra")): "\ud800"})
    return TRAIN.case(job, rng, "a lone surrogate in an answer", path, expected=EITHER)


def flipped(job: Job, rng: random.Random) -> Case:
    content = bytearray(Path(job.toy / "few_train.jsonl").read_bytes())
    for _ in range(rng.choice((1, 1, 5))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return TRAIN.case(
        job, rng, "bytes changed at random", job.write("data.jsonl", bytes(content)), expected=EITHER
    )


# ---- other formats ---------------------------------------------------------------------------------------


def _zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("train.jsonl", "{}")


def _arrow(path: Path) -> None:
    path.write_bytes(b"ARROW1\x00\x00" + bytes(200) + b"ARROW1")


FORMATS: dict[str, Callable[[Path, Rows], object]] = {
    "empty": lambda path, rows: path.write_bytes(b""),
    "blank lines": lambda path, rows: path.write_text("\n \n\t\n"),
    "a JSON array": lambda path, rows: path.write_text(json.dumps(rows)),
    "indented JSON": lambda path, rows: path.write_text(json.dumps(rows, indent=2)),
    "an object of columns": lambda path, rows: path.write_text(json.dumps({"rows": rows})),
    "CSV": lambda path, rows: path.write_text(
        "prompt,answer\n" + "".join(f'"{row["prompt"]}","{row["answer"]}"\n' for row in rows)
    ),
    "a gzip file": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows[0]).encode())),
    "a zip file": lambda path, rows: _zipped(path),
    "an arrow file": lambda path, rows: _arrow(path),
    "parquet": lambda path, rows: path.write_bytes(b"PAR1" + bytes(range(256)) * 2 + b"PAR1"),
    "a pickle": lambda path, rows: path.write_bytes(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94."),
    "UTF-16": lambda path, rows: path.write_bytes(
        "".join(json.dumps(row) + "\n" for row in rows).encode("utf-16")
    ),
    "UTF-32": lambda path, rows: path.write_bytes(json.dumps(rows[0]).encode("utf-32")),
    "a Git LFS pointer": lambda path, rows: path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
    ),
    "HTML": lambda path, rows: path.write_text("<!doctype html>\n<html><body>404</body></html>\n"),
    "one endless line": lambda path, rows: path.write_bytes(b"x" * 3_000_000),
    "zeros": lambda path, rows: path.write_bytes(bytes(100_000)),
}


def other_format(
    job: Job,
    rng: random.Random,
    *,
    what: str,
    make: Callable[[Path, Rows], object],
    programs: Programs = (TRAIN,),
) -> Case:
    path = job.folder / rng.choice(("data.jsonl", "data.json", "data.parquet", "data"))
    make(path, job.rows("train"))
    return rng.choice(programs).case(job, rng, what, path, expected=REFUSED, names=(str(path),))


# Ways to write the same rows.
WAYS: dict[str, Callable[[list[str]], bytes]] = {
    "a byte-order mark": lambda lines: "\n".join(lines).encode("utf-8-sig"),
    "carriage returns": lambda lines: "\r\n".join(lines).encode(),
    "blank lines between": lambda lines: "\n\n \n".join(lines).encode(),
    "no newline at the end": lambda lines: "\n".join(lines).encode(),
    "blanks around": lambda lines: "\n".join(f"  {line}\t" for line in lines).encode(),
    "many rows": lambda lines: ("\n".join(lines) + "\n").encode() * 60,
    "other keys": lambda lines: "\n".join(
        line[:-1] + ', "id": 3, "meta": {"a": [null, 1.5]}}' for line in lines
    ).encode(),
}


def same_rows(
    job: Job,
    rng: random.Random,
    *,
    what: str,
    make: Callable[[list[str]], bytes],
    programs: Programs = (TRAIN,),
) -> Case:
    program = rng.choice(programs)
    path = job.write("data.jsonl", make([json.dumps(row) for row in job.rows(program.sample)]))
    return program.case(job, rng, what, path, expected=ACCEPTED)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "the memory of a process": lambda path: path.symlink_to("/proc/self/mem"),
}


def no_file(
    job: Job,
    rng: random.Random,
    *,
    what: str,
    make: Callable[[Path], object],
    programs: Programs = (TRAIN,),
) -> Case:
    clear(path := job.folder / "data.jsonl")
    make(path)
    return rng.choice(programs).case(job, rng, what, path, expected=REFUSED, names=(str(path),))

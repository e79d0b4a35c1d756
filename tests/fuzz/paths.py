"""Paths of every setting that has one, to what is no file or folder of that kind."""

import os
import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.job import Job

READ = {
    "train": ("data.train", "data.validation", "actor.path", "critic.path", "reward.path"),
    "sft": ("data.train", "actor.path"),
}


def _socket(path: Path) -> Path:
    held = Path.cwd()
    os.chdir(path.parent)  # a socket's name has at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(held)
    return path


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _link(path: Path, to: str) -> Path:
    path.symlink_to(to)
    return path


# What is neither a model folder nor a data file, and cannot be written into.
NOWHERE: dict[str, Callable[[Path], object]] = {
    "a pipe": _pipe,
    "a socket": _socket,
    "a link to itself": lambda path: _link(path, path.name),
    "a device": lambda path: "/dev/null",
    "an endless device": lambda path: "/dev/zero",
    "below a file": lambda path: path.write_text("x") and path / "below",
    "a long name": lambda path: path.with_name("n" * 300),
    "a long path": lambda path: str(path) + "/n" * 3000,
    "in /proc": lambda path: "/proc/1/nothing/run",
}
# What reading finds nothing at, and writing may create.
NOTHING: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path,
    "a link to nothing": lambda path: _link(path, "nothing"),
    "a blank": lambda path: "' '",
    "a tilde": lambda path: "~/no/such/thing",
    "a URL": lambda path: "'https://example.invalid/x'",
    "a variable": lambda path: "$HOME/no/such/thing",
    "a surrogate": lambda path: f"{path}\udcff",
}
NO_FILES: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir() or path,
    "the root": lambda path: "/",
    "this folder": lambda path: ".",
}


def mutations() -> list[Mutation]:
    found: list[Mutation] = []
    for program, settings in READ.items():
        for setting in settings:
            tables = (
                (NOWHERE, NOTHING, NO_FILES)
                if setting.startswith("data")
                else (NOWHERE, NOTHING, NO_FILES, {"a file": lambda path: path.write_text("x") and path})
            )
            found += [
                partial(unreadable, program=program, setting=setting, what=what, make=make)
                for table in tables
                for what, make in table.items()
            ]
        found += [
            partial(unwritable, program=program, what=what, make=make) for what, make in NOWHERE.items()
        ]
        found += [
            partial(
                unwritable, program=program, what="a file", make=lambda path: path.write_text("x") and path
            )
        ]
    return found + [named_oddly] * 6 + [garbage_inside] * 12


def unreadable(
    job: Job, rng: random.Random, *, program: str, setting: str, what: str, make: Callable[[Path], object]
) -> Case:
    given = f"{setting}={make(job.folder / 'thing')}"
    return Case(
        name=f"{setting} is {what}",
        expected=REFUSED,
        names=(setting,),
        act=job.dry_run(given, program=program),
    )


def unwritable(
    job: Job, rng: random.Random, *, program: str, what: str, make: Callable[[Path], object]
) -> Case:
    given = f"run.output_dir={make(job.folder / 'thing')}"
    return Case(
        name=f"run.output_dir is {what}",
        expected=REFUSED,
        names=("run.output_dir",),
        act=job.dry_run(given, program=program),
    )


def named_oddly(job: Job, rng: random.Random) -> Case:
    """Folders and files with names that are unusual and right."""
    name = rng.choice(
        (
            "with blanks",
            "ünïcödé",
            "a'b",
            "dots...",
            "-dash",
            "percent%20",
            "[brackets]",
            "a{b}",
            "#hash",
            "step_3",
        )
    )
    given = (
        f"run.output_dir={_quoted(job.folder / name)}",
        f"data.train={_quoted(job.write_rows(job.rows('train'), f'{name}/{name}.jsonl'))}",
        f"actor.path={_quoted(job.model(name + '_model'))}",
    )
    return Case(name=f"paths with {name!r}", expected=ACCEPTED, act=job.dry_run(*given))


def _quoted(path: Path) -> str:
    text = str(path).replace("'", "\\'")
    return f"'{text}'"


def garbage_inside(job: Job, rng: random.Random) -> Case:
    """An output folder in which there is already something of another kind."""
    name = rng.choice(
        (
            "metrics.jsonl",
            "metrics.csv",
            "checkpoint",
            "checkpoint/step_1",
            "actor",
            "critic",
            "tensorboard",
            "timeline",
        )
    )
    kind = rng.choice(("file", "folder", "pipe"))
    path = job.write(f"out/{name}", b"\xff\x00garbage")
    if kind != "file":
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    return Case(name=f"output_dir/{name} is a {kind}", expected=EITHER, act=job.dry_run())

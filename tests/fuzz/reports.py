"""Folders of runs with damaged, hostile or strange files: a report without them, or one error."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.damage import SPOILS
from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.commands import call
from tests.fuzz.job import Job
from tests.reported_runs import HOSTILE, SEPARATORS, healthy_rows, plant_stall, starts_of, write_run

METRICS = "metrics.jsonl"
SAMPLES = ("samples/step_3.jsonl", "validation/step_3.jsonl")
FILES = (
    METRICS,
    "run.json",
    "config.yaml",
    "timeline.json",
    "samples/step_3.jsonl",
    "validation/step_3.jsonl",
)
OTHERS = ("run.lock", "stacks", "stacks/rank_0.txt", "samples", "validation", "report.html", "tensorboard")
LEAVES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2.5, 10**15, 2**70, -(10**400), 1e308, -1e308, 5e-324, "NaN", "", "x" * 10**5),
    *([], {}, [[]], {"x": None}, [None], "\ud800", "\0", HOSTILE, SEPARATORS, "ü\u202e"),
    *(float("nan"), float("inf"), float("-inf")),
)
LINES = (
    *(
        b"",
        b"\0" * 4096,
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"step": 1e400}',
        b'{"step": 4}' * 2,
    ),
    *(
        b'{"step": 4, "step": 5}',
        b'{"step": ' + b"9" * 5000 + b"}",
        b'{"step": 3, "a": 1' + b"0" * 5000 + b"}",
    ),
    *(
        b'{"step": 4, "": 1}',
        b'{"step": 4, "a": NaN, "b": -Infinity}',
        b"\xef\xbb\xbf{}",
        b"\r",
        b'"\\ud800"',
    ),
    b'{"step": 4, "reward/mean": 1e308}\n{"step": 5, "reward/mean": -1e308}',
    b'{"step": 9007199254740993, "reward/mean": 1}',
    b'{"step": 4, "</script><script>": 1}',
)


def mutations() -> list[Mutation]:
    found: list[Mutation] = [partial(with_lines, line=line, file=file) for line in LINES for file in FILES]
    found += [partial(changed, file=file) for file in FILES if file != "config.yaml" for _ in range(40)]
    found += [partial(spoiled, file=file, spoil=spoil) for file in FILES for spoil in SPOILS]
    found += [partial(in_the_way, name=name, what=what) for name in OTHERS for what in PUT]
    return found + [partial(rows, what=what) for what in ROWS] * 2 + [untouched, twice, stalled]


def _run(job: Job) -> Path:
    folder = write_run(job.folder / "run", healthy_rows(6))
    (folder / "run.json").write_text(json.dumps(starts_of(("error", "ValueError: x"), ("", ""))))
    (folder / "config.yaml").write_text("run:\n  seed: 3\nactor:\n  lr: 1.0e-06\n")
    return folder


def _case(job: Job, what: str, expected: str = EITHER, *more: str) -> Case:
    names = ("run",) if expected == REFUSED else ()
    return Case(name=what, expected=expected, names=names, act=call(job.folder, "report", "run", *more))


def untouched(job: Job, rng: random.Random) -> Case:
    _run(job)
    return _case(job, "as it was written", ACCEPTED)


def twice(job: Job, rng: random.Random) -> Case:
    _run(job)
    return _case(job, "the same run twice", ACCEPTED, "run", "./run")


def stalled(job: Job, rng: random.Random) -> Case:
    plant_stall(_run(job))
    return _case(job, "stalled", ACCEPTED)


def with_lines(job: Job, rng: random.Random, *, line: bytes, file: str) -> Case:
    """A line more in a file."""
    path = _run(job) / file
    lines = path.read_bytes().splitlines()
    lines.insert(rng.randrange(len(lines) + 1), line)
    path.write_bytes(b"\n".join(lines) + b"\n" * (rng.random() < 0.7))
    return _case(job, f"{file} has {line[:60]!r}")


def changed(job: Job, rng: random.Random, *, file: str) -> Case:
    """A value anywhere in a file of JSON, of another type or not finite."""
    path = _run(job) / file
    lines = path.read_text().splitlines()
    number, value = rng.randrange(len(lines)), rng.choice(LEAVES)
    content = json.loads(lines[number])
    holder, key = rng.choice(_places(content))
    holder[key] = value
    lines[number] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")
    return _case(job, f"{file}, line {number + 1}, {key}: {ascii(value)[:60]}")


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every holder of a value, with its key or number there."""
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    found = [(content, key) for key in keys]
    for key in keys:
        found += _places(content[key])
    return found


def spoiled(job: Job, rng: random.Random, *, file: str, spoil: Callable[[Path, random.Random], None]) -> Case:
    spoil(_run(job) / file, rng)
    return _case(job, f"{spoil.__name__} of {file}")


PUT: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_bytes(b"\xff\0"),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def in_the_way(job: Job, rng: random.Random, *, name: str, what: str) -> Case:
    """Something of another kind where a run has a file or a folder."""
    path = _run(job) / name
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(path.with_name("moved"))
    PUT[what](path)
    return _case(job, f"{name} is {what}")


ROWS: dict[str, Callable[[random.Random], list[dict]]] = {
    "none": lambda rng: [],
    "one": lambda rng: [{"step": 0}],
    "far apart": lambda rng: [{"step": 10**n, "reward/mean": 1.0} for n in range(15)],
    "all NaN": lambda rng: [{"step": n, "reward/mean": float("nan")} for n in range(60)],
    "huge": lambda rng: [{"step": n, "reward/mean": rng.choice((1e308, -1e308))} for n in range(60)],
    "tiny": lambda rng: [{"step": n, "policy/entropy": 5e-324 * n} for n in range(60)],
    "backwards": lambda rng: [{"step": 60 - n, "reward/mean": 1.0 * n} for n in range(60)],
    "many names": lambda rng: [{"step": 1} | {f"reward/{n}": n for n in range(2000)}],
    "strange names": lambda rng: [{"step": 1, "": 1, "/": 2, "time/_s": 3, "memory/": 4, HOSTILE: 5}],
    "phases of nothing": lambda rng: [{"step": n, "time/rollout_s": 0.0} for n in range(60)],
    "any": lambda rng: [
        row | {key: rng.choice((0, -1.0, 1e308, None, float("inf")))}
        for row in healthy_rows(70)
        for key in rng.sample(list(row), 1)
        if key != "step"
    ],
}


def rows(job: Job, rng: random.Random, *, what: str) -> Case:
    """Metrics that a run may have logged, however strange."""
    write_run(job.folder / "run", ROWS[what](rng))
    return _case(job, f"rows: {what}", ACCEPTED)

"""Recipes that extend others: circles, what is not there, wrong entries, files that are no recipes."""

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation
from tests.fuzz.commands import SECTIONS, call
from tests.fuzz.job import Job

RECIPE, BASE = "mine.yaml", "base.yaml"
EXTENDED = "defaults: [ppo_toy_cpu, _self_]\n"
# Lists of defaults that no recipe has; YAML.
WRONG = (
    *("[nothing_like_it, _self_]", "[ppo_toy_cp]", "[ppo_toy_cpu.yml]", "[/etc/passwd]", "[../../x]"),
    *("[./mine]", "[sub/../mine]", "[./ppo_toy_cpu]", "[sub]", "[~/base]", "[sub/base, {a: b}]"),
    *("3", "text", "{a: b}", "[3]", "[[a]]", "[{a: [b]}]", "[null]", "[1.5]", "[true]", "['']", "[' ']"),
    *("[{ppo_toy_cpu: 3}]", "[{nothing: here}]", "[{override nothing: here}]", "[{override hydra/job: x}]"),
    *("['${nothing.here}']", "['${']", "[ppo_toy_cpu@nothing]", "['ppo_toy_cpu@run']", "['@']", "[toy_cpu]"),
    *('["\\0"]', '["\\ud800"]', f"[{'x' * 10**5}]", "[{'a': null}]", "['optional nothing: here']", "[.]"),
    *(f"[{'a/' * 3000}b]", "[_self_, _self_]", "[mine]", "[mine, _self_]", "[..]"),
)
HARMLESS = (
    *("[ppo_toy_cpu]", "[ppo_toy_cpu, _self_]", "[/ppo_toy_cpu, _self_]"),
    *("[ppo_toy_cpu.yaml, _self_]", "[base, _self_]", "[./base]", "[./base.yaml]", "[/ppo_toy_cpu, ./base]"),
    *("[sub/base]", "[./sub/base, base]"),
)
FILES: dict[str, Callable[[Path], object]] = {
    "not UTF-8": lambda path: path.write_bytes(b"run: {seed: 3}  # \xff\xfe\n"),
    "UTF-16": lambda path: path.write_bytes("run: {seed: 3}\n".encode("utf-16")),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "no YAML": lambda path: path.write_text("run: [\n"),
    "a list": lambda path: path.write_text("[1, 2]\n"),
    "deep": lambda path: path.write_text("run: " + "[" * 3000 + "]" * 3000),
    "twice a setting": lambda path: path.write_text("run:\n  seed: 3\n  seed: 4\n"),
    "an unknown setting": lambda path: path.write_text("run: {nothing: 3}\n"),
    "an unknown section": lambda path: path.write_text("nothing: {seed: 3}\n"),
    "a circle": lambda path: path.write_text("defaults: [mine, _self_]\n"),
    "itself": lambda path: path.write_text("defaults: [base, _self_]\n"),
    "of nothing": lambda path: path.write_text("defaults: [nothing_like_it]\n"),
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a Python object": lambda path: path.write_text("run: !!python/object/apply:os.getcwd []\n"),
    "too large": lambda path: path.write_bytes(b"#" * (2 << 20)),
}
EMPTY: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_text(""),
    "null": lambda path: path.write_text("null\n"),
    "a comment": lambda path: path.write_text("# run: 3\n"),
}


def mutations() -> list[Mutation]:
    found: list[Mutation] = [partial(of_defaults, text=text, expected=REFUSED) for text in WRONG]
    found += [partial(of_defaults, text=text, expected=ACCEPTED) for text in HARMLESS]
    for table, expected in ((FILES, REFUSED), (EMPTY, EITHER)):
        for what, make in table.items():
            found += [
                partial(of_a_file, file=file, what=what, make=make, expected=expected)
                for file in (RECIPE, BASE)
            ]
    return found + [chain, circle, circle, flipped, flipped, flipped, flipped, by_the_doctor]


def _case(job: Job, what: str, expected: str, *names: Any) -> Case:
    act = call(job.folder, "train", "--config", RECIPE, "--dry-run")
    return Case(name=what, expected=expected, names=names, act=act)


def _write(job: Job, defaults: str = EXTENDED) -> None:
    job.write(RECIPE, defaults + SECTIONS.format(toy=job.toy))


def of_defaults(job: Job, rng: random.Random, *, text: str, expected: str) -> Case:
    _write(job, f"defaults: {text}\n")
    job.write(BASE, "defaults: [/ppo_toy_cpu, _self_]\n")
    (job.folder / "sub").mkdir()
    job.write("sub/base.yaml", "defaults: [../base, toy_cpu/group]\nrun: {iterations: 3}\n")
    return _case(job, f"defaults: {text[:80]}", expected)


def of_a_file(
    job: Job, rng: random.Random, *, file: str, what: str, make: Callable[[Path], object], expected: str
) -> Case:
    """The recipe, or one that it extends, is something else."""
    _write(job, "defaults: [ppo_toy_cpu, base, _self_]\n")
    (job.folder / file).unlink(missing_ok=True)
    make(job.folder / file)
    names = (("base", "mine", "nothing"),) if expected == REFUSED else ()
    return _case(job, f"{file} is {what}", expected, *names)


def chain(job: Job, rng: random.Random) -> Case:
    """Forty recipes, each of which extends the next."""
    for number in range(40):
        job.write(f"r{number}.yaml", f"defaults: [r{number + 1}, _self_]\n")
    job.write("r40.yaml", EXTENDED)
    _write(job, "defaults: [r0, _self_]\n")
    return _case(job, "a long chain", ACCEPTED)


def circle(job: Job, rng: random.Random) -> Case:
    length = rng.randrange(1, 6)
    for number in range(length):
        job.write(f"r{number}.yaml", f"defaults: [r{(number + 1) % length}, _self_]\n")
    _write(job, "defaults: [ppo_toy_cpu, r0, _self_]\n")
    return _case(job, f"a circle of {length}", REFUSED, "r0")


def flipped(job: Job, rng: random.Random) -> Case:
    """A byte of the list of defaults changed at random."""
    content = bytearray(EXTENDED.encode())
    at, value = rng.randrange(len(content)), rng.randrange(256)
    content[at] = value
    job.write(RECIPE, bytes(content) + SECTIONS.format(toy=job.toy).encode())
    return _case(job, f"byte {at} is {value}", EITHER)


def by_the_doctor(job: Job, rng: random.Random) -> Case:
    """The doctor looks at a recipe in a process of its own, and calls it a problem."""
    _write(job, "defaults: [nothing_like_it]\n")
    act = partial(_ask_the_doctor, call(job.folder, "doctor", "--config", RECIPE))
    return Case(name="doctor: a recipe of nothing", expected=REFUSED, names=("nothing_like_it",), act=act)


def _ask_the_doctor(ask: Callable[[], None]) -> None:
    """Its other checks are of the machine."""
    from verl_megatron.doctor import checks

    checks.CHECKS = {"Recipe": checks.CHECKS["Recipe"]}
    try:
        ask()
    except SystemExit as ended:
        if ended.code != 1:
            raise
    print("error: the doctor found a problem", flush=True)
    raise SystemExit(2)

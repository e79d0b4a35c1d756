"""Recipe files: YAML that does not parse, says a key twice or holds what no recipe has; encodings."""

import os
import random
from collections.abc import Callable
from functools import partial

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation, Names
from tests.fuzz.job import RECIPES, Job
from tests.worlds import ROOT

NAME = "mine"
TEXT = (ROOT / "recipes" / f"{RECIPES['train']}.yaml").read_text()
LINES = TEXT.splitlines()
SETTINGS = [number for number, line in enumerate(LINES) if line.startswith("  ")]

Spoil = Callable[[random.Random], str | bytes]


def mutations() -> list[Mutation]:
    found: list[Mutation] = []
    for table, expected, names in (
        (BROKEN, REFUSED, (f"{NAME}.yaml",)),
        (WRONG, REFUSED, ()),
        (HARMLESS, ACCEPTED, ()),
        (OPEN, EITHER, ()),
    ):
        found += [
            partial(spoilt, what=what, spoil=spoil, expected=expected, names=names)
            for what, spoil in table.items()
        ]
    found += [partial(other_file, what=what, make=make) for what, make in OTHER_FILES.items()]
    return found + [
        unknown_section,
        unknown_setting,
        unknown_setting,
        no_section,
        no_section,
        flipped,
        flipped,
        flipped,
        cut,
        cut,
        bomb,
    ]


def spoilt(job: Job, rng: random.Random, *, what: str, spoil: Spoil, expected: str, names: Names) -> Case:
    job.write(f"recipes/{NAME}.yaml", spoil(rng))
    return Case(name=what, expected=expected, names=names, act=_run(job))


def _run(job: Job):
    return job.dry_run(recipe=("--config-path", f"{job.folder}/recipes", "--config-name", NAME))


# ---- changes of the text ---------------------------------------------------------------------------------


def _changed(rng: random.Random, change: Callable[[str], str]) -> str:
    """The recipe with one setting's line changed."""
    lines = list(LINES)
    number = rng.choice(SETTINGS)
    lines[number] = change(lines[number])
    return "\n".join(lines) + "\n"


def _twice(rng: random.Random) -> str:
    return _changed(rng, lambda line: f"{line}\n{line}")


def _section_twice(rng: random.Random) -> str:
    return TEXT + rng.choice(("run:\n  seed: 3\n", "data:\n  shuffle: true\n", "actor: {}\n"))


BROKEN: dict[str, Spoil] = {  # cannot be read: the message names the file
    "a colon less": lambda rng: _changed(rng, lambda line: line.replace(":", "", 1)),
    "an indentation less": lambda rng: _changed(rng, lambda line: " " + line.lstrip()),
    "a tab": lambda rng: _changed(rng, lambda line: "\t" + line.lstrip()),
    "an open bracket": lambda rng: _changed(rng, lambda line: line.partition(":")[0] + ": [1, 2"),
    "an open brace": lambda rng: _changed(rng, lambda line: line.partition(":")[0] + ": {a: 1"),
    "an open quote": lambda rng: _changed(rng, lambda line: line.partition(":")[0] + ": 'abc"),
    "a percent sign first": lambda rng: _changed(rng, lambda line: line.partition(":")[0] + ": %a"),
    "an at sign first": lambda rng: _changed(rng, lambda line: line.partition(":")[0] + ": @a"),
    "an alias of nothing": lambda rng: _changed(rng, lambda line: line.partition(":")[0] + ": *nothing"),
    "a Python object": lambda rng: _changed(
        rng, lambda line: line.partition(":")[0] + ": !!python/object/apply:os.getcwd []"
    ),
    "an unknown tag": lambda rng: _changed(rng, lambda line: line.partition(":")[0] + ": !nothing 3"),
    "a setting twice": _twice,
    "a section twice": _section_twice,
    "UTF-16": lambda rng: TEXT.encode(rng.choice(("utf-16", "utf-16-le", "utf-32"))),
    "Latin-1": lambda rng: TEXT.replace("toy", "t\u00f6y").encode("latin-1"),
    "a control character": lambda rng: _changed(rng, lambda line: line + chr(rng.choice((0, 1, 7, 27)))),
    "a list": lambda rng: "- run\n- data\n",
    "a text": lambda rng: rng.choice(("run", "3", "'run: 3'", "true")),
    "two documents": lambda rng: TEXT + "---\n" + TEXT,
    "JSON cut off": lambda rng: '{"run": {"seed": 3}',
    "deep brackets": lambda rng: "run: " + "[" * 3000 + "]" * 3000,
    "a shell script": lambda rng: "#!/bin/bash\nset -e\nexport A=3\necho hello: world\n",
}
WRONG: dict[str, Spoil] = {  # can be read, and is no recipe of this program
    "dotted settings": lambda rng: TEXT + "run.seed: 3\n",
    "a number for a section": lambda rng: TEXT + "3: 4\n",
    "null for a section": lambda rng: TEXT + "~: {a: 3}\n",
    "true for a section": lambda rng: TEXT + "true: {a: 3}\n",
    "a number for a setting": lambda rng: TEXT.replace("run:\n", "run:\n  7: 8\n"),
    "a list for a setting's name": lambda rng: TEXT.replace("run:\n", "run:\n  ? [a, b]\n  : 8\n"),
    "a date": lambda rng: TEXT.replace("run:\n", "run:\n  seed: 2024-01-31\n"),
    "an interpolation of nothing": lambda rng: TEXT.replace("run:\n", "run:\n  seed: ${nothing.here}\n"),
    "an interpolation cut off": lambda rng: TEXT.replace("run:\n", "run:\n  resume: ${run.seed\n"),
    "defaults of nothing": lambda rng: "defaults: [nothing_like_it, _self_]\n" + TEXT,
    "defaults of a wrong form": lambda rng: (
        f"defaults: {rng.choice(('3', '{a: b}', '[[a]]', '[3]', '[{a: [b]}]'))}\n" + TEXT
    ),
    "a base64 binary": lambda rng: TEXT.replace("run:\n", "run:\n  resume: !!binary aGVsbG8=\n"),
    "a set": lambda rng: TEXT.replace("run:\n", "run:\n  resume: !!set {a, b}\n"),
    "a mark of what is missing": lambda rng: TEXT.replace("run:\n", "run:\n  seed: ???\n"),
}
HARMLESS: dict[str, Spoil] = {
    "as it is": lambda rng: TEXT,
    "a byte-order mark": lambda rng: TEXT.encode("utf-8-sig"),
    "carriage returns": lambda rng: TEXT.replace("\n", "\r\n"),
    "no newline at the end": lambda rng: TEXT.rstrip("\n"),
    "comments": lambda rng: _changed(rng, lambda line: line + "  # ü: [comment"),
    "a document's marks": lambda rng: "---\n" + TEXT + "...\n",
    "an anchor": lambda rng: TEXT.replace("max_tokens: 8", "max_tokens: &tokens 8\n  max_num_seqs: *tokens"),
    "underscores in a number": lambda rng: TEXT.replace("192", "1_92"),
    "an interpolation": lambda rng: TEXT.replace("run:\n", "run:\n  seed: ${rollout.tp}\n"),
    "flow style": lambda rng: TEXT.replace(
        "critic:\n  layout: pp2\n  lr: 5e-4", "critic: {layout: pp2, lr: 5.0e-4}"
    ),
}
OPEN: dict[str, Spoil] = {  # nothing but no traceback
    "nothing": lambda rng: "",
    "null": lambda rng: "null",
    "comments only": lambda rng: "# nothing\n\n# here\n",
    "blanks": lambda rng: " \n \n",
    "a megabyte of comments": lambda rng: TEXT + "# comment\n" * 100_000,
}


def unknown_section(job: Job, rng: random.Random) -> Case:
    name = rng.choice(("rn", "model", "optimizer", "actor_rollout_ref", "hydra_", "Run", "ünbekannt"))
    job.write(f"recipes/{NAME}.yaml", TEXT + f"{name}:\n  seed: 3\n")
    return Case(name=f"section {name}", expected=REFUSED, names=(name,), act=_run(job))


def unknown_setting(job: Job, rng: random.Random) -> Case:
    section, name = (
        rng.choice(("run", "data", "actor", "rollout", "algorithm")),
        rng.choice(("nothing", "lr_", "Seed", "layers", "ü", "a-b", "a b")),
    )
    job.write(f"recipes/{NAME}.yaml", TEXT.replace(f"{section}:\n", f"{section}:\n  {name}: 3\n", 1))
    return Case(
        name=f"setting {section}.{name}", expected=REFUSED, names=(f"{section}.{name}",), act=_run(job)
    )


def no_section(job: Job, rng: random.Random) -> Case:
    section, value = (
        rng.choice(("reward", "engine", "reshard")),
        rng.choice(("3", "text", "[1, 2]", "true", "2.5", "[[]]", "null", "''")),
    )
    job.write(f"recipes/{NAME}.yaml", TEXT + f"{section}: {value}\n")
    return Case(
        name=f"{section}: {value}",
        expected=EITHER if value == "null" else REFUSED,
        names=() if value == "null" else (section,),
        act=_run(job),
    )


def flipped(job: Job, rng: random.Random) -> Case:
    """A byte changed at random: whatever it does, no traceback."""
    content = bytearray(TEXT.encode())
    at = rng.randrange(len(content))
    content[at] = rng.randrange(256)
    job.write(f"recipes/{NAME}.yaml", bytes(content))
    return Case(name=f"byte {at} is {content[at]}", expected=EITHER, act=_run(job))


def cut(job: Job, rng: random.Random) -> Case:
    at = rng.randrange(len(TEXT))
    job.write(f"recipes/{NAME}.yaml", TEXT[:at])
    return Case(name=f"cut at {at}", expected=EITHER, act=_run(job))


def bomb(job: Job, rng: random.Random) -> Case:
    """Aliases of aliases: 10^9 elements in a few lines."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)
    ]
    job.write(f"recipes/{NAME}.yaml", TEXT + "\n".join(lines) + "\n")
    return Case(name="aliases of aliases", expected=REFUSED, act=_run(job))


# ---- no files --------------------------------------------------------------------------------------------

OTHER_FILES: dict[str, Callable[[Job], object]] = {
    "a folder": lambda job: (job.folder / f"recipes/{NAME}.yaml").mkdir(parents=True),
    "a pipe": lambda job: os.mkfifo(job.write("recipes/x", "").with_name(f"{NAME}.yaml")),
    "a link to nothing": lambda job: (
        job.write("recipes/x", "").with_name(f"{NAME}.yaml").symlink_to("nothing")
    ),
    "a link to itself": lambda job: (
        job.write("recipes/x", "").with_name(f"{NAME}.yaml").symlink_to(f"{NAME}.yaml")
    ),
    "another ending": lambda job: job.write(f"recipes/{NAME}.yml", TEXT),
    "nothing": lambda job: job.write("recipes/other.yaml", TEXT),
    "a picture": lambda job: job.write(
        f"recipes/{NAME}.yaml", (ROOT / "recipes/quickstart.png").read_bytes()
    ),
}


def other_file(job: Job, rng: random.Random, *, what: str, make: Callable[[Job], object]) -> Case:
    make(job)
    return Case(name=what, expected=REFUSED, names=(NAME,), act=_run(job))

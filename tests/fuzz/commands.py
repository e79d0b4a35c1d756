"""Arguments of the commands: files and folders that are none, numbers, unknown options and settings."""

import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests.fuzz.case import ACCEPTED, EITHER, REFUSED, Case, Mutation, Names
from tests.fuzz.job import Job
from tests.fuzz.paths import NO_FILES, NOTHING, NOWHERE
from tests.reported_runs import healthy_rows, write_run

Make = Callable[[Path], object]

SHORT = ("data.max_prompt_tokens=16", "rollout.max_tokens=16")  # of the toy model's positions
# What each command is given where all is right; in braces what the job has.
SOUND: dict[str, tuple[str, ...]] = {
    "data check": ("{toy}/few_train.jsonl", "--model", "{toy}/model"),
    "evaluate": ("{toy}/model", "{toy}/few_val.jsonl", "--out", "{folder}/samples.jsonl", *SHORT),
    "generate": ("{toy}/model", "{toy}/few_val.jsonl", "--out", "{folder}/samples.jsonl", *SHORT),
    "plan": ("--model", "llama3-1b", "--gpus", "1", "--json", "{folder}/plan.json"),
    "reshard-plan": ("--hf", "llama3-1b", "--train", "tp2", "--rollout", "tp1", "--json", "{folder}/r.json"),
    "export": ("{toy}", "--out", "{folder}/out"),
    "convert hf-to-mcore": ("{toy}/model", "{folder}/out", "--workers", "1"),
    "convert mcore-to-hf": ("{toy}", "{folder}/out", "--workers", "1"),
    "convert verify": ("{toy}/model", "{toy}/model", "--workers", "1"),
    "convert inspect": ("{toy}/model",),
    "report": ("{folder}/run", "--output", "{folder}/report.html"),
    "recipes show": ("ppo_toy_cpu",),
    "recipes copy": ("ppo_toy_cpu", "{folder}/out"),
    "train": ("--config", "{folder}/mine.yaml", "--dry-run"),
    "benchmark engine": ("--ranks", "1"),
    "benchmark rollout": ("--ranks", "1", "--shape", "llama3-1b"),
    "benchmark reshard": ("--ranks", "1", "--shape", "llama3-1b"),
    "benchmark weight-sync": ("--ranks", "1", "--shape", "llama3-1b"),
    "benchmark data": ("{folder}/prompts", "--model", "{toy}/model", "--prompts", "20", "--only"),
    "reward-server": ("{toy}/model", "--port", "0"),
    "doctor": (),
}
SECTIONS = """
run: {{output_dir: out}}
actor: {{path: {toy}/model}}
data: {{train: {toy}/few_train.jsonl, validation: ""}}
"""
# The job has no checkpoint and no reward model, and machines differ.
NEVER_SOUND = ("export", "convert mcore-to-hf", "reward-server", "doctor")
READ = {  # numbers of the arguments of SOUND that name something to read
    "data check": (0, 2),
    "evaluate": (0, 1),
    "generate": (0, 1),
    "plan": (1,),
    "reshard-plan": (1,),
    "export": (0,),
    "convert hf-to-mcore": (0,),
    "convert mcore-to-hf": (0,),
    "convert verify": (0, 1),
    "convert inspect": (0,),
    "report": (0,),
    "recipes show": (0,),
    "train": (1,),
    "benchmark data": (2,),
    "reward-server": (0,),
}
WRITTEN = {  # and something to write
    "evaluate": (3,),
    "generate": (3,),
    "plan": (5,),
    "reshard-plan": (7,),
    "convert hf-to-mcore": (1,),
    "report": (2,),
    "recipes copy": (1,),
    "benchmark data": (0,),
}
NUMBERS = {
    "evaluate": ("--samples", "--ranks", "--max-restarts"),
    "generate": ("--samples", "--ranks"),
    "plan": ("--gpus", "--hosts", "--prompt", "--response", "--samples-per-iteration", "--mini-batches"),
    "reshard-plan": ("--ranks", "--hosts", "--window-mib", "--same-gpu-rate"),
    "export": ("--step",),
    "convert hf-to-mcore": ("--memory-gib", "--workers", "--file-gib"),
    "doctor": ("--ranks",),
    "train": ("--ranks", "--max-restarts"),
    "benchmark engine": ("--ranks", "--max-restarts", "--rows", "--steps"),
    "benchmark rollout": ("--response", "--utilization", "--max-num-seqs"),
    "benchmark reshard": ("--window-mib", "--repetitions", "--link-mib"),
    "benchmark weight-sync": ("--tokens", "--utilization"),
    "reward-server": ("--port", "--max-tokens", "--gpu-memory-utilization"),
}
NO_NUMBERS = (
    *(
        "",
        " ",
        "-1",
        "x",
        "nan",
        "inf",
        "1e400",
        "1e308",
        "1.5.2",
        "9" * 5000,
        "\udcff",
        "٣٫",
        "0x10",
        "--",
        "1,2",
    ),
)
# Where to write to: nothing outside a case's own folder, so no devices, and pipes wait for their readers.
OUTSIDE = ("a device", "an endless device", "a pipe")
NOT_WRITTEN = {what: make for what, make in NOWHERE.items() if what not in OUTSIDE}
NEW = {what: NOTHING[what] for what in ("nothing", "a link to nothing", "a blank", "a surrogate")}
NEW |= {"a folder": NO_FILES["a folder"], "this folder": NO_FILES["this folder"]}
CHOICES = {
    "data check": "--kind",
    "export": "--dtype",
    "convert hf-to-mcore": "--spec",
    "convert mcore-to-hf": "--dtype",
    "plan": "--algorithm",
    "reshard-plan": "--dtype",
    "benchmark data": "--format",
    "reward-server": "--dtype",
}
SETTINGS = ("data check", "evaluate", "generate", "plan")  # commands that take settings
NO_SETTINGS = (
    *("nothing.at=all", "rollout.nothing=1", "data.prompt_keyy=a", "=3", "data=3", "data.=3", ".=3"),
    *("rollout.max_tokens=x", "rollout.max_tokens=-1", "rollout.max_tokens=[1]", "rollout.max_tokens={a: 1}"),
    *("data.prompt_key=[1,2", "data.prompt_key={", "rollout.max_tokens=${nothing.here}", "rollout=null"),
    *("rollout.max_tokens=\udcff", "data.max_prompt_tokens=" + "9" * 5000, "a" * 100_000),
)
NAMES = (
    *("", " ", ".", "..", "../ppo_toy_cpu", "/etc/passwd", "ppo_toy_cp", "\udcff", "x" * 5000, "toy_cpu"),
    "a\nb",
)
NO_COMMANDS = (
    *(("\udcff",), ("x" * 10**5,), ("data", "x"), ("convert",), ("convert", "x"), ("recipes", "x")),
)
UNKNOWN = ("--foo", "--foo=3", "-x", "---json", "--Json", "--step=", "--dtype=")


def mutations() -> list[Mutation]:
    found: list[Mutation] = []
    for places, table, expected in (
        (READ, NOWHERE | NOTHING, REFUSED),
        (READ, NO_FILES, EITHER),
        (WRITTEN, NOT_WRITTEN, REFUSED),
        (WRITTEN, NEW, EITHER),
    ):
        for command, numbers in places.items():
            found += [
                partial(placed, command=command, number=number, thing=thing, expected=expected)
                for number in numbers
                for thing in table.items()
            ]
    for command, options in NUMBERS.items():
        found += [
            partial(optional, command=command, option=option, value=value)
            for option in options
            for value in NO_NUMBERS
        ]
    for command, option in CHOICES.items():
        found += [partial(optional, command=command, option=option, value=value) for value in NAMES]
    for command in SETTINGS:
        found += [partial(added, command=command, value=value) for value in NO_SETTINGS]
    for command in SOUND:
        found += [partial(added, command=command, value=value) for value in UNKNOWN]
        if SOUND[command]:
            found += [partial(shortened, command=command), partial(shuffled, command=command)]
    found += [
        partial(named, words=("recipes", action, name)) for action in ("show", "copy") for name in NAMES
    ]
    found += [partial(sound, command=command) for command in SOUND if command not in NEVER_SOUND]
    return found + [partial(named, words=words) for words in NO_COMMANDS]


def call(folder: Path, *words: str) -> Callable[[], NoReturn]:
    """The command line in a folder, to be called in a process of its own; ranks are not started."""
    return partial(_call, folder, words)


def _call(folder: Path, words: Sequence[str]) -> NoReturn:
    from verl_megatron.commands import main
    from verl_megatron.launch import ranks

    def start(module: str, *_: object, check: Callable[[], object] = lambda: None, **__: object) -> NoReturn:
        check()
        print(f"would start {module}")
        sys.exit()

    ranks.start = ranks.check_and_start = start
    os.environ["VERL_MEGATRON_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    sys.exit(main(words))


def _words(job: Job, command: str) -> list[str]:
    """The words of a command where all is right, which its files are then written for."""
    if command == "train":
        job.write("mine.yaml", "defaults: [ppo_toy_cpu, _self_]\n" + SECTIONS.format(toy=job.toy))
    if command == "report":
        write_run(job.folder / "run", healthy_rows(2))
    return [*command.split(), *(text.format(toy=job.toy, folder=job.folder) for text in SOUND[command])]


def _case(job: Job, words: Sequence[str], what: str, expected: str = REFUSED, names: Names = ()) -> Case:
    name = f"{' '.join(words[:1])}: {what}"
    return Case(name=name, expected=expected, names=names, act=call(job.folder, *words))


def _shown(value: str) -> str:
    return ascii(value[:80])


# ---- mutations -------------------------------------------------------------------------------------------


def placed(
    job: Job, rng: random.Random, *, command: str, number: int, thing: tuple[str, Make], expected: str
) -> Case:
    """A file or folder that is none of the right kind."""
    what, make = thing
    words = _words(job, command)
    words[number + len(command.split())] = str(make(job.folder / "thing")).strip("'")
    return _case(job, words, f"argument {number} is {what}", expected)


def optional(job: Job, rng: random.Random, *, command: str, option: str, value: str) -> Case:
    """An option with a value that it does not take."""
    words = [*_words(job, command), *((option, value) if rng.random() < 0.5 else (f"{option}={value}",))]
    names = ((option, "algorithm.name", "has no folder checkpoint"),)
    return _case(job, words, f"{option} {_shown(value)}", names=names)


def added(job: Job, rng: random.Random, *, command: str, value: str, expected: str = REFUSED) -> Case:
    """A word that the command does not know, anywhere, or a setting behind the others."""
    words = _words(job, command)
    first = len(command.split()) if value.startswith("-") else len(words)
    words.insert(rng.randrange(first, len(words) + 1), value)
    return _case(job, words, f"with {_shown(value)}", expected)


def shortened(job: Job, rng: random.Random, *, command: str) -> Case:
    words = _words(job, command)
    del words[rng.randrange(len(command.split()), len(words))]
    return _case(job, words, " ".join(words[1:]), EITHER)


def shuffled(job: Job, rng: random.Random, *, command: str) -> Case:
    words = _words(job, command)
    given = words[len(command.split()) :]
    rng.shuffle(given)
    return _case(job, [*command.split(), *given], " ".join(given), EITHER)


def sound(job: Job, rng: random.Random, *, command: str) -> Case:
    return _case(job, _words(job, command), "as it should be", ACCEPTED)


def named(job: Job, rng: random.Random, *, words: tuple[str, ...]) -> Case:
    return _case(job, words, _shown(str(words)))

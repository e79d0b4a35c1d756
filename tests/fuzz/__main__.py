"""Command line of the fuzz; what it prints last is one line of counts."""

import os

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}  # before torch: a pool of threads does not survive a fork

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.fuzz import (
    checkpoints,
    command_lines,
    commands,
    configs,
    data,
    demonstrations,
    environment,
    extended,
    layouts,
    pairs,
    paths,
    pools,
    recipes,
    reports,
    rewards,
    settings,
    tables,
    tokenizers,
    weights,
)
from tests.fuzz.case import ACCEPTED, EITHER, FAULTS, REFUSED, Case, Ended, verdict
from tests.fuzz.job import Job, make_job_base
from tests.fuzz.runner import run_cases

# Kinds of input and how many of a hundred cases are of each.
KINDS = {
    "settings": (settings, 6),
    "lines": (command_lines, 7),
    "recipes": (recipes, 8),
    "environment": (environment, 3),
    "layouts": (layouts, 7),
    "paths": (paths, 6),
    "configs": (configs, 9),
    "weights": (weights, 6),
    "tokenizers": (tokenizers, 3),
    "data": (data, 9),
    "tables": (tables, 3),
    "demonstrations": (demonstrations, 3),
    "pairs": (pairs, 8),
    "rewards": (rewards, 4),
    "pools": (pools, 2),
    "checkpoints": (checkpoints, 3),
    "commands": (commands, 8),
    "reports": (reports, 3),
    "extended": (extended, 2),
}
SHOWN = 600  # characters of what a failed case printed


def names_of(kinds: list[str], count: int) -> list[str]:
    """`count` names KIND:NUMBER, each kind by its share."""
    total, names = sum(KINDS[kind][1] for kind in kinds), []
    for kind in kinds:
        names += [f"{kind}:{number}" for number in range(-(-count * KINDS[kind][1] // total))]
    return names


def make_case(name: str, *, seed: int, toy: Path, scratch: Path) -> Case:
    """Case KIND:NUMBER of a seed, in a folder of its own."""
    kind, _, number = name.partition(":")
    mutations = KINDS[kind][0].mutations()
    random.Random(f"{seed}/{kind}").shuffle(mutations)
    job = Job(toy, scratch / name.replace(":", "_"))
    return mutations[int(number) % len(mutations)](job, random.Random(f"{seed}/{name}"))


def warm_up() -> None:
    """Import what cases need, so that their processes need not."""
    import transformers

    import verl_megatron.launch.dry_run
    import verl_megatron.supervised.trainer
    import verl_megatron.trainer  # noqa: F401

    transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast  # noqa: B018 (imported now)


def run(
    names: list[str], *, seed: int, scratch: Path, at_once: int
) -> Iterator[tuple[str, Case, Ended, str]]:
    """Make the toy job, run the cases and tell what came of each."""
    make_job_base(scratch / "toy")
    warm_up()
    (scratch / "logs").mkdir()
    cases: list[tuple[str, Callable[[], Case]]] = [
        (name, partial(make_case, name, seed=seed, toy=scratch / "toy", scratch=scratch)) for name in names
    ]
    for name, case, ended in run_cases(cases, logs=scratch / "logs", at_once=at_once):
        shutil.rmtree(scratch / name.replace(":", "_"), ignore_errors=True)
        yield name, case, ended, verdict(case, ended)


def counts_line(seed: int, found: Counter[str], seconds: float) -> str:
    """All in one line."""
    right = {REFUSED: "refused as they should", ACCEPTED: "accepted as they should", EITHER: "either way"}
    parts = [f"{found[what]:,} {text}" for what, text in right.items()] + [
        f"{found[fault]:,} {fault}" for fault in FAULTS
    ]
    return f"fuzz seed {seed}: {sum(found.values()):,} cases in {seconds:.0f} s: {', '.join(parts)}"


def show(name: str, case: Case, ended: Ended, came: str, *, whole: bool) -> None:
    """What a case was and what came of it; `whole`: with all that it printed."""
    print(
        f"{name} {came}: {case.name} (should be {case.expected} and name {list(case.names)};"
        f" ended with {ended.code} after {ended.seconds:.1f} s)"
    )
    text = "\n".join(ended.left) + ended.stdout + ended.stderr
    print(
        "    "
        + (
            text if whole or len(text) <= SHOWN else f"{text[: SHOWN // 3]} ... {text[-2 * SHOWN // 3 :]}"
        ).replace("\n", "\n    "),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1000, help="at least so many")
    parser.add_argument("--kind", nargs="+", choices=KINDS, help="of these kinds only")
    parser.add_argument("--case", metavar="KIND:NUMBER", help="this one, with all that it prints")
    parser.add_argument(
        "--show", action="store_true", help="what each case printed, not only those that fail"
    )
    parser.add_argument("--at-once", type=int, default=2, help="processes side by side")
    given = parser.parse_args()
    names = [given.case] if given.case else names_of(given.kind or list(KINDS), given.cases)
    began, found = time.monotonic(), Counter()
    with tempfile.TemporaryDirectory(prefix="fuzz_") as scratch:
        for name, case, ended, came in run(
            names, seed=given.seed, scratch=Path(scratch), at_once=given.at_once
        ):
            found[came] += 1
            if came in FAULTS or given.show or given.case:
                show(name, case, ended, came, whole=bool(given.case))
    print(counts_line(given.seed, found, time.monotonic() - began), flush=True)
    return int(any(found[fault] for fault in FAULTS))


if __name__ == "__main__":
    sys.exit(main())

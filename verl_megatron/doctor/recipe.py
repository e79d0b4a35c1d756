"""Check of a recipe: whether its run is valid and fits this machine, by a dry run."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from parallel.runtime.refusal import NO_ROOM
from verl_megatron.config import SCHEMAS
from verl_megatron.config.gpus import USUAL, machine_of
from verl_megatron.config.section import as_dict
from verl_megatron.doctor.finding import PROBE_S, Answer, Case, Finding, ask, first_line
from verl_megatron.launch.bases import files_of
from verl_megatron.launch.recipe import SHIPPED

# Of the dry run, whose modules import torch: the doctor works where that is broken.
DOES_NOT_FIT = "It does not fit:"


def check_recipe_fits(case: Case) -> Iterator[Finding]:
    """The dry run's answer for the GPUs of this machine; without GPUs, for the h200."""
    if not case.recipe:
        yield Finding(check="recipe", status="skipped", found="no recipe named: not checked")
        return
    gpu = _machine(case)
    answer = _dry_run(case, gpu)
    lines = [line.strip() for line in answer.text.splitlines()]
    title = next((line.removeprefix("dry run: ") for line in lines if line.startswith("dry run: ")), "")
    where = f"{case.recipe}: {title}, {gpu}" + ("" if case.gpus else " (no GPU here)")
    if not answer.problem:
        memory = next((line for line in lines if line.startswith("It fits")), "")
        yield Finding(check="recipe", status="ok", found=f"{where}. {memory}".strip())
    elif answer.status == NO_ROOM and DOES_NOT_FIT in lines:
        yield _does_not_fit(where, lines[lines.index(DOES_NOT_FIT) + 1 :])
    else:
        error = re.search(r"^error: (.*(?:\n  - .*)*)", answer.text, re.MULTILINE)
        reason, _, remedy = (error[1] if error else answer.problem).partition("; ")
        yield Finding(
            check="recipe",
            status="problem",
            found=f"{case.recipe}: {reason}",
            why="a run is refused with this message",
            remedy=remedy or "mend what the message names",
        )


def _does_not_fit(where: str, lines: list[str]) -> Finding:
    better = [line for line in lines if "layout=" in line]
    return Finding(
        check="recipe",
        status="problem",
        found=f"{where}: it does not fit",
        why=first_line("\n".join(lines)),
        remedy=f"add {better[0]}" if better else "use more GPUs, shorter samples or smaller models",
    )


def _dry_run(case: Case, gpu: str) -> Answer:
    """Plan in another process: a broken package or a slow disk cannot end or hang the doctor."""
    is_own = Path(case.recipe).suffix == ".yaml"
    path = Path(case.recipe) if is_own else SHIPPED / f"{case.recipe}.yaml"
    command = [sys.executable, "-m", "verl_megatron", _command_of(path)]
    command += ["--config" if is_own else "--config-name", case.recipe]
    command += ["--ranks", str(case.ranks)] if case.ranks else []
    return ask(
        [*command, "--dry-run", "--gpu", gpu, *case.settings],
        timeout_s=PROBE_S,
        without=("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    )


def _command_of(path: Path) -> str:
    """Return the command whose settings a recipe has: that which knows the most of its names, or train."""
    names: set[str] = set()
    try:
        for file in files_of(path):
            document = yaml.safe_load(file.read_text(encoding="utf-8"))
            names |= _names(document) if isinstance(document, dict) else set()
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return "train"  # which says what is wrong with the file
    known = {command: _names(as_dict(schema())) for command, schema in SCHEMAS.items()}
    return max(known, key=lambda command: len(names & known[command])).replace("_", "-")


def _names(settings: dict[Any, Any]) -> set[str]:
    sections = {section: values for section, values in settings.items() if isinstance(values, dict)}
    return {f"{section}.{name}" for section, values in sections.items() for name in values}


def _machine(case: Case) -> str:
    """Return the planner's name of this machine's GPUs; the h200 without GPUs or for unknown ones."""
    return (machine_of(case.gpus[0].name) if case.gpus else None) or USUAL

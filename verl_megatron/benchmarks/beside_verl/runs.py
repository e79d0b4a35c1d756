"""Starts each program on the job, and reads seconds by phase from its metrics."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from verl_megatron.benchmarks.beside_verl.job import Job
from verl_megatron.benchmarks.beside_verl.settings import (
    VERL_ENVIRONMENT,
    as_arguments,
    our_settings,
    verl_settings,
)
from verl_megatron.benchmarks.options.verl import RECIPES
from verl_megatron.benchmarks.scaling.runs import Recipe, environment, exits_on_sigterm
from verl_megatron.observe.tracking import METRICS_FILE, complete_lines, parsed_rows

# Phases of the table; each program's own names of what is in them.
OUR_PHASES = {
    "weight sync": ("reshard", "return"),
    "rollout": ("rollout",),
    "log-probs": ("log_probs",),
    "values": ("values",),
    "critic update": ("critic_update",),
    "actor update": ("actor_update",),
}
VERL_PHASES = {
    "weight sync": ("update_weights",),
    "rollout": ("gen", "reward"),
    "log-probs": ("old_log_prob", "ref"),
    "values": ("values",),
    "critic update": ("update_critic",),
    "actor update": ("update_actor",),
}
WARM_UP = 2  # iterations that do not count: they compile kernels and allocate memory
ENDING_S = 20.0  # from SIGTERM to SIGKILL
ERROR_CHARACTERS, ERROR_LINES, ERROR_WIDTH = 4000, 20, 300
ERRORS = re.compile(r"Error\b|Exception\b|out of memory")


class RunFailedError(RuntimeError):
    """A program failed, or took longer than it may; with the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of a program's iterations.

    Args:
        seconds: by phase of the table; `iteration` is the whole.
        memory_gib: in use on the fullest GPU at the ends of our phases; None for verl
        iterations: that have ended, with those that do not count.
        problem: what went wrong after the iterations that count.
    """

    name: str
    seconds: dict[str, float]
    memory_gib: float | None
    iterations: int = 0
    problem: str = ""


def run_ours(job: Job, name: str, given: Sequence[str], *, limit_s: float) -> Measured:
    """Run one of our ways.

    Raises:
        RunFailedError: it failed, or took longer than `limit_s`.
    """
    folder = job.folder / name
    (folder / METRICS_FILE).unlink(missing_ok=True)
    recipe = Recipe.find(RECIPES[job.algorithm], tuple(given))
    command = recipe.command(job.gpus, our_settings(job, name, given))
    problem = _run(command, environment(job.gpus), folder / "log.txt", limit_s)
    rows, _ = parsed_rows(complete_lines(folder / METRICS_FILE))
    rows = [row for row in rows if "time/rollout_s" in row]
    seconds = [_named(row, "time/", "_s") | {"iteration": row["train/step_time_ms"] / 1e3} for row in rows]
    memory = [max(_named(row, "memory/", "_mb").values()) / 1024 for row in rows]
    return measured(name, seconds, OUR_PHASES, memory, problem=problem)


def run_verl(job: Job, python: str, given: Sequence[str], *, limit_s: float) -> Measured:
    """Run verl.

    Raises:
        RunFailedError: it failed, or took longer than `limit_s`.
    """
    folder = job.folder / "verl"
    folder.mkdir(exist_ok=True)
    metrics = folder / METRICS_FILE
    metrics.unlink(missing_ok=True)
    command = [python, "-m", "verl.trainer.main_ppo", *as_arguments(verl_settings(job)), *given]
    variables = dict(os.environ) | VERL_ENVIRONMENT | {"VERL_FILE_LOGGER_PATH": str(metrics)}
    for name in ("RAY_ADDRESS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        variables.pop(name, None)
    problem = _run(command, variables, folder / "log.txt", limit_s)
    rows = [json.loads(line)["data"] for line in complete_lines(metrics)]
    rows = [row for row in rows if "timing_s/step" in row]
    seconds = [_named(row, "timing_s/") | {"iteration": row["timing_s/step"]} for row in rows]
    return measured("verl", seconds, VERL_PHASES, (), problem=problem)


def _named(row: Mapping[str, float], prefix: str, suffix: str = "") -> dict[str, float]:
    """Return the metrics whose names have this prefix and suffix, by what stands between these."""
    found = {key: value for key, value in row.items() if key.startswith(prefix) and key.endswith(suffix)}
    return {key[len(prefix) : len(key) - len(suffix)]: value for key, value in found.items()}


def measured(
    name: str,
    iterations: Sequence[Mapping[str, float]],
    phases: Mapping[str, Sequence[str]],
    memory_gib: Sequence[float],
    *,
    problem: str = "",
) -> Measured:
    """Return medians over the iterations after `WARM_UP`.

    Raises:
        RunFailedError: there are too few.
    """
    counted = iterations[WARM_UP:]
    if not counted:
        raise RunFailedError(
            problem or f"{name} has written {len(iterations)} iterations, of which the first two do not count"
        )
    seconds = {}
    for phase, parts in phases.items():
        seconds[phase] = median(total(one, parts) for one in counted)
    return Measured(
        name=name,
        seconds=seconds | {"iteration": median(one["iteration"] for one in counted)},
        memory_gib=max(memory_gib, default=None),
        iterations=len(iterations),
        problem=problem,
    )


def total(seconds: Mapping[str, float], parts: Sequence[str]) -> float:
    """Return the seconds of several parts together; absent ones took none."""
    return sum(seconds.get(part, 0.0) for part in parts)


def version_of_verl(python: str) -> str:
    """Return the version of verl that a Python has.

    Raises:
        ValueError: none, or no such Python.
    """
    code = "import importlib.metadata; print(importlib.metadata.version('verl'))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"--verl-python {python} cannot be run ({error}); name a Python") from None
    if found.returncode:
        raise ValueError(
            f"--verl-python {python} has no verl; install verl 0.9 with megatron-bridge there, or leave verl "
            "out with --only ours"
        )
    return found.stdout.strip()


def _run(command: Sequence[str], variables: Mapping[str, str], log: Path, limit_s: float) -> str:
    """Run a command in a session of its own, and end what it leaves there; return what went wrong."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        with _ended(process.pid):
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return f"{log.parent.name} took longer than --limit {limit_s:g} s; {_end_of(log)}"
    return f"{log.parent.name} ended with {code}; {_end_of(log)}" if code else ""


def _end_of(log: Path) -> str:
    """Return the last errors of a log, which may be far from its end, and the end."""
    text = log.read_text(errors="replace")
    errors = [line[:ERROR_WIDTH] for line in text[:-ERROR_CHARACTERS].splitlines() if ERRORS.search(line)]
    return "\n".join([f"{log} ends with:", *errors[-ERROR_LINES:], text[-ERROR_CHARACTERS:]])


@contextlib.contextmanager
def _ended(session: int) -> Iterator[None]:
    """End all processes of a session with the block, also if this program is ended by SIGTERM."""
    try:
        with exits_on_sigterm():
            yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in _processes_of(session):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + ENDING_S
            while _processes_of(session) and time.monotonic() < deadline:
                time.sleep(0.2)


def _processes_of(session: int) -> list[int]:
    """Return the processes of a session, without those that only wait to be reaped."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it has just ended
        if int(its_session) == session and state != "Z":
            found.append(int(folder.name))
    return found

"""What a check of a machine found, and what checks share: options, GPUs, and programs with a time limit."""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warning", "problem", "skipped"]
NO_GPU = "no GPU: not checked"
SMI_S = 20.0  # for an answer of nvidia-smi, which takes seconds where the driver is not kept loaded
PROBE_S = 120.0  # for a Python program that imports torch
SMI_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor.

    `why` and `remedy` are empty where there is nothing to do.
    """

    check: str
    status: Status
    found: str
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program has printed."""

    text: str = ""
    status: int = 0
    problem: str = ""  # why there is no answer: absent, too slow, or failed


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as nvidia-smi sees it."""

    index: int
    uuid: str
    name: str
    total_mib: float
    used_mib: float
    driver: str


@dataclass(kw_only=True)
class Case:
    """What is looked at."""

    folder: Path  # output folder of runs, which may not exist yet
    recipe: str = ""  # name of a recipe, or a file; empty: none
    settings: tuple[str, ...] = ()  # added to the recipe's, as SECTION.SETTING=VALUE
    ranks: int = 0  # of the recipe's run; 0: as many as `verl-megatron train` starts here

    @cached_property
    def gpus(self) -> list[Gpu]:
        """The GPUs of this host; empty without any, or if `gpu_problem` says why they are not known."""
        return self._gpus[0]

    @cached_property
    def gpu_problem(self) -> str:
        """Why the GPUs of this host are not known; empty if they are, or if there are none."""
        return self._gpus[1]

    @cached_property
    def _gpus(self) -> tuple[list[Gpu], str]:
        has_driver = os.path.exists("/proc/driver/nvidia") or os.path.exists("/dev/nvidiactl")
        if shutil.which("nvidia-smi") is None:
            return [], "there is an NVIDIA driver, and no nvidia-smi on the PATH" if has_driver else ""
        answer = ask(["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"])
        if answer.problem:
            return [], answer.problem
        gpus = [gpu for line in answer.text.splitlines() if (gpu := _parsed(line)) is not None]
        return gpus, "" if gpus else f"nvidia-smi lists no GPU: {first_line(answer.text)}"


def _parsed(line: str) -> Gpu | None:
    cells = [cell.strip() for cell in line.split(",")]
    try:
        index, uuid, name, total, used, driver = cells
        return Gpu(
            index=int(index),
            uuid=uuid,
            name=name,
            total_mib=float(total),
            used_mib=float(used),
            driver=driver,
        )
    except ValueError:
        return None


def ask(
    command: list[str], *, timeout_s: float = SMI_S, without: tuple[str, ...] = (), given: str = ""
) -> Answer:
    """Run a program and return what it prints, for at most `timeout_s` seconds.

    A program that cannot even be killed (one that waits for a driver) is left behind.

    Args:
        without: environment variables that it does not get.
        given: its standard input.
    """
    name = Path(command[0]).name if command[0] != sys.executable else "a Python program"
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with tempfile.TemporaryFile() as source:
            source.write(given.encode())
            source.seek(0)
            try:
                process = subprocess.Popen(
                    command,
                    stdin=source,
                    stdout=output,
                    stderr=errors,
                    env={name: value for name, value in os.environ.items() if name not in without},
                    start_new_session=True,
                )
            except OSError as error:
                return Answer(status=-1, problem=f"{name} cannot be started ({error.strerror})")
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end_group(process)
            return Answer(status=-1, problem=f"{name} gave no answer within {timeout_s:g} s")
        texts = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (output, errors)]
    why = first_line(texts[1]) or first_line(texts[0])
    return Answer(
        text=texts[0] if status == 0 else texts[0] + texts[1],
        status=status,
        problem=f"{name} ended with {status}: {why}" if status else "",
    )


def end_group(process: subprocess.Popen) -> None:
    """Kill a program with its children, and wait a moment for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)


def line_within(process: subprocess.Popen, timeout_s: float) -> str:
    """Return the first line that a program prints; empty if none comes in time."""
    if process.stdout is None or not select.select([process.stdout], [], [], timeout_s)[0]:
        return ""
    return process.stdout.readline()


def first_line(text: str) -> str:
    """Return the first line with words, without control characters, at most 200 characters long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return "".join(letter for letter in line if letter.isprintable())[:200]


def last_line(text: str) -> str:
    """Return the last line with words, as `first_line`."""
    return first_line("\n".join(reversed(text.splitlines())))


def plain(text: str) -> str:
    """Return `text` without a terminal's codes for colours."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)

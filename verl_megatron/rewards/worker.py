"""Reward worker: imports reward functions in a sandbox, calls them per sample and validates their results.

The trainer sends pickled (number of the function, (prompt, response, ground truth, extra, messages)). Answers
are lines of JSON, first one about the import of each function: the trainer unpickles nothing that a reward
made. Worker processes import this file, so it needs only the standard library.
"""

import contextlib
import json
import math
import os
import pickle
import socket
import sys
import time
from io import TextIOWrapper
from typing import Any, NoReturn, cast

from parallel.runtime.refusal import short_repr
from verl_megatron.rewards.arguments import Call, columns_of
from verl_megatron.rewards.functions import described, load_reward
from verl_megatron.rewards.sandbox import enter

EXCEPTION, TIMEOUT, NOT_FINITE, WRONG_TYPE, DIED, SERVER = (
    "exception",
    "timeout",
    "not finite",
    "wrong type",
    "worker died",
    "server error",
)  # kinds of failure
MAX_METRICS = 100  # metric names of a reward function
MAX_NAME = 100  # characters of each

FLOAT32_MAX = (2 - 2**-23) * 2.0**127

Answer = tuple[float, dict[str, float], str | None, str]  # score, metrics, kind of failure, its text


def main(
    specs: list[str], options: dict[str, Any], *, connection: int, parent: int, output_bytes: int
) -> NoReturn:
    """Serve samples on the socket with file descriptor `connection` until its other end closes."""
    refused = enter(parent, connection=connection, output_bytes=output_bytes)
    os.set_inheritable(connection, False)
    own_id, trainer = os.getpid(), socket.socket(fileno=connection)
    sys.argv[:] = [""]
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)  # this process ends by being killed
    functions: list[Any] = []

    def send(answer: Any) -> None:
        if os.getpid() != own_id:  # a reward that forks and returns twice answers once
            os._exit(0)
        trainer.sendall(json.dumps(answer).encode() + b"\n")

    with trainer.makefile("rb") as requests, contextlib.suppress(EOFError, OSError):
        for spec in specs:
            function, answer = _imported(spec, options)
            functions.append(function)
            send({"refused": refused} | answer)
        while True:
            number, call = pickle.load(requests)
            send(_timed(functions[number], call))
    os._exit(0)


def _imported(spec: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a function with the columns that it needs, or None with the problem."""
    try:
        function = load_reward(spec, options)
        return function, {"columns": columns_of(function)}
    except ValueError as error:
        return None, {"problem": str(error)}
    except BaseException as error:  # a file with attributes that raise
        setting = f"reward.function={short_repr(spec)}"
        return None, {"problem": f"{setting} cannot be looked at: {described(error)}; mend the file"}


def _timed(function: Call, call: tuple) -> list:
    """Return an Answer and the call's ms."""
    started = time.perf_counter()
    try:
        answer = read_value(function(*call))
    except BaseException as error:  # SystemExit as well: user code must not end the run
        answer = 0.0, {}, EXCEPTION, described(error)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    return [*answer, (time.perf_counter() - started) * 1000]


def read_value(value: Any) -> Answer:
    """Validate the return value of a reward function."""
    entries = value if isinstance(value, dict) else {"score": value}
    score = _number(entries.get("score"))
    if score is None:
        return _wrong(f'expected a number or a dict with a number as "score", got {_shown(value)}')
    if not abs(score) <= FLOAT32_MAX:
        return 0.0, {}, NOT_FINITE, f"score is {score}" + ", beyond float32" * math.isfinite(score)
    if len(entries) - 1 > MAX_METRICS:
        return _wrong(f"{len(entries) - 1} entries besides the score; report at most {MAX_METRICS}")
    metrics = {}
    for name, entry in entries.items():
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME):
            return _wrong(
                f"the name {_shown(name)} of a metric; use printable texts of at most {MAX_NAME} characters"
            )
        number = _number(entry)
        if name != "score" and number is not None and math.isfinite(number):
            metrics[str(name)] = number
    return score, metrics, None, ""


def _wrong(text: str) -> Answer:
    return 0.0, {}, WRONG_TYPE, text


def _shown(value: Any) -> str:
    try:
        return short_repr(value)
    except BaseException:  # its `__repr__` may even exit the process
        return f"an object of type {short_repr(type(value).__name__)}"


def _number(entry: Any) -> float | None:
    """Convert a Python, numpy or one-element tensor number to a float; None for everything else."""
    try:
        return float(entry) if hasattr(entry, "__float__") else None
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None

"""Reward functions in worker processes, so that they run while generation goes on and a bad one cannot stop the run.

Worker processes import this file, so it needs only the standard library and pebble.
"""

import contextlib
import ctypes
import functools
import math
import os
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError
from dataclasses import dataclass, field
from multiprocessing import context, popen_spawn_posix
from typing import Any

from pebble import ProcessFuture, ProcessPool

from verl_megatron.rewards.functions import RewardFunction, load_reward

EXCEPTION, TIMEOUT, NOT_FINITE, WRONG_TYPE, DIED = "exception", "timeout", "not finite", "wrong type", "worker died"  # kinds of failure

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(kw_only=True, slots=True)
class Reward:
    """What a reward function said about a row."""

    score: float
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # kind; then the score is the pool's failure_score


@dataclass(kw_only=True, slots=True)
class Failure:
    """A row whose reward failed, for showing."""

    kind: str
    error: str
    row_id: int
    prompt: str
    response: str

    def __str__(self) -> str:
        return f"reward {self.kind} on row {self.row_id}: {self.error}\n  prompt: {self.prompt!r}\n  response: {self.response!r}"


class RewardPool:
    """Scores rows with the reward function `spec` in `workers` processes, started here and ended by `close` or with this process.

    A call that raises, takes longer than `timeout_s` (its worker is killed and replaced), returns NaN, infinity or no number,
    or ends its worker gives `failure_score`. `failures` (count by kind), `total_ms` and `calls` speak of the rows of the
    last `results()`; `examples` keeps the first failure of each kind. Create the pool in a thread that outlives it, such as
    the main one: Linux ends the workers with the thread that started them.

    Raises:
        ValueError: `spec` names no function that can be loaded, or a setting is out of range.
    """

    def __init__(self, spec: str, *, workers: int = 1, timeout_s: float = 10.0, failure_score: float = 0.0):
        if workers < 1:
            raise ValueError(f"reward.workers={workers} must be at least 1")
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s={timeout_s} must be greater than 0")
        self.timeout_s = timeout_s
        self.failure_score = failure_score
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, Failure] = {}
        self.total_ms = 0.0
        self.calls = 0
        self._spec = spec
        self._pending: dict[int, tuple[str, str, ProcessFuture]] = {}
        self._pool = ProcessPool(workers, initializer=_start_worker, initargs=(spec, os.getpid()), context=_CleanContext())
        try:
            self._pool.schedule(_check, args=(spec,)).result()  # a wrong spec is said now, not at the first row
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def latency_ms(self) -> float:
        """Mean time of a call, ms, over the rows of the last `results()`."""
        return self.total_ms / max(self.calls, 1)

    def submit(self, row_id: int, prompt: str, response: str, ground_truth: Any, extra: dict[str, Any] | None = None) -> None:
        """Hand a row to the workers and return at once."""
        assert row_id not in self._pending, f"row {row_id} was submitted twice"
        future = self._pool.schedule(_score, args=(self._spec, prompt, response, ground_truth, extra or {}), timeout=self.timeout_s)
        self._pending[row_id] = (prompt, response, future)

    def results(self, *, progress: Callable[[], None] = lambda: None) -> dict[int, Reward]:
        """Rewards by row_id of all rows submitted since the last call; waits for them, and calls `progress` as they come."""
        pending, self._pending = self._pending, {}
        self.failures, self.total_ms, self.calls = Counter(), 0.0, len(pending)
        rewards = {}
        for row_id, row in pending.items():
            rewards[row_id] = self._collect(row_id, *row)
            progress()
        return rewards

    def _collect(self, row_id: int, prompt: str, response: str, future: ProcessFuture) -> Reward:
        error = future.exception()
        if error is None:
            score, metrics, kind, text, elapsed_ms = future.result()
        elif isinstance(error, TimeoutError):
            score, metrics, kind, text, elapsed_ms = 0.0, {}, TIMEOUT, f"no answer within {self.timeout_s} s", self.timeout_s * 1000
        else:
            score, metrics, kind, text, elapsed_ms = 0.0, {}, DIED, str(error), 0.0
        self.total_ms += elapsed_ms
        if kind is None:
            return Reward(score=score, metrics=metrics)
        self.failures[kind] += 1
        self.examples.setdefault(kind, Failure(kind=kind, error=text, row_id=row_id, prompt=prompt, response=response))
        return Reward(score=self.failure_score, failure=kind)

    def close(self) -> None:
        """End the workers, whatever they are doing. Rows not yet collected are lost."""
        self._pool.stop()
        self._pool.join()


# --- in the worker ---


@functools.cache
def _load(spec: str) -> RewardFunction:
    return load_reward(spec)


def _start_worker(spec: str, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # even a call that never gives up the GIL ends with the trainer
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    os.setsid()  # torchrun passes SIGTERM on to the trainer's whole process group, and the trainer still wants its answers
    with contextlib.suppress(ValueError):  # said by the first call; here it only spares that call the import
        _load(spec)


def _check(spec: str) -> None:
    _load(spec)  # and return nothing: functions of a path.py cannot be pickled


def _score(spec: str, prompt: str, response: str, ground_truth: Any, extra: dict) -> tuple[float, dict[str, float], str | None, str, float]:
    """Score, metrics, kind of failure, its text, and ms of the call."""
    started = time.perf_counter()
    try:
        value = _load(spec)(prompt, response, ground_truth, extra)
        score, metrics, kind, text = _read(value)
    except BaseException as error:  # SystemExit as well: user code must not end the run
        score, metrics, kind, text = 0.0, {}, EXCEPTION, f"{type(error).__name__}: {error}"
    return score, metrics, kind, text, (time.perf_counter() - started) * 1000


def _read(value: Any) -> tuple[float, dict[str, float], str | None, str]:
    """Score, metrics, kind of failure and its text from what a reward function returned."""
    entries = value if isinstance(value, dict) else {"score": value}
    numbers = {name: number for name, entry in entries.items() if (number := _number(entry)) is not None}
    score = numbers.pop("score", None)
    if score is None:
        return 0.0, {}, WRONG_TYPE, f'expected a number or a dict with a number as "score", got {value!r:.200}'
    if not math.isfinite(score):
        return 0.0, {}, NOT_FINITE, f"score is {score}"
    return score, {name: number for name, number in numbers.items() if math.isfinite(number)}, None, ""


def _number(entry: Any) -> float | None:
    """A Python, numpy or one-element tensor number as a float; None for everything else."""
    try:
        return float(entry) if hasattr(entry, "__float__") else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


# --- starting workers ---


class _CleanProcess(context.SpawnProcess):
    """A spawned process that does not import the caller's main script, which may import torch or start a training run."""

    @staticmethod
    def _Popen(process_obj):  # noqa: N802  (multiprocessing's name)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # multiprocessing looks here for what to import
        try:
            return popen_spawn_posix.Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


class _CleanContext(context.SpawnContext):
    Process = _CleanProcess


__all__ = ["Failure", "Reward", "RewardPool"]

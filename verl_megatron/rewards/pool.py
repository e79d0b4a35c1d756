"""Pool of reward workers: reward functions run in processes during generation and cannot stop the run."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.rewards.functions import OUT_OF_TOP_LEVEL, REWARDS, builtin_problem, described
from verl_megatron.rewards.sandbox import KILLED
from verl_megatron.rewards.worker import DIED, EXCEPTION, MAX_METRICS, NOT_FINITE, TIMEOUT, WRONG_TYPE

CHECK_TIMEOUT_S = 45.0  # a reward file that takes longer to import is rejected before a model is built
START_TIMEOUT_S = 600.0  # the workers of all ranks of a host import it at once
OUTPUT_BYTES = 1 << 16  # printed per worker; replacements of a worker may print less

REMEDIES = {
    EXCEPTION: "mend the function",
    TIMEOUT: "make the function faster or raise reward.timeout_s",
    NOT_FINITE: "return a finite number that float32 can hold",
    WRONG_TYPE: 'return a number, or a dict with a number as "score"',
    DIED: "the function must not end its process; look for crashes and for memory running out",
}

_MAIN = (
    "import sys; sys.path[:] = {path!r}; from verl_megatron.rewards.worker import main; "
    "main({spec!r}, connection={connection}, parent={parent}, output_bytes={output})"
)
_COLUMNS: dict[str, list[str]] = {}  # that reward files need, by their spec
_LONGEST_S = 1e6  # longest socket timeout
_LONGEST_ANSWER = 1 << 20  # bytes
_GRACE_S = 5.0  # for a worker's processes to exit after its connection closes
_KILLED_BY_OTHERS = (KILLED, -signal.SIGKILL)  # for example by the OOM killer; a retry may succeed


@dataclass(kw_only=True, slots=True)
class Reward:
    """The result of a reward function for one sample."""

    score: float
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # kind of failure; the score is then the pool's failure_score


@dataclass(kw_only=True, slots=True)
class Failure:
    """A sample whose reward failed, formatted for messages."""

    kind: str
    error: str
    sample_id: int
    prompt: str
    response: str

    def __str__(self) -> str:
        prompt, response = short_repr(self.prompt, limit=500), short_repr(self.response, limit=500)
        example = f"\n  prompt: {prompt}\n  response: {response}"
        return f"reward {self.kind} on sample {self.sample_id}: {self.error}{example}"


def check_reward(spec: str, *, timeout_s: float = CHECK_TIMEOUT_S) -> list[str]:
    """Import reward.function=`spec` in a worker within `timeout_s` and return the problems found."""
    if spec in REWARDS:
        return [problem] if (problem := builtin_problem(spec)) else []
    try:
        worker = _Worker(spec, output_bytes=0)
    except ValueError as error:
        return [str(error)]
    try:
        worker.wait(timeout_s)
        _COLUMNS[spec] = worker.columns
    except ValueError as error:
        return [str(error)]
    finally:
        worker.end()
    return []


def columns_problem(spec: str, columns: Collection[str]) -> str:
    """Return which argument of a checked reward no column of the data gives; empty if there is none."""
    missing = next((name for name in _COLUMNS.get(spec, []) if name not in columns), "")
    shown = ", ".join(map(short_repr, sorted(columns)[:20])) or "none besides prompt and answer"
    return missing and (
        f"reward.function={short_repr(spec)} takes the argument {short_repr(missing)}, and the data have no "
        f"such column; they have {shown}"
    )


class RewardPool:
    """Scores samples with the reward function `spec` in `workers` sandboxed processes.

    The processes start here and end by `close` or with this process. A call gives `failure_score` if it
    raises, takes longer than `timeout_s` (its worker is killed and replaced), returns NaN, infinity or no
    number, or ends its worker. A call whose worker is killed from outside is retried once.

    `failures` (count by kind), `first_failure`, `total_ms` and `calls` cover the samples of the last
    `results()`; `examples` keeps the first failure of each kind. `refused` is the system's reason for not
    giving the workers their own namespaces (sandbox.py); empty if they have them.

    Raises:
        ValueError: `spec` names no function that can be loaded, or a setting is out of range.
    """

    def __init__(self, spec: str, *, workers: int = 1, timeout_s: float = 10.0, failure_score: float = 0.0):
        if workers < 1:
            raise ValueError(f"reward.workers={workers} must be at least 1")
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s={timeout_s} must be greater than 0")
        self.spec, self.timeout_s, self.failure_score = spec, timeout_s, failure_score
        self.failures: Counter[str] = Counter()
        self.first_failure: Failure | None = None
        self.examples: dict[str, Failure] = {}
        self.metric_names: set[str] = set()  # of the samples of the last results()
        self.total_ms = 0.0
        self.calls = 0
        self._pending: dict[int, tuple[str, str, Future]] = {}
        self._tasks: SimpleQueue[tuple[tuple, Future] | None] = SimpleQueue()
        first: SimpleQueue[str | Exception] = SimpleQueue()
        self._slots = [_Slot(self, first) for _ in range(workers)]
        for slot in self._slots:
            slot.start()
        started = first.get()  # a wrong spec is reported now, not at the first sample
        if isinstance(started, Exception):
            self.close()
            raise started
        self.refused = started

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def latency_ms(self) -> float:
        """Mean time of a call, ms, over the samples of the last `results()`."""
        return self.total_ms / max(self.calls, 1)

    def submit(
        self,
        sample_id: int,
        prompt: str,
        response: str,
        ground_truth: Any,
        extra: dict[str, Any] | None = None,
        messages: list[dict[str, Any]] | None = None,
    ) -> None:
        """Queue a sample for the workers and return immediately; `messages` are those of a chat prompt."""
        assert sample_id not in self._pending, f"sample {sample_id} was submitted twice"
        future: Future = Future()
        self._pending[sample_id] = (prompt, response, future)
        self._tasks.put(((prompt, response, ground_truth, extra or {}, messages), future))

    def results(self, *, progress: Callable[[], None] = lambda: None) -> dict[int, Reward]:
        """Return rewards by sample_id of the samples submitted since the last call.

        Calls `progress` after each of them.
        """
        pending, self._pending = self._pending, {}
        self.failures, self.total_ms, self.calls = Counter(), 0.0, len(pending)
        self.first_failure, self.metric_names = None, set()
        rewards = {}
        for sample_id, call in pending.items():
            rewards[sample_id] = self._collect(sample_id, *call)
            progress()
        return rewards

    def _collect(self, sample_id: int, prompt: str, response: str, future: Future) -> Reward:
        score, metrics, kind, text, elapsed_ms = future.result()
        self.total_ms += elapsed_ms
        if kind is None:
            self.metric_names |= metrics.keys()
            return Reward(score=score, metrics=metrics)
        failure = Failure(kind=kind, error=text, sample_id=sample_id, prompt=prompt, response=response)
        self.failures[kind] += 1
        self.examples.setdefault(kind, failure)
        self.first_failure = self.first_failure or failure
        return Reward(score=self.failure_score, failure=kind)

    def complaint(self, failed: int, calls: int) -> str:
        """Return why the samples of the last `results()` are unusable; empty if no reason was found here.

        `failed` and `calls` count the samples of all ranks.
        """
        setting = f"reward.function={short_repr(self.spec)}"
        if 0 < calls == failed and self.first_failure is not None:
            problem = f"{setting} failed on all {calls} samples, so nothing can be learnt from them"
            return f"{problem}; {REMEDIES[self.first_failure.kind]}; {self.first_failure}"
        if len(self.metric_names) > MAX_METRICS:
            few = ", ".join(short_repr(name) for name in sorted(self.metric_names)[:3])
            problem = f"{setting} reports metrics of {len(self.metric_names)} names ({few}, ...)"
            return f"{problem}; use at most {MAX_METRICS} names, the same for all samples"
        return ""

    def close(self) -> None:
        """Stop the workers, even in the middle of a call. Results not yet collected are lost."""
        try:
            while True:
                self._tasks.get_nowait()
        except Empty:
            pass
        for slot in self._slots:
            slot.closing = True
            self._tasks.put(None)
        for slot in self._slots:
            slot.finish()


class _Slot(Thread):
    """A thread that runs one worker, replaces it whenever it ends, and passes it samples.

    Linux ends a worker when the thread that started it ends: this thread.
    """

    def __init__(self, pool: RewardPool, first: SimpleQueue):
        super().__init__(daemon=True, name="reward")
        self._spec, self._timeout_s, self._tasks, self._first = pool.spec, pool.timeout_s, pool._tasks, first
        self._worker: _Worker | None = None
        self._starts = 0
        self.closing = False

    def run(self) -> None:
        try:
            self._first.put(self._ensure_worker().refused)
        except Exception as error:
            self._first.put(error)
        while (task := self._tasks.get()) is not None:
            call, future = task
            future.set_result(self._call(call))
        self._end_worker()

    def finish(self) -> None:
        """Wait until this thread has ended; called by another thread after the end is queued."""
        while self.is_alive():
            worker = self._worker
            if worker is not None:
                worker.stop()  # makes a call in progress fail
            self.join(0.1)

    def _call(self, call: tuple) -> list:
        """Return score, metrics, kind of failure, its text, and ms."""
        started = time.perf_counter()
        for repeated in (False, True):
            try:
                worker = self._ensure_worker()
                score, metrics, kind, text, elapsed_ms = worker.ask(pickle.dumps(call), self._timeout_s)
                return [float(score), metrics, kind, text, elapsed_ms]
            except TimeoutError:
                self._end_worker()
                kind, text = TIMEOUT, f"no answer within {self._timeout_s} s"
            except _LostWorkerError:
                code = self._end_worker(grace_s=_GRACE_S)
                kind, text = DIED, f"its process ended: {_cause(code)}"
                if code in _KILLED_BY_OTHERS and not repeated:
                    continue
            except (
                Exception
            ) as error:  # no worker starts, a sample is nested too deep, an answer is malformed
                self._end_worker()
                kind, text = DIED, described(error)
            break
        return [0.0, {}, kind, text, (time.perf_counter() - started) * 1000]

    def _ensure_worker(self) -> "_Worker":
        """Return the worker, started if there is none; ValueError if it cannot be started."""
        if self.closing:
            raise ValueError("the pool is closed")
        if self._worker is not None and self._worker.has_ended():
            self._end_worker()
        for repeated in (False, True):
            if self._worker is not None:
                break
            self._starts += 1
            self._worker = _Worker(self._spec, output_bytes=OUTPUT_BYTES // self._starts)
            try:
                self._worker.wait(START_TIMEOUT_S)
            except ValueError:
                code = self._end_worker()
                if repeated or code not in _KILLED_BY_OTHERS:
                    raise
        assert self._worker is not None
        return self._worker

    def _end_worker(self, *, grace_s: float = 0.0) -> int | None:
        worker, self._worker = self._worker, None
        return None if worker is None else worker.end(grace_s=grace_s)


class _LostWorkerError(Exception):
    """A worker ended or sent a malformed answer."""


class _Worker:
    """A sandboxed process that imports the reward function `spec`; ValueError if none can be started."""

    def __init__(self, spec: str, *, output_bytes: int):
        self.refused = ""  # why it has no own namespaces
        self.columns: list[str] = []  # of the data that the function needs
        self._setting = f"reward.function={short_repr(spec)}"
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        command = _MAIN.format(
            path=sys.path, spec=spec, connection=theirs.fileno(), parent=os.getpid(), output=output_bytes
        )
        try:
            with theirs:
                # Its own session: torchrun sends SIGTERM to the trainer's group, which still needs answers.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", command],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            self._close()
            raise ValueError(
                f"{self._setting}: no worker process can be started: {described(error)}"
            ) from None

    def wait(self, timeout_s: float) -> None:
        """Wait for the import; ValueError if it fails or takes longer than `timeout_s`."""
        try:
            answer = self.ask(b"", timeout_s)
        except TimeoutError:
            problem = f"takes longer than {timeout_s:.0f} s"
        except _LostWorkerError:
            problem = f"ends its process ({_cause(self.end(grace_s=_GRACE_S))})"
        else:
            if "problem" in answer:
                raise ValueError(answer["problem"])
            self.refused, self.columns = answer["refused"], answer["columns"]
            return
        raise ValueError(f"{self._setting}: importing the file {problem}; {OUT_OF_TOP_LEVEL}")

    def ask(self, request: bytes, timeout_s: float) -> Any:
        """Send a request and wait for the answer.

        Raises:
            TimeoutError: no answer within `timeout_s`.
            _LostWorkerError: the worker ended or sent a malformed answer.
        """
        self._socket.settimeout(min(timeout_s, _LONGEST_S))
        try:
            self._socket.sendall(request)
            return json.loads(self._answers.readline(_LONGEST_ANSWER))
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:
            raise _LostWorkerError from error

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, *, grace_s: float = 0.0) -> int | None:
        """End all its processes.

        Returns:
            The exit code if they exited by themselves within `grace_s`, else None.
        """
        try:
            code = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            code = None
        self.stop()
        self._close()
        return code

    def stop(self) -> None:
        self._process.terminate()  # the warden ends the others
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close(self) -> None:
        self._answers.close()
        self._socket.close()


def _cause(code: int | None) -> str:
    """Describe how a worker ended, from its exit code."""
    if code is None:
        return "it closed its connection"
    number = -code if code < 0 else code - 128
    return (
        f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"
    )

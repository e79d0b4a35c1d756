"""Pool of reward workers: reward functions run in processes during generation and cannot stop the run."""

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.data.columns import source_of
from verl_megatron.rewards.functions import described
from verl_megatron.rewards.plan import Part, is_url, read_plan
from verl_megatron.rewards.process import (
    GRACE_S,
    KILLED_BY_OTHERS,
    LostWorkerError,
    WorkerProcess,
    cause_of,
)
from verl_megatron.rewards.server import ServerScorer
from verl_megatron.rewards.worker import (
    DIED,
    EXCEPTION,
    FLOAT32_MAX,
    MAX_METRICS,
    NOT_FINITE,
    SERVER,
    TIMEOUT,
    WRONG_TYPE,
)

START_TIMEOUT_S = 600.0  # the workers of all ranks of a host import it at once
SHOWN_S = 5.0  # after which those who wait are told of failures
OUTPUT_BYTES = 1 << 16  # printed per worker; replacements of a worker may print less

REMEDIES = {
    EXCEPTION: "mend the function",
    TIMEOUT: "make the function faster or raise reward.timeout_s",
    NOT_FINITE: "return a finite number that float32 can hold",
    WRONG_TYPE: 'return a number, or a dict with a number as "score"',
    SERVER: "look at the log of the reward server",
    DIED: "the function must not end its process; look for crashes and for memory running out",
}

# What a call gave: score, metrics, kind of failure (None: it went well), its text, and ms.
Outcome = list[Any]


@dataclass(kw_only=True, slots=True)
class Reward:
    """The result of a reward function for one sample."""

    score: float
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # kind of failure; the score is then the pool's failure_score


@dataclass(kw_only=True, slots=True)
class Failure:
    """A function that failed on a sample, formatted for messages."""

    kind: str
    error: str
    sample_id: int
    prompt: str
    response: str
    function: str = ""  # its name, where a run has several

    def __str__(self) -> str:
        prompt, response = short_repr(self.prompt, limit=500), short_repr(self.response, limit=500)
        example = f"\n  prompt: {prompt}\n  response: {response}"
        of = f" of {self.function}" * bool(self.function)
        return f"reward {self.kind}{of} on sample {self.sample_id}: {self.error}{example}"


@dataclass(slots=True)
class _Pending:
    """A sample that has been submitted."""

    prompt: str
    response: str
    parts: tuple[Part, ...]
    outcomes: "list[Future[Outcome]]"  # of each part


class RewardPool:
    """Scores samples with the reward functions of `spec` in `workers` sandboxed processes.

    The processes start here and end by `close` or with this process. Each of them imports all functions.
    Servers are asked by as many threads each. A sample's score is that of its function, or the weighted sum
    of several (plan.py). A function gives `failure_score` if it raises, takes longer than `timeout_s` (its
    worker is killed and replaced), returns NaN, infinity or no number, or ends its worker, and a server if it
    gives no score within `timeout_s`. The functions of a sample have `timeout_s` together. A call whose
    worker is killed from outside is retried once.

    `failures` (count by kind), `failed` (samples of which no function gave a score), `first_failure`,
    `total_ms` and `calls` cover the samples of the last `results()`; `examples` keeps the first failure of
    each kind and function. `refused` is the system's reason for not giving the workers their own namespaces
    (sandbox.py); empty if they have them.

    Args:
        options: keyword arguments of built-in functions, by their names.

    Raises:
        ValueError: `spec` names no functions that can be loaded, or a setting is out of range.
    """

    def __init__(
        self,
        spec: str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        failure_score: float = 0.0,
    ):
        if workers < 1:
            raise ValueError(f"reward.workers={workers} must be at least 1")
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s={timeout_s} must be greater than 0")
        self.spec, self.timeout_s, self.failure_score = spec, timeout_s, failure_score
        self.plan, self.options = read_plan(spec), dict(options or {})
        self.failures: Counter[str] = Counter()
        self.failed = 0
        self.first_failure: Failure | None = None
        self.examples: dict[str, Failure] = {}
        self._shown: set[str] = set()  # of these
        self.metric_names: set[str] = set()  # of the samples of the last results()
        self.total_ms = 0.0
        self.calls = 0
        self._pending: dict[int, _Pending] = {}
        self.in_workers = [one for one in self.plan.specs if not is_url(one)]
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._servers = {url: SimpleQueue() for url in self.plan.specs if is_url(url)}
        self._scorers = [
            ServerScorer(url, samples, timeout_s=timeout_s)
            for url, samples in self._servers.items()
            for _ in range(workers)
        ]
        first: SimpleQueue[str | Exception] = SimpleQueue()
        self._slots = [_Slot(self, first) for _ in range(workers if self.in_workers else 0)]
        for thread in (*self._slots, *self._scorers):
            thread.start()
        started = first.get() if self._slots else ""  # a wrong spec is reported now, not at the first sample
        if isinstance(started, Exception):
            self.close()
            raise started
        self.refused = started

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def submit(
        self,
        sample_id: int,
        prompt: str,
        response: str,
        ground_truth: Any,
        extra: dict[str, Any] | None = None,
        messages: list[dict[str, Any]] | None = None,
    ) -> None:
        """Queue a sample for the workers and return immediately; `messages` are those of a chat prompt.

        Raises:
            ValueError: no function is for rows of its data_source.
        """
        assert sample_id not in self._pending, f"sample {sample_id} was submitted twice"
        extra = extra or {}
        parts = self.plan.parts(source_of(extra))
        if not parts:
            raise ValueError(
                f"reward.function={short_repr(self.spec)} has no entry for data_source "
                f"{short_repr(source_of(extra))}; add one, or an entry default"
            )
        call = (prompt, response, ground_truth, extra, messages)
        pending = _Pending(prompt, response, parts, [Future() for _ in parts])
        self._pending[sample_id] = pending
        here: list[tuple[int, Future[Outcome]]] = []
        for part, outcome in zip(parts, pending.outcomes):
            if part.spec in self._servers:
                self._servers[part.spec].put((call, outcome))
            else:
                here.append((self.in_workers.index(part.spec), outcome))
        if here:
            self._tasks.put((call, here))

    def are_done(self, sample_ids: Iterable[int]) -> bool:
        """Whether `results` would return the rewards of these samples at once."""
        waiting = (outcome for sample_id in sample_ids for outcome in self._pending[sample_id].outcomes)
        return all(outcome.done() for outcome in waiting)

    def results(
        self, sample_ids: Iterable[int] | None = None, *, progress: Callable[[], None] = lambda: None
    ) -> dict[int, Reward]:
        """Return rewards by sample_id of these samples, or of all submitted and not yet returned.

        Calls `progress` after each of them. Failures are shown early if all take longer than SHOWN_S.
        """
        wanted = list(self._pending) if sample_ids is None else sample_ids
        pending = {sample_id: self._pending.pop(sample_id) for sample_id in wanted}
        self.failures, self.failed, self.total_ms, self.calls = Counter(), 0, 0.0, len(pending)
        self.first_failure, self.metric_names = None, set()
        rewards, begin = {}, time.monotonic()
        for sample_id, sample in pending.items():
            if time.monotonic() > begin + SHOWN_S:
                self.show_new_failures()
            rewards[sample_id] = self._collect(sample_id, sample)
            progress()
        return rewards

    def _collect(self, sample_id: int, sample: _Pending) -> Reward:
        outcomes, is_plain = [future.result() for future in sample.outcomes], self.plan.is_plain
        score, metrics, failed = 0.0, {}, []
        for part, (own, reported, kind, text, elapsed_ms) in zip(sample.parts, outcomes):
            self.total_ms += elapsed_ms
            if kind is not None:
                own, name = self.failure_score, "" if is_plain else part.name
                self._fail(sample_id, sample, kind, text, name)
                failed.append(kind)
            score = own if is_plain else score + part.weight * own
            metrics |= reported if is_plain else _of_part(part.name, own, reported if kind is None else {})
        self.failed += len(failed) == len(outcomes)
        if not abs(score) <= FLOAT32_MAX:  # a sum of several
            self._fail(sample_id, sample, NOT_FINITE, f"the weighted sum is {score}, beyond float32", "")
            failed.append(NOT_FINITE)
            score = self.failure_score
        self.metric_names |= metrics.keys()
        return Reward(score=score, metrics=metrics, failure=failed[0] if failed else None)

    def _fail(self, sample_id: int, sample: _Pending, kind: str, text: str, name: str) -> None:
        """Count a failure of the function `name`; empty: of the only one."""
        failure = Failure(
            kind=kind,
            error=text,
            sample_id=sample_id,
            prompt=sample.prompt,
            response=sample.response,
            function=name,
        )
        self.failures[kind] += 1
        self.examples.setdefault(f"{kind} of {name}" if name else kind, failure)
        self.first_failure = self.first_failure or failure

    def forget(self) -> None:
        """Drop the samples whose results nobody will ask for."""
        self._pending.clear()

    def show_new_failures(self) -> None:
        """Print an example of each kind of failure that has not been shown yet."""
        for kind in self.examples.keys() - self._shown:
            print(f"{self.examples[kind]} (counted as reward/failed; shown once)", flush=True)
            self._shown.add(kind)

    def complaint(self, failed: int, calls: int, first: Failure | None = None) -> str:
        """Return why samples are unusable; empty if no reason was found here.

        Args:
            failed: of the samples of all ranks.
            calls: these samples.
            first: the first failure on this rank; None: that of the last `results()`, if there was one.
        """
        first = first or self.first_failure
        setting = f"reward.function={short_repr(self.spec)}"
        if 0 < calls == failed and first is not None:
            problem = f"{setting} failed on all {calls} samples, so nothing can be learnt from them"
            return f"{problem}; {REMEDIES[first.kind]}; {first}"
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
        for samples in self._servers.values():
            for _ in self._scorers:
                samples.put(None)
        for scorer in self._scorers:
            scorer.close()
        for slot in self._slots:
            slot.finish()


def _of_part(name: str, score: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a sample that one of several functions gives."""
    return {name: score} | {f"{name}/{own}": value for own, value in metrics.items()}


# A sample, and the numbers of the functions that score it, with where their outcomes go.
_Task = tuple[tuple[Any, ...], "Sequence[tuple[int, Future[Outcome]]]"]


class _Slot(Thread):
    """A thread that runs one worker, replaces it whenever it ends, and passes it samples.

    Linux ends a worker when the thread that started it ends: this thread.
    """

    def __init__(self, pool: RewardPool, first: SimpleQueue):
        super().__init__(daemon=True, name="reward")
        self._specs, self._options, self._timeout_s = pool.in_workers, pool.options, pool.timeout_s
        self._tasks, self._first = pool._tasks, first
        self._worker: WorkerProcess | None = None
        self._starts = 0
        self.closing = False

    def run(self) -> None:
        try:
            self._first.put(self._ensure_worker().refused)
        except Exception as error:
            self._first.put(error)
        while (task := self._tasks.get()) is not None:
            self._call_all(*task)
        self._end_worker()

    def finish(self) -> None:
        """Wait until this thread has ended; called by another thread after the end is queued."""
        while self.is_alive():
            worker = self._worker
            if worker is not None:
                worker.stop()  # makes a call in progress fail
            self.join(0.1)

    def _call_all(self, call: tuple, functions: "Sequence[tuple[int, Future[Outcome]]]") -> None:
        """Call functions one after the other; they have the time limit together."""
        left_s = self._timeout_s
        for number, future in functions:
            outcome = (
                self._call(number, call, left_s)
                if left_s > 0
                else [0.0, {}, TIMEOUT, f"functions before it took all of the {self._timeout_s} s", 0.0]
            )
            left_s = 0.0 if outcome[2] == TIMEOUT else left_s - outcome[4] / 1000
            future.set_result(outcome)

    def _call(self, number: int, call: tuple, timeout_s: float) -> Outcome:
        started = time.perf_counter()
        for repeated in (False, True):
            try:
                worker = self._ensure_worker()
                score, metrics, kind, text, elapsed_ms = worker.ask(pickle.dumps((number, call)), timeout_s)
                return [float(score), dict(metrics), kind, text, float(elapsed_ms)]
            except TimeoutError:
                self._end_worker()
                kind, text = TIMEOUT, f"no answer within {self._timeout_s} s"
            except LostWorkerError:
                code = self._end_worker(grace_s=GRACE_S)
                kind, text = DIED, f"its process ended: {cause_of(code)}"
                if code in KILLED_BY_OTHERS and not repeated:
                    continue
            except (
                Exception
            ) as error:  # no worker starts, a sample is nested too deep, an answer is malformed
                self._end_worker()
                kind, text = DIED, described(error)
            break
        return [0.0, {}, kind, text, (time.perf_counter() - started) * 1000]

    def _ensure_worker(self) -> WorkerProcess:
        """Return the worker, started if there is none; ValueError if it cannot be started."""
        if self.closing:
            raise ValueError("the pool is closed")
        if self._worker is not None and self._worker.has_ended():
            self._end_worker()
        for repeated in (False, True):
            if self._worker is not None:
                break
            self._starts += 1
            self._worker = WorkerProcess(
                self._specs, self._options, output_bytes=OUTPUT_BYTES // self._starts
            )
            if problems := self._worker.wait(START_TIMEOUT_S):
                code = self._end_worker()
                if repeated or code not in KILLED_BY_OTHERS:
                    raise ValueError(problems[0])
        assert self._worker is not None
        return self._worker

    def _end_worker(self, *, grace_s: float = 0.0) -> int | None:
        worker, self._worker = self._worker, None
        return None if worker is None else worker.end(grace_s=grace_s)

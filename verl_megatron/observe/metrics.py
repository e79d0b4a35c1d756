"""Metrics of one rank: sums with their counts, seconds per phase, and the keys under which they are reported.

tracking.py writes them. Letters: B samples on this rank, T token positions, N response tokens of those
samples.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.rank_set import RankSet

Scalar = Tensor | float | int

# Reward metrics of the run itself. A reward function's metric of such a name is reported as reward/own_NAME
# (`own_metric`).
REWARD_MEAN, REWARD_MAX, REWARD_FAILED, REWARD_LATENCY, OVERLONG_PENALTY, GREEDY_MEAN = RESERVED = (
    "reward/mean",
    "reward/max",
    "reward/failed",
    "reward/latency_ms",
    "reward/overlong_penalty",
    "reward/greedy_mean",
)

SOURCE = "source"  # reward/source/NAME and validation/source/NAME (sources.py)


def own_metric(name: str) -> str:
    """Return the key of a metric that a reward function reports as `name`.

    It is reward/NAME, or reward/own_NAME if the run itself uses that key, or keys below it.
    """
    bare = name
    while bare.startswith("own_"):  # "own_mean" becomes own_own_mean, so no two names share a key
        bare = bare.removeprefix("own_")
    is_reserved = f"reward/{bare}" in RESERVED or bare.partition("/")[0] == SOURCE
    return f"reward/own_{name}" if is_reserved else f"reward/{name}"


class Sums:
    """Totals with their counts, and maxima, by name.

    Tensors stay on their device until `reduce`, so adding never waits for a GPU.
    """

    def __init__(self) -> None:
        self._totals: dict[str, tuple[Scalar, Scalar]] = {}
        self._maxima: dict[str, Scalar] = {}

    def add(self, name: str, total: Scalar, count: Scalar) -> None:
        """Add `total` (scalar) over `count` items to the mean `name`."""
        total_so_far, count_so_far = self._totals.get(name, (0.0, 0))
        self._totals[name] = (total_so_far + detached(total), count_so_far + detached(count))

    def max(self, name: str, value: Scalar) -> None:
        """Raise the maximum `name` to `value` (scalar)."""
        value = detached(value)
        if name in self._maxima:
            value = torch.maximum(
                *(torch.as_tensor(x, dtype=torch.float64) for x in (value, self._maxima[name]))
            )
        self._maxima[name] = value

    def state_dict(self) -> dict[str, dict]:
        """Plain numbers for `from_state`."""
        names = list(self._totals)
        cells = iter(to_floats([cell for name in names for cell in self._totals[name]]))
        return {
            "totals": {name: (next(cells), next(cells)) for name in names},
            "maxima": dict(zip(self._maxima, to_floats(list(self._maxima.values())))),
        }

    @classmethod
    def from_state(cls, state: dict[str, dict]) -> "Sums":
        sums = cls()
        sums._totals, sums._maxima = (
            {name: tuple(cells) for name, cells in state["totals"].items()},
            dict(state["maxima"]),
        )
        return sums

    def merge(self, other: "Sums") -> None:
        """Add everything in `other`."""
        for name, (total, count) in other._totals.items():
            self.add(name, total, count)
        for name, value in other._maxima.items():
            self.max(name, value)

    def reduce(self, ranks: RankSet) -> dict[str, float]:
        """Return means (global total over global count) and global maxima; means with count 0 are omitted.

        The same result on each of `ranks`, which may have different metrics, or none. Collective over them.
        """
        names = sorted(ranks.union([*self._totals, *self._maxima]))
        cells = to_floats([cell for name in names for cell in self._totals.get(name, (0.0, 0))])
        largest = torch.tensor(
            to_floats([self._maxima.get(name, -math.inf) for name in names]), dtype=torch.float64
        )
        # Gloo's maximum loses a NaN unless the first rank has it, so NaNs are counted.
        is_nan = largest.isnan()
        summed = ranks.all_sum(torch.cat([torch.tensor(cells, dtype=torch.float64), is_nan.double()]))
        totals_and_counts = summed[: len(cells)].view(-1, 2).tolist()
        maxima = ranks.all_max(largest.masked_fill(is_nan, -math.inf))
        maxima = maxima.masked_fill(summed[len(cells) :] > 0, math.nan).tolist()
        means = {
            name: total / count
            for name, (total, count) in zip(names, totals_and_counts, strict=True)
            if count
        }
        return means | {
            name: value
            for name, value in zip(names, maxima, strict=True)
            if value > -math.inf or math.isnan(value)
        }


def detached(x: Scalar) -> Scalar:
    """Detach a tensor and convert it to float64, so that long sums stay precise; return numbers unchanged."""
    return x.detach().double() if isinstance(x, Tensor) else x


def to_floats(values: list[Scalar]) -> list[float]:
    """Convert the values to floats, with a single device-to-host copy for all tensors."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    copied = iter(torch.stack([t.to(tensors[0].device) for t in tensors]).tolist() if tensors else [])
    return [next(copied) if isinstance(value, Tensor) else float(value) for value in values]


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """A phase on one rank, in seconds from a time origin common to all ranks."""

    name: str
    start_s: float
    busy_end_s: float  # the rank's own work, including its GPU's, is done; then it waits for other ranks
    end_s: float


@dataclass(frozen=True, slots=True)
class RecordedIteration:
    """A rank's phases between two calls of `pop()`."""

    events: tuple[PhaseEvent, ...]
    began_at: float  # wall-clock time of the time origin, seconds since 1970
    wall_s: float  # between the two calls of `pop()`, including time outside the phases


class PhaseTimer:
    """Wall-clock seconds per phase of an iteration and between phases, and memory in use after each.

    Phases are in the order in which they first began.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] = lambda: None,
        used_memory: Callable[[], int] = lambda: 0,
        around: Callable[[str], AbstractContextManager] = nullcontext,
    ):
        self._synchronize = (
            synchronize  # waits for the device, so that a phase includes the kernels it queued
        )
        self._used_memory = used_memory
        self._around = around  # context manager factory, called with the phase's name
        self._wait_for_others: Callable[[], object] | None = None  # None: nothing is recorded
        self._events: list[PhaseEvent] = []
        self._began_s = self._began_at = self._inside_s = 0.0
        self._popped_s: float | None = None  # None: no phase yet
        # The last iterations that `pop` has ended, if they are recorded.
        self.iterations: deque[RecordedIteration] = deque(maxlen=1)
        self.seconds: dict[str, float] = {}  # since the last pop()
        self.memory_bytes: dict[str, int] = {}  # in use at the end of each of these phases

    def record(self, wait_for_others: Callable[[], object], *, iterations: int = 1) -> None:
        """Record the start and end of each phase of the last `iterations` from now on.

        Every phase then ends with `wait_for_others`, a barrier of all ranks, so that waiting is attributed to
        the phase in which it arises. Without recording there are no barriers, and an early rank waits inside
        its next collective.
        """
        self._wait_for_others, self.iterations = wait_for_others, deque(maxlen=iterations)

    def enter(self, around: Callable[[str], AbstractContextManager]) -> None:
        """Run every later phase inside `around(name)` as well."""
        before = self._around

        @contextmanager
        def both(name: str) -> Iterator[None]:
            with before(name), around(name):
                yield

        self._around = both

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to phase `name`; phases do not nest."""
        if self._popped_s is None:
            self._popped_s = time.perf_counter()
        self._synchronize()
        if self._wait_for_others is not None and not self._events:
            self._meet()
        start = time.perf_counter()
        self._busy_end_s: float | None = None
        try:
            with self._around(name):
                yield
                self._synchronize()
                if self._wait_for_others is not None:
                    self._finish(name, start)
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
            self._inside_s += elapsed
            self.memory_bytes[name] = self._used_memory()

    def own_work_ends(self) -> None:
        """Mark the end of the rank's own work inside a phase that then waits for other ranks.

        Has an effect only while recording.
        """
        if self._wait_for_others is not None:
            self._synchronize()
            self._busy_end_s = time.perf_counter()

    def _meet(self) -> None:
        """Set the time origin to the end of a barrier, because the hosts' clocks differ."""
        assert self._wait_for_others is not None
        self._wait_for_others()
        self._began_s, self._began_at = time.perf_counter(), time.time()

    def _finish(self, name: str, start: float) -> None:
        assert self._wait_for_others is not None
        busy_end = self._busy_end_s or time.perf_counter()
        self._wait_for_others()
        self._events.append(
            PhaseEvent(name, *(moment - self._began_s for moment in (start, busy_end, time.perf_counter())))
        )

    def pop(self) -> dict[str, float]:
        """Return the seconds per phase since the last call, and under "other" those between phases.

        They sum to the elapsed time.
        """
        if self._popped_s is None:
            return {}
        now = time.perf_counter()
        wall_s = now - self._popped_s
        seconds = self.seconds | {"other": wall_s - self._inside_s}
        if self._wait_for_others is not None:
            self.iterations.append(RecordedIteration(tuple(self._events), self._began_at, wall_s))
        self.seconds, self.memory_bytes, self._events = {}, {}, []
        self._popped_s, self._inside_s = now, 0.0
        return seconds


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What an iteration took and moved, over all ranks."""

    tokens: int  # of prompts and responses
    response_tokens: int
    gpus: int  # of all worlds; ranks where there are no GPUs
    reshard_bytes: int
    memory_bytes: dict[str, int]  # at the end of a phase, on the fullest rank


def iteration_metrics(
    seconds: dict[str, float], amounts: Amounts, *, waited_s: float | None = None, made_s: float | None = None
) -> dict[str, float]:
    """Return cost metrics of an iteration.

    Args:
        seconds: by phase: "rollout", "reshard", "critic_update", ...
        waited_s, made_s: where other worlds generate, for how long they waited for training, and generated;
            both 0 if they have only ended since the last iteration, and earlier samples were there.
    """
    memory_bytes, iteration_s = amounts.memory_bytes, sum(seconds.values())
    generation_s = seconds["rollout"] if made_s is None else made_s
    costs = {
        "rollout/throughput_tokens_per_sec": amounts.response_tokens / generation_s if generation_s else 0.0,
        "train/throughput_tokens_per_sec_per_gpu": amounts.tokens / iteration_s / amounts.gpus,
        "train/step_time_ms": 1e3 * iteration_s,
        "memory/actor_gpu_mem_mb": memory_bytes.get("actor_update", 0) / 2**20,
        "reshard/ms": 1e3 * seconds["reshard"],
        "reshard/bytes": float(amounts.reshard_bytes),
    }
    if waited_s is not None and made_s is not None:
        costs["async/rollout_wait_fraction"] = waited_s / (waited_s + made_s) if waited_s else 0.0
        costs["async/training_wait_fraction"] = seconds["rollout"] / iteration_s
    if "critic_update" in seconds:
        costs["critic/update_ms"] = 1e3 * seconds["critic_update"]
    costs |= {f"memory/{phase}_mb": value / 2**20 for phase, value in memory_bytes.items()}
    return costs | {f"time/{phase}_s": value for phase, value in seconds.items()}

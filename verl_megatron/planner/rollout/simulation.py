"""Simulation of a replica that decodes, from the end of one sample to the next, and of training beside it."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf

from verl_megatron.rollout.admission import STARTS

_Group = tuple[int, int]  # number of its release, and place in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of decoding steps."""

    step_s: Callable[[int, float], float]  # of running samples, and of their tokens in the KV cache
    # Further ones of a step with starts: of the samples that start, and as above.
    start_s: Callable[[int, int, float], float] = lambda started, running, cached: 0.0


class Decoding:
    """A replica that decodes samples in the order of their release.

    Between two ends nothing but the tokens in the cache changes; half way they have their mean. Samples start
    several at a time, as of `Admission.to_start`.

    Args:
        at_once: samples that are decoded concurrently, at most.
        prompt_tokens: of a sample.
        samples_per_prompt: of a group, which are released one after the other.
    """

    def __init__(self, costs: Costs, *, at_once: int, prompt_tokens: int, samples_per_prompt: int = 1):
        self._costs, self._at_once, self._prompt_tokens = costs, at_once, prompt_tokens
        self._group_size = samples_per_prompt
        self._waiting: deque[tuple[int, _Group]] = deque()  # with the sample's tokens
        # Heap: last step, step before the first, group.
        self._running: list[tuple[int, int, _Group]] = []
        self._step = self._begun = 0  # begun: sum of the running samples' steps before the first
        self._missing: Counter[_Group] = Counter()  # samples
        self.now = self.busy = 0.0  # seconds since the beginning; those in which it decoded
        self.complete: dict[int, list[float]] = defaultdict(list)  # when groups ended, by their release

    @property
    def made_tokens(self) -> int:
        """Response tokens of the running samples so far."""
        return len(self._running) * self._step - self._begun

    @property
    def num_running(self) -> int:
        return len(self._running)

    def release(self, number: int, lengths: Sequence[int]) -> int:
        """Let samples of so many response tokens start as soon as there is room; return how many groups."""
        groups = [(number, place // self._group_size) for place in range(len(lengths))]
        self._waiting += zip(lengths, groups)
        self._missing.update(groups)
        return ceil(len(lengths) / self._group_size)

    def spend(self, seconds: float) -> None:
        """Do something else."""
        self.now, self.busy = self.now + seconds, self.busy + seconds

    def advance(self, until: float = inf, *, awaited: int = -1, groups: int = 1) -> None:
        """Decode until a time, whole steps, or until so many groups of a release have ended, or all."""
        while self.now < until and len(self.complete.get(awaited, ())) < groups:
            self._start()
            if not self._running:
                self.now = self.now if until == inf else until
                return
            count, steps = len(self._running), self._running[0][0] - self._step
            mean = self._cached + count * steps / 2
            step_s = self._costs.step_s(count, mean)
            if until < inf and step_s > 0:
                steps = min(steps, ceil((until - self.now) / step_s))
            self.spend(steps * step_s)
            self._step += steps
            self._end()

    @property
    def _cached(self) -> float:
        return len(self._running) * self._prompt_tokens + self.made_tokens

    def _start(self) -> None:
        room = self._at_once - len(self._running)
        if not self._waiting or (self._running and room < max(1, self._at_once // STARTS)):
            return
        started = min(room, len(self._waiting))
        for _ in range(started):
            length, group = self._waiting.popleft()
            heappush(self._running, (self._step + length, self._step, group))
            self._begun += self._step
        self.spend(self._costs.start_s(started, len(self._running), self._cached))

    def _end(self) -> None:
        while self._running and self._running[0][0] == self._step:
            _, begun, group = heappop(self._running)
            self._begun -= begun
            self._missing[group] -= 1
            if not self._missing[group]:
                self.complete[group[0]].append(self.now)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Means of iterations in which a replica generates without pause beside training."""

    seconds: float  # of an iteration
    busy: float  # of these the replica works


def pipeline(
    decoding: Decoding,
    lengths: Sequence[int],
    *,
    training_s: float,
    staleness: int,
    interval: int,
    on_version: Callable[[Decoding], None],
) -> Pipeline:
    """Simulate async.buffer=window with the largest lead.

    The samples of a weight sync are those of `interval` iterations, each of which takes the first that are
    complete. They may start when the sync `staleness` + 1 before has trained. Twice so many syncs count, as
    waits may alternate, and as many before them are left out.

    Args:
        lengths: response tokens of a weight sync's samples.
        training_s: seconds of an iteration without the rollout, from its last sample on.
        interval: async.sync_interval.
        on_version: called when the replica gets new weights.
    """
    syncs, skipped = 4 * (staleness + 1), 2 * (staleness + 1)
    begin, busy, end, groups = 0.0, 0.0, 0.0, 0
    for sync in range(staleness + 1):
        groups = decoding.release(sync, lengths)
    for sync in range(syncs):
        for part in range(interval):
            needed = ceil(groups * (part + 1) / interval)
            decoding.advance(awaited=sync, groups=needed)
            end = max(decoding.complete[sync][needed - 1], end) + training_s
            decoding.advance(end)
        if sync + 1 == skipped:
            begin, busy = end, decoding.busy
        on_version(decoding)
        decoding.release(sync + 1 + staleness, lengths)
    counted = (syncs - skipped) * interval
    return Pipeline((end - begin) / counted, (decoding.busy - busy) / counted)

"""Continuous generation: groups of samples start as there is room, and new weights arrive in between.

What becomes of running samples when new weights arrive is `async.partial`:

    finish      they end with the old weights; none starts meanwhile
    continue    they are aborted, and go on from their tokens so far, whose cache the new weights compute
    pause       they keep their cache, which the old weights have computed
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from verl_megatron.rollout.engine import RolloutEngine
from verl_megatron.rollout.sampling import Generation, Request

Partial = Literal["finish", "continue", "pause"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt whose samples are to be generated."""

    number: int
    requests: Sequence[Request]  # their sample_ids are those of no other running group


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """The samples of a prompt."""

    number: int
    samples: list[Generation]  # in the order of the group's requests
    versions: list[list[int]]  # of the weights, for each response token of each sample


@dataclass(kw_only=True)
class _Sample:
    """A sample that runs or waits."""

    group: int
    request: Request  # as given
    earlier: Generation | None = None  # what it had when it was aborted
    # Where a version begins, in response tokens: (0, first version), ...; empty until it starts.
    starts: list[tuple[int, int]] = field(default_factory=list)

    def versions(self, num_tokens: int) -> list[int]:
        """Return the version of each of its response tokens."""
        ends = [start for start, _ in self.starts[1:]] + [num_tokens]
        return [
            version
            for (start, version), end in zip(self.starts, ends)
            for _ in range(min(end, num_tokens) - start)
        ]

    def remaining(self) -> Request:
        """Return the request for the tokens that are missing."""
        if self.earlier is None:
            return self.request
        tokens, sampling = self.earlier.token_ids, self.request.sampling
        return Request(
            self.request.sample_id,
            [*self.request.prompt_token_ids, *tokens],
            self.request.seed + len(self.starts),  # the engine's generator begins anew
            replace(
                sampling,
                max_tokens=sampling.max_tokens - len(tokens),
                min_tokens=max(0, sampling.min_tokens - len(tokens)),
            ),
            self.request.cache_salt,
        )


class GroupStream:
    """Generates groups one after the other, as many samples at once as the engine admits.

    All methods are collective over the replica's tensor-parallel ranks, within the engine's session.

    Args:
        version: of the engine's weights; None: it has none yet, and nothing starts.
        on_finish: called with each finished sample.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        partial: Partial,
        version: int | None = None,
        on_finish: Callable[[Generation], None] = lambda sample: None,
    ):
        self.engine, self.partial, self.version, self._on_finish = engine, partial, version, on_finish
        self._waiting: deque[_Sample] = deque()
        self._running: dict[int, _Sample] = {}  # by sample_id
        self._finished: dict[int, dict[int, tuple[Generation, list[int]]]] = {}  # by group and sample_id
        self._groups: dict[int, Group] = {}
        self._drains = False
        self.num_interrupted = 0  # samples that went on with other weights
        self.aborted_tokens = 0  # response tokens of these whose cache is computed again

    @property
    def num_waiting(self) -> int:
        """Samples that have not started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, group: Group) -> None:
        """Add a group, to start as there is room."""
        self._groups[group.number], self._finished[group.number] = group, {}
        self._waiting += [_Sample(group=group.number, request=request) for request in group.requests]

    def step(self) -> list[FinishedGroup]:
        """Decode a token or more of every running sample; return the groups that are complete."""
        self._start()
        if not self._running:
            return []
        admission, ended = self.engine.admission, self.engine.step()
        for generation in ended:
            self._end(generation)
        admission.observe(self.engine.read_cache(), ended)
        complete = [
            number
            for number, samples in self._finished.items()
            if len(samples) == len(self._groups[number].requests)
        ]
        return [self._finish(number) for number in complete]

    def _start(self) -> None:
        admission = self.engine.admission
        if self._drains or self.version is None or not self._waiting:
            return
        if not self._running:
            requests = [sample.remaining() for sample in self._waiting]
            admission.begin(requests, max_model_len=self.engine.max_model_len)
        for _ in range(min(admission.to_start(len(self._running)), len(self._waiting))):
            sample = self._waiting.popleft()
            if not sample.starts or sample.starts[-1][1] != self.version:
                so_far = len(sample.earlier.token_ids) if sample.earlier else 0
                sample.starts.append((so_far, self.version))
            request = replace(sample.remaining(), cache_salt=str(self.version))
            self.engine.submit(request)
            admission.start(request)
            self._running[request.sample_id] = sample

    def _end(self, generation: Generation) -> None:
        sample = self._running.pop(generation.sample_id)
        if sample.earlier is not None:
            generation = replace(sample.earlier.then((), generation), is_sampled=None)
        versions = sample.versions(len(generation.token_ids))
        self._finished[sample.group][generation.sample_id] = generation, versions
        self._on_finish(generation)

    def _finish(self, number: int) -> FinishedGroup:
        found, group = self._finished.pop(number), self._groups.pop(number)
        pairs = [found[request.sample_id] for request in group.requests]
        return FinishedGroup(
            number=number,
            samples=[generation for generation, _ in pairs],
            versions=[versions for _, versions in pairs],
        )

    # ---- new weights ---------------------------------------------------------------------------------------

    def begin_change(self) -> bool:
        """Prepare for new weights; return whether they may be written now. If not, call it again later."""
        if self.partial == "continue":
            self._interrupt()
        elif self.partial == "finish":
            self._drains = True
        return self.partial == "pause" or not self._running

    def end_change(self, version: int) -> None:
        """Go on with the new weights."""
        if self.partial == "pause":
            for sample_id, sample in self._running.items():
                sample.starts.append((self.engine.num_generated(sample_id), version))
            self.num_interrupted += len(self._running)
        else:
            self.engine.reset_cache()
        self.version, self._drains = version, False

    def _interrupt(self) -> None:
        """Abort what runs, to go on with it first."""
        interrupted = []
        for generation in self.engine.abort(list(self._running)):
            sample = self._running.pop(generation.sample_id)
            so_far = sample.earlier
            sample.earlier = generation if so_far is None else so_far.then((), generation)
            self.aborted_tokens += len(sample.earlier.token_ids)
            interrupted.append(sample)
        self.engine.admission.forget()
        self._waiting.extendleft(reversed(interrupted))
        self.num_interrupted += len(interrupted)

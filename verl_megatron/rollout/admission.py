"""Admission: how many samples a replica decodes concurrently, and the load that this gave.

With `rollout.dynamic_batching` the number follows the use of the KV cache. Every tensor-parallel rank of a
replica takes the same steps with the same readings, so all reach the same number.

Letters: R running samples, K different lengths of finished responses.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.sampling import Generation, Request

# Shares of the cache: the number may grow below LOW; above HIGH no sample starts.
LOW, HIGH = 0.6, 0.9
REMEMBERED = 2000  # finished responses whose lengths count
STARTS = 16  # samples start in groups of at least this part of those at once
INTERVAL = 8  # decoding steps between adaptations, if no sample finishes
CONCURRENT, CACHE_USED, PREEMPTED = "rollout/concurrent", "rollout/kv_cache_used", "rollout/preempted"
DRAFTED = "rollout/draft_fraction"
ACCEPTANCE_RATE, ACCEPTANCE_LENGTH = "rollout/acceptance_rate", "rollout/acceptance_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Size of a replica's KV cache, which is handed out in blocks."""

    num_blocks: int
    block_tokens: int

    def blocks(self, tokens: np.ndarray) -> np.ndarray:
        """Return the blocks of samples of so many tokens, both [R]."""
        return np.ceil(np.maximum(tokens, 1) / self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafts that the model has verified in a decoding step (`rollout.speculative`)."""

    count: int  # samples with a draft
    drafted: int  # tokens of these drafts
    accepted: int  # of these tokens
    ahead: Mapping[int, int]  # running samples with a draft: their accepted tokens, beyond one a step


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReading:
    """Reading of a KV cache, and of the drafts, after a decoding step."""

    used: float | None  # share of its blocks that running samples hold; None: the engine does not tell
    preempted: int  # preemptions, since the engine was built, of the samples that have finished
    drafts: Drafts | None = None  # None: the engine makes none


class Admission:
    """Decides how many samples a replica decodes concurrently, and records the load.

    Fixed, it is `limit`. Adaptive, it starts from what certainly fits, all samples at their longest. While
    the cache is used below 60 %, further samples start, as long as 90 % hold all at their expected lengths.
    Between 60 and 90 % only finished samples are replaced, and above 90 % not even these. Nothing running is
    stopped. Expected lengths are those that responses of this age have had (`expected_lengths`).

    Args:
        limit: maximum number, `rollout.max_num_seqs`.
        adaptive: `rollout.dynamic_batching`.
    """

    def __init__(self, cache: KVCache, *, limit: int, adaptive: bool):
        self.cache, self.limit, self.adaptive = cache, limit, adaptive
        self.target = limit
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)  # of finished responses, tokens
        # Running samples: step of the start, earlier by the tokens that drafts gave; prompt tokens.
        self._started: dict[int, tuple[int, int]] = {}
        self._step = 0
        self._prompt = self._longest = 1.0  # tokens: mean prompt, longest possible response
        self._preempted_before = 0
        self._start_load()

    def begin(self, requests: Sequence[Request], *, max_model_len: int) -> None:
        """Set the number at the start of a generation of these samples; there is at least one."""
        self._started.clear()
        if not self.adaptive:
            return
        prompts = [len(request.prompt_token_ids) for request in requests]
        most = [min(request.sampling.max_tokens, max_model_len - n) for n, request in zip(prompts, requests)]
        self._prompt, self._longest = sum(prompts) / len(prompts), max(most)
        whole = np.array([prompt + response for prompt, response in zip(prompts, most)])
        certain = int(self.cache.num_blocks // self.cache.blocks(whole).max())
        self.target = min(self.limit, max(1, certain, self._room()))

    def to_start(self, running: int, *, most: int | None = None) -> int:
        """Return how many samples to start now: none, or so many that it pays.

        vLLM takes a decoding step in which a sample starts without whole CUDA graphs, layer by layer.

        Args:
            most: samples at once, if there are not enough for the number that was decided.
        """
        target = self.target if most is None else min(self.target, most)
        room = target - running
        return room if not running or room >= max(1, target // STARTS) else 0

    def forget(self) -> None:
        """Note that all running samples were aborted."""
        self._started.clear()

    def start(self, request: Request) -> None:
        """Note that a sample starts with the next step."""
        self._started[request.sample_id] = self._step, len(request.prompt_token_ids)

    def observe(self, reading: CacheReading, finished: Sequence[Generation]) -> None:
        """Record a decoding step of the samples that have started, and adapt their number."""
        self._step += 1
        self._steps, self._in_flight = self._steps + 1, self._in_flight + len(self._started)
        self._preempted = reading.preempted
        if reading.drafts is not None:
            self._observe_drafts(reading.drafts)
        for sample in finished:
            del self._started[sample.sample_id]
            self._lengths.append(len(sample.token_ids))
        if reading.used is None:
            return
        self._most_used = max(self._most_used or 0.0, reading.used)
        if self.adaptive and (finished or self._step % INTERVAL == 0):
            self._adapt(reading.used)

    def _observe_drafts(self, drafts: Drafts) -> None:
        self._speculates = True
        self._drafts += drafts.count
        self._drafted, self._accepted = self._drafted + drafts.drafted, self._accepted + drafts.accepted
        for sample, tokens in drafts.ahead.items():
            step, prompt = self._started[sample]
            self._started[sample] = step - tokens, prompt

    def _adapt(self, used: float) -> None:
        running = len(self._started)
        most = running if used > HIGH else running + self._room()
        self.target = min(self.limit, max(1, most if used < LOW else min(self.target, most)))

    def _room(self) -> int:
        """Return how many more samples fit into 90 % of the cache, with the running ones at full length."""
        if not self._lengths:
            return 0
        starts_2R = np.array([*self._started.values(), (self._step, self._prompt)]).T
        ages_R = self._step - starts_2R[0]
        expected_R = expected_lengths(ages_R, np.array(self._lengths), longest=self._longest)
        blocks_R = self.cache.blocks(starts_2R[1] + expected_R)  # the last one's is a new sample's
        left = HIGH * self.cache.num_blocks - blocks_R[:-1].sum()
        return max(0, int(left // blocks_R[-1]))

    def add_load(self, sums: Sums, *, is_first: bool) -> None:
        """Add the load since the last call: mean samples in flight, highest use of the cache, preemptions.

        With drafts also: the share of the samples of all steps that had one, that of drafted tokens which the
        model accepted, and the tokens that a step with a draft gave a sample.

        Args:
            sums: of an owner rank.
            is_first: whether it is the first of all ranks; preemptions are summed over the replicas.
        """
        if self._steps:
            sums.add(CONCURRENT, self._in_flight, self._steps)
        if self._most_used is not None:
            sums.max(CACHE_USED, self._most_used)
        sums.add(PREEMPTED, self._preempted - self._preempted_before, int(is_first))
        self._preempted_before = self._preempted
        if self._speculates:
            sums.add(DRAFTED, self._drafts, self._in_flight)
            sums.add(ACCEPTANCE_RATE, self._accepted, self._drafted)
            sums.add(ACCEPTANCE_LENGTH, self._accepted + self._drafts, self._drafts)
        self._start_load()

    def _start_load(self) -> None:
        self._steps = self._in_flight = 0
        self._speculates, self._drafts, self._drafted, self._accepted = False, 0, 0, 0
        self._most_used: float | None = None
        self._preempted = self._preempted_before


def expected_lengths(ages_R: np.ndarray, finished: np.ndarray, *, longest: float) -> np.ndarray:
    """Return the mean final length of responses that have reached an age: [R] tokens.

    E[L | L > a] = a + ∫ S(u) du / S(a) from a to `longest`. S is the Kaplan-Meier estimate of the share of
    responses longer than u (1958): running ones count as longer than their age. Without that, short responses
    would count too much, as they finish first. Beyond all finished lengths S stays as it is.

    Args:
        ages_R: tokens of the running responses.
        finished: lengths of finished responses; at least one.
        longest: longest possible response, tokens.
    """
    times_K, count_K = np.unique(finished, return_counts=True)
    everyone = np.sort(np.concatenate([finished, ages_R]))
    at_risk_K = len(everyone) - np.searchsorted(everyone, times_K)  # responses that have reached the time
    survival = np.concatenate([[1.0], np.cumprod(1 - count_K / at_risk_K)])  # from each bound on
    bounds = np.concatenate([[0.0], times_K])
    ends = np.concatenate([times_K, [max(longest, times_K[-1])]])
    areas = survival * (ends - bounds)
    after = np.cumsum(areas[::-1])[::-1]  # the area from each bound on
    at = np.searchsorted(bounds, ages_R, side="right") - 1
    area_R = after[at] - survival[at] * (ages_R - bounds[at])
    known_R = survival[at] > 0
    return np.where(
        known_R, ages_R + area_R / np.where(known_R, survival[at], 1.0), np.maximum(longest, ages_R)
    )

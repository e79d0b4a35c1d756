"""Sampler: generates responses to prompts and scores them concurrently with generation.

Letters: B samples on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from parallel.runtime.refusal import RefusalError
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import Prompt
from verl_megatron.data.tokenizer import Tokenizer
from verl_megatron.observe.metrics import REWARD_FAILED, REWARD_LATENCY, Sums, own_metric
from verl_megatron.rewards.pool import Reward, RewardPool
from verl_megatron.rewards.worker import MAX_METRICS
from verl_megatron.rollout.dispatch import ContinueTurn, generate
from verl_megatron.rollout.engine import RolloutEngine
from verl_megatron.rollout.sampling import Generation, Request, Sampling, sample_seed

KeepGroup = Callable[[Sequence[float]], bool]  # rewards of a prompt's samples → whether to train on them


class PromptSource(Protocol):
    """Source of prompts; the same on every rank."""

    def draw(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        ...


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Number of prompts and samples of a collection, and their sampling parameters."""

    num_prompts: int
    samples_per_prompt: int
    sampling: Sampling
    # Prompts to keep with `keep_group`, if the first round draws more; the surplus is dropped. None: all.
    quota: int | None = None
    max_rounds: int = 10  # maximum number of rounds with `keep_group`
    with_greedy: bool = False  # generate one more sample of each prompt, the last, greedily

    @property
    def group_size(self) -> int:
        """Samples of a prompt, the greedy one included."""
        return self.samples_per_prompt + self.with_greedy


class Sampler:
    """Draws prompts, generates samples and sends them to the reward workers. Collective over `engine.world`.

    Args:
        pool: reward workers, on the owner rank of each replica; None: no reward function.
        seed: of the run; each sample's seed is derived from it, the iteration and the sample's number.
        on_step: called before each decoding step, and while waiting for rewards.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        tokenizer: Tokenizer,
        pool: RewardPool | None,
        seed: int,
        on_step: Callable[[], None] = lambda: None,
    ):
        self.engine, self.tokenizer, self.pool, self.seed, self.on_step = (
            engine,
            tokenizer,
            pool,
            seed,
            on_step,
        )
        self._results: dict[int, Reward] = {}  # known rewards of the last collected samples
        self._latency_ms, self._calls = 0.0, 0  # of these
        self._num_drawn = self._num_kept = 0  # prompts of the last collection with `keep_group`
        self._shown_failures: set[str] = set()

    def collect(
        self,
        source: PromptSource,
        draw: Draw,
        *,
        iteration: int,
        version: int,
        continue_turn: ContinueTurn | None = None,
        keep_group: KeepGroup | None = None,
    ) -> RolloutBatch:
        """Collect samples of `draw.num_prompts` prompts, numbered prompt by prompt without gaps.

        Args:
            iteration: number of the collection, from which the samples' seeds are derived.
            version: policy version of the engine.
            continue_turn: tokens to append after a turn, such as a tool's output.
            keep_group: selects the prompts whose samples to keep; the others are replaced by further
                prompts, in at most `draw.max_rounds` rounds. If prompts are then still missing, the last
                of the others stay.

        Returns:
            The samples owned by this rank (the first of its replica; other ranks own none), ordered by
            number. Call `score` for their rewards.
        """
        self._results, self._latency_ms, self._calls, self._num_drawn = {}, 0.0, 0, 0
        wanted, num_drawn, parts, kept = draw.quota or draw.num_prompts, 0, [], []
        for _ in range(draw.max_rounds):
            prompts = source.draw(wanted - len(kept) if parts else draw.num_prompts)
            requests = self._requests(prompts, draw, iteration=iteration, first_group=num_drawn)
            samples = self._generate(requests, prompts, draw, continue_turn)
            parts.append(_batch_of(samples, group_size=draw.group_size, policy_version=version))
            num_drawn += len(prompts)
            if keep_group is None:
                return parts[0]
            kept += self._kept_groups(parts[-1], keep_group)
            if len(kept) >= wanted:
                break
        self._num_drawn, self._num_kept = num_drawn, len(kept)
        others = sorted(set(range(num_drawn)) - set(kept))
        missing = max(wanted - len(kept), 0)
        chosen = kept[:wanted] + others[len(others) - missing :]
        return self._renumbered(RolloutBatch.concatenate(parts), sorted(chosen), draw.group_size)

    def _requests(
        self, prompts: list[Prompt], draw: Draw, *, iteration: int, first_group: int
    ) -> list[Request]:
        """Build a request for each sample of these prompts, numbered from group `first_group` on."""
        n, first = draw.group_size, first_group * draw.group_size
        greedy = replace(draw.sampling, temperature=0.0)
        return [
            Request(
                first + i,
                prompts[i // n].prompt_token_ids,
                sample_seed(self.seed, iteration, first + i),
                greedy if draw.with_greedy and i % n == n - 1 else draw.sampling,
            )
            for i in range(n * len(prompts))
        ]

    def _generate(
        self, requests: list[Request], prompts: list[Prompt], draw: Draw, continue_turn: ContinueTurn | None
    ) -> list[Generation]:
        """Generate this rank's samples, ordered by number; submit each for reward as it finishes."""
        first, pool = requests[0].sample_id, self.pool

        def score(sample: Generation) -> None:
            prompt = prompts[(sample.sample_id - first) // draw.group_size]
            assert pool is not None
            inputs = (prompt.text, self._text(sample), prompt.answer, prompt.extra, prompt.messages)
            pool.submit(sample.sample_id, *inputs)

        on_finish = score if self.pool is not None and self.engine.is_owner else None
        samples = generate(
            self.engine, requests, on_finish=on_finish, on_step=self.on_step, continue_turn=continue_turn
        )
        return sorted(samples, key=lambda sample: sample.sample_id) if self.engine.is_owner else []

    def _text(self, sample: Generation) -> str:
        """Return the response text passed to the reward, including tool outputs."""
        return self.tokenizer.decode(sample.token_ids)

    def score(self, batch: RolloutBatch, sums: Sums) -> Tensor:
        """Return the rewards of the last collection, [B] float32; 0 without a reward function.

        Raises:
            RefusalError: on every rank, if the function failed on all samples or reports too many metrics.
        """
        rewards_B = torch.zeros(len(batch))
        self._wait_for_rewards()
        if self._num_drawn:  # the same on every rank, so a mean over ranks is the number itself
            sums.add("rollout/groups_sampled", self._num_drawn, 1)
            sums.add("rollout/groups_without_variance", self._num_drawn - self._num_kept, 1)
        if self.pool is None:
            return rewards_B
        sums.add(REWARD_LATENCY, self._latency_ms, self._calls)
        for b, sample in enumerate(batch.sample_id.tolist()):
            result = self._results[sample]
            rewards_B[b] = result.score
            sums.add(REWARD_FAILED, float(result.failure is not None), 1)
            for name, value in result.metrics.items():
                sums.add(own_metric(name), value, 1)
        for kind in self.pool.examples.keys() - self._shown_failures:
            print(f"{self.pool.examples[kind]} (counted as reward/failed; shown once)", flush=True)
            self._shown_failures.add(kind)
        return rewards_B

    def _wait_for_rewards(self) -> None:
        if self.pool is not None:
            self._results |= self.pool.results(progress=self.on_step)
            self._latency_ms += self.pool.total_ms
            self._calls += self.pool.calls
        self._check_rewards()

    def _check_rewards(self) -> None:
        """Raise RefusalError on every rank if all reward calls failed or there are too many metrics."""
        pool = self.pool
        here = [pool.failures.total(), pool.calls, len(pool.metric_names)] if pool is not None else [0, 0, 0]
        failed, calls, names = self.engine.world.all_sum(torch.tensor(here)).tolist()
        if 0 < failed == calls or names > MAX_METRICS:
            said = self.engine.world.union(
                [complaint] if pool is not None and (complaint := pool.complaint(failed, calls)) else []
            )
            if said:
                raise RefusalError(said[0])

    def _kept_groups(self, batch: RolloutBatch, keep_group: KeepGroup) -> list[int]:
        """Return the groups of this round to keep, in order; the same on every rank.

        The samples of a group may be on several ranks.
        """
        self._wait_for_rewards()
        mine = [
            (group, self._results[sample].score)
            for sample, group in zip(batch.sample_id.tolist(), batch.required("group_id").tolist())
        ]
        gathered = self.engine.world.all_gather_object(mine)
        scores: dict[int, list[float]] = {}
        for group, score in (entry for part in gathered for entry in part):
            scores.setdefault(group, []).append(score)
        return [group for group in sorted(scores) if keep_group(scores[group])]

    def _renumbered(self, batch: RolloutBatch, chosen: list[int], group_size: int) -> RolloutBatch:
        """Return the samples of groups `chosen`, numbered densely in that order, with their rewards."""
        number = {group: new for new, group in enumerate(chosen)}
        places = [b for b, group in enumerate(batch.required("group_id").tolist()) if group in number]
        part = batch.select(torch.tensor(places, dtype=torch.int64))
        group_id = torch.tensor(
            [number[group] for group in part.required("group_id").tolist()], dtype=torch.int64
        )
        sample_id = group_id * group_size + part.sample_id % group_size
        self._results = {
            new: self._results[old] for old, new in zip(part.sample_id.tolist(), sample_id.tolist())
        }
        return replace(part, sample_id=sample_id, group_id=group_id)


def _batch_of(samples: Sequence[Generation], *, group_size: int, policy_version: int) -> RolloutBatch:
    batch = RolloutBatch.from_lists(
        [sample.sample_id for sample in samples],
        [list(sample.prompt_token_ids) for sample in samples],
        [list(sample.token_ids) for sample in samples],
        [list(sample.logprobs) for sample in samples],
    )
    for b, sample in enumerate(samples):
        if sample.is_sampled is not None:
            batch.set_targets(b, sample.is_sampled)
    batch.group_id = batch.sample_id // group_size
    batch.policy_version = torch.full_like(batch.sample_id, policy_version)
    batch.is_cut = torch.tensor([sample.finish_reason == "length" for sample in samples], dtype=torch.bool)
    return batch

"""Sampler: generates responses to prompts and scores them concurrently with generation.

Letters: B samples on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

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
    quota: int | None = None  # prompts to collect with `keep_group`; None: num_prompts
    max_rounds: int = 10  # maximum number of rounds with `keep_group`


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
            keep_group: selects the prompts whose samples to keep; further prompts are drawn until
                `draw.quota` or `draw.max_rounds` is reached.

        Returns:
            The samples owned by this rank (the first of its replica; other ranks own none), ordered by
            number. Call `score` for their rewards.
        """
        self._results = {}
        wanted, num_drawn, parts, num_kept = draw.quota or draw.num_prompts, 0, [], 0
        for _ in range(draw.max_rounds):
            prompts = source.draw(draw.num_prompts if not num_drawn else wanted - num_kept)
            requests = self._requests(prompts, draw, iteration=iteration, first_group=num_drawn)
            samples = self._generate(requests, prompts, draw, continue_turn)
            batch = _batch_of(samples, samples_per_prompt=draw.samples_per_prompt, policy_version=version)
            num_drawn += len(prompts)
            if keep_group is None:
                return batch
            kept = self._kept_groups(batch, keep_group)[: wanted - num_kept]
            parts.append(
                self._renumbered(
                    batch, kept, first_group=num_kept, samples_per_prompt=draw.samples_per_prompt
                )
            )
            num_kept += len(kept)
            if num_kept == wanted:
                break
        return RolloutBatch.concatenate(parts)

    def _requests(
        self, prompts: list[Prompt], draw: Draw, *, iteration: int, first_group: int
    ) -> list[Request]:
        """Build a request for each sample of these prompts, numbered from group `first_group` on."""
        n, first = draw.samples_per_prompt, first_group * draw.samples_per_prompt
        return [
            Request(
                first + i,
                prompts[i // n].prompt_token_ids,
                sample_seed(self.seed, iteration, first + i),
                draw.sampling,
            )
            for i in range(n * len(prompts))
        ]

    def _generate(
        self, requests: list[Request], prompts: list[Prompt], draw: Draw, continue_turn: ContinueTurn | None
    ) -> list[Generation]:
        """Generate this rank's samples, ordered by number; submit each for reward as it finishes."""
        first = requests[0].sample_id

        def score(sample: Generation) -> None:
            prompt = prompts[(sample.sample_id - first) // draw.samples_per_prompt]
            self.pool.submit(sample.sample_id, prompt.text, self._text(sample), prompt.answer, prompt.extra)

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
            ValueError: on every rank, if the function failed on all samples or reports too many metrics.
        """
        rewards_B = torch.zeros(len(batch))
        self._wait_for_rewards()
        if self.pool is None:
            return rewards_B
        sums.add(REWARD_LATENCY, self.pool.total_ms, self.pool.calls)
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
        self._check_rewards()

    def _check_rewards(self) -> None:
        """Raise ValueError on every rank if all reward calls failed or there are too many metrics."""
        pool = self.pool
        here = [pool.failures.total(), pool.calls, len(pool.metric_names)] if pool is not None else [0, 0, 0]
        failed, calls, names = self.engine.world.all_sum(torch.tensor(here)).tolist()
        if 0 < failed == calls or names > MAX_METRICS:
            said = self.engine.world.union(
                [complaint] if pool is not None and (complaint := pool.complaint(failed, calls)) else []
            )
            if said:
                raise ValueError(said[0])

    def _kept_groups(self, batch: RolloutBatch, keep_group: KeepGroup) -> list[int]:
        """Return the groups of this round to keep, in order; the same on every rank.

        The samples of a group may be on several ranks.
        """
        self._wait_for_rewards()
        mine = [
            (group, self._results[sample].score)
            for sample, group in zip(batch.sample_id.tolist(), batch.group_id.tolist())
        ]
        gathered = self.engine.world.all_gather_object(mine)
        scores: dict[int, list[float]] = {}
        for group, score in (entry for part in gathered for entry in part):
            scores.setdefault(group, []).append(score)
        return [group for group in sorted(scores) if keep_group(scores[group])]

    def _renumbered(
        self, batch: RolloutBatch, kept: list[int], *, first_group: int, samples_per_prompt: int
    ) -> RolloutBatch:
        """Return the samples of kept groups, renumbered from `first_group` on, with their rewards."""
        number = {group: first_group + i for i, group in enumerate(kept)}
        places = [b for b, group in enumerate(batch.group_id.tolist()) if group in number]
        part = batch.select(torch.tensor(places, dtype=torch.int64))
        group_id = torch.tensor([number[group] for group in part.group_id.tolist()], dtype=torch.int64)
        sample_id = group_id * samples_per_prompt + part.sample_id % samples_per_prompt
        for old in batch.sample_id.tolist():
            result = self._results.pop(old)
            if old in part.sample_id:
                self._results[int(sample_id[part.sample_id == old])] = result
        return replace(part, sample_id=sample_id, group_id=group_id)


def _batch_of(samples: Sequence[Generation], *, samples_per_prompt: int, policy_version: int) -> RolloutBatch:
    batch = RolloutBatch.from_lists(
        [sample.sample_id for sample in samples],
        [list(sample.prompt_token_ids) for sample in samples],
        [list(sample.token_ids) for sample in samples],
        [list(sample.logprobs) for sample in samples],
    )
    for b, sample in enumerate(samples):
        if sample.is_sampled is not None:
            first = len(sample.prompt_token_ids)
            batch.response_mask[b, first : first + len(sample.token_ids)] = torch.tensor(sample.is_sampled)
    batch.group_id = batch.sample_id // samples_per_prompt
    batch.policy_version = torch.full_like(batch.sample_id, policy_version)
    return batch

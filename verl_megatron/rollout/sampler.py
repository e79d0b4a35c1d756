"""Prompts in, samples out: what the rollout engine generated on this rank, scored while it was being generated.

Letters: B samples on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import all_names, all_sum
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import Prompt
from verl_megatron.data.tokenizer import Tokenizer
from verl_megatron.observe.metrics import REWARD_FAILED, REWARD_LATENCY, Sums, own_metric
from verl_megatron.rewards.pool import Reward, RewardPool
from verl_megatron.rewards.worker import MAX_METRICS
from verl_megatron.rollout.dispatch import ContinueTurn, generate
from verl_megatron.rollout.engine import RolloutEngine
from verl_megatron.rollout.sampling import Generation, Request, Sampling, row_seed

KeepGroup = Callable[
    [Sequence[float]], bool
]  # the rewards of a prompt's samples → whether they are trained on


class PromptSource(Protocol):
    """Where prompts come from; the same on every rank."""

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        ...


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How many prompts a collection draws, and how they are answered."""

    num_prompts: int
    samples_per_prompt: int
    sampling: Sampling
    quota: int | None = None  # prompts to keep where `keep_group` leaves some out; None: num_prompts
    max_rounds: int = 10  # of drawing further prompts in place of those that were not kept


class Sampler:
    """Draws prompts, keeps the engine full and hands finished samples to the reward workers. Its methods are collective over the world.

    Args:
        pool: reward workers, on the home rank of each replica; None: no reward function.
        seed: of the run; each sample's own comes from it, the policy version and the sample's number.
        on_step: called as tokens are added.
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
        self._results: dict[int, Reward] = {}  # of the samples last collected, where they are known already
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
        """Samples of `draw.num_prompts` prompts, numbered prompt by prompt without gaps.

        Args:
            iteration: number of the collection; together with the run's seed and a sample's number it fixes the sample's seed.
            version: of the policy that the engine runs.
            continue_turn: what follows a turn of the model, such as a tool's answer.
            keep_group: which prompts' samples to keep; others are drawn in place of the rest until `draw.quota` or `draw.max_rounds`
                is reached.

        Returns:
            The samples that this rank owns (the first of its replica; the other ranks own none), ordered by number.
            `score` has their rewards.
        """
        self._results = {}
        wanted, num_drawn, parts, num_kept = draw.quota or draw.num_prompts, 0, [], 0
        for _ in range(draw.max_rounds):
            prompts = source.draw(draw.num_prompts if not num_drawn else wanted - num_kept)
            requests = self._requests(prompts, draw, iteration=iteration, first_group=num_drawn)
            rows = self._generate(requests, prompts, draw, continue_turn)
            batch = _batch_of(rows, samples_per_prompt=draw.samples_per_prompt, policy_version=version)
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
        """A request for each sample of these prompts, of which the first has the number `first_group`."""
        n, first = draw.samples_per_prompt, first_group * draw.samples_per_prompt
        return [
            Request(
                first + i,
                prompts[i // n].prompt_token_ids,
                row_seed(self.seed, iteration, first + i),
                draw.sampling,
            )
            for i in range(n * len(prompts))
        ]

    def _generate(
        self, requests: list[Request], prompts: list[Prompt], draw: Draw, continue_turn: ContinueTurn | None
    ) -> list[Generation]:
        """The samples that this rank owns, by number; each goes to the reward workers as it finishes."""
        first = requests[0].row_id

        def score(row: Generation) -> None:
            prompt = prompts[(row.row_id - first) // draw.samples_per_prompt]
            self.pool.submit(row.row_id, prompt.text, self._text(row), prompt.answer, prompt.extra)

        on_finish = score if self.pool is not None and self.engine.is_home else None
        rows = generate(
            self.engine, requests, on_finish=on_finish, on_step=self.on_step, continue_turn=continue_turn
        )
        return sorted(rows, key=lambda row: row.row_id) if self.engine.is_home else []

    def _text(self, row: Generation) -> str:
        """What the reward reads: the whole response, a tool's answers included."""
        return self.tokenizer.decode(row.token_ids)

    def score(self, batch: RolloutBatch, sums: Sums) -> Tensor:
        """[B] float32: what the reward function gives the samples of the last collection; 0 without a function.

        Raises:
            ValueError: the function failed on all samples, or reports metrics without end; the same on every rank.
        """
        rewards_B = torch.zeros(len(batch))
        self._wait_for_rewards()
        if self.pool is None:
            return rewards_B
        sums.add(REWARD_LATENCY, self.pool.total_ms, self.pool.calls)
        for b, row in enumerate(batch.row_id.tolist()):
            result = self._results[row]
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
        """ValueError, the same on every rank, where the reward function failed on all samples or reports metrics without end."""
        pool = self.pool
        here = [pool.failures.total(), pool.calls, len(pool.metric_names)] if pool is not None else [0, 0, 0]
        failed, calls, names = all_sum(torch.tensor(here)).tolist()
        if 0 < failed == calls or names > MAX_METRICS:
            said = all_names(
                [complaint] if pool is not None and (complaint := pool.complaint(failed, calls)) else []
            )
            if said:
                raise ValueError(said[0])

    def _kept_groups(self, batch: RolloutBatch, keep_group: KeepGroup) -> list[int]:
        """The groups of this round to keep, in order; the same on every rank. A group's samples may lie on several ranks."""
        self._wait_for_rewards()
        mine = [
            (group, self._results[row].score)
            for row, group in zip(batch.row_id.tolist(), batch.group_id.tolist())
        ]
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        scores: dict[int, list[float]] = {}
        for group, score in (entry for part in gathered for entry in part):
            scores.setdefault(group, []).append(score)
        return [group for group in sorted(scores) if keep_group(scores[group])]

    def _renumbered(
        self, batch: RolloutBatch, kept: list[int], *, first_group: int, samples_per_prompt: int
    ) -> RolloutBatch:
        """The samples of the kept groups, which are numbered from `first_group` on; their rewards follow them."""
        number = {group: first_group + i for i, group in enumerate(kept)}
        places = [b for b, group in enumerate(batch.group_id.tolist()) if group in number]
        part = batch.select(torch.tensor(places, dtype=torch.int64))
        group_id = torch.tensor([number[group] for group in part.group_id.tolist()], dtype=torch.int64)
        row_id = group_id * samples_per_prompt + part.row_id % samples_per_prompt
        for old in batch.row_id.tolist():
            result = self._results.pop(old)
            if old in part.row_id:
                self._results[int(row_id[part.row_id == old])] = result
        return replace(part, row_id=row_id, group_id=group_id)


def _batch_of(rows: Sequence[Generation], *, samples_per_prompt: int, policy_version: int) -> RolloutBatch:
    batch = RolloutBatch.from_rows(
        [row.row_id for row in rows],
        [list(row.prompt_token_ids) for row in rows],
        [list(row.token_ids) for row in rows],
        [list(row.logprobs) for row in rows],
    )
    for b, row in enumerate(rows):
        if row.is_sampled is not None:
            first = len(row.prompt_token_ids)
            batch.response_mask[b, first : first + len(row.token_ids)] = torch.tensor(row.is_sampled)
    batch.group_id = batch.row_id // samples_per_prompt
    batch.policy_version = torch.full_like(batch.row_id, policy_version)
    return batch

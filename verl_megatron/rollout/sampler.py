"""Sampler: generates responses to prompts and scores them concurrently with generation.

Letters: B samples on this rank.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from parallel.rank_set import RankSet
from parallel.runtime.refusal import RefusalError
from verl_megatron.config import TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.prompts import Prompt
from verl_megatron.data.tokenizer import Tokenizer
from verl_megatron.observe.metrics import REWARD_FAILED, REWARD_LATENCY, Sums, own_metric
from verl_megatron.observe.sources import Sources
from verl_megatron.rewards.functions import options_of
from verl_megatron.rewards.pool import Failure, Reward, RewardPool
from verl_megatron.rewards.worker import MAX_METRICS
from verl_megatron.rollout.adaptive import Table, entry_of
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
    """Number of prompts and samples of a collection, and their sampling parameters.

    The samples of all prompts are at most `num_prompts` times `samples_per_prompt`, and the greedy ones.
    """

    num_prompts: int
    samples_per_prompt: int
    sampling: Sampling
    # Prompts to keep with `keep_group`, if the first round draws more; the surplus is dropped. None: all.
    quota: int | None = None
    max_rounds: int = 10  # maximum number of rounds with `keep_group`
    with_greedy: bool = False  # generate one more sample of each prompt, the last, greedily
    table: Table = ()  # samples and sampling by prompt length; empty: the same for all
    # Numbers of the prompts to generate for, of so many; without `keep_group`. None: all.
    share: Callable[[int], range] | None = None

    @property
    def most_samples(self) -> int:
        """Samples of a prompt at most, the greedy one included."""
        return (
            max([self.samples_per_prompt, *(entry.samples or 0 for entry in self.table)]) + self.with_greedy
        )

    def size_of(self, prompt: Prompt) -> int:
        """Return the samples of a prompt, the greedy one included."""
        return len(self.samplings_of(prompt))

    def samplings_of(self, prompt: Prompt) -> list[Sampling]:
        """Return the sampling parameters of each sample of a prompt."""
        count, sampling = self.samples_per_prompt, self.sampling
        if self.table:
            entry = entry_of(self.table, len(prompt.prompt_token_ids))
            count, sampling = entry.samples or count, entry.sampling(sampling)
        greedy = replace(self.sampling, temperature=0.0)
        return [sampling] * count + [greedy] * self.with_greedy


class Sampler:
    """Draws prompts, generates samples and sends them to the reward workers. Collective over `engine.world`.

    Args:
        pool: reward workers, on the owner rank of each replica; None: no reward function.
        sources: of the prompts, whose numbers the samples get; None: they get none.
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
        sources: Sources | None = None,
        on_step: Callable[[], None] = lambda: None,
    ):
        self.sources = sources or Sources()
        self.engine, self.tokenizer, self.pool, self.seed, self.on_step = (
            engine,
            tokenizer,
            pool,
            seed,
            on_step,
        )
        self._results: dict[int, Reward] = {}  # known rewards of the last collected samples
        # With `keep_group`: scores of each prompt that the last collection drew, also of those replaced.
        self.scores_of_group: list[list[float]] = []
        self._latency_ms, self._calls, self._failed = 0.0, 0, 0  # of these
        self._first_failure: Failure | None = None
        self.num_dropped = self.dropped_tokens = 0  # samples of this rank that the last collection left out
        self._num_drawn = self._num_kept = 0  # prompts of the last collection with `keep_group`

    @property
    def world(self) -> RankSet:
        """The ranks that collect."""
        return self.engine.world

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
        self._results, self._latency_ms, self._num_drawn = {}, 0.0, 0
        self._calls, self._failed, self._first_failure = 0, 0, None
        if self.pool is not None:
            self.pool.forget()  # samples of a collection that was interrupted
        self.num_dropped = self.dropped_tokens = 0
        self.scores_of_group = []
        wanted, numbers, parts, kept = draw.quota or draw.num_prompts, Numbers(), [], []
        for _ in range(draw.max_rounds):
            prompts = source.draw(wanted - len(kept) if parts else draw.num_prompts)
            requests = self._requests(prompts, draw, iteration=iteration, first=numbers.num_samples)
            requests = [replace(request, cache_salt=str(version)) for request in requests]
            first_group = numbers.num_groups
            numbers.add([draw.size_of(prompt) for prompt in prompts])
            if draw.share is not None:
                own = draw.share(len(prompts))
                requests = requests[numbers.starts[own.start] : numbers.starts[own.stop]]
            samples = self._generate(requests, prompts, numbers, continue_turn)
            parts.append(batch_of(samples, requests, numbers, draw, policy_version=version))
            parts[-1].source_id = self.sources.numbers(
                prompts[group - first_group].extra for group in parts[-1].required("group_id").tolist()
            )
            if keep_group is None:
                return parts[0]
            kept += self._kept_groups(parts[-1], keep_group)
            if len(kept) >= wanted:
                break
        self._num_drawn, self._num_kept = numbers.num_groups, len(kept)
        others = sorted(set(range(numbers.num_groups)) - set(kept))
        missing = max(wanted - len(kept), 0)
        chosen = kept[:wanted] + others[len(others) - missing :]
        whole = RolloutBatch.concatenate(parts)
        batch = self._renumbered(whole, sorted(chosen), numbers)
        self.num_dropped = len(whole) - len(batch)
        self.dropped_tokens = whole.num_response_tokens - batch.num_response_tokens
        return batch

    def _requests(self, prompts: list[Prompt], draw: Draw, *, iteration: int, first: int) -> list[Request]:
        """Build a request for each sample of these prompts, numbered from `first` on."""
        requests = []
        for prompt in prompts:
            for sampling in draw.samplings_of(prompt):
                sample = first + len(requests)
                seed = sample_seed(self.seed, iteration, sample)
                requests.append(Request(sample, prompt.prompt_token_ids, seed, sampling))
        return requests

    def _generate(
        self,
        requests: list[Request],
        prompts: list[Prompt],
        numbers: "Numbers",
        continue_turn: ContinueTurn | None,
    ) -> list[Generation]:
        """Generate this rank's samples, ordered by number; submit each for reward as it finishes.

        `prompts` are the last of `numbers`.
        """
        first, pool = numbers.num_groups - len(prompts), self.pool

        def score(sample: Generation) -> None:
            prompt = prompts[numbers.group_of(sample.sample_id) - first]
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

        Args:
            sums: receives metrics of rewards and of the engine's load.

        Raises:
            RefusalError: on every rank, if the function failed on all samples or reports too many metrics.
        """
        self._wait_for_rewards()
        if self.engine.is_owner:
            self.engine.admission.add_load(sums, is_first=self.engine.world.is_first)
        if self._num_drawn:  # the same on every rank, so a mean over ranks is the number itself
            sums.add("rollout/groups_sampled", self._num_drawn, 1)
            sums.add("rollout/groups_without_variance", self._num_drawn - self._num_kept, 1)
        if self.pool is None:
            return torch.zeros(len(batch))
        sums.add(REWARD_LATENCY, self._latency_ms, self._calls)
        rewards_B = rewards_of([self._results[sample] for sample in batch.sample_id.tolist()], sums)
        self.pool.show_new_failures()
        return rewards_B

    def _wait_for_rewards(self) -> None:
        if self.pool is not None:
            self._results |= self.pool.results(progress=self.on_step)
            self._latency_ms += self.pool.total_ms
            self._calls += self.pool.calls
            self._failed += self.pool.failed
            self._first_failure = self._first_failure or self.pool.first_failure
        self._check_rewards()

    def _check_rewards(self) -> None:
        """Raise RefusalError on every rank if all calls of the collection failed or metrics are too many."""
        pool = self.pool
        here = [self._failed, self._calls, len(pool.metric_names) if pool is not None else 0]
        failed, calls, names = self.engine.world.all_sum(torch.tensor(here)).tolist()
        if 0 < failed == calls or names > MAX_METRICS:
            complaint = pool.complaint(failed, calls, self._first_failure) if pool is not None else ""
            said = self.engine.world.union([complaint] * bool(complaint))
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
        self.scores_of_group += [scores[group] for group in sorted(scores)]
        return [group for group in sorted(scores) if keep_group(scores[group])]

    def _renumbered(self, batch: RolloutBatch, chosen: list[int], numbers: "Numbers") -> RolloutBatch:
        """Return the samples of groups `chosen`, numbered densely in that order, with their rewards."""
        number, dense = {group: new for new, group in enumerate(chosen)}, Numbers()
        dense.add([numbers.starts[group + 1] - numbers.starts[group] for group in chosen])
        places = [b for b, group in enumerate(batch.required("group_id").tolist()) if group in number]
        part = batch.select(torch.tensor(places, dtype=torch.int64))
        groups = part.required("group_id").tolist()
        shifts = [dense.starts[number[group]] - numbers.starts[group] for group in groups]
        group_id = torch.tensor([number[group] for group in groups], dtype=torch.int64)
        sample_id = part.sample_id + torch.tensor(shifts, dtype=torch.int64)
        self._results = {
            new: self._results[old] for old, new in zip(part.sample_id.tolist(), sample_id.tolist())
        }
        return replace(part, sample_id=sample_id, group_id=group_id)


def rewards_of(results: Sequence[Reward], sums: Sums) -> Tensor:
    """Return the scores of samples, [B] float32, and add their metrics to `sums`."""
    for result in results:
        sums.add(REWARD_FAILED, float(result.failure is not None), 1)
        for name, value in result.metrics.items():
            sums.add(own_metric(name), value, 1)
    return torch.tensor([result.score for result in results], dtype=torch.float32)


class Numbers:
    """Numbers of the samples of prompts that are drawn one after the other, without gaps."""

    def __init__(self) -> None:
        self.starts = [0]  # first sample of each group, and at last the number of samples

    @property
    def num_groups(self) -> int:
        return len(self.starts) - 1

    @property
    def num_samples(self) -> int:
        return self.starts[-1]

    def add(self, sizes: Sequence[int]) -> None:
        """Number the samples of further prompts.

        Args:
            sizes: samples of each.
        """
        for size in sizes:
            self.starts.append(self.starts[-1] + size)

    def group_of(self, sample_id: int) -> int:
        """Return the group of a sample."""
        return bisect_right(self.starts, sample_id) - 1


def batch_of(
    samples: Sequence[Generation],
    requests: Sequence[Request],
    numbers: Numbers,
    draw: Draw,
    *,
    policy_version: int,
) -> RolloutBatch:
    """Return the batch of the samples, which are some of the requests'."""
    batch = RolloutBatch.from_lists(
        [sample.sample_id for sample in samples],
        [list(sample.prompt_token_ids) for sample in samples],
        [list(sample.token_ids) for sample in samples],
        [list(sample.logprobs) for sample in samples],
    )
    for b, sample in enumerate(samples):
        if sample.is_sampled is not None:
            batch.set_targets(b, sample.is_sampled)
    groups = [numbers.group_of(sample.sample_id) for sample in samples]
    batch.group_id = torch.tensor(groups, dtype=torch.int64)
    if draw.table:
        of_sample = {request.sample_id: request.sampling.trained_temperature for request in requests}
        temperatures = [of_sample[sample.sample_id] for sample in samples]
        batch.temperature = torch.tensor(temperatures, dtype=torch.float32)
    batch.policy_version = torch.full_like(batch.sample_id, policy_version)
    batch.is_cut = torch.tensor([sample.finish_reason == "length" for sample in samples], dtype=torch.bool)
    return batch


def make_reward_pool(config: TrainerConfig, engine: RolloutEngine) -> RewardPool | None:
    """Start reward workers on the first rank of each replica, which owns its samples."""
    reward = config.reward
    if not reward.function or not engine.is_owner:
        return None
    pool = RewardPool(
        reward.function,
        options_of(reward),
        workers=reward.workers,
        timeout_s=reward.timeout_s,
        failure_score=reward.failure_score,
    )
    if pool.refused and engine.world.is_first:
        print(
            f"reward workers have no namespaces of their own ({pool.refused}): "
            "a reward function may signal any process of this user",
            flush=True,
        )
    return pool

"""Adjustments of scored samples before training: overlong penalty, and baselines from greedy samples.

Letters: B samples on this rank, G prompts of the whole iteration.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import Sums


def overlong_penalty(response_B: Tensor, *, max_tokens: int, overlong_tokens: int) -> Tensor:
    """Compute DAPO's soft overlong punishment (Yu et al. 2025), [B] float32 in [-1, 0].

    It is 0 up to max_tokens - overlong_tokens response tokens and falls linearly to -1 at max_tokens.

    Args:
        response_B: int64, response tokens.
        max_tokens: limit of a response.
        overlong_tokens: length of the interval before it, above 0.
    """
    excess_B = (response_B - (max_tokens - overlong_tokens)).clamp(min=0)
    return -(excess_B / overlong_tokens).clamp(max=1).float()


def has_variance(scores: Sequence[float]) -> bool:
    """Whether the samples of a prompt differ in their score; otherwise group-relative advantages are 0."""
    return max(scores) > min(scores)


def take_baselines(
    batch: RolloutBatch, sums: Sums, *, num_groups: int, group_size: int, all_sum: Callable[[Tensor], Tensor]
) -> RolloutBatch:
    """Remove the greedy samples, the last of each group; set `baselines` of the others to their scores.

    The remaining samples are renumbered. `all_sum` adds over the ranks, and each of them must call it.
    """
    is_greedy_B = batch.sample_id % group_size == group_size - 1
    greedy_B = batch.required("rewards").double() * is_greedy_B
    sums.add("reward/greedy_mean", greedy_B.sum(), is_greedy_B.sum())
    score_G = all_sum(
        torch.zeros(num_groups, dtype=torch.float64).index_add_(0, batch.required("group_id"), greedy_B)
    )
    part = batch.select((~is_greedy_B).nonzero().squeeze(1))
    group_B = part.required("group_id")
    return replace(
        part,
        sample_id=group_B * (group_size - 1) + part.sample_id % group_size,
        baselines=score_G[group_B].float(),
    )

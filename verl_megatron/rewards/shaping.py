"""Adjustments of scored samples before training: penalties of long or unfinished ones, greedy baselines.

Letters: B samples on this rank, G prompts of the whole iteration.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import GREEDY_MEAN, Sums


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


def lacks_eos(batch: RolloutBatch, eos_token_ids: Collection[int]) -> Tensor:
    """Return whether each response lacks an end-of-sequence token as the last of its own tokens, [B] bool.

    Responses that were cut off, that ended at another stop token or string, or that are empty lack it.
    """
    place_T = torch.arange(1, batch.generated_ids.size(1) + 1)
    last_B = (batch.response_mask * place_T).amax(1)  # place of the last own token, from 1; 0: there is none
    last_id_B = batch.generated_ids.gather(1, (last_B - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return ~torch.isin(last_id_B, torch.tensor(sorted(eos_token_ids))) | (last_B == 0)


def has_variance(scores: Sequence[float]) -> bool:
    """Whether the samples of a prompt differ in their score; otherwise group-relative advantages are 0."""
    return max(scores) > min(scores)


def take_baselines(
    batch: RolloutBatch, sums: Sums, *, num_groups: int, all_sum: Callable[[Tensor], Tensor]
) -> RolloutBatch:
    """Remove the greedy samples, the last of each group; set `baselines` of the others to their scores.

    Groups may differ in size. The remaining samples are renumbered. `all_sum` adds over the ranks, and each
    of them must call it.
    """
    owned_B = batch.required("group_id")
    size_G = all_sum(torch.bincount(owned_B, minlength=num_groups).double()).long()
    is_greedy_B = batch.sample_id == (size_G.cumsum(0) - 1)[owned_B]
    greedy_B = batch.required("rewards").double() * is_greedy_B
    sums.add(GREEDY_MEAN, greedy_B.sum(), is_greedy_B.sum())
    score_G = all_sum(torch.zeros(num_groups, dtype=torch.float64).index_add_(0, owned_B, greedy_B))
    part = batch.select((~is_greedy_B).nonzero().squeeze(1))
    group_B = part.required("group_id")
    return replace(
        part,
        sample_id=part.sample_id - group_B,  # each group before it has lost its last sample
        baselines=score_G[group_B].float(),
    )

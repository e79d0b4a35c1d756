"""Advantage estimators: pure functions whose only communication is `all_sum`.

Letters: B samples on this rank, T token positions, G groups (prompts) of the whole iteration. A field at
position t refers to token t: values_BT[b, t] is the value of the tokens before t, and token_rewards_BT[b, t]
is received after token t. The mask selects the tokens that the model generated. They start and end at
different t in each sample, and other tokens, such as a tool's output, may come between them. `all_sum`
returns the sum of a float64 tensor over the ranks that own samples; each of them must call it, even with no
samples.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from verl_megatron.algorithms.kl import reference_kl
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch

AllSum = Callable[[Tensor], Tensor]

STD_EPSILON = 1e-6  # added to a group's standard deviation: a group of equal scores gets advantage 0
VARIANCE_EPSILON = 1e-8  # added to the variance in whitening


def own_samples(x: Tensor) -> Tensor:
    """Identity: the `all_sum` of a single-rank program."""
    return x


def token_rewards(rewards_B: Tensor, mask_BT: Tensor, kl_BT: Tensor | None, kl_coef: float) -> Tensor:
    """Per-token rewards [B, T] float32: the score on the last response token, minus kl_coef times the KL.

    rewards_B float32; mask_BT bool, the response; kl_BT float32 or None for no penalty. Samples without a
    response give 0.
    """
    tokens_left_BT = mask_BT.flip(-1).cumsum(-1).flip(-1)
    is_last_BT = mask_BT & (tokens_left_BT == 1)
    rewards_BT = torch.where(is_last_BT, rewards_B.float().unsqueeze(-1), 0.0)
    if kl_BT is not None:
        rewards_BT = rewards_BT - kl_coef * kl_BT.masked_fill(~mask_BT, 0.0)
    return rewards_BT


def penalized_token_rewards(batch: RolloutBatch, config: AlgorithmConfig, kl_coef: float) -> Tensor:
    """Per-token rewards [B, T] float32 of a scored batch, with the KL penalty for `kl_in=reward`."""
    assert batch.rewards is not None, "advantages need rewards"
    return token_rewards(batch.rewards, batch.response_mask, _reward_kl(batch, config), kl_coef)


def penalized_scores(batch: RolloutBatch, config: AlgorithmConfig, kl_coef: float) -> Tensor:
    """Scores [B] float32, for `kl_in=reward` minus kl_coef times the KL summed over the response."""
    assert batch.rewards is not None, "advantages need rewards"
    kl_BT = _reward_kl(batch, config)
    return batch.rewards if kl_BT is None else batch.rewards - kl_coef * kl_BT.sum(-1)


def with_sample_advantages(
    batch: RolloutBatch, advantages_B: Tensor, config: AlgorithmConfig, kl_coef: float
) -> RolloutBatch:
    """Set token rewards, and advantages that are the same for all response tokens of a sample."""
    return replace(
        batch,
        token_rewards=penalized_token_rewards(batch, config, kl_coef),
        advantages=batch.response_mask * advantages_B.float().unsqueeze(-1),
    )


def _reward_kl(batch: RolloutBatch, config: AlgorithmConfig) -> Tensor | None:
    return reference_kl(batch, estimator=config.kl_estimator) if config.kl_in == "reward" else None


def returns_to_go(token_rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of a token's reward and those after it, [B, T] float32, 0 outside the response."""
    no_values_BT = torch.zeros_like(token_rewards_BT)
    return gae(token_rewards_BT, no_values_BT, mask_BT, gamma=gamma, lam=1.0)[0]


def gae(
    token_rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, return_t = A_t + V_t; after the
    last response token V = A = 0. Here t counts only the model's own tokens; tokens between them are skipped.

    Returns:
        Advantages and returns, both [B, T] float32, 0 outside the response.
    """
    advantages_BT = torch.zeros_like(values_BT)
    # Of the sample's next own token; 0 after its last.
    advantage_B = next_value_B = values_BT.new_zeros(len(values_BT))
    for t in reversed(range(values_BT.shape[1])):
        is_own_B, value_B = mask_BT[:, t], values_BT[:, t]
        delta_B = token_rewards_BT[:, t] + gamma * next_value_B - value_B
        advantage_B = torch.where(is_own_B, delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = torch.where(is_own_B, value_B, next_value_B)
        advantages_BT[:, t] = advantage_B
    advantages_BT = advantages_BT.masked_fill(~mask_BT, 0.0)
    return advantages_BT, advantages_BT + values_BT.masked_fill(~mask_BT, 0.0)


def group_advantages(
    rewards_B: Tensor, group_B: Tensor, num_groups: int, *, scale_by_std: bool, all_sum: AllSum = own_samples
) -> Tensor:
    """Group-relative advantages [B] float32 (GRPO, Shao et al. 2024): (r - mean) / (std + 1e-6).

    std divides by n - 1; the only sample of a group gets 0. rewards_B float32; group_B int64 in [0,
    num_groups), the sample's group. Only per-group sums are communicated, so a group's samples may be on any
    ranks.
    """
    mean_B, count_B = group_statistics(rewards_B, group_B, num_groups, all_sum=all_sum)
    deviation_B = rewards_B.double() - mean_B
    if not scale_by_std:
        return deviation_B.float()
    square_G = all_sum(_group_sum(deviation_B.square(), group_B, num_groups))
    std_B = (square_G[group_B] / (count_B - 1).clamp(min=1)).sqrt()
    return (deviation_B / (std_B + STD_EPSILON)).float()


def group_statistics(
    rewards_B: Tensor, group_B: Tensor, num_groups: int, *, all_sum: AllSum = own_samples
) -> tuple[Tensor, Tensor]:
    """Mean of the rewards and number of samples of each sample's group, both [B] float64."""
    ones_B = torch.ones(len(rewards_B), dtype=torch.float64)
    sums = [_group_sum(x_B, group_B, num_groups) for x_B in (rewards_B.double(), ones_B)]
    total_G, count_G = all_sum(torch.stack(sums))
    return (total_G / count_G.clamp(min=1))[group_B], count_G[group_B]


def _group_sum(x_B: Tensor, group_B: Tensor, num_groups: int) -> Tensor:
    return x_B.new_zeros(num_groups).index_add_(0, group_B, x_B)


def whiten(
    x_BT: Tensor, mask_BT: Tensor, *, all_sum: AllSum = own_samples, shift_mean: bool = True
) -> Tensor:
    """Scale x to standard deviation 1 (and mean 0 if shift_mean) over the masked tokens of all ranks.

    Returns [B, T] float32, 0 outside the mask.
    """
    x = x_BT[mask_BT].double()
    total, count = all_sum(torch.stack([x.sum(), x.new_tensor(float(x.numel()))]))
    mean = total / count.clamp(min=1)
    variance = all_sum((x - mean).square().sum()) / count.clamp(min=1)  # second pass: no cancellation
    white = (x - mean) * torch.rsqrt(variance + VARIANCE_EPSILON)
    return torch.zeros_like(x_BT, dtype=torch.float32).masked_scatter(
        mask_BT, (white if shift_mean else white + mean).float()
    )

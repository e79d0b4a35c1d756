"""Clipped surrogate of PPO (Schulman et al. 2017), with separate bounds and an optional dual clip."""

import torch
from torch import Tensor

from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig


def objective(logprobs_N: Tensor, tokens: PolicyTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Compute -min(ratio A, clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) A) of each token."""
    return clipped_surrogate(tokens.log_ratio(logprobs_N).exp(), tokens.advantages_N, config)


def clipped_surrogate(
    ratio_N: Tensor, advantages_N: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Compute the clipped loss of each ratio, [N] float32, and which of them are clipped, [N] bool.

    With `dual_clip` = c above 0, the loss of a negative advantage is at most -c A (Ye et al. 2020).
    """
    surrogate_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high) * advantages_N
    loss_N, is_clipped_N = -torch.minimum(surrogate_N, clipped_N), clipped_N < surrogate_N
    if config.dual_clip:
        limit_N = torch.where(advantages_N < 0, -config.dual_clip * advantages_N, torch.inf)
        is_clipped_N = is_clipped_N | (loss_N > limit_N)
        loss_N = torch.minimum(loss_N, limit_N)
    return loss_N, is_clipped_N

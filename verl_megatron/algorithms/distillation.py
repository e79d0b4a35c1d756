"""On-policy distillation (Agarwal et al. 2024; Gu et al. 2024): reverse KL to a teacher on the actor's own samples."""

from dataclasses import replace

import torch

from verl_megatron.algorithms.advantages import AllSum, token_rewards
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch, config: AlgorithmConfig, *, kl_coef: float, num_groups: int, all_sum: AllSum
) -> RolloutBatch:
    """Set advantages of 0: only the teacher's term, `add_teacher`, teaches."""
    rewards_BT = token_rewards(batch.rewards, batch.response_mask, None, 0.0)
    return replace(batch, token_rewards=rewards_BT, advantages=torch.zeros_like(rewards_BT))


def add_teacher(batch: RolloutBatch, *, coef: float) -> RolloutBatch:
    """Add coef (log p_teacher - log p_old) to the advantage of each response token.

    As a reward of the token alone, without discounted sums, its policy gradient lowers the reverse KL
    KL(p, p_teacher) of each next-token distribution.
    """
    assert batch.logprobs is not None and batch.teacher_logprobs is not None
    gap_BT = (batch.teacher_logprobs - batch.logprobs).masked_fill(~batch.response_mask, 0.0)
    return replace(batch, advantages=batch.advantages + coef * gap_BT)

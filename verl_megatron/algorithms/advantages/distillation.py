"""On-policy distillation (Agarwal et al. 2024; Gu et al. 2024).

Reverse KL to a teacher on the actor's own samples.
"""

from dataclasses import replace

import torch

from verl_megatron.algorithms.advantages.estimators import AllSum, token_rewards
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch, config: AlgorithmConfig, *, kl_coef: float, num_groups: int, all_sum: AllSum
) -> RolloutBatch:
    """Set advantages of 0: only the teacher's term, `add_teacher`, teaches. Rewards are not needed."""
    rewards_B = torch.zeros(len(batch)) if batch.rewards is None else batch.rewards
    rewards_BT = token_rewards(rewards_B, batch.response_mask, None, 0.0)
    return replace(batch, token_rewards=rewards_BT, advantages=torch.zeros_like(rewards_BT))


def add_teacher(batch: RolloutBatch, *, coef: float) -> RolloutBatch:
    """Add coef (log p_teacher - log p_old) to the advantage of each response token.

    As a reward of the token alone, without discounted sums, its policy gradient lowers the reverse KL
    KL(p, p_teacher) of each next-token distribution.
    """
    gap_BT = (batch.required("teacher_logprobs") - batch.required("logprobs")).masked_fill(
        ~batch.response_mask, 0.0
    )
    return replace(batch, advantages=batch.required("advantages") + coef * gap_BT)

"""REINFORCE++ (Hu et al. 2025): no critic; advantages are normalized over the whole iteration."""

from dataclasses import replace

from verl_megatron.algorithms.advantages.estimators import (
    AllSum,
    group_advantages,
    penalized_scores,
    penalized_token_rewards,
    returns_to_go,
    whiten,
)
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch, config: AlgorithmConfig, *, kl_coef: float, num_groups: int, all_sum: AllSum
) -> RolloutBatch:
    """Set advantages to the discounted returns of the token rewards, whitened over the iteration's tokens."""
    rewards_BT, mask_BT = penalized_token_rewards(batch, config, kl_coef), batch.response_mask
    returns_BT = returns_to_go(rewards_BT, mask_BT, gamma=config.gamma)
    return replace(batch, token_rewards=rewards_BT, advantages=whiten(returns_BT, mask_BT, all_sum=all_sum))


def baseline_advantages(
    batch: RolloutBatch, config: AlgorithmConfig, *, kl_coef: float, num_groups: int, all_sum: AllSum
) -> RolloutBatch:
    """Set advantages to score minus the mean of the group, whitened over the iteration's tokens."""
    scores_B = penalized_scores(batch, config, kl_coef)
    centered_B = group_advantages(
        scores_B, batch.required("group_id"), num_groups, scale_by_std=False, all_sum=all_sum
    )
    centered_BT = batch.response_mask * centered_B.unsqueeze(-1)
    return replace(
        batch,
        token_rewards=penalized_token_rewards(batch, config, kl_coef),
        advantages=whiten(centered_BT, batch.response_mask, all_sum=all_sum),
    )

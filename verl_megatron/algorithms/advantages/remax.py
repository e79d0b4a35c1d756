"""ReMax (Li et al. 2024): the baseline is the score of a greedy response to the same prompt."""

from dataclasses import replace

from verl_megatron.algorithms.advantages.estimators import AllSum, penalized_token_rewards, returns_to_go
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch, config: AlgorithmConfig, *, kl_coef: float, num_groups: int, all_sum: AllSum
) -> RolloutBatch:
    """Set advantages to the returns of the token rewards minus `batch.baselines`, the greedy scores."""
    assert batch.baselines is not None, "ReMax needs the scores of greedy responses"
    rewards_BT, mask_BT = penalized_token_rewards(batch, config, kl_coef), batch.response_mask
    returns_BT = returns_to_go(rewards_BT, mask_BT, gamma=config.gamma)
    advantages_BT = mask_BT * (returns_BT - batch.baselines.unsqueeze(-1))
    return replace(batch, token_rewards=rewards_BT, advantages=advantages_BT)

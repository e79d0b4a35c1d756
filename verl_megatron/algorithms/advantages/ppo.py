"""PPO (Schulman et al. 2017): critic values, generalized advantage estimation, advantage whitening."""

from dataclasses import replace

from verl_megatron.algorithms.advantages.estimators import AllSum, gae, penalized_token_rewards, whiten
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch, config: AlgorithmConfig, *, kl_coef: float, num_groups: int, all_sum: AllSum
) -> RolloutBatch:
    """Set token_rewards, advantages and returns.

    Needs rewards, values and, with a reference, logprobs and ref_logprobs. Advantages are whitened over the
    iteration; returns, the critic's targets, are not.
    """
    assert batch.values is not None, "PPO needs values"
    rewards_BT = penalized_token_rewards(batch, config, kl_coef)
    advantages_BT, returns_BT = gae(
        rewards_BT, batch.values, batch.response_mask, gamma=config.gamma, lam=config.gae_lambda
    )
    if config.whiten:
        advantages_BT = whiten(advantages_BT, batch.response_mask, all_sum=all_sum)
    return replace(batch, token_rewards=rewards_BT, advantages=advantages_BT, returns=returns_BT)

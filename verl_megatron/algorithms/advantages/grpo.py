"""GRPO (Shao et al. 2024): no critic; advantages are scores relative to the other samples of the prompt."""

from verl_megatron.algorithms.advantages.estimators import (
    AllSum,
    group_advantages,
    penalized_scores,
    with_sample_advantages,
)
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch, config: AlgorithmConfig, *, kl_coef: float, num_groups: int, all_sum: AllSum
) -> RolloutBatch:
    """Set token_rewards and advantages from rewards; all response tokens of a sample get the same advantage.

    The paper puts the KL into the loss (`kl_in: loss`). With `kl_in: reward` the KL, summed over the
    response, is subtracted from a sample's score.
    """
    scores_B = penalized_scores(batch, config, kl_coef)
    advantages_B = group_advantages(
        scores_B, batch.required("group_id"), num_groups, scale_by_std=config.scale_by_std, all_sum=all_sum
    )
    return with_sample_advantages(batch, advantages_B, config, kl_coef)

"""RLOO, REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024)."""

from verl_megatron.algorithms.advantages.estimators import (
    AllSum,
    group_statistics,
    penalized_scores,
    with_sample_advantages,
)
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch, config: AlgorithmConfig, *, kl_coef: float, num_groups: int, all_sum: AllSum
) -> RolloutBatch:
    """Set advantages: a sample's score minus the mean score of the *other* samples of its prompt.

    score - (total - score) / (n - 1) = n / (n - 1) (score - mean). The only sample of a group gets 0.
    """
    scores_B = penalized_scores(batch, config, kl_coef)
    mean_B, count_B = group_statistics(scores_B, batch.required("group_id"), num_groups, all_sum=all_sum)
    advantages_B = count_B / (count_B - 1).clamp(min=1) * (scores_B.double() - mean_B)
    return with_sample_advantages(batch, advantages_B, config, kl_coef)

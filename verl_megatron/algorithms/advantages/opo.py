"""OPO, on-policy RL with optimal reward baseline (Hao et al. 2025): a baseline weighted by length."""

from verl_megatron.algorithms.advantages import estimators
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch,
    config: AlgorithmConfig,
    *,
    kl_coef: float,
    num_groups: int,
    all_sum: estimators.AllSum,
) -> RolloutBatch:
    """Set advantages: a sample's score minus the group's mean score weighted by response length.

    This baseline has the least gradient variance if a sample's squared gradient norm is proportional to its
    length.
    """
    scores_B = estimators.penalized_scores(batch, config, kl_coef).double()
    length_B, group_B = batch.response_mask.sum(1).double(), batch.required("group_id")
    total_B, _ = estimators.group_statistics(length_B * scores_B, group_B, num_groups, all_sum=all_sum)
    tokens_B, _ = estimators.group_statistics(length_B, group_B, num_groups, all_sum=all_sum)
    advantages_B = scores_B - total_B / tokens_B.clamp(min=1e-9)  # both are 0 in a group without responses
    return estimators.with_sample_advantages(batch, advantages_B, config, kl_coef)

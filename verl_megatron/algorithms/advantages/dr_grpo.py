"""Dr. GRPO (Liu et al. 2025): GRPO without its two biases, the group's standard deviation and the length."""

from dataclasses import replace

from verl_megatron.algorithms.advantages import grpo
from verl_megatron.algorithms.advantages.estimators import AllSum
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch, config: AlgorithmConfig, *, kl_coef: float, num_groups: int, all_sum: AllSum
) -> RolloutBatch:
    """Set advantages to score minus the mean of the group.

    The table's normalizer `sequence_sum` divides a sample's loss by a constant instead of its length.
    """
    unscaled = replace(config, scale_by_std=False)
    return grpo.advantages(batch, unscaled, kl_coef=kl_coef, num_groups=num_groups, all_sum=all_sum)

"""GRPO (Shao et al. 2024): no critic; advantages are scores relative to the other samples of the prompt."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from verl_megatron.algorithms.advantages import group_advantages, token_rewards
from verl_megatron.algorithms.kl import reference_kl
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def advantages(
    batch: RolloutBatch,
    config: AlgorithmConfig,
    *,
    kl_coef: float,
    num_groups: int,
    all_sum: Callable[[Tensor], Tensor],
) -> RolloutBatch:
    """Set token_rewards and advantages from rewards; all response tokens of a sample get the same advantage.

    The paper puts the KL into the loss (`kl_in: loss`). With `kl_in: reward` the KL, summed over the
    response, is subtracted from a sample's score.
    """
    assert batch.rewards is not None and batch.group_id is not None, "GRPO needs rewards of groups"
    mask_BT = batch.response_mask
    kl_BT = reference_kl(batch, estimator=config.kl_estimator) if config.kl_in == "reward" else None
    scores_B = batch.rewards if kl_BT is None else batch.rewards - kl_coef * kl_BT.sum(-1)
    advantages_B = group_advantages(
        scores_B, batch.group_id, num_groups, scale_by_std=config.scale_by_std, all_sum=all_sum
    )
    return replace(
        batch,
        token_rewards=token_rewards(batch.rewards, mask_BT, kl_BT, kl_coef),
        advantages=mask_BT * advantages_B.unsqueeze(-1),
    )

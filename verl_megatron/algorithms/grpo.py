"""GRPO (Shao et al. 2024): no critic; a row's advantage is its score relative to the other samples of its prompt."""

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
    """Needs rewards; sets token_rewards and advantages, the same for every response token of a row.

    The paper puts the KL into the loss (`kl_in: loss`). With `kl_in: reward` a row's score is less its KL, summed over the response.
    """
    assert batch.rewards is not None, "GRPO needs rewards"
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

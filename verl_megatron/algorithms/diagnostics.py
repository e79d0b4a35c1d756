"""Batch statistics of an iteration that do not depend on the algorithm."""

from collections.abc import Callable

import torch
from torch import Tensor

from verl_megatron.algorithms.kl import reference_kl
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import REWARD_MAX, REWARD_MEAN, Sums


def batch_sums(batch: RolloutBatch, *, kl_estimator: str) -> Sums:
    """Sum statistics of the samples owned by this rank.

    These are the reward, response tokens, the share of responses that were cut off, the KL of a sample from
    the reference and from the teacher, and the log-prob gap to the sampler (nats). Sums are in float64:
    which rank has which sample does not matter.
    """
    sums, samples, mask_BT = Sums(), len(batch), batch.response_mask
    tokens_B = mask_BT.sum(-1)
    sums.add("rollout/response_tokens_mean", tokens_B.sum(), samples)
    if batch.is_cut is not None:
        sums.add("rollout/cut_fraction", batch.is_cut.sum(), samples)
    if batch.rewards is not None:
        sums.add(REWARD_MEAN, batch.rewards.sum(dtype=torch.float64), samples)
    kl_BT = reference_kl(batch, estimator=kl_estimator)
    if kl_BT is not None:
        sums.add("kl/ref", kl_BT.sum(dtype=torch.float64), samples)
    if batch.teacher_logprobs is not None:
        gap_BT = batch.required("logprobs") - batch.teacher_logprobs
        sums.add("kl/teacher", gap_BT[mask_BT].sum(dtype=torch.float64), samples)
    if batch.logprobs is not None and batch.rollout_logprobs is not None:
        gap_N = (batch.logprobs - batch.rollout_logprobs)[mask_BT].abs()
        sums.add("rollout/logprob_gap_mean", gap_N.sum(dtype=torch.float64), gap_N.numel())
        if gap_N.numel():
            sums.max("rollout/logprob_gap_max", gap_N.max())
    if samples:
        sums.max("rollout/response_tokens_max", tokens_B.max())
        if batch.rewards is not None:
            sums.max(REWARD_MAX, batch.rewards.max())
    return sums


def reference_gap(batch: RolloutBatch) -> Sums:
    """Sum differences between the log-probs of actor and reference (nats), before the first update.

    Their weights are the same then, so this is the error of the reference's numerics: 0 where they are the
    actor's. Empty without a reference.
    """
    sums = Sums()
    if batch.ref_logprobs is not None:
        gap_N = (batch.required("logprobs") - batch.ref_logprobs)[batch.response_mask].abs()
        sums.add("reference/logprob_gap_mean", gap_N.sum(dtype=torch.float64), gap_N.numel())
        if gap_N.numel():
            sums.max("reference/logprob_gap_max", gap_N.max())
    return sums


def zero_variance_fraction(
    batch: RolloutBatch, *, num_groups: int, all_max: Callable[[Tensor], Tensor]
) -> float:
    """Return the share of prompts whose samples all have the same score: they give no gradient.

    `all_max` returns the maximum over the ranks that own samples; each of them must call it.
    """
    rewards_B, group_B = batch.required("rewards").double(), batch.required("group_id")
    bounds_2G = torch.full((2, num_groups), -torch.inf, dtype=torch.float64)
    for bound_G, value_B in zip(bounds_2G, (rewards_B, -rewards_B)):
        bound_G.scatter_reduce_(0, group_B, value_B, "amax")
    highest_G, lowest_G = all_max(bounds_2G)
    return (highest_G == -lowest_G).double().mean().item()

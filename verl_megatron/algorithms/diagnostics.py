"""Batch statistics of an iteration that do not depend on the algorithm."""

from verl_megatron.algorithms.kl import reference_kl
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import REWARD_MAX, REWARD_MEAN, Sums


def batch_sums(batch: RolloutBatch, *, kl_estimator: str) -> Sums:
    """Sum statistics of the samples owned by this rank.

    These are the reward, response tokens, the KL of a sample from the reference and from the teacher, and
    the log-prob gap to the sampler (nats).
    """
    sums, samples, mask_BT = Sums(), len(batch), batch.response_mask
    tokens_B = mask_BT.sum(-1)
    sums.add("rollout/response_tokens_mean", tokens_B.sum(), samples)
    if batch.rewards is not None:
        sums.add(REWARD_MEAN, batch.rewards.sum(), samples)
    kl_BT = reference_kl(batch, estimator=kl_estimator)
    if kl_BT is not None:
        sums.add("kl/ref", kl_BT.sum(), samples)
    if batch.teacher_logprobs is not None:
        gap_BT = batch.required("logprobs") - batch.teacher_logprobs
        sums.add("kl/teacher", gap_BT[mask_BT].sum(), samples)
    if batch.logprobs is not None and batch.rollout_logprobs is not None:
        gap_N = (batch.logprobs - batch.rollout_logprobs)[mask_BT].abs()
        sums.add("rollout/logprob_gap_mean", gap_N.sum(), gap_N.numel())
        if gap_N.numel():
            sums.max("rollout/logprob_gap_max", gap_N.max())
    if samples:
        sums.max("rollout/response_tokens_max", tokens_B.max())
        if batch.rewards is not None:
            sums.max(REWARD_MAX, batch.rewards.max())
    return sums

"""Per-token losses of one micro-batch.

They are summed and divided once, at the optimizer step, by the algorithm's normalizer over the whole
mini-batch. The result therefore does not depend on how samples are packed and distributed.

Letters: N response tokens of a packed micro-batch. All tensors are float32; gradients flow only into the
first argument (and the entropy).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_megatron.algorithms.kl import KL_ESTIMATORS, MAX_LOG_RATIO, k3
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.observe.metrics import Sums


@dataclass(slots=True)
class PolicyTokens:
    """Quantities of the response tokens that are fixed before the update."""

    sample_N: Tensor  # int64, the sample that each token belongs to
    old_logprobs_N: Tensor  # from the actor before the iteration's updates
    advantages_N: Tensor
    ref_logprobs_N: Tensor | None = None  # for KL in the loss
    rollout_logprobs_N: Tensor | None = None  # from the sampler, for importance weights

    @classmethod
    def of(cls, micro: MicroBatch) -> "PolicyTokens":
        """The target tokens of a micro-batch."""
        fields = micro.fields
        return cls(
            micro.sample,
            fields["logprobs"],
            fields["advantages"],
            fields.get("ref_logprobs"),
            fields.get("rollout_logprobs"),
        )


def policy_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor | None,
    tokens: PolicyTokens,
    config: AlgorithmConfig,
    kl_coef: float,
) -> tuple[Tensor, Sums]:
    """Clipped surrogate (Schulman et al. 2017), minus the entropy bonus, plus the KL when `kl_in` is "loss".

    Per token: -w min(ratio A, clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) A) - entropy_coef H + kl_coef KL, with
    ratio = p / p_old and w = min(p_old / p_sampler, tis_cap) if the cap is above 0 (truncated
    importance sampling, Yao et al. 2025), else 1. log ratio is clamped to +-MAX_LOG_RATIO, so that an
    infinite ratio never multiplies an advantage of 0.

    Returns:
        [N] losses and their metrics.
    """
    log_ratio_N = (logprobs_N - tokens.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    surrogate_N = ratio_N * tokens.advantages_N
    clipped_N = ratio_N.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high) * tokens.advantages_N
    loss_N = -torch.minimum(surrogate_N, clipped_N)

    sums = Sums()
    count = loss_N.numel()
    if config.tis_cap > 0:
        weight_N = importance_weights(tokens, cap=config.tis_cap)
        loss_N = weight_N * loss_N
        sums.add("policy/importance_weight", weight_N.sum(), count)
    sums.add("policy/loss", loss_N.sum(), count)
    sums.add("policy/clip_fraction", (clipped_N < surrogate_N).sum(), count)
    sums.add("policy/approx_kl", k3(tokens.old_logprobs_N, logprobs_N.detach()).sum(), count)
    if count:
        sums.max("policy/ratio_max", ratio_N.max())

    if entropy_N is not None:
        sums.add("policy/entropy", entropy_N.sum(), count)
    if config.entropy_coef:
        assert entropy_N is not None, "an entropy bonus needs the entropy"
        loss_N = loss_N - config.entropy_coef * entropy_N
    if config.kl_in == "loss" and tokens.ref_logprobs_N is not None:
        kl_N = KL_ESTIMATORS[config.kl_estimator](logprobs_N, tokens.ref_logprobs_N)
        sums.add("kl/loss", kl_N.sum(), count)
        loss_N = loss_N + kl_coef * kl_N
    return loss_N, sums


def importance_weights(tokens: PolicyTokens, *, cap: float) -> Tensor:
    """Importance weights [N] min(p_old / p_sampler, cap), without gradient.

    They correct the gap between the sampler's and the trainer's probabilities.
    """
    assert tokens.rollout_logprobs_N is not None, "importance weights need the sampler's log-probs"
    return (tokens.old_logprobs_N - tokens.rollout_logprobs_N).exp().clamp(max=cap).detach()


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Sums]:
    """Half the squared error, with the change of the value clipped to `cliprange_value` (0: not clipped).

    Per token: max((V - R)^2, (clip(V, V_old - cliprange_value, V_old + cliprange_value) - R)^2) / 2.

    Returns:
        [N] losses and their metrics.
    """
    sums = Sums()
    count = values_N.numel()
    square_N = (values_N - returns_N).square()
    if config.cliprange_value > 0:
        near_N = old_values_N + (values_N - old_values_N).clamp(
            -config.cliprange_value, config.cliprange_value
        )
        near_square_N = (near_N - returns_N).square()
        sums.add("critic/clip_fraction", (near_square_N > square_N).sum(), count)
        square_N = torch.maximum(square_N, near_square_N)
    loss_N = 0.5 * square_N
    sums.add("critic/loss", loss_N.sum(), count)
    sums.add("critic/value_mean", values_N.sum(), count)
    sums.add("critic/return_mean", returns_N.sum(), count)
    return loss_N, sums


def cross_entropy(logprobs_N: Tensor) -> tuple[Tensor, Sums]:
    """Negative log-likelihood of the target tokens (nats); [N] losses and their metrics."""
    loss_N = -logprobs_N
    sums = Sums()
    sums.add("sft/loss", loss_N.sum(), logprobs_N.numel())
    return loss_N, sums

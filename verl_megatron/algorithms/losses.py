"""Per-token losses of one micro-batch.

They are summed and divided once, at the optimizer step, by the algorithm's normalizer over the whole
mini-batch. The result therefore does not depend on how samples are packed and distributed.

Letters: N response tokens of a packed micro-batch. All tensors are float32; gradients flow only into the
first argument (and the entropy).
"""

import torch
from torch import Tensor

from verl_megatron.algorithms.correction import importance_weights
from verl_megatron.algorithms.kl import KL_ESTIMATORS, k3
from verl_megatron.algorithms.objectives import Objective
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig
from verl_megatron.observe.metrics import Sums


def policy_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor | None,
    tokens: PolicyTokens,
    objective: Objective,
    config: AlgorithmConfig,
    kl_coef: float,
) -> tuple[Tensor, Sums]:
    """Policy loss: w objective - entropy_coef H, plus kl_coef KL for `kl_in=loss`.

    w is the importance weight of `algorithm.correction`, 1 without it. With `kl_unbiased` the KL of a token
    is multiplied by p / p_old, so that its expected gradient is that of KL(p, q) with k1 and k3
    (DeepSeek-V3.2, 2025).

    Returns:
        [N] losses and their metrics.
    """
    log_ratio_N, sums = tokens.log_ratio(logprobs_N), Sums()
    count, ratio_N = log_ratio_N.numel(), log_ratio_N.exp()
    old_logprobs_N = logprobs_N.detach() if tokens.old_logprobs_N is None else tokens.old_logprobs_N
    loss_N, is_clipped_N = objective(logprobs_N, tokens, config)
    if config.correction in ("truncate", "mask"):
        weight_N, weight_sums = importance_weights(old_logprobs_N, tokens, config)
        loss_N = weight_N * loss_N
        sums.merge(weight_sums)
    sums.add("policy/loss", loss_N.sum(), count)
    sums.add("policy/clip_fraction", is_clipped_N.sum(), count)
    sums.add("policy/approx_kl", k3(old_logprobs_N, logprobs_N.detach()).sum(), count)
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
        loss_N = loss_N + kl_coef * (ratio_N * kl_N if config.kl_unbiased else kl_N)
    return loss_N, sums


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

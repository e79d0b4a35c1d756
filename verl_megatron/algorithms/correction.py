"""Correction of the gap between the sampler's probabilities and the trainer's, by importance weights.

The weight of a token is the ratio p_old / p_sampler at the level of
    token: the token itself
    sequence: the product over the sample's tokens
    geometric: the geometric mean over the sample's tokens
and is limited to [correction_low, correction_high] by
    truncate: clipping to the bounds (truncated importance sampling, TIS, Yao et al. 2025)
    mask: 0 outside the bounds (token level: IcePop, Ling team 2025; sequence and geometric level: masked
        importance sampling, MIS, Liu et al. 2025).

Letters: N response tokens of a packed micro-batch.
"""

from dataclasses import replace

import torch
from torch import Tensor

from verl_megatron.algorithms.kl import MAX_LOG_RATIO
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig, TrainerConfig
from verl_megatron.observe.metrics import Sums

WEIGHT, WEIGHT_SQUARE = "policy/importance_weight", "policy/importance_weight_square"
# Longest responses whose weights are those of sequences by default. Between vLLM and Megatron-Core in
# bfloat16 log-probs differ by some 0.04 a token: over n tokens the log ratio has a deviation of 0.04 √n, and
# the effective sample size is exp(-0.0016 n), 0.8 here.
SHORT_TOKENS = 128
OUTSIDE, SAMPLE_SIZE = "policy/correction_fraction", "policy/effective_sample_size"


def correction_of(config: TrainerConfig) -> str:
    """Return algorithm.correction, with auto replaced by what it stands for."""
    if config.algorithm.correction != "auto":
        return config.algorithm.correction
    differs = config.async_.is_stale or config.rollout.weight_dtype == "fp8"
    return "truncate" if differs and config.algorithm.old_logprobs != "sampler" else "none"


def with_correction(config: TrainerConfig) -> AlgorithmConfig:
    """Return the settings of the algorithm, with auto replaced in those of the correction.

    A token's own ratio corrects for the choice of this token alone, which is enough between two programs that
    compute the same weights. Old weights also wrote what follows, and a score is of that: the ratio of the
    whole sequence corrects for both. In a long response rounding alone would make that ratio uneven.
    """
    level = config.algorithm.correction_level
    if level == "auto":
        is_short = config.rollout.max_tokens <= SHORT_TOKENS
        level = "sequence" if config.async_.is_stale and is_short else "token"
    return replace(config.algorithm, correction=correction_of(config), correction_level=level)


def importance_weights(
    old_logprobs_N: Tensor, tokens: PolicyTokens, config: AlgorithmConfig
) -> tuple[Tensor, Sums]:
    """Compute the weights [N] float32, without gradient, and metrics. Collective over `tokens.cp_group`.

    Log ratios are limited to ±MAX_LOG_RATIO nats. Without a run, whose staleness it depends on, the level
    auto is that of a token.
    """
    assert tokens.rollout_logprobs_N is not None, "a correction needs the sampler's log-probs"
    log_ratio_N = (old_logprobs_N - tokens.rollout_logprobs_N).detach()
    if config.correction_level == "sequence":
        log_ratio_N = tokens.sum_of_sample(log_ratio_N)
    elif config.correction_level == "geometric":
        log_ratio_N = tokens.mean_of_sample(log_ratio_N)
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = config.correction_low, config.correction_high
    is_outside_N = (ratio_N < low) | (ratio_N > high)
    if config.correction == "truncate":
        weight_N = ratio_N.clamp(low, high)
    else:
        weight_N = torch.where(is_outside_N, 0.0, ratio_N)
    sums = Sums()
    add_weights(sums, weight_N)
    sums.add(OUTSIDE, is_outside_N.sum(), weight_N.numel())
    return weight_N, sums


def add_weights(sums: Sums, weight_N: Tensor) -> None:
    """Add what `add_sample_size` needs of importance weights."""
    sums.add(WEIGHT, weight_N.sum(), weight_N.numel())
    sums.add(WEIGHT_SQUARE, weight_N.square().sum(), weight_N.numel())


def add_sample_size(metrics: dict[str, float]) -> None:
    """Replace the weights' mean square by the effective sample size, (Σ w)² / (n Σ w²), between 0 and 1."""
    square = metrics.pop(WEIGHT_SQUARE, None)
    if square is not None:
        metrics[SAMPLE_SIZE] = metrics[WEIGHT] ** 2 / square if square > 0 else 0.0

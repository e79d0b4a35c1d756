"""Clipped importance-sampling policy optimization (CISPO, MiniMax-M1 2025): a clipped weight, no gradient."""

from torch import Tensor

from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig


def objective(logprobs_N: Tensor, tokens: PolicyTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Compute -sg[clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)] A log p of each token.

    sg stops the gradient.
    """
    ratio_N = tokens.log_ratio(logprobs_N.detach()).exp()
    weight_N = ratio_N.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    return -weight_N * tokens.advantages_N * logprobs_N, weight_N != ratio_N

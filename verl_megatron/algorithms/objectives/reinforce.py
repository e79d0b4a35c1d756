"""Plain policy gradient (REINFORCE, Williams 1992)."""

import torch
from torch import Tensor

from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig


def objective(logprobs_N: Tensor, tokens: PolicyTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Compute -A log p of each token; nothing is clipped."""
    return -tokens.advantages_N * logprobs_N, torch.zeros_like(logprobs_N, dtype=torch.bool)

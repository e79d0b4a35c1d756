"""Soft punishment of responses near the length limit (DAPO, Yu et al. 2025)."""

from torch import Tensor


def overlong_penalty(response_B: Tensor, *, max_tokens: int, overlong_tokens: int) -> Tensor:
    """Compute the penalty of each sample, [B] float32, in [-1, 0].

    It is 0 up to max_tokens - overlong_tokens response tokens and falls linearly to -1 at max_tokens.

    Args:
        response_B: int64, response tokens.
        max_tokens: limit of a response.
        overlong_tokens: length of the interval before it, above 0.
    """
    return -((response_B - (max_tokens - overlong_tokens)).clamp(min=0) / overlong_tokens).clamp(max=1).float()

"""Loss normalizers: divisors and weights of the token-loss sum, independent of packing and layout.

The sum runs over all ranks. Letters: B samples of the whole iteration.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossScale:
    """Normalization of one optimizer step's loss: sum of weight * loss over all tokens, over `divisor`."""

    divisor: float
    weight_B: Tensor | None = None  # float32, weight of the tokens of each sample; None: 1


# (response tokens of every sample of the iteration [B] int64, samples of one optimizer step) → its scale.
Normalizer = Callable[[Tensor, range], LossScale]


def token_mean(response_B: Tensor, samples: range) -> LossScale:
    """Weight every response token of the mini-batch equally (DAPO, Yu et al. 2025, equation 12)."""
    return LossScale(divisor=max(int(response_B[samples.start : samples.stop].sum()), 1))


def pair_mean(response_B: Tensor, samples: range) -> LossScale:
    """Weight every pair of samples of the mini-batch equally; a pair's loss is the sum over its tokens."""
    return LossScale(divisor=max(len(samples) // 2, 1))

"""Loss normalizers: divisors and weights of the token-loss sum, independent of packing and layout.

The sum runs over all ranks. Letters: B samples of the whole iteration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossScale:
    """Normalization of one optimizer step's loss: sum of weight * loss over all tokens, over `divisor`."""

    divisor: float
    weight_B: Tensor | None = None  # float32, weight of the tokens of each sample; None: 1


class Normalizer(Protocol):
    """Computes the loss scale of one optimizer step.

    Args:
        response_B: int64, response tokens of every sample of the iteration.
        samples: the samples of the step.
        max_tokens: the constant of `sequence_sum`.
    """

    def __call__(self, response_B: Tensor, samples: range, max_tokens: int = 0) -> LossScale: ...


def token_mean(response_B: Tensor, samples: range, max_tokens: int = 0) -> LossScale:
    """Weight every response token of the mini-batch equally (DAPO, Yu et al. 2025, equation 12)."""
    return LossScale(divisor=max(int(response_B[samples.start : samples.stop].sum()), 1))


def pair_mean(response_B: Tensor, samples: range) -> LossScale:
    """Weight every pair of samples of the mini-batch equally; a pair's loss is the sum over its tokens."""
    return LossScale(divisor=max(len(samples) // 2, 1))


def sequence_mean(response_B: Tensor, samples: range, max_tokens: int = 0) -> LossScale:
    """Average the samples' token means: every sample weighs the same (GRPO, Shao et al. 2024, equation 3)."""
    return LossScale(divisor=max(len(samples), 1), weight_B=1.0 / response_B.clamp(min=1))


def sequence_sum(response_B: Tensor, samples: range, max_tokens: int = 0) -> LossScale:
    """Average the samples' token sums, divided by the constant `max_tokens` (Dr. GRPO, Liu et al. 2025)."""
    return LossScale(divisor=float(max(len(samples), 1) * max_tokens))


NORMALIZERS: dict[str, Normalizer] = {
    normalizer.__name__: normalizer for normalizer in (token_mean, sequence_mean, sequence_sum)
}


def leave_out(
    normalizer: Callable[[Tensor, range], LossScale], is_out_B: Tensor
) -> Callable[[Tensor, range], LossScale]:
    """Return a normalizer of the loss of the other samples alone.

    Neither the tokens of those left out count in the divisor, nor the samples themselves. A step whose
    samples are all left out has loss 0.

    Args:
        is_out_B: bool, the samples of the iteration that get no loss.
    """
    kept_B = ~is_out_B
    counted_B = kept_B.cumsum(0)
    before = [0, *map(int, counted_B)]  # kept samples before each sample

    def scale(response_B: Tensor, samples: range) -> LossScale:
        kept = normalizer(response_B[kept_B], range(before[samples.start], before[samples.stop]))
        weight_B = kept_B.float()
        if kept.weight_B is not None:
            weight_B[kept_B] = kept.weight_B
        return LossScale(divisor=kept.divisor, weight_B=weight_B)

    return scale

"""What the sum of the tokens' losses is divided by, over all ranks, whatever the packing and the layout.

Letters: R rows of the whole iteration.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossScale:
    """How the losses of one optimizer step's tokens become a mean: sum of weight * loss over all tokens, divided by `divisor`."""

    divisor: float
    weight_R: Tensor | None = None  # float32, of every token of a row; None: 1


# Response tokens of every row of the iteration [R] int64, and the rows of one optimizer step → its scale.
Normalizer = Callable[[Tensor, range], LossScale]


def token_mean(response_R: Tensor, rows: range) -> LossScale:
    """Every response token of the mini-batch counts alike (DAPO, Yu et al. 2025, equation 12)."""
    return LossScale(divisor=max(int(response_R[rows.start : rows.stop].sum()), 1))

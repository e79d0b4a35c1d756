"""The checksum of a slice in plain torch; `kernels.Checksums` computes many of them in one launch."""

import torch
from torch import Tensor

PIECE = 2**22  # elements widened to int64 at a time, so that a large slice needs 32 MiB
# Odd; Knuth's MMIX and Vigna's xorshift* multipliers.
ROW_FACTOR, COLUMN_FACTOR = (
    0x5851F42D4C957F2D,
    0x2545F4914F6CDD1D,
)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(slice_RC: Tensor) -> Tensor:
    """Return an int64 that depends on each bit of the slice and its position; any strides, any device.

    It is the sum over rows r and columns c of bits[r, c] · u[r] · v[c] modulo 2**64, where u and v are odd.
    An odd factor is invertible, so a single changed element always changes the sum.
    """
    num_rows, num_cols = slice_RC.shape
    weight_C = _weights(0, num_cols, COLUMN_FACTOR, slice_RC.device)
    rows = max(1, PIECE // num_cols)
    total = torch.zeros((), dtype=torch.int64, device=slice_RC.device)
    for first in range(0, num_rows, rows):
        bits_RC = (
            slice_RC[first : first + rows].contiguous().view(BITS[slice_RC.element_size()]).to(torch.int64)
        )
        weight_R = _weights(first, len(bits_RC), ROW_FACTOR, slice_RC.device)
        total += ((bits_RC * weight_C).sum(1) * weight_R).sum()
    return total


def _weights(first: int, count: int, factor: int, device: torch.device) -> Tensor:
    return (torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device) * factor) | 1

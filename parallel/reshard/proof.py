"""Prove that slices arrived: the same checksum at the source's parameter and at the destination's, for every checked transfer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.reshard.plan import Transfer

SAMPLE = 16  # a sync checks one transfer in SAMPLE, and SAMPLE syncs check all of them
_PIECE = 2**22  # elements widened to int64 at a time, so that a proof of a large slice needs 32 MiB
_ROW_FACTOR, _COLUMN_FACTOR = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D  # odd; Knuth's MMIX and Vigna's xorshift* multipliers
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReshardError(RuntimeError):
    """The weights at the destination are not those of the source."""


def checksum(slice_RC: Tensor) -> Tensor:
    """An int64 that depends on each bit of the slice and on where it stands; any strides, any device.

    The sum over rows r and columns c of bits[r, c] · u[r] · v[c] modulo 2**64, where u and v are odd: an odd factor is
    invertible, so a single changed element always changes the sum.
    """
    num_rows, num_cols = slice_RC.shape
    weight_C = _weights(0, num_cols, _COLUMN_FACTOR, slice_RC.device)
    rows = max(1, _PIECE // num_cols)
    total = torch.zeros((), dtype=torch.int64, device=slice_RC.device)
    for first in range(0, num_rows, rows):
        bits_RC = slice_RC[first : first + rows].contiguous().view(_BITS[slice_RC.element_size()]).to(torch.int64)
        weight_R = _weights(first, len(bits_RC), _ROW_FACTOR, slice_RC.device)
        total += ((bits_RC * weight_C).sum(1) * weight_R).sum()
    return total


def compare(transfers: Sequence[Transfer], sent: dict[int, Tensor], received: dict[int, Tensor], *, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Collective over `group`: compare checksums, given by index into `transfers` where this rank is the source or the destination.

    Raises:
        ReshardError: on every rank, naming the first slices that differ.
    """
    # The source adds and the destination subtracts; modulo 2**64 the sum over the ranks is 0 exactly if they are equal.
    difference = torch.zeros(len(transfers), dtype=torch.int64, device=device)
    for sums, sign in ((sent, 1), (received, -1)):
        if sums:
            index = torch.tensor(list(sums), device=device)
            difference.index_add_(0, index, torch.stack(list(sums.values())), alpha=sign)
    dist.all_reduce(difference, group=group)
    wrong = difference.nonzero().flatten().tolist()
    if wrong:
        named = "; ".join(str(transfers[index]) for index in wrong[:4])
        raise ReshardError(f"{len(wrong)} of {len(transfers)} checked slices did not arrive as they were sent: {named}{'; …' if len(wrong) > 4 else ''}")


def _weights(first: int, count: int, factor: int, device: torch.device) -> Tensor:
    return (torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device) * factor) | 1

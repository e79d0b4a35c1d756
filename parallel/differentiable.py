"""Collective operations through which gradients flow."""

import torch
import torch.distributed as dist
from torch import Tensor


class _Sum(torch.autograd.Function):
    """Sum over a group's ranks. Each rank's input adds to all ranks' sums, so gradients are summed, too."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradient, ctx.group), None


def _all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the ranks of `group`, with gradient. Its backward pass is collective, too.

    Each rank's loss is a part of the total loss, which is their sum.
    """
    return _Sum.apply(x, group)

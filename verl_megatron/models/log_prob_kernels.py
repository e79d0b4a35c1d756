"""Softmax statistics of a chunk of logits, and the gradient of its logits.

Each reads the logits once: Triton kernels on GPUs, PyTorch elsewhere. `log_probs.py` explains how the numbers
are used.

Letters: N tokens of a chunk, V vocabulary rows on this rank, B a kernel's block of them. l = logits /
temperature, in float32 from the first step on, whatever the dtype of the logits. The temperature is one
number, or [N] float32, one for each token.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPUs
    triton = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Launch parameters of a kernel, whose programs each work on one token's logits."""

    block: int = 2048  # logits per step, a power of two
    num_warps: int = 4
    stages: int = 1  # blocks that `stats` prefetches


STATS, GRAD = Tuning(stages=3), Tuning(block=4096, num_warps=8)
VECTOR = 16  # bytes, widest load


def stats(logits_NV: Tensor, labels_N: Tensor, temperature: float | Tensor) -> Tensor:
    """Return the maximum l, Σ exp(l − maximum), Σ exp(l − maximum)·l and the label's l: float32 [4, N].

    Args:
        logits_NV: float32 or bfloat16, before the division by `temperature`; at least one column, columns
            dense, rows may be strided.
        labels_N: int64 columns; for a label outside [0, V), which is on another rank, the label's l is 0.
    """
    if triton is None or not logits_NV.is_cuda:
        return stats_by_torch(logits_NV, labels_N, temperature)
    with torch.cuda.device(logits_NV.device):
        return stats_by_triton(logits_NV, labels_N, temperature)


def grad_logits_(
    logits_NV: Tensor, labels_N: Tensor, temperature: float | Tensor, factors_4N: Tensor
) -> Tensor:
    """Overwrite logits with their gradient and return them.

    With p = exp(l − log Z), the gradient of logit j is
    (grad_logprob·([j = label] − p_j) − grad_entropy·p_j·(l_j − mean)) / temperature.

    Args:
        logits_NV, labels_N: as in `stats`.
        factors_4N: float32, columns dense: log Z, the mean Σ p·l, and the gradients of the label's
            log-probability and of the entropy.
    """
    if triton is None or not logits_NV.is_cuda:
        return grad_logits_by_torch_(logits_NV, labels_N, temperature, factors_4N)
    with torch.cuda.device(logits_NV.device):
        return grad_logits_by_triton_(logits_NV, labels_N, temperature, factors_4N)


# ---- PyTorch -------------------------------------------------------------------------------------------


def stats_by_torch(logits_NV: Tensor, labels_N: Tensor, temperature: float | Tensor) -> Tensor:
    """`stats` in PyTorch, in about ten passes over the logits."""
    logits_NV = logits_NV.float() / _of_rows(temperature)
    column_N1, inside_N1 = _columns(labels_N, logits_NV.size(1))
    top_N1 = logits_NV.amax(1, keepdim=True)
    exp_NV = (logits_NV - top_N1).exp_()
    label_N1 = logits_NV.gather(1, column_N1) * inside_N1
    return torch.cat(
        [top_N1, exp_NV.sum(1, keepdim=True), exp_NV.mul_(logits_NV).sum(1, keepdim=True), label_N1], dim=1
    ).t()


def grad_logits_by_torch_(
    logits_NV: Tensor, labels_N: Tensor, temperature: float | Tensor, factors_4N: Tensor
) -> Tensor:
    """`grad_logits_` in PyTorch, in about ten passes over the logits."""
    log_z_N1, mean_N1, grad_logprob_N1, grad_entropy_N1 = factors_4N.unsqueeze(-1)
    column_N1, inside_N1 = _columns(labels_N, logits_NV.size(1))
    temperature = _of_rows(temperature)
    scaled_NV = logits_NV.float() / temperature
    weight_NV = (scaled_NV - mean_N1).mul_(grad_entropy_N1).add_(grad_logprob_N1)
    grad_NV = scaled_NV.sub_(log_z_N1).exp_().mul_(weight_NV).neg_()
    grad_NV.scatter_add_(1, column_N1, grad_logprob_N1 * inside_N1)
    return logits_NV.copy_(grad_NV.div_(temperature))


def _of_rows(temperature: float | Tensor) -> float | Tensor:
    """The temperature as it divides the rows of [N, V]."""
    return temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature


def _columns(labels_N: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Labels clamped to the columns, and whether they were inside; [N, 1] each."""
    labels_N1 = labels_N.unsqueeze(1)
    column_N1 = labels_N1.clamp(0, columns - 1)
    return column_N1, column_N1 == labels_N1


# ---- Triton --------------------------------------------------------------------------------------------


def stats_by_triton(
    logits_NV: Tensor, labels_N: Tensor, temperature: float | Tensor, tuning: Tuning = STATS
) -> Tensor:
    """`stats` in one launch, one program per token."""
    stats_4N = torch.empty(4, len(labels_N), device=logits_NV.device)
    kernel: Any = stats_kernel  # Triton's launch, which types do not know
    kernel[(len(labels_N),)](
        logits_NV,
        labels_N,
        stats_4N,
        *_geometry(logits_NV),
        len(labels_N),
        _inverse(temperature, labels_N),
        LOWEST=torch.finfo(logits_NV.dtype).min,
        LANES=_lanes(logits_NV),
        BLOCK=tuning.block,
        STAGES=tuning.stages,
        num_warps=tuning.num_warps,
    )
    return stats_4N


def grad_logits_by_triton_(
    logits_NV: Tensor,
    labels_N: Tensor,
    temperature: float | Tensor,
    factors_4N: Tensor,
    tuning: Tuning = GRAD,
) -> Tensor:
    """`grad_logits_` in one launch, one program per token and block of columns."""
    kernel: Any = grad_kernel
    kernel[(len(labels_N), -(-logits_NV.size(1) // tuning.block))](
        logits_NV,
        labels_N,
        factors_4N,
        *_geometry(logits_NV),
        factors_4N.stride(0),
        _inverse(temperature, labels_N),
        LANES=_lanes(logits_NV),
        BLOCK=tuning.block,
        num_warps=tuning.num_warps,
    )
    return logits_NV


def _inverse(temperature: float | Tensor, labels_N: Tensor) -> Tensor:
    """The reciprocal temperature of each token, [N] float32."""
    if isinstance(temperature, Tensor):
        return temperature.float().reciprocal()
    return torch.full(labels_N.shape, 1 / temperature, dtype=torch.float32, device=labels_N.device)


def _lanes(logits_NV: Tensor) -> int:
    """Logits per vector load: every row starts at a multiple of it."""
    return gcd(logits_NV.stride(0), VECTOR // logits_NV.element_size())


def _geometry(logits_NV: Tensor) -> tuple[int, int]:
    """Row stride in lanes, and number of columns."""
    return logits_NV.stride(0) // _lanes(logits_NV), logits_NV.size(1)


if triton:

    @triton.jit
    def stats_kernel(
        logits,
        labels,
        stats,
        stride,
        columns,
        count,
        inverse_temperatures,
        LOWEST: tl.constexpr,
        LANES: tl.constexpr,
        BLOCK: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Compute one token's four statistics.

        Exponentials are accumulated in BLOCK lanes, which are rescaled when the running maximum grows
        (Milakov & Gimelshein 2018).
        """
        row = tl.program_id(0).to(tl.int64)
        # The compiler sees that the row offset is a multiple of LANES.
        start_B = logits + row * (stride * LANES) + tl.arange(0, BLOCK)
        inverse_temperature = tl.load(inverse_temperatures + row)
        scale = inverse_temperature * 1.4426950408889634  # 1 / ln 2: the hardware computes powers of two
        top, total_B, weighted_B = (
            float("-inf"),
            tl.zeros([BLOCK], dtype=tl.float32),
            tl.zeros([BLOCK], dtype=tl.float32),
        )
        whole = columns // BLOCK * BLOCK
        for at in tl.range(0, whole, BLOCK, num_stages=STAGES):
            top, total_B, weighted_B = _merge(tl.load(start_B + at), top, total_B, weighted_B, scale)
        # The remainder, padded with the lowest finite number: never above a logit and, unlike −inf, 0 if
        # multiplied by 0.
        rest_B = tl.load(start_B + whole, mask=whole + tl.arange(0, BLOCK) < columns, other=LOWEST)
        top, total_B, weighted_B = _merge(rest_B, top, total_B, weighted_B, scale)
        label = tl.load(labels + row)
        label_logit = tl.load(
            logits + row * (stride * LANES) + label, mask=(label >= 0) & (label < columns), other=0.0
        ).to(tl.float32)
        tl.store(stats + row, top * inverse_temperature)
        tl.store(stats + count + row, tl.sum(total_B))
        tl.store(stats + 2 * count + row, tl.sum(weighted_B) * inverse_temperature)
        tl.store(stats + 3 * count + row, label_logit * inverse_temperature)

    @triton.jit
    def _merge(logit_B, top, total_B, weighted_B, scale):
        """Merge one more block into the sums, which are relative to the running maximum."""
        logit_B = logit_B.to(tl.float32)
        new_top = tl.maximum(top, tl.max(logit_B))
        shrink = tl.exp2((top - new_top) * scale)
        exp_B = tl.exp2((logit_B - new_top) * scale)
        return new_top, total_B * shrink + exp_B, weighted_B * shrink + exp_B * logit_B

    @triton.jit
    def grad_kernel(
        logits,
        labels,
        factors,
        stride,
        columns,
        factor_stride,
        inverse_temperatures,
        LANES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Overwrite BLOCK logits of one token with their gradient."""
        row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
        column_B = first + tl.arange(0, BLOCK)
        logit_B = logits + row * (stride * LANES) + column_B
        factors += row
        inverse_temperature = tl.load(inverse_temperatures + row)
        log_z, mean = tl.load(factors), tl.load(factors + factor_stride)
        grad_logprob, grad_entropy = (
            tl.load(factors + 2 * factor_stride),
            tl.load(factors + 3 * factor_stride),
        )
        is_label_B = column_B == tl.load(labels + row)
        if first + BLOCK <= columns:  # no mask: it would prevent wide loads for an odd `columns`
            grad_B = _gradient(
                tl.load(logit_B), is_label_B, log_z, mean, grad_logprob, grad_entropy, inverse_temperature
            )
            tl.store(logit_B, grad_B.to(logits.dtype.element_ty))
        else:
            inside_B = column_B < columns
            grad_B = _gradient(
                tl.load(logit_B, mask=inside_B, other=0.0),
                is_label_B,
                log_z,
                mean,
                grad_logprob,
                grad_entropy,
                inverse_temperature,
            )
            tl.store(logit_B, grad_B.to(logits.dtype.element_ty), mask=inside_B)

    @triton.jit
    def _gradient(logit_B, is_label_B, log_z, mean, grad_logprob, grad_entropy, inverse_temperature):
        scaled_B = logit_B.to(tl.float32) * inverse_temperature
        weighted_B = tl.exp(scaled_B - log_z) * (grad_logprob + grad_entropy * (scaled_B - mean))
        return (tl.where(is_label_B, grad_logprob, 0.0) - weighted_B) * inverse_temperature

"""Log-probabilities and entropy from a vocabulary-parallel head, without materializing all logits at once.

Letters: N tokens whose log-probability is computed, H hidden size, V vocabulary rows on this tensor-parallel
rank.

logits = hidden · weightᵀ / temperature, computed in chunks of tokens. Each chunk is reduced to four numbers
per token: the maximum logit m, Σ exp(l − m), Σ exp(l − m)·l and the label's logit. They are combined over the
tensor-parallel ranks once. The backward pass recomputes each chunk's logits and overwrites them with their
gradient:
    ∂ log p(y) / ∂l_j = [j = y] − p_j            ∂ entropy / ∂l_j = −p_j (l_j − Σ_i p_i l_i)
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from verl_megatron.data.packing import LOGIT_CHUNK_BYTES
from verl_megatron.models.log_prob_kernels import grad_logits_, stats

TILE = 128  # rows of a GPU matrix-product tile; chunks are whole tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """A distribution over the vocabulary, whose logits are split over the ranks of `group`."""

    vocab_size: int  # without padding
    # Divides the logits, as in sampling: of all tokens, where 0 (greedy) counts as 1, or [N] float32 of each.
    temperature: float | Tensor = 1.0
    group: dist.ProcessGroup | None = None  # tensor-parallel ranks; None: a single rank
    chunk_tokens: int = 0  # tokens per chunk of logits; 0: as many as fit LOGIT_CHUNK_BYTES


def token_log_probs(
    hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Compute log p(label) and entropy of each token's distribution over the unpadded vocabulary.

    Args:
        hidden_NH: hidden states, the same on every rank of the group. Their gradient is this rank's partial
            sum; the caller must sum it over the group (LanguageHead does).
        weight_VH: this rank's rows of the output layer, of the same dtype; rows at or beyond the vocabulary's
            size are padding and are ignored.
        labels_N: int64 token ids below the vocabulary's size.

    Returns:
        logprobs_N and entropy_N, float32; both carry gradients.
    """
    return _TokenLogProbs.apply(hidden_NH, weight_VH, labels_N, softmax)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, softmax: Softmax):
        group, row_bytes = softmax.group, hidden.element_size() * weight.size(0)
        size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        first = rank * weight.size(0)
        given = softmax.temperature
        temperature = ctx.temperature = given if isinstance(given, Tensor) else given or 1.0
        chunk = ctx.chunk = softmax.chunk_tokens or max(TILE, LOGIT_CHUNK_BYTES // row_bytes // TILE * TILE)
        ctx.rows = max(0, min(weight.size(0), softmax.vocab_size - first))  # without padding
        local = labels - first
        stats_4N = torch.zeros(4, labels.numel(), device=hidden.device)
        stats_4N[0] = -torch.inf
        for part in _chunks(labels.numel() if ctx.rows else 0, chunk):
            logits = _logits(hidden[part], weight, ctx.rows)
            stats_4N[:, part] = stats(logits, local[part], _of(temperature, part))
            del logits  # before the next chunk's are made
        top = stats_4N[0].clone()
        if size > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            stats_4N[1:3] *= (stats_4N[0] - top).exp()
            dist.all_reduce(stats_4N[1:], group=group)
        log_z = top + stats_4N[1].log()
        mean_logit = stats_4N[2] / stats_4N[1]
        ctx.save_for_backward(hidden, weight, local, log_z, mean_logit)
        return stats_4N[3] - log_z, log_z - mean_logit

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, local, log_z, mean_logit = ctx.saved_tensors
        factors_4N = torch.stack([log_z, mean_logit, grad_logprobs, grad_entropy])
        grad_hidden = torch.zeros_like(hidden)
        # Accumulate several chunks in float32, to round to the weight's dtype once, as within one product.
        grad_weight = torch.zeros_like(
            weight, dtype=weight.dtype if local.numel() <= ctx.chunk else torch.float32
        )
        for part in _chunks(local.numel() if ctx.rows else 0, ctx.chunk):
            logits = _logits(hidden[part], weight, ctx.rows)
            grad = grad_logits_(logits, local[part], _of(ctx.temperature, part), factors_4N[:, part])
            torch.mm(grad, weight[: ctx.rows], out=grad_hidden[part])
            _add_product(grad_weight[: ctx.rows], grad.t(), hidden[part])
            del grad, logits  # before the next chunk's logits are made
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _of(temperature: float | Tensor, part: slice) -> float | Tensor:
    return temperature[part] if isinstance(temperature, Tensor) else temperature


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(at, at + chunk) for at in range(0, tokens, chunk)]


def _logits(hidden: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Logits of one chunk without padding rows.

    The product includes the padding, because an odd number of columns is slow to write and to read.
    """
    return (hidden @ weight.t())[:, :rows]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a @ b.

    Where PyTorch supports it, a bfloat16 product is added to a float32 total in one pass, before it is
    rounded.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and _sums_in_float32(a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


@cache
def _sums_in_float32(dtype: torch.dtype) -> bool:
    """Whether this PyTorch can add a product of `dtype` to a float32 sum on GPUs; not all versions can."""
    ones, total = torch.ones(16, 16, dtype=dtype, device="cuda"), torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, ones, ones, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())

"""Log-probabilities and entropy from a vocabulary-sharded head, without ever holding the logits of all tokens.

Letters: N tokens whose log-probability is wanted, H hidden size, V vocabulary rows on this tensor-parallel rank.

logits = hidden · weightᵀ / temperature, taken in chunks of tokens. Of each chunk only four numbers a token survive: the largest
logit m, Σ exp(l − m), Σ exp(l − m)·l and the label's logit. They are combined over the tensor-parallel ranks once. The backward
pass makes each chunk's logits again:
    ∂ log p(y) / ∂l_j = [j = y] − p_j            ∂ entropy / ∂l_j = −p_j (l_j − Σ_i p_i l_i)
"""

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 256 << 20  # float32 logits held at once


def token_log_probs(
    hidden_NH: Tensor, weight_VH: Tensor, labels_N: Tensor, *, vocab_size: int, temperature: float, group: dist.ProcessGroup | None = None, chunk_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    """log p(label) and entropy of each token's distribution over the true vocabulary.

    Args:
        hidden_NH: hidden states, the same on every rank of `group`; their gradient is this rank's part and must be summed over
            `group` by whoever spread them (LanguageHead does).
        weight_VH: this rank's rows of the output layer; rows at or beyond `vocab_size` are padding and take no part.
        labels_N: int64 token ids below `vocab_size`.
        temperature: logits are divided by it, as in sampling; 0 (greedy) counts as 1.
        chunk_tokens: tokens whose logits are made at once; 0: as many as CHUNK_BYTES hold.

    Returns:
        logprobs_N and entropy_N, float32; both carry gradients.
    """
    chunk = chunk_tokens or max(1, CHUNK_BYTES // (4 * weight_VH.size(0)))
    return _TokenLogProbs.apply(hidden_NH, weight_VH, labels_N, vocab_size, temperature or 1.0, group, chunk)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, vocab_size, temperature, group, chunk):
        size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        first = rank * weight.size(0)
        rows = max(0, min(weight.size(0), vocab_size - first))  # without padding
        local = labels - first
        inside = (local >= 0) & (local < rows)
        local = local.clamp(0, max(rows - 1, 0))
        stats = torch.zeros(4, labels.numel(), device=hidden.device)  # m, Σ exp, Σ exp·l, label's logit
        stats[0] = -torch.inf
        if rows:
            for at in range(0, labels.numel(), chunk):
                part = slice(at, at + chunk)
                logits = (hidden[part] @ weight[:rows].t()).float().div_(temperature)
                stats[3, part] = logits.gather(1, local[part, None]).squeeze(1) * inside[part]
                stats[0, part] = logits.amax(1)
                exp = (logits - stats[0, part, None]).exp_()
                stats[1, part] = exp.sum(1)
                stats[2, part] = exp.mul_(logits).sum(1)
        top = stats[0].clone()
        if size > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            stats[1:3] *= (stats[0] - top).exp()
            dist.all_reduce(stats[1:], group=group)
        log_z = top + stats[1].log()
        mean_logit = stats[2] / stats[1]
        ctx.save_for_backward(hidden, weight, local, inside, log_z, mean_logit)
        ctx.rows, ctx.temperature, ctx.chunk = rows, temperature, chunk
        return stats[3] - log_z, log_z - mean_logit

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, local, inside, log_z, mean_logit = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        true_weight = weight[: ctx.rows]
        for at in range(0, local.numel() if ctx.rows else 0, ctx.chunk):
            part = slice(at, at + ctx.chunk)
            logits = (hidden[part] @ true_weight.t()).float().div_(ctx.temperature)
            probabilities = (logits - log_z[part, None]).exp_()
            weighting = grad_logprobs[part, None] + grad_entropy[part, None] * (logits - mean_logit[part, None])
            grad = probabilities.mul_(weighting).neg_()
            grad.scatter_add_(1, local[part, None], (grad_logprobs[part] * inside[part])[:, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ true_weight
            grad_weight[: ctx.rows] += grad.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None

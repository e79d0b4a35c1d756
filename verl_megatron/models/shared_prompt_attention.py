"""Core attention of packed groups, whose samples share the keys and values of their prompt.

The packed tokens are [prompts of the groups | their responses | other rows], as data/shared_prompts.py lays
them out. Two passes, each over sequences of any length:

    own      every prompt, response and row attends to itself, causally
    shared   the responses of a group attend to all of their prompt

A response's token sees the keys of both. With the log-sum-exp z of the scores of each pass,
    z = log(exp z_own + exp z_shared)        out = exp(z_own − z) out_own + exp(z_shared − z) out_shared
A backward pass recomputes its probabilities as exp(score − z) and needs the row sums of grad · out. Both
passes get the merged z and out, so their gradients are exact and add up (Dao 2023, FlashAttention-2).

Letters: T packed tokens, Q queries and K keys of a pass or of a sequence, n query heads, k key/value heads,
g query heads of a key/value head, d head size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from verl_megatron.data.micro_batch import SharedPrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Sequences that follow each other: the queries of each attend to its keys."""

    queries: list[int]  # tokens of each sequence; none is empty
    keys: list[int]
    cu_queries: Tensor  # [len(queries) + 1] int32, their first tokens and the end
    cu_keys: Tensor
    causal: bool  # queries and keys are the same tokens, and a query sees the keys up to itself


class SharedPromptAttention(MegatronModule):
    """Core attention over packed sequences of groups; without context parallelism."""

    def __init__(self, config, *, pg_collection, softmax_scale=None, **_):
        super().__init__(config)
        assert pg_collection.cp.size() == 1, "preflight refuses engine.shared_prompts with cp"
        self.scale = softmax_scale or config.softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query, key, value, attention_mask, *, packed_seq_params, **_) -> Tensor:
        """Packed [T, n, d] queries and [T, k, d] keys and values -> [T, n·d]."""
        lengths, cu = packed_seq_params.lengths, packed_seq_params.cu_sequences
        own = Spans(queries=lengths, keys=lengths, cu_queries=cu, cu_keys=cu, causal=True)
        shared = packed_seq_params.shared
        return attention(query, key, value, own, shared, scale=self.scale).flatten(1)


def attention(
    query: Tensor, key: Tensor, value: Tensor, own: Spans, shared: SharedPrompts | None, *, scale: float
) -> Tensor:
    """Attention of packed tokens to themselves, and of responses to their group's prompt: [T, n, d]."""
    spans = None
    if shared is not None:
        spans = Spans(
            queries=shared.responses,
            keys=shared.prompts,
            cu_queries=shared.cu_responses,
            cu_keys=shared.cu_prompts,
            causal=False,
        )
    return _Attention.apply(query, key, value, (own, spans), scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, spans: tuple[Spans, Spans | None], scale: float):
        ctx.spans, ctx.scale = spans, scale
        own, shared = spans
        kernels = kernels_for(query)
        out_Tnd, z_nT = kernels.forward(query, key, value, own, scale)
        if shared is not None:
            prompts, responses = _places(shared)
            out_Qnd, z_nQ = kernels.forward(query[responses], key[prompts], value[prompts], shared, scale)
            weight_Qn1 = torch.sigmoid(z_nQ - z_nT[:, responses]).t().unsqueeze(-1)  # exp(z_shared − z)
            own_Qnd = out_Tnd[responses] * (1 - weight_Qn1)
            out_Tnd[responses] = own_Qnd.addcmul_(out_Qnd, weight_Qn1)
            z_nT[:, responses] = torch.logaddexp(z_nT[:, responses], z_nQ)
        ctx.save_for_backward(query, key, value, out_Tnd, z_nT)
        return out_Tnd

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, z = ctx.saved_tensors
        kernels, (own, shared) = kernels_for(query), ctx.spans
        grads = kernels.backward(grad, (query, key, value), out, z, own, ctx.scale)
        if shared is not None:
            prompts, responses = _places(shared)
            taken = (query[responses], key[prompts], value[prompts])
            z = z[:, responses].contiguous()
            parts = kernels.backward(grad[responses], taken, out[responses], z, shared, ctx.scale)
            for whole, place, part in zip(grads, (responses, prompts, prompts), parts):
                whole[place] += part
        return *grads, None, None


def _places(shared: Spans) -> tuple[slice, slice]:
    """Packed tokens of the prompts and of the responses."""
    first = sum(shared.keys)
    return slice(0, first), slice(first, first + sum(shared.queries))


# ---- kernels -------------------------------------------------------------------------------------------


class Kernels(Protocol):
    """Attention of sequences, forward and backward."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output [Q, n, d], and the log-sum-exp of the scores [n, Q] float32."""
        ...

    @staticmethod
    def backward(
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        z: Tensor,
        spans: Spans,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return new gradients of query, key and value; `out` and `z` may cover more keys than these."""
        ...


def kernels_for(query: Tensor) -> type[Kernels]:
    """Choose FlashAttention where it runs: GPUs, half precision, head sizes of whole vectors."""
    fits = query.size(-1) % 8 == 0 and query.size(-1) <= 256
    kernels: type[Any] = Flash if query.is_cuda and query.dtype != torch.float32 and fits else Plain
    return kernels


class Flash:
    """FlashAttention-2 as PyTorch has it (flash_api.cpp): z is [n, Q], keys may have fewer heads."""

    @staticmethod
    def forward(query, key, value, spans, scale):
        out, z, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_lengths(spans), 0.0, spans.causal, False, scale=scale
        )
        return out, z

    @staticmethod
    def backward(grad, inputs, out, z, spans, scale):
        # Without dropout the state of the random numbers is not read.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=z.device), z.new_empty(0)
        return torch.ops.aten._flash_attention_backward(
            grad, *inputs, out, z, *_lengths(spans), 0.0, spans.causal, state, unused, scale=scale
        )


def _lengths(spans: Spans) -> tuple[Any, ...]:
    return spans.cu_queries, spans.cu_keys, max(spans.queries), max(spans.keys)


class Plain:
    """PyTorch, in float32 at least, with all scores of a sequence at once."""

    @staticmethod
    def forward(query, key, value, spans, scale):
        outs, zs = [], []
        for q, k, v in _sequences(spans, (query,), (key, value)):
            score = _scores(q, k, spans, scale)
            z = score.logsumexp(-1)
            outs.append(torch.einsum("kgQK,Kkd->Qkgd", (score - z.unsqueeze(-1)).exp(), v))
            zs.append(z.flatten(0, 1))
        return torch.cat(outs).flatten(1, 2).to(query.dtype), torch.cat(zs, 1)

    @staticmethod
    def backward(grad, inputs, out, z, spans, scale):
        query, key, value = inputs
        grads: tuple[list[Tensor], ...] = ([], [], [])
        for q, dout, o, z_Qn, k, v in _sequences(spans, (query, grad, out, z.t()), (key, value)):
            k_heads, g = k.size(1), q.size(1) // k.size(1)
            dout, o = (x.unflatten(1, (k_heads, g)) for x in (dout, o))
            p = (_scores(q, k, spans, scale) - z_Qn.t().unflatten(0, (k_heads, g)).unsqueeze(-1)).exp()
            dp = torch.einsum("Qkgd,Kkd->kgQK", dout, v)
            ds = p * (dp - (dout * o).sum(-1).permute(1, 2, 0).unsqueeze(-1)) * scale
            grads[0].append(torch.einsum("kgQK,Kkd->Qkgd", ds, k).flatten(1, 2))
            grads[1].append(torch.einsum("kgQK,Qkgd->Kkd", ds, q.unflatten(1, (k_heads, g))))
            grads[2].append(torch.einsum("kgQK,Qkgd->Kkd", p, dout))
        dq, dk, dv = (torch.cat(parts).to(x.dtype) for parts, x in zip(grads, inputs))
        return dq, dk, dv


def _sequences(
    spans: Spans, by_query: tuple[Tensor, ...], by_key: tuple[Tensor, ...]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the parts of each sequence, in float32 at least."""
    pieces = [x.split(spans.queries) for x in by_query] + [x.split(spans.keys) for x in by_key]
    for parts in zip(*pieces, strict=True):
        yield tuple(part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts)


def _scores(q: Tensor, k: Tensor, spans: Spans, scale: float) -> Tensor:
    """Scores of a sequence [k, g, Q, K]; −inf where the query must not see the key."""
    score = torch.einsum("Qkgd,Kkd->kgQK", q.unflatten(1, (k.size(1), -1)), k) * scale
    if spans.causal:
        future = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
        score = score.masked_fill(future, -torch.inf)
    return score

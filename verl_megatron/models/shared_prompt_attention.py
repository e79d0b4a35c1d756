"""Core attention of packed groups, whose samples share the keys and values of their prompt.

The packed tokens are [prompts of the groups | their responses | other rows], as data/shared_prompts.py lays
them out. Two passes, each over sequences of any length:

    own      every prompt, response and row attends to itself, causally
    shared   the responses of a group attend to all of their prompt

A response's token sees the keys of both. With the log-sum-exp z of the scores of each pass,
    z = log(exp z_own + exp z_shared)        out = exp(z_own − z) out_own + exp(z_shared − z) out_shared
A backward pass recomputes its probabilities as exp(score − z) and needs the row sums of grad · out. Both
passes get the merged z and out, so their gradients are exact and add up (Dao 2023, FlashAttention-2).

Letters: T packed tokens, Q queries of responses, n query heads, k key/value heads, d head size.
"""

import math

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from verl_megatron.data.micro_batch import SharedPrompts
from verl_megatron.models.attention_kernels import Kernels, Spans, kernels_for, merge_


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
        return attention(query, key, value, (own, shared), scale=self.scale).flatten(1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: tuple[Spans, SharedPrompts | None],
    *,
    scale: float,
    kernels: type[Kernels] | None = None,
) -> Tensor:
    """Attention of packed tokens to themselves, and of responses to their group's prompt: [T, n, d].

    Args:
        packed: all sequences, and what the groups share.
        kernels: other ones than `kernels_for` chooses.
    """
    own, shared = packed
    spans = None
    if shared is not None:
        spans = Spans(
            queries=shared.responses,
            keys=shared.prompts,
            cu_queries=shared.cu_responses,
            cu_keys=shared.cu_prompts,
            causal=False,
        )
    return _Attention.apply(query, key, value, (own, spans), (scale, kernels or kernels_for(query)))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, spans: tuple[Spans, Spans | None], how: tuple[float, type[Kernels]]):
        ctx.spans, ctx.how = spans, how
        scale, kernels = how
        own, shared = spans
        query, key, value = (x.contiguous() for x in (query, key, value))
        out_Tnd, z_nT = kernels.forward(query, key, value, own, scale)
        if shared is not None:
            prompts, responses = _places(shared)
            out_Qnd, z_nQ = kernels.forward(query[responses], key[prompts], value[prompts], shared, scale)
            merge_(out_Tnd[responses], z_nT[:, responses], out_Qnd, z_nQ)
        ctx.save_for_backward(query, key, value, out_Tnd, z_nT)
        return out_Tnd

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, z = ctx.saved_tensors
        grad = grad.contiguous()
        (own, shared), (scale, kernels) = ctx.spans, ctx.how
        grads = kernels.backward(grad, (query, key, value), out, z, own, scale)
        if shared is not None:
            prompts, responses = _places(shared)
            taken = (query[responses], key[prompts], value[prompts])
            parts = kernels.backward(grad[responses], taken, out[responses], z[:, responses], shared, scale)
            for whole, place, part in zip(grads, (responses, prompts, prompts), parts):
                whole[place] += part
        return *grads, None, None


def _places(shared: Spans) -> tuple[slice, slice]:
    """Packed tokens of the prompts and of the responses."""
    first = sum(shared.keys)
    return slice(0, first), slice(first, first + sum(shared.queries))

"""Attention of sequences to other sequences, forward and backward, with the log-sum-exp z of its scores.

cuDNN's kernels, FlashAttention's, or plain PyTorch. A backward pass takes `out` and `z` of more keys than its
own, so that passes over parts of the keys add up (Dao 2023, FlashAttention-2; ring attention does the same).

Letters: Q queries and K keys of a pass or of a sequence, n query heads, k key/value heads, g query heads of a
key/value head, d head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

LEAST_CUDNN = (9, 6, 0)

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without GPUs
    triton = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Sequences that follow each other: the queries of each attend to its keys."""

    queries: list[int]  # tokens of each sequence; none is empty
    keys: list[int]
    cu_queries: Tensor  # [len(queries) + 1] int32, their first tokens and the end
    cu_keys: Tensor
    causal: bool  # queries and keys are the same tokens, and a query sees the keys up to itself


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
    """Choose cuDNN or FlashAttention where they run: GPUs, half precision, head sizes of whole vectors."""
    kernels: type[Any] = Plain
    if query.is_cuda and query.dtype != torch.float32 and query.size(-1) % 8 == 0:
        if query.size(-1) <= 128 and isinstance(cudnn_calls(query.device), Calls):
            kernels = Cudnn
        elif query.size(-1) <= 256:
            kernels = Flash
    return kernels


class Cudnn:
    """cuDNN's attention as Transformer Engine calls it: z is [Q, n, 1], keys may have fewer heads."""

    @staticmethod
    def forward(query, key, value, spans, scale):
        calls = _needed(query)
        given = _arguments((query, key, value), spans, scale)
        out, (z, *_) = calls.forward(is_training=True, fused_attention_backend=calls.backend, **given)[:2]
        return out, z.squeeze(-1).t()

    @staticmethod
    def backward(grad, inputs, out, z, spans, scale):
        calls = _needed(grad)
        # Without dropout the state of the random numbers is not read.
        state = torch.zeros(2, dtype=torch.int64, device=z.device)
        given = _arguments(inputs, spans, scale) | _of_backward(grad, out, z, state)
        return calls.backward(fused_attention_backend=calls.backend, **given)[:3]


def _arguments(inputs: Sequence[Tensor], spans: Spans, scale: float) -> dict[str, Any]:
    query, key, value = inputs
    return {
        "q": query,
        "k": key,
        "v": value,
        "fake_dtype": query.dtype,
        "max_seqlen_q": max(spans.queries),
        "max_seqlen_kv": max(spans.keys),
        "cu_seqlens_q": spans.cu_queries,
        "cu_seqlens_kv": spans.cu_keys,
        "cu_seqlens_q_padded": spans.cu_queries,
        "cu_seqlens_kv_padded": spans.cu_keys,
        "attn_scale": scale,
        "dropout": 0.0,
        "qkv_layout": "thd_thd_thd",
        "o_format": "thd",
        "attn_mask_type": "padding_causal" if spans.causal else "padding",
    }


def _of_backward(grad: Tensor, out: Tensor, z: Tensor, state: Tensor) -> dict[str, Any]:
    return {
        "o": out,
        "d_o": grad,
        "aux_ctx_tensors": [z.t().contiguous().unsqueeze(-1), state],
        "do_format": "thd",
        "dqkv_layout": "thd_thd_thd",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Transformer Engine's calls of cuDNN's attention."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    backend: Any  # its name of these kernels


def _needed(query: Tensor) -> Calls:
    found = cudnn_calls(query.device)
    assert isinstance(found, Calls), "kernels_for has asked"
    return found


@cache
def cudnn_calls(device: torch.device) -> Calls | str:
    """Return the calls, or why FlashAttention is used instead.

    Transformer Engine prefers cuDNN on Hopper and Blackwell; before 9.6 it gives z by padded sequences.
    It may use another cuDNN than torch, which is not asked: that would load its own beside it.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        return f"a GPU of compute capability {major}.{minor}, and cuDNN's kernels want 9.x or 10.x"
    try:
        from transformer_engine.pytorch.cpp_extensions import fused_attn
        from transformer_engine.pytorch.utils import get_cudnn_version

        if (version := get_cudnn_version()) < LEAST_CUDNN:
            return f"cuDNN {'.'.join(map(str, version))}, and its kernels are used from 9.6 on"
        backend = fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
        calls = Calls(forward=fused_attn.fused_attn_fwd, backward=fused_attn.fused_attn_bwd, backend=backend)
        _check_arguments(calls)
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        return f"Transformer Engine's calls cannot be used: {type(error).__name__}: {error}"
    return calls


def _check_arguments(calls: Calls) -> None:
    """Raise TypeError unless the calls take the arguments that they are given here."""
    none = torch.empty(0)
    spans = Spans(queries=[1], keys=[1], cu_queries=none, cu_keys=none, causal=True)
    given = _arguments((none, none, none), spans, 1.0)
    signature(calls.forward).bind(is_training=True, fused_attention_backend=calls.backend, **given)
    given |= _of_backward(none, none, none, none)
    signature(calls.backward).bind(fused_attention_backend=calls.backend, **given)


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
            grad,
            *inputs,
            out,
            z.contiguous(),
            *_lengths(spans),
            0.0,
            spans.causal,
            state,
            unused,
            scale=scale,
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


# ---- two passes ----------------------------------------------------------------------------------------


def merge_(out_Qnd: Tensor, z_nQ: Tensor, other_Qnd: Tensor, other_z_nQ: Tensor) -> None:
    """Make output and log-sum-exp those of both passes, which have the same queries and different keys.

    Args:
        out_Qnd, other_Qnd: dense.
        z_nQ, other_z_nQ: float32 at least, of any strides.
    """
    if triton is None or not out_Qnd.is_cuda:
        merge_by_torch_(out_Qnd, z_nQ, other_Qnd, other_z_nQ)
        return
    with torch.cuda.device(out_Qnd.device):
        merge_by_triton_(out_Qnd, z_nQ, other_Qnd, other_z_nQ)


def merge_by_torch_(out_Qnd: Tensor, z_nQ: Tensor, other_Qnd: Tensor, other_z_nQ: Tensor) -> None:
    """`merge_` in PyTorch."""
    weight_Qn1 = torch.sigmoid(other_z_nQ - z_nQ).t().unsqueeze(-1)  # exp(other z − z of both)
    out_Qnd.copy_((out_Qnd * (1 - weight_Qn1)).addcmul_(other_Qnd, weight_Qn1))
    z_nQ.copy_(torch.logaddexp(z_nQ, other_z_nQ))


def merge_by_triton_(out_Qnd: Tensor, z_nQ: Tensor, other_Qnd: Tensor, other_z_nQ: Tensor) -> None:
    """`merge_` in one launch, one program per query."""
    queries, heads, size = out_Qnd.shape
    kernel: Any = merge_kernel  # Triton's launch, which types do not know
    kernel[(queries,)](
        out_Qnd,
        z_nQ,
        other_Qnd,
        other_z_nQ,
        heads,
        size,
        *z_nQ.stride(),
        *other_z_nQ.stride(),
        HEADS=_power_of_2(heads),
        SIZE=_power_of_2(size),
        num_warps=8,
    )


def _power_of_2(number: int) -> int:
    """The smallest that is not below `number`."""
    return 1 << (number - 1).bit_length()


if triton:

    @triton.jit
    def merge_kernel(
        out,
        z,
        other,
        other_z,
        heads,
        size,
        z_head,
        z_query,
        other_z_head,
        other_z_query,
        HEADS: tl.constexpr,
        SIZE: tl.constexpr,
    ):
        """Merge all heads of one query."""
        query = tl.program_id(0).to(tl.int64)
        head_n, column_d = tl.arange(0, HEADS), tl.arange(0, SIZE)
        inside_n = head_n < heads
        z_n = tl.load(z + head_n * z_head + query * z_query, mask=inside_n, other=0.0)
        other_n = tl.load(other_z + head_n * other_z_head + query * other_z_query, mask=inside_n, other=0.0)
        top_n = tl.maximum(z_n, other_n)
        both_n = top_n + tl.log(tl.exp(z_n - top_n) + tl.exp(other_n - top_n))
        weight_n = tl.exp(other_n - both_n)
        at_nd = query * heads * size + head_n[:, None] * size + column_d[None, :]
        inside_nd = inside_n[:, None] & (column_d < size)[None, :]
        out_nd = tl.load(out + at_nd, mask=inside_nd, other=0.0).to(tl.float32)
        other_nd = tl.load(other + at_nd, mask=inside_nd, other=0.0).to(tl.float32)
        out_nd += weight_n[:, None] * (other_nd - out_nd)
        tl.debug_barrier()  # several warps read the same numbers: all have, before one overwrites them
        tl.store(z + head_n * z_head + query * z_query, both_n, mask=inside_n)
        tl.store(out + at_nd, out_nd.to(out.dtype.element_ty), mask=inside_nd)

"""Core attention of the local layer spec: PyTorch's fused attention over packed sequences.

It supports context parallelism. Letters: T packed tokens on this rank, n heads, k key/value heads, d head
size.
"""

import math
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

try:  # flash attention over packed sequences without transformer-engine; CUDA, half precision
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN_OPTIONS = signature(varlen_attn).parameters
    HAS_VARLEN = "window_size" in _VARLEN_OPTIONS  # selects causal attention, from torch 2.11 on
except ImportError:
    HAS_VARLEN = False


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence, without a mask over all packed tokens.

    With context parallelism, sequences are split as in Megatron: 2·cp chunks, of which rank r holds chunks r
    and 2·cp-1-r. Keys and values are gathered, and each chunk attends to the keys up to its own end.
    """

    def __init__(self, config, *, pg_collection, softmax_scale=None, **_):
        super().__init__(config)
        assert pg_collection is not None, "this attention takes its groups from the collection"
        self.cp = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query, key, value, attention_mask, *, packed_seq_params, **_) -> Tensor:
        """Packed [T, n, d] queries and [T, k, d] keys and values -> [T, n·d]; all sequences are complete."""
        assert packed_seq_params is not None, "this attention takes packed sequences"
        lengths = packed_seq_params.lengths  # set by packing.py, so nothing is copied back from the GPU
        if self.cp.size() > 1:
            out = self._context_parallel(query, key, value, lengths)
        elif HAS_VARLEN and query.is_cuda and query.dtype != torch.float32:
            out = self._varlen(query, key, value, packed_seq_params)
        else:
            parts = zip(query.split(lengths), key.split(lengths), value.split(lengths))
            out = torch.cat([self._attend(q, k, v, causal=True) for q, k, v in parts])
        return out.flatten(1)

    def _varlen(self, query, key, value, params) -> Tensor:
        grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _VARLEN_OPTIONS else {}
        if not grouped and key.size(1) != query.size(1):
            key, value = (x.repeat_interleave(query.size(1) // key.size(1), 1) for x in (key, value))
        cu, longest = params.cu_seqlens_q, params.max_seqlen_q
        out = varlen_attn(
            query, key, value, cu, cu, longest, longest, window_size=(-1, 0), scale=self.scale, **grouped
        )
        return cast(Tensor, out)  # a pair only with return_aux

    def _attend(self, q, k, v, *, causal) -> Tensor:
        """Attention of one sequence or chunk: [Tq, n, d] against [Tk, k, d].

        `causal` aligns the last query with the last key.
        """
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if causal and q.size(2) != k.size(2):
            mask = causal_lower_right(q.size(2), k.size(2))
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
        return out.squeeze(0).transpose(0, 1)

    def _context_parallel(self, query, key, value, lengths) -> Tensor:
        cp, rank = self.cp.size(), self.cp.rank()
        gathered = [
            gather_from_sequence_parallel_region(x, group=self.cp).view(cp, *x.shape) for x in (key, value)
        ]
        outputs, first = [], 0
        for length in lengths:  # of the whole sequence, a multiple of 2·cp
            piece = length // (2 * cp)
            local = slice(first, first + 2 * piece)
            k, v = (self._in_order(x[:, local], piece) for x in gathered)
            for place, q in zip((rank, 2 * cp - 1 - rank), query[local].split(piece)):
                end = (place + 1) * piece
                outputs.append(self._attend(q, k[:end], v[:end], causal=True))
            first = local.stop
        return torch.cat(outputs)

    @staticmethod
    def _in_order(x, piece: int) -> Tensor:
        """Reorder [cp, 2·piece, k, d], as gathered from the ranks, to [2·cp·piece, k, d] in token order."""
        front, back = x[:, :piece], x[:, piece:]
        return torch.cat([front.flatten(0, 1), back.flip(0).flatten(0, 1)])

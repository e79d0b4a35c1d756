"""Rotary frequencies as in Hugging Face transformers, for every scaling that `Architecture` supports."""

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from parallel.weights.architecture import Architecture


def rope_frequencies(arch: Architecture) -> tuple[Tensor, float]:
    """Return inverse frequencies [head_dim / 2] float32, and the scale of queries and keys.

    The scale is YaRN's attention factor, else 1.
    """
    if arch.rope_scaling is None:
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
        return 1.0 / arch.rope_theta**exponents, 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = arch.to_hf()
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    return ROPE_INIT_FUNCTIONS[arch.rope_scaling.rope_type](config, "cpu")


class TokenRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding of packed tokens by their own positions: [T, 1, 1, head_dim].

    Megatron's has the positions from 0 on, for every packed sequence the same.
    """

    def get_rotary_seq_len(
        self,
        inference_context,
        transformer,
        transformer_input,
        transformer_config,
        packed_seq_params=None,
        **_,
    ) -> int:
        """Take the tokens' positions; Megatron calls `forward` next."""
        assert packed_seq_params is not None, "micro-batches are packed"
        self._positions = packed_seq_params.positions
        return len(self._positions)

    def get_freqs_non_repeated(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles [T, head_dim / 2] float32."""
        return torch.outer(self._positions.to(self.inv_freq.dtype), self.inv_freq)

    def forward(self, max_seq_len: int, *_, **__) -> Tensor:
        """Return the embeddings; Megatron's own method keeps them by `max_seq_len`."""
        return self.get_emb(max_seq_len)

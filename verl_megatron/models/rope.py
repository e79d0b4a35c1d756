"""Rotary frequencies as in Hugging Face transformers, for every scaling that `Architecture` supports."""

import torch
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

"""Names of the older Python interface that are not at the package's root."""

import importlib.util


def is_flash_attn_available() -> bool:
    """Whether attention can use FlashAttention's kernels: its package is installed and there is a GPU.

    Nothing has to be set: Transformer Engine's layers and vLLM choose their kernels themselves.
    """
    from parallel import device

    return device.is_gpu() and importlib.util.find_spec("flash_attn") is not None

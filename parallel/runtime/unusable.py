"""Packages that are installed but of no use here, hidden from those that would import them.

vLLM's CPU build asks for torchvision, torchaudio and torchcodec, which are usually built for CUDA. Beside
torch's CPU build their import fails, and takes transformers along. Transformer Engine imports JAX where that
is installed, which takes seconds. Only the standard library is imported here.
"""

import sys
from importlib.metadata import PackageNotFoundError, version

COMPANIONS = ("torchvision", "torchaudio", "torchcodec", "triton")
OTHER_FRAMEWORK = "transformer_engine.jax"
OF_CPU = "+cpu"  # end of a CPU build's version


def hide_unusable() -> None:
    """Hide Transformer Engine's side for JAX and, from a CPU build of torch, companions built for CUDA."""
    _hide(OTHER_FRAMEWORK)
    if not _version("torch").endswith(OF_CPU):
        return
    for name in COMPANIONS:
        if (found := _version(name)) and not found.endswith(OF_CPU):
            _hide(name)


def _hide(name: str) -> None:
    """Make imports of a module fail and `find_spec` return None, unless it has been imported."""
    sys.modules.setdefault(name, None)  # pyright: ignore[reportArgumentType]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""

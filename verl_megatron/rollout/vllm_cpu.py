"""What vLLM's CPU build needs in order to live in a trainer's ranks; on GPUs nothing here is active.

Each entry of `CPU_PATCHES` says what goes wrong without it; `engine_options` does the same for settings.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator

import torch

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on CPUs


def _keep_weights():
    import vllm._custom_ops as ops

    ops._supports_onednn = False


def _plain_all_reduce():
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _free_memory_policy():
    torch.ops._C.init_cpu_memory_env = lambda nodes: None


# What fails without the patch, and the patch.
CPU_PATCHES: dict[str, tuple[str, Callable[[], None]]] = {
    "keep_weights": (
        "linear weights are repacked into opaque handles, so they cannot be written in place; "
        "tied ones go wrong silently",
        _keep_weights,
    ),
    "plain_all_reduce": (
        "the shared-memory all-reduce names its files alike in all jobs of a machine (a killed job blocks "
        "every later one) and spins, "
        "which is erratic where ranks outnumber cores; gloo takes its place",
        _plain_all_reduce,
    ),
    "free_memory_policy": (
        "memory of the whole process, the trainer's too, is bound to one NUMA node, "
        "with a warning from every rank",
        _free_memory_policy,
    ),
}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the import of vLLM's parts: its sampler would otherwise compile a C++ kernel at the first request (1 to 40 s a rank)."""
    import torch._dynamo

    disabled, torch._dynamo.config.disable = torch._dynamo.config.disable, True
    triton = logging.getLogger(
        "torch._library.triton"
    )  # its absence, which every rank would report, is no fault here
    level, triton.level = triton.level, logging.ERROR
    try:
        yield
    finally:
        torch._dynamo.config.disable, triton.level = disabled, level


def prepare() -> None:
    """Apply all patches; after the import of vLLM, before its first engine."""
    for _, patch in CPU_PATCHES.values():
        patch()


@contextlib.contextmanager
def preserving_threads() -> Iterator[None]:
    """The engine replaces torch.set_num_threads by a function that does nothing; give the process its own back."""
    function, number = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = function
        if torch.get_num_threads() != number:
            torch.set_num_threads(number)


def engine_options(*, kv_cache_mib: int, max_model_len: int | None) -> dict[str, object]:
    """Settings that differ from a GPU's."""
    options: dict[str, object] = {
        "kv_cache_memory_bytes": kv_cache_mib
        << 20,  # otherwise every rank asks for 92 % of the machine's memory
        "enable_chunked_prefill": False,  # a prompt split over two steps needs a generator offset, which CPU generators lack
        "enforce_eager": True,  # no CUDA graphs here; compiling takes longer than it saves
    }
    if max_model_len is not None:
        options["max_num_batched_tokens"] = max(4096, max_model_len)  # prompts are computed whole
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        raise ValueError(
            "VLLM_CPU_KVCACHE_SPACE overrides rollout.kv_cache_mib; "
            "unset it and give the size in MiB as rollout.kv_cache_mib"
        )
    return options

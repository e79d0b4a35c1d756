"""Patches and settings that let vLLM's CPU build run inside the trainer's ranks; unused on GPUs.

Each entry of `CPU_PATCHES` states what fails without it; so do the comments of `engine_options`.

Letters: B samples, N drafted tokens of all, V vocabulary.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # supported by vLLM's CPU attention


def _keep_weights():
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    small: Any = utils  # and small ones of 16 bits, on a CPU with AMX
    small.check_cpu_sgl_kernel = lambda n, k, dtype: False


def _plain_all_reduce():
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _free_memory_policy():
    operators: Any = torch.ops._C
    operators.init_cpu_memory_env = lambda nodes: None


def _constrain_drafts():
    from vllm.v1.sample import rejection_sampler

    def constrain(logits_NV: Tensor, ends_B: Tensor, sampling: Any) -> Tensor:
        """Return logits under the sampling parameters of the samples whose drafts end at `ends_B`."""
        if sampling.all_greedy or not len(logits_NV):
            return logits_NV
        drafted_B = ends_B.diff(prepend=ends_B.new_zeros(1))

        def of_token(value_B: Tensor | None) -> Tensor | None:
            return None if value_B is None else value_B.repeat_interleave(drafted_B)

        temperature_B = torch.where(sampling.temperature == 0, 1.0, sampling.temperature)  # 0: greedy
        scaled_NV = logits_NV / temperature_B.repeat_interleave(drafted_B)[:, None]
        return rejection_sampler.apply_top_k_top_p(
            scaled_NV, of_token(sampling.top_k), of_token(sampling.top_p)
        )

    rejection_sampler.apply_sampling_constraints = constrain


def _tolerate_numba():
    with contextlib.suppress(ImportError):  # older versions have no such module
        from vllm.triton_utils import dispatcher

        namespaces: Any = dispatcher
        namespaces.vars = lambda value: found if isinstance(found := vars(value), Mapping) else {}


# Failure without the patch, and the patch.
CPU_PATCHES: dict[str, tuple[str, Callable[[], None]]] = {
    "keep_weights": (
        "linear weights are repacked into opaque handles, so they cannot be written in place; "
        "output layers go wrong silently",
        _keep_weights,
    ),
    "plain_all_reduce": (
        "the shared-memory all-reduce uses the same file names in all jobs of a machine (a killed job blocks "
        "every later one) and spins, "
        "which is erratic where ranks outnumber cores; gloo takes its place",
        _plain_all_reduce,
    ),
    "free_memory_policy": (
        "memory of the whole process, the trainer's too, is bound to one NUMA node, "
        "with a warning from every rank",
        _free_memory_policy,
    ),
    "constrain_drafts": (
        "drafts are verified at whatever temperature, top-k and top-p the memory holds, as a kernel writes "
        "them into a copy; without drafts top-k fails on no rows",
        _constrain_drafts,
    ),
    "tolerate_numba": (
        "engines do not start once numba is imported, as by the first that drafts: the search for kernels in "
        "all modules stumbles over an object whose __dict__ is a function",
        _tolerate_numba,
    ),
}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context for importing vLLM with torch.compile disabled.

    Otherwise its sampler compiles a C++ kernel at the first request (1 to 40 s per rank).
    """
    import torch._dynamo

    disabled, torch._dynamo.config.disable = torch._dynamo.config.disable, True
    triton = logging.getLogger(
        "torch._library.triton"
    )  # silences a warning on every rank that triton is absent
    level, triton.level = triton.level, logging.ERROR
    try:
        yield
    finally:
        torch._dynamo.config.disable, triton.level = disabled, level


def import_worker() -> None:
    """Import what an engine imports when it is constructed, so that ranks can be forked after that."""
    import vllm.v1.worker.cpu_worker  # noqa: F401


def prepare() -> None:
    """Apply all patches; call after importing vLLM and before its first engine."""
    for _, patch in CPU_PATCHES.values():
        patch()


@contextlib.contextmanager
def preserving_threads() -> Iterator[None]:
    """Restore torch.set_num_threads, which the engine replaces by a no-op, and the thread count."""
    function, number = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = function
        if torch.get_num_threads() != number:
            torch.set_num_threads(number)


def engine_options(*, kv_cache_mib: int, max_model_len: int | None) -> dict[str, object]:
    """Return the settings that differ from those of GPUs."""
    options: dict[str, object] = {
        "kv_cache_memory_bytes": kv_cache_mib
        << 20,  # by default every rank takes 92 % of the machine's memory
        "enable_chunked_prefill": False,  # needs generator offsets, which CPU generators lack
        "enforce_eager": True,  # no CUDA graphs; compilation takes longer than it saves
    }
    if max_model_len is not None:
        options["max_num_batched_tokens"] = max(4096, max_model_len)  # no chunked prefill
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        raise ValueError(
            "VLLM_CPU_KVCACHE_SPACE overrides rollout.kv_cache_mib; "
            "unset it and give the size in MiB as rollout.kv_cache_mib"
        )
    return options

"""The process around a vLLM engine: environment, imports, process groups, and state that vLLM changes."""

import contextlib
import gc
import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy
import torch

from parallel import device
from parallel.runtime import leftovers
from verl_megatron.rollout import vllm_cpu

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in-process engine: weights are written in place
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # flashinfer is optional
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # no usage statistics are sent
    # Triton's usual one. Without it, Inductor names one of its own, which is not the same when vLLM loads a
    # compiled model as when it compiles it: kernels would be compiled again.
    "TRITON_CACHE_DIR": os.path.join(
        os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache"
    ),
}


def engine_environment() -> dict[str, str]:
    """Return the environment variables of an engine that are not set otherwise."""
    return {**ENVIRONMENT, "VLLM_RPC_BASE_PATH": leftovers.socket_folder()}


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Context for importing and constructing vLLM: faster, and without third-party deprecation warnings.

    vLLM gives its logger a level only while it constructs an engine. It has warned by then.
    """
    logger = logging.getLogger("vllm")
    if logger.level == logging.NOTSET:
        logger.setLevel(os.environ.get("VLLM_LOGGING_LEVEL") or ENVIRONMENT["VLLM_LOGGING_LEVEL"])
    with (
        paused_collector(),
        warnings.catch_warnings(),
        contextlib.nullcontext() if device.is_gpu() else vllm_cpu.importing(),
    ):
        warnings.simplefilter("ignore", FutureWarning)
        yield


def import_vllm() -> None:
    """Import vLLM ahead of the first engine, without touching a GPU."""
    threads = contextlib.nullcontext() if device.is_gpu() else vllm_cpu.preserving_threads()
    with preserved_environment(ENVIRONMENT), threads, starting():
        from vllm import LLM  # noqa: F401 (its module imports nearly all that an engine needs)

        if not device.is_gpu():
            vllm_cpu.import_worker()


@contextlib.contextmanager
def groups_in_order(ranks: tuple[int, ...], rank: int) -> Iterator[None]:
    """Context for starting an engine: map the positions 0, 1, ... of vLLM's groups to `ranks`."""
    from vllm.distributed import parallel_state

    initialize = parallel_state.init_model_parallel_group

    def initialize_in_order(group_ranks: list[list[int]], *args, **kwargs):
        in_order = [list(map(ranks.__getitem__, group)) for group in group_ranks]
        return initialize(in_order, *args, **kwargs)

    parallel_state.init_model_parallel_group = initialize_in_order
    # vLLM needs the position here: it computes with it, and it is the key of the compile cache on disk.
    os.environ["RANK"] = str(ranks.index(rank))
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = initialize
        os.environ["RANK"] = str(rank)


def release_groups(*, ours: bool) -> None:
    """Destroy vLLM's process groups; with `ours` the default group as well."""
    from vllm.distributed import cleanup_dist_env_and_memory, destroy_model_parallel

    cleanup_dist_env_and_memory() if ours else destroy_model_parallel()


def check_ranks(ranks: Sequence[int], tp: int, world: int) -> tuple[int, ...]:
    """Return `ranks` as a tuple; ValueError unless they are all ranks of the world, increasing by replica."""
    if sorted(ranks) != list(range(world)):
        raise ValueError(f"ranks={tuple(ranks)} must name each of the world's {world} ranks once")
    for first in range(0, world, tp):
        replica = list(ranks[first : first + tp])
        if replica != sorted(replica):  # torch sorts a group's ranks, and vLLM takes the TP index from that
            raise ValueError(
                f"ranks={tuple(ranks)}: the ranks of a replica must increase, and {replica} do not; "
                f"write {sorted(replica)}"
            )
    return tuple(ranks)


def resolve_dtype(setting: str) -> str:
    """Return the dtype of the weights; "auto" is bfloat16 on GPUs and float32 on CPUs."""
    return setting if setting != "auto" else "bfloat16" if device.is_gpu() else "float32"


# ---- state that is restored --------------------------------------------------------------------------------


@contextlib.contextmanager
def preserved_environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set the variables of `defaults` that are not set; restore the environment on exit."""
    before = dict(os.environ)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the generators of random, numpy and torch (CPU and the current GPU) on exit."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Disable garbage collection and freeze existing objects: large imports take a third less time."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # so that explicit collections are fast, too
    try:
        yield
    finally:
        if enabled:
            gc.enable()

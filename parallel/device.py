"""The device of the process: the only file that distinguishes GPUs from a CPU.

Megatron-Core is written for CUDA. `prepare()` makes it run on CPU tensors and gloo; where CUDA is available
it patches nothing. Each patch is one entry of `CPU_PATCHES`, and a test shows that Megatron-Core fails
without it.
"""

import logging
import mmap
import os
import secrets
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from types import CodeType
from typing import Any, cast

import torch
import torch.distributed as dist

from parallel.runtime import process, store
from parallel.runtime.environment import BRIDGE, check_world

# Ranks without a part in a phase may wait this long; the watchdog reports a stuck rank much earlier.
COLLECTIVE_TIMEOUT = timedelta(hours=2)
MEET_S = 0.1  # between two looks at whether all ranks have come
_served: set[int] = set()  # ports of the stores that this process has started
_NAME = "verl_megatron"  # key of the shared store: name of the newest world
_CPU_NAMES = {
    "cuda": "cpu",
    **{f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")},
}


def is_gpu() -> bool:
    return torch.cuda.is_available()


def visible_gpus() -> int:
    """Number of GPUs that this process may use."""
    return torch.cuda.device_count() if is_gpu() else 0


def device() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend of groups that move a model's tensors."""
    return "nccl" if is_gpu() else "gloo"


def initialize() -> None:
    """Join the world that torchrun started (or a world of one) and choose this rank's device.

    Raises:
        ValueError: the environment describes no world, or this host has more ranks than GPUs.
    """
    process.end_with_launcher()
    prepare()
    check_world()
    for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1").items():
        os.environ[name] = os.environ.get(name) or value
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = str(_free_port())
    one_host = _is_on_one_host()
    if one_host and _is_bridge_local() and os.path.exists("/sys/class/net/lo"):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # the ranks' ports are unreachable from other hosts
    if is_gpu():
        local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local_rank >= gpus:
            remedy = (
                f"start at most {gpus} ranks on it (GPUS, --nproc-per-node) or change CUDA_VISIBLE_DEVICES"
            )
            raise ValueError(f"LOCAL_RANK={local_rank} has no GPU: this host shows {gpus}; {remedy}")
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        joined: dict[str, Any] = dict(
            device_id=device() if is_gpu() else None,
            timeout=COLLECTIVE_TIMEOUT,
            **_shared_store(one_host=one_host),
        )
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu() else "gloo", **joined)


def _shared_store(*, one_host: bool) -> dict:
    """Return arguments for `init_process_group` that use the launcher's store, or one that rank 0 starts.

    Keys get a prefix of this world alone. Without it a restarted gloo rank (torch 2.13) finds the addresses
    of ranks that have ended, and cannot connect: torchrun keeps its store. A store that rank 0 starts is a
    process of its own: if a rank served it and were stopped, the others could not report who is missing.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if world_size == 1:
        shared = dist.HashStore()
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        shared = dist.TCPStore(address, port, world_size, is_master=False)
    else:
        if rank == 0 and port not in _served:
            store.serve_apart(address, port, one_host=one_host)
            _served.add(port)
        shared = dist.TCPStore(store.LOCAL if one_host else address, port, world_size, is_master=False)
    shared.set_timeout(COLLECTIVE_TIMEOUT)
    return {
        "store": dist.PrefixStore(f"verl_megatron/{_meet(shared, rank, world_size)}", shared),
        "rank": rank,
        "world_size": world_size,
    }


def _meet(shared: dist.Store, rank: int, world_size: int) -> str:
    """Wait until all ranks are here, and return a name of their world, which no other has.

    The store may hold the name of an earlier attempt. torchrun's count of attempts tells nothing: a host
    counts only those that ended by ranks of its own.
    """
    if rank == 0:
        name = secrets.token_hex(8)
        shared.set(_NAME, name)
        shared.wait([f"{name}/{other}" for other in range(1, world_size)])
        shared.set(f"{name}/complete", "")
        return name
    while True:
        name = shared.get(_NAME).decode()
        is_new = shared.add(f"{name}/{rank}", 1) == 1  # else it is of an attempt that ended
        while name == shared.get(_NAME).decode():
            if is_new and shared.check([f"{name}/complete"]):
                return name
            time.sleep(MEET_S)


def _is_on_one_host() -> bool:
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or ("1" if os.environ["WORLD_SIZE"] == "1" else "")
    return (
        ranks == os.environ["WORLD_SIZE"]
        if ranks
        else os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1")
    )


def _is_bridge_local() -> bool:
    """Whether worlds that this one is joined to, if any, are on this host, too."""
    return os.environ.get(BRIDGE, store.LOCAL).rpartition(":")[0] in ("", "localhost", store.LOCAL)


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def named_range(name: str) -> AbstractContextManager:
    """Return an NVTX range, which Nsight Systems shows under this name; a null context on a CPU."""
    return torch.cuda.nvtx.range(name) if is_gpu() else nullcontext()


def synchronize() -> None:
    if is_gpu():
        torch.cuda.synchronize()


def synchronize_stream() -> None:
    """Synchronize the current stream; copies on other streams continue."""
    if is_gpu():
        torch.cuda.current_stream().synchronize()


def host_of(rank: int) -> int:
    """Return the index of the host that world rank `rank` runs on."""
    return rank // ranks_per_host()


def ranks_per_host() -> int:
    """Return the number of ranks on each host, the same for all under torchrun; 1 without a world."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1))


def cores_per_rank() -> int:
    """Return this rank's share of the host's cores that the process may use; at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks_per_host())


def used_memory_bytes() -> int:
    """Return the used memory of this rank's GPU in bytes, by all processes; on a CPU the process's peak.

    Includes freed blocks that PyTorch caches.
    """
    if is_gpu():
        free, total = torch.cuda.mem_get_info()
        return total - free
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory_bytes() -> int:
    """Return the bytes that this rank may still allocate on its device; on a CPU its share of the host's.

    Cached blocks are given back first: an allocator's count of them has some that sleep (vLLM's).
    """
    if is_gpu():
        release_cached_memory()
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return kib * 1024 // ranks_per_host()


def host_memory_bytes() -> int:
    """Return the memory of this host in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def release_cached_memory() -> None:
    """Return cached blocks to the GPU, for another allocator (vLLM's) that is about to need them."""
    if is_gpu():
        torch.cuda.empty_cache()


def host_memory(num_bytes: int, owner: object) -> torch.Tensor:
    """Allocate [N] uint8 on the host, pinned if there is a GPU, until `owner` is garbage-collected.

    Pinned memory lets the GPU copy concurrently with its kernels. PyTorch's own allocator rounds pinned
    memory up to a power of two, and a single thread touches its pages.

    Raises:
        ValueError: the memory cannot be pinned.
        OSError: the system gives none.
    """
    if not is_gpu() or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # CUDA pins whole pages, so they are shared with nothing else.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory, cudart = torch.frombuffer(pages, dtype=torch.uint8), cast(Any, torch.cuda.cudart())
    with threads(cores_per_rank(), "pages") as pool:
        # The system allocates a page when it is first written to.
        list(pool.map(torch.Tensor.zero_, memory.tensor_split(cores_per_rank())))
        # CUDA tells a thread's next kernel of a failure, too; these threads launch none.
        failure = int(pool.submit(cudart.cudaHostRegister, memory.data_ptr(), num_bytes, 0).result())
    if failure:
        remedy = "set reshard.offload=none and run.async_save=false, or give the host more memory"
        raise ValueError(
            f"{num_bytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error {failure}); {remedy}"
        )
    # Unregister before the memory is freed: CUDA would keep copying to the old pages although another
    # allocation may own the address. Not needed at exit, where the system frees everything.
    weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return threads that use this rank's GPU: others use the first one, and make a context there."""
    own: dict[str, Any] = {}
    if is_gpu():
        own = dict(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))
    return ThreadPoolExecutor(count, thread_name_prefix=name, **own)


def copy_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy CPU tensors to this rank's device, in one copy per dtype.

    While optimizer state is being copied, too, every separate copy would wait for a piece of it.
    """
    moved = list(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        joined = torch.cat([tensors[i].flatten() for i in places])
        joined = (joined.pin_memory() if is_gpu() else joined).to(device(), non_blocking=True)
        for i, part in zip(places, joined.split([tensors[i].numel() for i in places])):
            moved[i] = part.view(tensors[i].shape)
    return moved


# ---- Megatron-Core on a CPU ------------------------------------------------------------------------


def _renamed(constant):
    """Return a compiled constant with CUDA's names replaced, through nested tuples and function bodies."""
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=_renamed(constant.co_consts))
    if isinstance(constant, tuple):
        return tuple(map(_renamed, constant))
    return _CPU_NAMES.get(constant, constant) if isinstance(constant, str) else constant


class _CPULoader(SourceFileLoader):
    def get_code(self, fullname):
        return _renamed(super().get_code(fullname))


class _CPUFinder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name.startswith("megatron.core") else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _CPULoader(spec.loader.name, spec.loader.path)
        return spec


def _rename_literals():
    sys.meta_path.insert(0, _CPUFinder())


def _current_device():
    torch.cuda.current_device = lambda: "cpu"


def _tensor_cuda():
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def _rng():
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random.logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


# In the order of application: the reason for the patch, and the patch.
CPU_PATCHES: dict[str, tuple[str, Callable[[], None]]] = {
    "literals": (
        'Megatron-Core writes device="cuda" and compares tensor types with torch.cuda.FloatTensor',
        _rename_literals,
    ),
    "current_device": ("parameters and buffers are created on torch.cuda.current_device()", _current_device),
    "tensor_cuda": ("models and shared embeddings are moved with .cuda()", _tensor_cuda),
    "rng": ("the tensor-parallel random state is kept in CUDA generators; here it is the CPU's", _rng),
}

_applied: list[str] = []  # entries that were applied, or left out, in this process


def prepare(*, leave_out: str = "") -> None:
    """Make Megatron-Core usable on this machine; call it before megatron.core is imported.

    Args:
        leave_out: one entry of `CPU_PATCHES` to skip, for tests.

    Raises:
        RuntimeError: megatron.core is imported already.
    """
    # Notices for Megatron's own developers, once per rank.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Every module warns once per rank that Apex is missing.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    # Deprecated names that Megatron-Core still uses.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if is_gpu() or _applied:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before parallel.device.prepare(); import parallel.device first"
        )
    # Megatron-Core compiles small functions, which takes seconds each and a C++ compiler, without a gain.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    for name, (_, patch) in CPU_PATCHES.items():
        _applied.append(name)  # before the patch, which may import modules that call prepare() themselves
        if name != leave_out:
            patch()

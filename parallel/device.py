"""The only file that knows whether the program runs on GPUs or on a CPU.

Megatron-Core is written for CUDA. `prepare()` makes it run on CPU tensors and gloo; where CUDA is available it does nothing.
Everything it changes is one entry of `CPU_PATCHES`, and a test shows that Megatron-Core fails without each.
"""

import itertools
import logging
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from types import CodeType

import torch
import torch.distributed as dist

from parallel.runtime import process, store
from parallel.runtime.environment import check_world

COLLECTIVE_TIMEOUT = timedelta(
    hours=2
)  # ranks that have no part in a phase may wait that long; which rank makes no progress the watchdog tells much earlier
_served: set[int] = set()  # ports of stores that this process has made
_worlds = itertools.count()  # that this process has joined
_CPU_NAMES = {
    "cuda": "cpu",
    **{f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")},
}


def is_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu() else torch.device("cpu")


def backend() -> str:
    """The torch.distributed backend of groups that move a model's tensors."""
    return "nccl" if is_gpu() else "gloo"


def initialize() -> None:
    """Join the world that torchrun started (or a world of one) and choose this rank's device.

    Raises:
        ValueError: the environment describes no world, or more ranks of this host than it has GPUs.
    """
    process.end_with_launcher()
    prepare()
    check_world()
    for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1").items():
        os.environ[name] = os.environ.get(name) or value
    if not os.environ.get("MASTER_PORT"):
        os.environ["MASTER_PORT"] = str(_free_port())
    one_host = _is_on_one_host()
    if one_host and os.path.exists("/sys/class/net/lo"):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # what the ranks listen on is nobody else's
    if is_gpu():
        local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local_rank >= gpus:
            remedy = (
                f"start at most {gpus} ranks on it (GPUS, --nproc-per-node) or change CUDA_VISIBLE_DEVICES"
            )
            raise ValueError(f"LOCAL_RANK={local_rank} has no GPU: this host shows {gpus}; {remedy}")
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        joined = dict(
            device_id=device() if is_gpu() else None,
            timeout=COLLECTIVE_TIMEOUT,
            **_shared_store(one_host=one_host),
        )
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu() else "gloo", **joined)


def _shared_store(*, one_host: bool) -> dict:
    """Arguments that join through the launcher's store, or one that rank 0 has served, under keys of this world alone.

    Without such keys a restarted gloo rank (torch 2.13) finds the addresses of the ranks that have ended, and cannot connect.
    A rank that served the store itself would take it along when it is stopped, and the others could not say which one is.
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
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {
        "store": dist.PrefixStore(f"verl_megatron/attempt_{attempt}/{next(_worlds)}", shared),
        "rank": rank,
        "world_size": world_size,
    }


def _is_on_one_host() -> bool:
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or ("1" if os.environ["WORLD_SIZE"] == "1" else "")
    return (
        ranks == os.environ["WORLD_SIZE"]
        if ranks
        else os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1")
    )


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def named_range(name: str) -> AbstractContextManager:
    """Nsight Systems shows the block under this name (NVTX); nothing on a CPU."""
    return torch.cuda.nvtx.range(name) if is_gpu() else nullcontext()


def synchronize() -> None:
    if is_gpu():
        torch.cuda.synchronize()


def synchronize_stream() -> None:
    """Wait for what the current stream was given; copies on streams of their own go on."""
    if is_gpu():
        torch.cuda.current_stream().synchronize()


def host_of(rank: int) -> int:
    """The host that world rank `rank` runs on."""
    return rank // ranks_per_host()


def ranks_per_host() -> int:
    """torchrun starts the same number on each host; a process without a world is alone."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1))


def cores_per_rank() -> int:
    """Of this host's, as far as the process may use them; at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks_per_host())


def used_memory_bytes() -> int:
    """Bytes taken on this rank's GPU, by whomever, freed blocks that PyTorch keeps included; on a CPU the process's peak."""
    if is_gpu():
        free, total = torch.cuda.mem_get_info()
        return total - free
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_memory_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def release_cached_memory() -> None:
    """Give freed blocks back to the GPU: another allocator (vLLM's) is about to need them."""
    if is_gpu():
        torch.cuda.empty_cache()


def host_memory(num_bytes: int, owner: object) -> torch.Tensor:
    """[N] uint8 on the host. Where there is a GPU it copies to and from this memory beside its work (pinned) until `owner` is gone.

    PyTorch's own pinned memory comes in powers of two, and one thread alone takes it from the system.

    Raises:
        ValueError: the system does not allow it.
    """
    if not is_gpu() or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(
        -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # CUDA pins whole pages: they are shared with nothing else
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with ThreadPoolExecutor(cores_per_rank()) as pool:
        list(
            pool.map(torch.Tensor.zero_, memory.tensor_split(cores_per_rank()))
        )  # the system gives a page when it is first written to
    cudart = torch.cuda.cudart()
    failure = int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if failure:
        remedy = "set reshard.offload=none and run.async_save=false, or give the host more memory"
        raise ValueError(
            f"{num_bytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error {failure}); {remedy}"
        )
    # Before the memory is freed: CUDA would go on to copy to the old pages, whoever has the address next. The process's end frees it anyway.
    weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def copy_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """CPU tensors on this rank's device, in one copy for each dtype: where optimizer state is on its way, too, every copy waits for a piece of it."""
    moved = list(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        joined = torch.cat([tensors[i].flatten() for i in places])
        joined = (joined.pin_memory() if is_gpu() else joined).to(device(), non_blocking=True)
        for i, part in zip(places, joined.split([tensors[i].numel() for i in places])):
            moved[i] = part.view(tensors[i].shape)
    return moved


# ---- Megatron-Core on a CPU -------------------------------------------------------------------------------------------


def _renamed(constant):
    """A compiled constant with CUDA's names replaced, through nested tuples and function bodies."""
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


# In the order in which they are applied: what fails without the patch, and the patch.
CPU_PATCHES: dict[str, tuple[str, Callable[[], None]]] = {
    "literals": (
        'Megatron-Core writes device="cuda" and compares tensor types with torch.cuda.FloatTensor',
        _rename_literals,
    ),
    "current_device": ("parameters and buffers are created on torch.cuda.current_device()", _current_device),
    "tensor_cuda": ("models and shared embeddings are moved with .cuda()", _tensor_cuda),
    "rng": ("the tensor-parallel random state is kept in CUDA generators; here it is the CPU's", _rng),
}

_applied: list[str] = []  # entries that were dealt with in this process


def prepare(*, leave_out: str = "") -> None:
    """Make Megatron-Core usable on this machine; call it before megatron.core is imported.

    Args:
        leave_out: one entry of `CPU_PATCHES` that a test wants to see missed.

    Raises:
        RuntimeError: megatron.core was imported before.
    """
    logging.getLogger("megatron").setLevel(
        logging.ERROR
    )  # notices for Megatron's own developers, once a rank
    warnings.filterwarnings(
        "ignore", module=r"megatron\.core"
    )  # every module says once a rank that Apex is missing
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"torch\.distributed"
    )  # names that Megatron-Core still uses
    if is_gpu() or _applied:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before parallel.device.prepare(); import parallel.device first"
        )
    os.environ.setdefault(
        "TORCH_COMPILE_DISABLE", "1"
    )  # Megatron-Core compiles small functions: seconds each, with a C++ compiler, for nothing
    for name, (_, patch) in CPU_PATCHES.items():
        _applied.append(name)  # first: a patch may import modules that call prepare() themselves
        if name != leave_out:
            patch()

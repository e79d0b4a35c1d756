"""Which CPU cores a rank keeps to: its part of those near its GPU.

Launching kernels and vLLM's scheduling are one thread's work at a time. Left alone, the system moves that thread between
cores, whose caches know nothing of it, to another socket than its GPU's, and onto the other half of a core that another rank computes on.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

_SYSTEM = Path("/sys")


def keep_to_own_cores(local_rank: int, *, ranks_per_host: int) -> None:
    """Bind this process, and the threads and processes it will start, to its part of its host's cores. Local rank n uses GPU n.

    Nothing where this process may not use the same cores as the one that started it: then the launcher has bound it.
    """
    if not shares_cores():
        return
    allowed = os.sched_getaffinity(0)
    near = [near_gpu(gpu) & allowed or allowed for gpu in range(ranks_per_host)]
    os.sched_setaffinity(0, own_part(local_rank, near, core_of=physical_core))


def shares_cores() -> bool:
    """Whether this host's ranks may all use the same cores."""
    try:
        return os.sched_getaffinity(0) == os.sched_getaffinity(os.getppid())
    except ProcessLookupError:  # a launcher that is gone, or is in another namespace
        return True


def own_part(gpu: int, near: Sequence[set[int]], *, core_of: Callable[[int], int]) -> set[int]:
    """Logical cores of the rank that uses `gpu`: an equal part of the physical cores near it, whole.

    Args:
        near: for each GPU of the host that a rank uses, the logical cores near it.
        core_of: of a logical core, a number of its physical core.

    Returns:
        All of `near[gpu]` where there are fewer physical cores than GPUs near them.
    """
    gpus = [other for other, cores in enumerate(near) if cores == near[gpu]]
    physical = sorted({core_of(cpu) for cpu in near[gpu]})
    place, count = gpus.index(gpu), len(gpus)
    part = set(physical[len(physical) * place // count : len(physical) * (place + 1) // count])
    return {cpu for cpu in near[gpu] if core_of(cpu) in part} or near[gpu]


def near_gpu(gpu: int) -> set[int]:
    """Logical cores of the socket that the GPU hangs on; empty where the system does not say."""
    card = torch.cuda.get_device_properties(gpu)
    place = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    return _cores_in(_SYSTEM / "bus/pci/devices" / place / "local_cpulist")


def physical_core(cpu: int) -> int:
    """The lowest of the logical cores that share their physical core with `cpu`."""
    return min(_cores_in(_SYSTEM / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), default=cpu)


def _cores_in(file: Path) -> set[int]:
    """0-3,8 as a set; empty where there is no such file."""
    try:
        parts = [part.split("-") for part in file.read_text().strip().split(",") if part]
    except OSError:
        return set()
    return {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}

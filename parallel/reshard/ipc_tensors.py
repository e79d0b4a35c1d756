"""IPC tensors: memory of other ranks of this host, mapped into this process so that its kernels can read it.

Source of the calls: CUDA Driver API, "Memory Management": cuMemGetAddressRange, cuIpcGetMemHandle,
cuIpcOpenMemHandle.
"""

import ctypes
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NamedTensors = Mapping[tuple[int, str], Tensor]  # by (model chunk, name)
IpcTensors = Mapping[int, NamedTensors]  # other ranks' tensors, by world rank

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


def map_tensors(tensors: NamedTensors, group: dist.ProcessGroup) -> IpcTensors | None:
    """Map the tensors of all other ranks of `group`; collective over `group`.

    The tensors must be dense, in memory of PyTorch's own allocator, and keep their addresses. Mappings stay
    open until the process ends.

    Returns:
        For each other rank, tensors by the same names, readable by kernels of this rank. None on every rank
        if it is impossible for one of them: a CPU, another host, GPUs without peer access, or memory that
        cannot be exported (expandable segments).
    """
    exports = exported_tensors(tensors)
    this_rank = dist.get_global_rank(group, dist.get_rank(group))
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (this_rank, exports), group=group)
    opened: Any = None
    if all(exports is not None for _, exports in everyone):
        opened = {rank: opened_tensors(*exports) for rank, exports in everyone if rank != this_rank}
    failed = opened is None or any(mapped is None for mapped in opened.values())
    outcomes: list = [None] * len(everyone)
    dist.all_gather_object(outcomes, failed, group=group)
    return None if any(outcomes) else opened


def exported_tensors(tensors: NamedTensors):
    """Return IPC handles of the tensors' allocations and each tensor's place in them.

    None if an allocation cannot be exported.
    """
    handles: dict[int, bytes] = {}  # by base address of the allocation
    places = {}
    for key, tensor in tensors.items():
        if not tensor.is_cuda or not tensor.is_contiguous():
            return None
        if not tensor.numel():
            continue
        base = ctypes.c_uint64()
        if _driver().cuMemGetAddressRange_v2(ctypes.byref(base), None, ctypes.c_uint64(tensor.data_ptr())):
            return None
        if base.value not in handles:
            handle = _Handle()
            if _driver().cuIpcGetMemHandle(ctypes.byref(handle), base):
                return None
            handles[base.value] = ctypes.string_at(ctypes.byref(handle), 64)
        places[key] = (base.value, tensor.data_ptr() - base.value, tuple(tensor.shape), tensor.dtype)
    return handles, places


def opened_tensors(handles: dict[int, bytes], places: dict) -> NamedTensors | None:
    """Map what `exported_tensors` has returned in another process; None if the driver refuses."""
    addresses = {}
    for base, handle in handles.items():
        address = ctypes.c_uint64()
        if _driver().cuIpcOpenMemHandle_v2(
            ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
        ):
            return None
        addresses[base] = address.value
    return {
        key: _tensor_at(addresses[base] + offset, shape, dtype)
        for key, (base, offset, shape, dtype) in places.items()
    }


class _Memory:
    """Raw device memory with the interface that torch accepts."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor over another rank's memory.

    Its `device` may be wrong; only its address, shape and strides are meaningful.
    """
    return torch.as_tensor(_Memory(address, math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")

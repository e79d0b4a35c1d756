"""Addresses of tensors as plain numbers that all ranks can plan with, and tensors at such addresses."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.reshard.in_place.memory_layout import Addresses, Key
from parallel.weights.shard import ShardedParameter


def allocations_of(parameters: Mapping[Key, Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct allocations that hold the parameters, in the order of their addresses."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in parameters.values()
        if tensor.numel()
    }
    return [storages[address] for address in sorted(storages)]


def addresses_of(parameters: Mapping[Key, Tensor]) -> Addresses:
    """Return the address of each parameter: an index into `allocations_of` and the first byte in it."""
    numbers = {storage.data_ptr(): number for number, storage in enumerate(allocations_of(parameters))}
    return {
        key: (
            numbers[tensor.untyped_storage().data_ptr()],
            int(tensor.storage_offset()) * tensor.element_size(),
        )
        for key, tensor in parameters.items()
        if tensor.numel()
    }


def views_at(
    addresses: Addresses,
    parameters: Sequence[ShardedParameter],
    memory: Mapping[Key, Tensor],
    dtype: torch.dtype,
) -> dict[Key, Tensor]:
    """Return tensors for the `parameters` that have an address, in the allocations that hold `memory`."""
    allocations = allocations_of(memory)
    views: dict[Key, Tensor] = {}
    for parameter in parameters:
        key = (parameter.chunk, parameter.name)
        if key in addresses:
            space, first = addresses[key]
            view: Any = torch.empty(0, dtype=dtype, device=allocations[space].device)
            views[key] = view.set_(allocations[space], first // dtype.itemsize, parameter.shape)
    return views

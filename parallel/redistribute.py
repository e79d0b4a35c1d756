"""Redistribute samples, entries of the first dimension of tensors, each to any number of ranks.

Letters: B samples, ... any trailing sizes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.rank_set import RankSet


def exchange_samples(
    tensors: dict[str, Tensor],
    destinations: Sequence[Sequence[int]],
    ranks: RankSet,
    *,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Send `tensor[b]` of every tensor to the ranks `destinations[b]`. Collective over `ranks`.

    Args:
        tensors: [B, ...] of any dtype, the same names, dtypes and number of dimensions on every rank of
            `ranks`; B may be 0. Trailing sizes may differ between ranks: samples are padded with zeros to the
            largest.
        destinations: for each local sample the ranks (numbered within `ranks`) that receive it; an empty
            list drops the sample.
        device: of the exchange and of the results; the GPU under NCCL.

    Returns:
        Tensors of the same names, [B', ...]: the B' received samples by source rank, then by source order.
    """
    assert all(len(value) == len(destinations) for value in tensors.values()), (
        "each tensor has one entry for every list of destinations"
    )
    group = ranks.group_for(device)
    order = sorted((rank, sample) for sample, receivers in enumerate(destinations) for rank in receivers)
    index = torch.tensor([sample for _, sample in order], dtype=torch.int64, device=device)
    sent = torch.zeros(ranks.size, dtype=torch.int64)
    for rank, _ in order:
        sent[rank] += 1
    send_counts, receive_counts = _exchange_counts(sent, group, device=device)
    shapes = _common_trailing_shapes(tensors, group, device=device)
    received = {}
    for name in sorted(tensors):  # the same order of collectives on every rank
        value = pad_trailing(tensors[name].to(device), shapes[name])
        received[name] = _all_to_all(value[index], send_counts, receive_counts, group)
    return {name: received[name] for name in tensors}


def _exchange_counts(
    sent: Tensor, group: ProcessGroup, *, device: torch.device | str
) -> tuple[list[int], list[int]]:
    sent = sent.to(device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return sent.tolist(), received.tolist()


def _common_trailing_shapes(
    tensors: dict[str, Tensor], group: ProcessGroup, *, device: torch.device | str
) -> dict[str, tuple[int, ...]]:
    """Return the largest trailing sizes over all ranks, by name."""
    names = sorted(tensors)
    flat = torch.tensor(
        [size for name in names for size in tensors[name].shape[1:]], dtype=torch.int64, device=device
    )
    if len(flat):
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
    largest = flat.cpu().split([tensors[name].dim() - 1 for name in names])
    return {name: tuple(sizes.tolist()) for name, sizes in zip(names, largest)}


def pad_trailing(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `value` [B, ...], padded with zeros at the end of every trailing dimension up to `shape`."""
    assert all(have <= want for have, want in zip(value.shape[1:], shape, strict=True)), (
        f"{tuple(value.shape)} is larger than {shape}"
    )
    if value.shape[1:] == shape:
        return value
    padded = value.new_zeros(len(value), *shape)
    padded[(slice(None), *(slice(size) for size in value.shape[1:]))] = value
    return padded


def _all_to_all(
    send: Tensor, send_counts: list[int], receive_counts: list[int], group: ProcessGroup
) -> Tensor:
    """Exchange the samples of `send`, which are ordered by destination; as bytes, so any dtype works."""
    total, shape, dtype = sum(receive_counts), send.shape[1:], send.dtype
    width = shape.numel() * send.element_size()
    payload = (
        send.contiguous().view(len(send), -1).view(torch.uint8)
        if len(send) and width
        else send.new_empty(len(send), width, dtype=torch.uint8)
    )
    received = torch.empty(total, width, dtype=torch.uint8, device=send.device)
    dist.all_to_all_single(received, payload, receive_counts, send_counts, group=group)
    if not total or not width:
        return send.new_empty(total, *shape, dtype=dtype)
    return received.view(dtype).view(total, *shape)

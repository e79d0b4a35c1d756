"""Offload of device memory: kept tensors are copied to pinned host memory, dropped ones return as zeros.

A storage is emptied and refilled in place, so tensors and all views of them remain valid objects.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from itertools import cycle

import torch
from torch import Tensor, UntypedStorage

from parallel.device import host_memory, release_cached_memory, threads

PIECE_BYTES = 64 * 2**20  # of one copy
PIECES_QUEUED = 8  # enough to keep the link busy while Python runs other code


class Residence(Enum):
    """The location of the contents."""

    ON_DEVICE = auto()  # on the device
    LEAVING = auto()  # on the device, being copied to the host
    ON_HOST = auto()  # on the host; the device memory is free
    RETURNING = auto()  # being copied to new device memory


class Offload:
    """Storages that are offloaded and onloaded together, repeatedly.

    The order of calls is offload_async, wait_offload, onload_async, wait; a call with nothing to do returns
    at once. All calls come from one thread and one current stream, on which the tensors are used. Copies run
    concurrently on streams of their own, queued piece by piece by a background thread. On a CPU the copies
    are synchronous.
    """

    def __init__(self, device: torch.device):
        self.device, self.residence = device, Residence.ON_DEVICE
        self.device_bytes = 0  # freed by the latest offload
        self._kept: list[tuple[UntypedStorage, int]] = []  # with their sizes in bytes
        self._dropped: list[tuple[UntypedStorage, int]] = []
        self._blocks: list[Tensor] = []
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        self._thread = threads(1, "offload")
        self._copied: Future[torch.Event] | None = None

    @property
    def host_bytes(self) -> int:
        """Host memory that is held from the first offload on, pinned if the device is a GPU."""
        return sum(block.numel() for block in self._blocks)

    def offload_async(
        self, *, keep: Iterable[Tensor], drop: Iterable[Tensor], stay: Iterable[Tensor]
    ) -> None:
        """Begin to copy `keep` to the host.

        Until `wait_offload` all tensors may be read; writes to `keep` may be lost.

        Args:
            keep: tensors whose contents are restored by `onload_async`.
            drop: tensors whose contents are lost; they return as zeros.
            stay: tensors whose storages stay on the device, also if they contain other tensors. Tensors of
                other devices stay, too.
        """
        if self.residence in (Residence.LEAVING, Residence.ON_HOST):
            return
        self.wait()
        taken = {tensor.untyped_storage().data_ptr() for tensor in stay}
        self._kept, self._dropped = self._storages(keep, taken), self._storages(drop, taken)
        self.device_bytes = sum(size for _, size in self._kept + self._dropped)
        self._copy(to_host=True)
        self.residence = Residence.LEAVING

    def _storages(self, tensors: Iterable[Tensor], taken: set[int]) -> list[tuple[UntypedStorage, int]]:
        """Return the storages of `tensors` that are not in `taken` (addresses), each once; add them to it."""
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == self.device and storage.nbytes() and storage.data_ptr() not in taken:
                taken.add(storage.data_ptr())
                found.append((storage, storage.nbytes()))
        return found

    def wait_offload(self, *, for_others: bool = True) -> None:
        """Wait for the copies and free the device memory. Afterwards the tensors may not be used.

        Args:
            for_others: return the memory to the device for other allocators; False keeps it in PyTorch's
                cache.
        """
        if self.residence is not Residence.LEAVING:
            return
        if self._copied is not None:
            self._copied.result().synchronize()  # memory freed here is at once reusable on the current stream
        for storage, _ in self._kept + self._dropped:
            storage.resize_(0)
        if for_others:
            release_cached_memory()
        self.residence = Residence.ON_HOST

    def onload_async(self) -> None:
        """Allocate device memory again, at other addresses, and begin to restore the contents.

        Cancels an unfinished offload. Dropped tensors may be used from here on, kept ones after `wait`.
        """
        if self.residence is Residence.ON_HOST:
            for storage, size in self._kept + self._dropped:
                storage.resize_(size)
            self._copy(to_host=False)
            for storage, _ in self._dropped:
                _bytes_of(storage).zero_()
            self.residence = Residence.RETURNING
        elif self.residence is Residence.LEAVING:
            self.residence = Residence.RETURNING

    def wait(self) -> None:
        """Make the current stream wait for the copies; the host waits only until the last copy is queued."""
        assert self.residence in (Residence.ON_DEVICE, Residence.RETURNING), (
            f"nothing is on its way back: {self.residence.name}; call onload_async first"
        )
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied.result())
        # Drop the references, so that the owners can free the tensors.
        self._kept, self._dropped, self._copied, self.residence = [], [], None, Residence.ON_DEVICE

    def _copy(self, *, to_host: bool) -> None:
        """Copy the kept storages to the host or back.

        The copies follow the work queued on the current stream and run concurrently with later work.
        """
        missing = sum(size for _, size in self._kept) - self.host_bytes
        if missing > 0:
            self._blocks.append(host_memory(missing, owner=self))
        pairs = list(_pieces([_bytes_of(storage) for storage, _ in self._kept], self._blocks))
        copies = [(here, there) if to_host else (there, here) for there, here in pairs]
        if self.device.type == "cuda":
            self._streams = self._streams or (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
            # Needed to onload, too: kernels of this stream may still use earlier contents of the new memory.
            begin = torch.cuda.current_stream(self.device).record_event()
            self._copied = self._thread.submit(copy_beside, copies, self._streams, begin)
        else:
            for target, source in copies:
                target.copy_(source)


def copy_beside(
    copies: Iterable[tuple[Tensor, Tensor]], streams: Sequence[torch.cuda.Stream], begin: torch.Event
) -> torch.Event:
    """Queue the copies (target, source) on alternating streams, one after the other, the first after `begin`.

    The copy engine of a direction stays with a stream as long as that stream has copies: another copy issued
    during 16 GiB of offload waited for all of it, 310 ms. At a piece that waits for another stream the engine
    switches: the wait is 1.3 ms, at the same 55 GB/s (`verl-megatron benchmark copies`, H200).

    Returns:
        The event after the last copy.
    """
    queued = deque([begin])
    for (target, source), stream in zip(copies, cycle(streams)):
        if len(queued) > PIECES_QUEUED:
            queued.popleft().synchronize()
        with torch.cuda.stream(stream):
            stream.wait_event(queued[-1])
            target.copy_(source, non_blocking=True)
            queued.append(stream.record_event())
    return queued[-1]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """Return the whole storage as a tensor [N] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pieces(parts: Iterable[Tensor], blocks: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of pieces of equal length, at most PIECE_BYTES, from the concatenated parts and blocks.

    The blocks may be longer in total than the parts.
    """
    following = iter(blocks)
    block = torch.empty(0)
    for part in parts:
        while part.numel():
            block = block if block.numel() else next(following)
            size = min(part.numel(), block.numel(), PIECE_BYTES)
            yield part[:size], block[:size]
            part, block = part[size:], block[size:]


# ---- tensors of a trained Megatron-Core model that are not needed while vLLM generates -------------


def gradients(chunks: Iterable) -> list[Tensor]:
    """Return the gradient buffers of DistributedDataParallel chunks.

    Every bucket and every parameter's main_grad is a view of one of them. Chunks that are fully sharded have
    none: they free their gradients after each step.
    """
    wrapped = [chunk for chunk in chunks if isinstance(chunk.buffers, list)]
    return [buffer.grad_data for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def optimizer_tensors(optimizer) -> list[Tensor]:
    """Return the parameters that a Megatron optimizer steps and its moments, if they exist yet.

    In bfloat16 the parameters are the float32 master weights. In float32 they are the model's own, which the
    caller passes as `stay`.
    """
    stepped = [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
    moments = [
        value for _, state in optimizer.state.items() for name, value in state.items() if name != "step"
    ]
    return stepped + [value for value in moments if isinstance(value, Tensor)]


def missing_moments_bytes(optimizer) -> int:
    """Return the bytes of Adam's float32 moments that a Megatron optimizer's first step will allocate."""
    stepped = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    both = sum(tensor.numel() for tensor in optimizer_tensors(optimizer))  # and the moments that exist
    return 4 * max(0, 3 * stepped - both)

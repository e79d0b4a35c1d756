"""Device memory given up for a while: what is kept waits in pinned host memory, what is dropped comes back zeroed.

A storage is emptied and filled again in place, so tensors, and all views of them, stay the objects that their owners hold.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from itertools import cycle

import torch
from torch import Tensor, UntypedStorage

from parallel.device import host_memory, release_cached_memory

PIECE_BYTES = 64 * 2**20  # of one copy
PIECES_QUEUED = 8  # enough to keep the link busy while Python does something else


class Residence(Enum):
    """Where the contents are."""

    ON_DEVICE = auto()  # on the device
    LEAVING = auto()  # on the device, and being copied to the host
    ON_HOST = auto()  # on the host; the device's memory is free
    RETURNING = auto()  # in new device memory, and being copied there


class Offload:
    """Storages that leave a device and come back together: offload_async, wait_offload, onload_async, wait, and again.

    A call with nothing to do does nothing. All calls come from one thread and one current stream, the one on which the tensors
    are used; copies run beside it on streams of their own, which a thread gives them piece by piece. On a CPU the same happens
    without streams and thread.
    """

    def __init__(self, device: torch.device):
        self.device, self.residence = device, Residence.ON_DEVICE
        self.device_bytes = 0  # of what the latest release moved
        self._kept: list[tuple[UntypedStorage, int]] = []  # with their sizes in bytes
        self._dropped: list[tuple[UntypedStorage, int]] = []
        self._blocks: list[Tensor] = []
        self._streams: tuple[torch.cuda.Stream, ...] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._copied: Future[torch.cuda.Event] | None = None

    @property
    def host_bytes(self) -> int:
        """Host memory held from the first release on, pinned on a GPU's host."""
        return sum(block.numel() for block in self._blocks)

    def offload_async(
        self, *, keep: Iterable[Tensor], drop: Iterable[Tensor], stay: Iterable[Tensor]
    ) -> None:
        """Begin to copy `keep` to the host. Until `wait_offload` all tensors may be read; what is written to `keep` may be lost.

        Args:
            keep: whose contents come back.
            drop: whose contents are lost: they come back zeroed.
            stay: a storage with one of these never leaves, whatever else is in it. Nor do tensors of other devices.
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
        """The storages of `tensors`, each once; adds them to `taken`, the addresses of those that are dealt with."""
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == self.device and storage.nbytes() and storage.data_ptr() not in taken:
                taken.add(storage.data_ptr())
                found.append((storage, storage.nbytes()))
        return found

    def wait_offload(self, *, for_others: bool = True) -> None:
        """Wait for the copies and free the device's memory. The tensors may not be used now.

        Args:
            for_others: other allocators get the memory, too; False leaves it to PyTorch.
        """
        if self.residence is not Residence.LEAVING:
            return
        if self._copied is not None:
            self._copied.result().synchronize()  # memory freed here belongs to the current stream again at once
        for storage, _ in self._kept + self._dropped:
            storage.resize_(0)
        if for_others:
            release_cached_memory()
        self.residence = Residence.ON_HOST

    def onload_async(self) -> None:
        """Take memory again (other than before) and begin to fill it; a release that is not finished is called off.

        Dropped tensors may be used from here on, kept ones after `wait`.
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
        """What the current stream is given from here on finds everything in place; the host waits until the last copies are queued."""
        assert self.residence in (Residence.ON_DEVICE, Residence.RETURNING), (
            f"nothing is on its way back: {self.residence.name}; call onload_async first"
        )
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied.result())
        self._kept, self._dropped, self._copied, self.residence = (
            [],
            [],
            None,
            Residence.ON_DEVICE,
        )  # their owners may let go of the tensors

    def _copy(self, *, to_host: bool) -> None:
        """Copy the kept storages to the host or back, after what the current stream was given, beside what it is given next."""
        missing = sum(size for _, size in self._kept) - self.host_bytes
        if missing > 0:
            self._blocks.append(host_memory(missing, owner=self))
        pairs = list(_pieces([_bytes_of(storage) for storage, _ in self._kept], self._blocks))
        copies = [(here, there) if to_host else (there, here) for there, here in pairs]
        if self.device.type == "cuda":
            self._streams = self._streams or (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
            # On the way back too: kernels of this stream may still work on what the new memory held before.
            begin = torch.cuda.current_stream(self.device).record_event()
            self._copied = self._thread.submit(copy_beside, copies, self._streams, begin)
        else:
            for target, source in copies:
                target.copy_(source)


def copy_beside(
    copies: Iterable[tuple[Tensor, Tensor]], streams: Sequence[torch.cuda.Stream], begin: torch.cuda.Event
) -> torch.cuda.Event:
    """Give the streams in turn the copies (target, source), each after the one before, the first after `begin`; the event after the last.

    One direction's copy engine stays with a stream as long as that has copies: a copy of the work beside 16 GiB had to wait for all of
    it, 310 ms. At a piece that waits for another stream's the engine turns to others: 1.3 ms, at the same 55 GB/s (tools/bench_copies.py, H200).
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
    """[N] uint8: all of the storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pieces(parts: Iterable[Tensor], blocks: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of equally long pieces of both, as if each were one row, of at most PIECE_BYTES; the blocks may be longer together."""
    following = iter(blocks)
    block = torch.empty(0)
    for part in parts:
        while part.numel():
            block = block if block.numel() else next(following)
            size = min(part.numel(), block.numel(), PIECE_BYTES)
            yield part[:size], block[:size]
            part, block = part[size:], block[size:]


# ---- what a Megatron-Core model that learns can do without while vLLM generates ---------------------------------------


def gradients(chunks: Iterable) -> list[Tensor]:
    """The gradient buffers of DistributedDataParallel chunks; every bucket and every parameter's main_grad is a view of one."""
    return [buffer.grad_data for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def optimizer_tensors(optimizer) -> list[Tensor]:
    """What a Megatron optimizer steps on and its moments, as far as there are any yet.

    In bfloat16 that is the float32 master weights; in float32 the model's own parameters, which the caller lets stay.
    """
    stepped = [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
    moments = [
        value for _, state in optimizer.state.items() for name, value in state.items() if name != "step"
    ]
    return stepped + [value for value in moments if isinstance(value, Tensor)]

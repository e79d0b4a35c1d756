"""Weights in numbered versions: training publishes a snapshot and goes on, generation adopts it when it likes; the transfer runs between the two.

Each rank has a thread that works through rounds, all ranks the same ones. In a round every rank says over the CPU whether it is
ready: a source once it has published, a destination once it has adopted what came before. If all are, the thread runs the
`Resharder` from the sources' snapshots into the destinations' back buffers; if not, the next round follows. A rank that is not
ready waits up to `TICK_S` before it says so; no GPU waits for an announcement.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device as machine
from parallel.reshard.execute import Parameters, Resharder, ReshardReport
from parallel.reshard.plan import Plan

TICK_S = 1.0  # longest time until the other ranks hear of a close; far below the timeout of any group

# What a rank says in a round. A source says the number of the version that it has published.
_CLOSED, _NOT_READY, _ANY_VERSION = -1, 0, 2**62


def background_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group for the threads alone, which carries announcements on the CPU and weights on any device. Every rank of the world has to call this."""
    return dist.new_group(list(ranks), backend="cpu:gloo,cuda:nccl" if machine.is_gpu() else "gloo")


class VersionedReshard:
    """Moves versions of one engine's parameters into another's while both go on working.

    A rank may be a source, a destination, both or neither. Constructing it is collective over `group`; afterwards each rank
    calls what it needs, from one thread. Every source publishes the same versions, and each destination adopts each of them:
    a version leaves the snapshot once all have adopted the one before. So one snapshot (`snapshot_bytes`) and one back buffer
    (`back_bytes`) are enough, and the n-th `adopt()` gives the same version on every rank. `ready()` and `in_flight()` may
    differ between ranks for a moment: ranks that act together let one of them ask and tell the others.

    An error in the background (`ReshardError`, a peer that is gone) is raised by the next call of any method, again and again.

    Where NCCL carries the weights, its kernels run beside those of other communicators in no common order. Each finds room on
    the GPU unless CUDA_DEVICE_MAX_CONNECTIONS=1 queues them behind each other, which can block for ever; with that setting give
    `device=torch.device("cpu")`, which keeps both buffers and the messages in host memory.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        source: Parameters,
        destination: Parameters,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        device: torch.device,
        verify: Literal["sample", "all", "none"] = "sample",
    ):
        """Allocate the buffers and start the thread.

        Args:
            plan: compiled without `peer_memory`.
            rank: this process's world rank.
            source: this rank's parameters that the plan reads. They may change at any time, but have to stay where they are.
            destination: those that it writes, of type `dtype`; only `adopt()` touches them.
            dtype: of an element on its way and in the snapshot.
            group: from `background_group`, over every rank of the plan; nothing else may use it.
            device: where buffers and messages are; with the CPU the parameters may still be on GPUs.
            verify: which slices are proved on their way from snapshot to back buffer, as in `Resharder`.

        Raises:
            ValueError: the group is the world's or cannot carry CPU tensors, or what `Resharder` refuses.
        """
        if group is None or group is dist.group.WORLD or "cpu:gloo" not in dist.get_backend_config(group):
            raise ValueError(
                "weights in the background need a process group of their own that also carries CPU tensors;"
                " make one with background_group"
            )
        if any(transfer.source_rank != transfer.destination_rank for transfer in plan.direct):
            raise ValueError(
                "snapshots are not mapped into other ranks; compile the plan of a VersionedReshard with"
                " peer_memory=False"
            )
        read = {transfer.source[:2] for transfer in plan.transfers() if transfer.source_rank == rank}
        written = {
            transfer.destination[:2] for transfer in plan.transfers() if transfer.destination_rank == rank
        }
        written |= {(hole.chunk, hole.name) for hole in plan.padding if hole.rank == rank}
        self.rank, self.group = rank, group
        self._source = {key: tensor.detach() for key, tensor in source.items() if key in read}
        self._destination = {key: tensor.detach() for key, tensor in destination.items() if key in written}
        self._snapshot = {key: _buffer_like(tensor, dtype, device) for key, tensor in self._source.items()}
        self._back = {
            key: _buffer_like(tensor, tensor.dtype, device) for key, tensor in self._destination.items()
        }
        self.snapshot_bytes, self.back_bytes = (
            sum(tensor.nbytes for tensor in buffer.values()) for buffer in (self._snapshot, self._back)
        )
        self.resharder = Resharder(
            plan,
            rank=rank,
            source=self._snapshot,
            destination=self._back,
            dtype=dtype,
            group=group,
            device=device,
            verify=verify,
        )

        self.version = 0  # that the destination holds
        self.transferred = 0  # the last version that left the snapshot, or reached the back buffer
        self.report: ReshardReport | None = None  # of that transfer
        self._published = 0
        # The thread and its owner share what follows, under the lock of `_changed`.
        self._changed = threading.Condition()
        self._pending: int | None = None  # version in the snapshot, until it has left
        self._arrived: int | None = None  # version in the back buffer, until it is adopted
        self._closing = self._ended = False
        self._closed_by: list[int] = []  # world ranks
        self._error: BaseException | None = None

        self._gpu = machine.device()  # a new thread would begin on GPU 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._hand_over()
        self._thread = threading.Thread(target=self._serve, name=f"weights of rank {rank}", daemon=True)
        self._thread.start()

    def publish(self, version: int) -> None:
        """Copy this rank's source parameters, as they are, into the snapshot and let it travel; they may change as soon as this returns.

        Waits until the version before has left the snapshot. Every source rank calls it; on a rank that the plan takes
        nothing from (a replica) it only checks the number.

        Raises:
            ValueError: `version` is not above the last one.
            RuntimeError: a rank closed, or this rank itself has to adopt a version first.
        """
        with self._changed:
            self._raise_error()
            if not self._published < version < _ANY_VERSION:
                raise ValueError(
                    f"version {version} cannot follow version {self._published}; versions are numbered"
                    " upwards from 1"
                )
            if self._pending is not None and self._arrived is not None:
                raise RuntimeError(
                    f"version {self._pending} cannot leave rank {self.rank} before it adopts version"
                    f" {self._arrived}; call adopt() first"
                )
            self._wait(lambda: self._pending is None)
            if self._ended:
                raise RuntimeError(self._reason(f"version {version} is not published"))
            _copy(self._snapshot, self._source)
            self._hand_over()
            self._published = version
            if self._snapshot:
                self._pending = version
                self._changed.notify_all()

    def in_flight(self) -> bool:
        """Whether a published version has not left the snapshot yet, so that `publish` would wait."""
        with self._changed:
            self._raise_error()
            return self._pending is not None and not self._ended

    def ready(self) -> bool:
        """Whether a version is complete in the back buffer, so that `adopt` would not wait."""
        with self._changed:
            self._raise_error()
            return self._arrived is not None

    def adopt(self) -> int:
        """Wait for the next version, copy it into the destination parameters and return its number. Nothing may read them meanwhile.

        Raises:
            ValueError: the plan gives this rank nothing.
            RuntimeError: a rank closed and no version is left.
        """
        with self._changed:
            self._raise_error()
            if not self._back:
                raise ValueError(f"the plan gives rank {self.rank} no weights to adopt")
            self._wait(lambda: self._arrived is not None)
            if self._arrived is None:
                raise RuntimeError(self._reason(f"no version follows {self.version}"))
            _copy(self._destination, self._back)
            self._hand_over()
            machine.synchronize()  # the next reader may use another stream
            self.version, self._arrived = self._arrived, None
            self._changed.notify_all()
            return self.version

    @property
    def closed(self) -> bool:
        """Whether nothing is transferred any more: this rank or another has closed, or an error happened."""
        return self._ended

    def close(self) -> None:
        """End the exchange for all ranks; every rank has to call it before the process group goes away.

        What this rank has published leaves first, unless another rank closes before. A complete version can still be adopted.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._raise_error()

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            if self._gpu.type == "cuda":
                torch.cuda.set_device(self._gpu)
            with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                while (version := self._round()) != _CLOSED:
                    if version != _NOT_READY:
                        self._transfer(version)
        except BaseException as error:  # the next call raises it
            error.add_note(f"in the background of rank {self.rank}, after version {self.transferred}")
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _round(self) -> int:
        """All ranks speak; the version that they are all ready to move, or `_NOT_READY`, or `_CLOSED`."""
        word = torch.tensor([self._word()])
        said = [torch.empty_like(word) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(said, word, group=self.group)
        words = [int(word) for word in said]
        if _CLOSED in words:
            self._closed_by = [
                rank for rank, word in zip(dist.get_process_group_ranks(self.group), words) if word == _CLOSED
            ]
            return _CLOSED
        if _NOT_READY in words:
            return _NOT_READY
        versions = sorted(set(words) - {_ANY_VERSION})
        if len(versions) != 1:
            raise RuntimeError(
                f"the source ranks published versions {versions} at the same time; every one has to publish"
                " each version"
            )
        return versions[0]

    def _word(self) -> int:
        def is_ready() -> bool:
            return self._arrived is None and (self._pending is not None or not self._snapshot)

        with self._changed:
            self._changed.wait_for(lambda: self._closing or is_ready(), TICK_S)
            if is_ready() and self._pending is not None:
                return self._pending
            if self._closing:
                return _CLOSED
            return _ANY_VERSION if is_ready() else _NOT_READY

    def _transfer(self, version: int) -> None:
        report = self.resharder.run()
        if self._stream:
            self._stream.synchronize()
        with self._changed:
            self.report, self.transferred = report, version
            self._pending = None
            self._arrived = version if self._back else None
            self._changed.notify_all()

    # ---- both sides -----------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """The thread's work comes after what the caller has queued so far."""
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def _wait(self, is_so: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: is_so() or self._ended)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _reason(self, consequence: str) -> str:
        return f"{consequence}: rank {', '.join(map(str, self._closed_by))} closed the exchange of weights"


def _buffer_like(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(
        tensor.shape, dtype=dtype, device=device, pin_memory=tensor.is_cuda and device.type == "cpu"
    )


def _copy(to: Parameters, source: Parameters) -> None:
    if to:
        with torch.no_grad():
            torch._foreach_copy_(list(to.values()), [source[key] for key in to])

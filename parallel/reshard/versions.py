"""Asynchronous weight sync in numbered versions, by a background thread.

Training publishes a snapshot and continues; generation adopts it when it chooses to.

    training:    parameters --publish()--> snapshot
                                              |  background thread: Resharder
    generation:  parameters <--adopt()--- back buffer

The thread of each rank works in rounds, the same ones on all ranks. In a round every rank reports over the
CPU whether it is ready: a source rank once it has published, a destination rank once it has adopted the
previous version. If all are ready, the threads run the `Resharder` from the snapshots into the back buffers;
else the next round follows. A rank that is not ready waits up to `TICK_S` before it reports; no GPU waits for
a report.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device as machine
from parallel.rank_set import new_group
from parallel.reshard.execute import Resharder, ReshardReport
from parallel.reshard.plan import Plan
from parallel.reshard.staged import StagedParameters
from parallel.reshard.transport import Parameters, Transport

Key = tuple[int, str]  # model chunk, parameter
TICK_S = 1.0  # longest time until the other ranks learn of a close; far below the timeout of any group

# A rank's report in a round. A source rank reports the number of the version that it has published.
_CLOSED, _NOT_READY, _ANY_VERSION = -1, 0, 2**62


def background_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create the process group of the background threads: reports on the CPU, weights on any device.

    Every rank of the world must call this.
    """
    return new_group(ranks, "cpu:gloo,cuda:nccl" if machine.is_gpu() else "gloo", timeout=None)


class VersionedReshard:
    """Copies versions of one engine's parameters into another's while both keep working.

    A rank may be a source, a destination, both or neither. The constructor is collective over `group`.
    Afterwards each rank calls the methods that it needs, from one thread.

    Every source rank publishes the same versions, and every destination rank adopts each of them. A version
    leaves the snapshot once all ranks have adopted the previous one. One snapshot (`snapshot_bytes`) and one
    back buffer (`back_bytes`) are therefore enough, and the n-th `adopt()` returns the same version on every
    rank. `ready()` and `in_flight()` may differ between ranks for a moment: ranks that act together should
    let one of them query and broadcast the answer.

    An error in the background (`ReshardError`, a lost peer) is raised by every later call of any method.

    NCCL's kernels run concurrently with those of other communicators, in no common order. Each finds room on
    the GPU unless CUDA_DEVICE_MAX_CONNECTIONS=1 serializes them, which can deadlock. With that setting pass
    a transport with `device=torch.device("cpu")`, which keeps both buffers and the messages in host memory.
    """

    def __init__(
        self,
        plan: Plan,
        source: Parameters,
        destination: Parameters,
        transport: Transport,
        *,
        keep: Callable[[int, Parameters], None] | None = None,
        staged: StagedParameters | None = None,
    ):
        """Allocate the buffers and start the thread.

        Args:
            plan: compiled without `peer_memory`.
            source: this rank's parameters that the plan reads. Values may change at any time, addresses not.
            destination: the parameters that the plan writes, of the transport's dtype; only `adopt()` touches
                them.
            transport: its group is from `background_group` or of a `Bridge`, over every rank of the plan, and
                nothing else may use it. Its device is that of the buffers and messages; with the CPU the
                parameters may still be on GPUs. Slices are verified between snapshot and back buffer.
            keep: called in the background with each version and its snapshot, which is empty on a rank that
                the plan does not read, once it has been transferred.
            staged: parameters in another form; `adopt()` converts them out of the back buffer.

        Raises:
            ValueError: the group is the world's or cannot carry CPU tensors, or as in `Resharder`.
        """
        _check_transport(plan, transport)
        self.rank, self.group, device = transport.rank, transport.group, transport.device
        self._all_ranks = transport.all_ranks
        read, written = _keys_of(plan, self.rank)
        self._source = {key: tensor.detach() for key, tensor in source.items() if key in read}
        self._destination = {key: tensor.detach() for key, tensor in destination.items() if key in written}
        self._snapshot = {
            key: _buffer_like(tensor, transport.dtype, device) for key, tensor in self._source.items()
        }
        self._back = {
            key: _buffer_like(tensor, tensor.dtype, device) for key, tensor in self._destination.items()
        }
        self._staged = staged or StagedParameters(shapes={}, write=lambda values: None)
        for key, shape in self._staged.shapes.items():
            self._back[key] = torch.zeros(shape, dtype=transport.dtype, device=device)
        self.snapshot_bytes, self.back_bytes = _bytes_of(self._snapshot), _bytes_of(self._back)
        self.resharder = Resharder(plan, self._snapshot, self._back, transport)

        self.version = 0  # the version in the destination parameters
        self.transferred = 0  # the last version that left the snapshot or reached the back buffer
        self.report: ReshardReport | None = None  # of that transfer
        self.transfer_s = 0.0  # from `publish` until it had left; on source ranks
        self.adopt_s = 0.0  # from the arrival of `version` until `adopt` returned; on destination ranks
        self._published, self._published_at, self._arrived_at = 0, 0.0, 0.0
        # The thread and the caller share the fields below, under the lock of `_changed`.
        self._changed = threading.Condition()
        self._pending: int | None = None  # version in the snapshot, until it is transferred
        self._arrived: int | None = None  # version in the back buffer, until it is adopted
        self._keep = keep
        self._closing = self._ended = False
        self._closed_by: list[int] = []  # world ranks
        self._error: BaseException | None = None
        self._start_thread(device)

    def _start_thread(self, device: torch.device) -> None:
        self._gpu = machine.device()  # a new thread would start on GPU 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._order_streams()
        self._thread = threading.Thread(target=self._serve, name=f"weights of rank {self.rank}", daemon=True)
        self._thread.start()

    def publish(self, version: int, values: Parameters | None = None) -> None:
        """Copy this rank's source parameters into the snapshot and start its transfer.

        Waits until the previous version has left the snapshot. The parameters may change as soon as this
        returns. Every source rank calls it; on a rank that the plan does not read (a replica) it only checks
        the number.

        Args:
            values: a copy of a snapshot to publish instead of the parameters' present values.

        Raises:
            ValueError: `version` is not above the last one.
            RuntimeError: a rank closed, or this rank must adopt a version first.
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
            self._published_at = time.perf_counter()
            _copy(self._snapshot, self._source if values is None else values)
            self._order_streams()
            self._published = version
            if self._snapshot:
                self._pending = version
                self._changed.notify_all()

    def in_flight(self) -> bool:
        """Return whether a published version has not left the snapshot yet, so that `publish` would wait."""
        with self._changed:
            self._raise_error()
            return self._pending is not None and not self._ended

    def ready(self) -> bool:
        """Return whether a version is complete in the back buffer, so that `adopt` would not wait."""
        with self._changed:
            self._raise_error()
            return self._arrived is not None

    @property
    def back(self) -> Parameters:
        """The back buffer, at fixed addresses; empty on a rank that is no destination."""
        return self._back

    def adopt(self, record: Callable[[], None] = lambda: None) -> int:
        """Wait for the next version, copy it into the destination parameters and return its number.

        Nothing may read the parameters meanwhile.

        Args:
            record: called once the parameters have the version, which is still in the back buffer.

        Raises:
            ValueError: this rank is no destination of the plan.
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
            with torch.no_grad():
                self._staged.write({key: self._back[key] for key in self._staged.shapes})
            record()
            self._order_streams()
            machine.synchronize()  # the next reader may use another stream
            self.version, self._arrived = self._arrived, None
            self.adopt_s = time.perf_counter() - self._arrived_at
            self._changed.notify_all()
            return self.version

    @property
    def closed(self) -> bool:
        """True once transfers have ended: this rank or another has closed, or an error occurred."""
        return self._ended

    def close(self) -> None:
        """End the exchange for all ranks; every rank must call it before the process group is destroyed.

        A version that this rank has published is transferred first, unless another rank closes earlier. A
        complete version can still be adopted.
        """
        self.begin_close()
        self._thread.join()
        self._raise_error()

    def begin_close(self) -> None:
        """Begin what `close` does; `closed` tells when it would not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def abandon(self) -> tuple[int, Parameters] | None:
        """End the exchange on this rank alone, because other ranks are gone; return what has not left yet.

        That is a version and its snapshot, empty as for `keep`. The thread ends once its group is let go of.
        """
        with self._changed:
            self._closing = self._ended = True
            self._changed.notify_all()
            return None if self.transferred >= self._published else (self._published, self._snapshot)

    # ---- the thread --------------------------------------------------------------------------------

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
        """Exchange the reports; return the version to transfer, `_NOT_READY` or `_CLOSED`."""
        report = torch.tensor([self._status()])
        gathered = [torch.empty_like(report) for _ in range(self.group.size())]
        self.group.allgather(
            [gathered], [report]
        ).wait()  # torch.distributed would hide errors of bare groups
        statuses = [int(status) for status in gathered]
        if _CLOSED in statuses:
            self._closed_by = [rank for rank, status in zip(self._all_ranks, statuses) if status == _CLOSED]
            return _CLOSED
        if _NOT_READY in statuses:
            return _NOT_READY
        versions = sorted(set(statuses) - {_ANY_VERSION})
        if len(versions) != 1:
            raise RuntimeError(
                f"the source ranks published versions {versions} at the same time; every one has to publish"
                " each version"
            )
        return versions[0]

    def _status(self) -> int:
        """Return this rank's report: the version that it has published, or one of the constants above."""

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
        if self._keep is not None:
            self._keep(version, self._snapshot)
        with self._changed:
            self.report, self.transferred = report, version
            self._pending = None
            self._arrived, self._arrived_at = version if self._back else None, time.perf_counter()
            self.transfer_s = self._arrived_at - self._published_at
            self._changed.notify_all()

    # ---- both sides --------------------------------------------------------------------------------

    def _order_streams(self) -> None:
        """Make the thread's stream wait for the work that the caller has queued so far."""
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: condition() or self._ended)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _reason(self, consequence: str) -> str:
        return f"{consequence}: rank {', '.join(map(str, self._closed_by))} closed the exchange of weights"


def _check_transport(plan: Plan, transport: Transport) -> None:
    group = transport.group
    unfit = transport.ranks is None and (
        group is None or group is dist.group.WORLD or "cpu:gloo" not in dist.get_backend_config(group)
    )
    if unfit:
        raise ValueError(
            "weights in the background need a process group of their own that also carries CPU tensors;"
            " make one with background_group"
        )
    if any(transfer.source_rank != transfer.destination_rank for transfer in plan.direct):
        raise ValueError(
            "snapshots are not mapped into other ranks; compile the plan of a VersionedReshard with"
            " peer_memory=False"
        )


def _keys_of(plan: Plan, rank: int) -> tuple[set[Key], set[Key]]:
    """Return the parameters that the plan reads and those that it writes on a rank."""
    read, written = set(), set()
    for transfer in plan.transfers():
        if transfer.source_rank == rank:
            read.add(transfer.source[:2])
        if transfer.destination_rank == rank:
            written.add(transfer.destination[:2])
    return read, written | {(part.chunk, part.name) for part in plan.padding if part.rank == rank}


def _bytes_of(buffer: Parameters) -> int:
    return sum(tensor.nbytes for tensor in buffer.values())


def _buffer_like(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(
        tensor.shape, dtype=dtype, device=device, pin_memory=tensor.is_cuda and device.type == "cpu"
    )


def _copy(to: Parameters, source: Parameters) -> None:
    if to:
        with torch.no_grad():
            torch._foreach_copy_(list(to.values()), [source[key] for key in to])

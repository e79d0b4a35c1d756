"""Execute a reshard plan: direct copies, windows of packed messages, and the checksum proof.

All names are resolved once, when the `Resharder` is constructed. Where ranks cannot read each other's memory,
a window is one message per pair of ranks, and three windows overlap:

    time ------>     (every row is one window; even and odd ones use opposite ends of the staging memory)
    window 0     pack | send   | unpack
    window 1            pack   | send   | unpack
    window 2                     pack   | send   | unpack        (packed after window 0 is unpacked)

Ranks that can read each other's memory (`parallel.reshard.peers`) send nothing. The destination rank copies
out of the source rank's parameters, or out of its staging memory (`one_sided`):

    launch 0     pack 0             barrier
    launch 1     unpack 0, pack 1   barrier
    launch 2     unpack 1, pack 2   barrier
"""

import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.reshard.kernels import Copies
from parallel.reshard.peers import Mapped, map_tensors
from parallel.reshard.plan import Plan
from parallel.reshard.proof import Proof, ReshardError
from parallel.reshard.transfer import Position, Window

Parameters = dict[tuple[int, str], Tensor]  # by (model chunk, name)


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """Statistics of one run on this rank."""

    seconds: float = 0.0  # including the proof
    bytes_received: int = 0  # from other ranks
    bytes_sent: int = 0
    bytes_local: int = 0  # copied from this rank's own parameters
    checked_slices: int = 0  # on all ranks


Pairs = list[tuple[Tensor, Tensor]]  # destinations and sources of copies


@dataclass(slots=True)
class _Window:
    """The copies and messages of one window on this rank."""

    pack: Pairs = field(default_factory=list)  # parameters to staging memory
    unpack: Pairs = field(default_factory=list)  # staging memory (a peer's if one_sided) to parameters
    givers: list[int] = field(default_factory=list)  # source rank of each pair in `unpack`
    messages: list[dist.P2POp] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Staging:
    """Offsets of a window's slices in every rank's staging memory.

    Even windows start at the beginning of the memory, odd ones finish at its end:

        | even window ...  |  free  |  odd window ... |
    """

    sizes: Mapping[int, int]  # elements, by rank
    used: dict[int, int] = field(default_factory=dict)

    def begin(self, number: int, elements: Mapping[int, int]) -> None:
        self.used = {
            rank: 0 if number % 2 == 0 else self.sizes[rank] - size for rank, size in elements.items()
        }

    def take(self, rank: int, elements: int) -> int:
        self.used[rank] += elements
        return self.used[rank] - elements


class Resharder:
    """Copies the parameters of one engine into those of another, in place and repeatedly.

    The constructor and `run()` are collective over `group`. The parameters must keep their addresses.
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
        peers: Mapping[int, Mapped] | None = None,
        staging: Tensor | None = None,
    ):
        """Resolve every slice.

        Args:
            rank: this process's world rank. It may be a source, a destination, both or neither.
            source: this rank's parameters that the plan reads, on `device`; empty if it is no source.
            destination: the parameters that the plan writes, on `device`, of `dtype`; others are left alone.
            dtype: of a transferred element; the source rank casts before it sends.
            group: spans every rank of the plan.
            peers: IPC tensors of all other ranks' sources, from `map_tensors`; required by a plan compiled
                with `peer_memory`.
            staging: [N] of `dtype` on `device`, for the windows; other plans may use it at other times.
                Allocated here by default.

        Raises:
            ValueError: a parameter that the plan names is missing or of another dtype, or the ranks hold
                different plans.
        """
        self.plan, self.rank, self.dtype, self.group, self.device, self.peers = (
            plan,
            rank,
            dtype,
            group,
            device,
            peers,
        )
        if plan.element_bytes != dtype.itemsize:
            raise ValueError(
                f"the plan counts {plan.element_bytes} bytes an element and {dtype} has {dtype.itemsize};"
                f" compile it with element_bytes={dtype.itemsize}"
            )
        transfers = list(plan.transfers())
        # By transfer number: the slice of this rank's parameter that the transfer reads or writes.
        self.reads = {
            number: _view(source, t.source, t.shape)
            for number, t in enumerate(transfers)
            if t.source_rank == rank
        }
        self.writes = {
            number: _view(destination, t.destination, t.shape)
            for number, t in enumerate(transfers)
            if t.destination_rank == rank
        }
        for number, write in self.writes.items():
            if write.dtype != dtype:
                raise ValueError(
                    f"destination parameter {transfers[number].destination[1]} is {write.dtype} and the"
                    f" reshard carries {dtype}; both must be the same"
                )
        self.bytes = {
            name: getattr(plan, f"{name}_bytes").get(rank, 0) for name in ("received", "sent", "local")
        }
        self._flag = torch.zeros(1, device=device)
        self._agree()
        self.direct = self._resolve_direct()
        self.windows = self._resolve_windows(staging)
        self.packs, self.unpacks, self.steps = [], [], []  # prepared launches
        if plan.one_sided:
            self.steps = self._resolve_steps()
        else:
            self.packs = [Copies(window.pack, device=device) for window in self.windows]
            self.unpacks = [
                Copies(window.unpack, groups=window.givers, device=device) for window in self.windows
            ]
        self.holes = [
            _view(destination, (hole.chunk, hole.name, hole.rows[0], hole.cols[0]), hole.shape)
            for hole in plan.padding
            if hole.rank == rank
        ]
        self.proof = Proof(
            transfers, self.reads, self.writes, dtype=dtype, device=device, group=group, verify=verify
        )
        self.proof.prepare()

    def run(self) -> ReshardReport:
        """Write the source's values into the destination, zeros into its padding, and verify checksums.

        Raises:
            ReshardError: a checked slice differs (on every rank of the group), or a peer is gone.
        """
        self.start()
        return self.finish()

    def start(self) -> None:
        """Run the first half of `run()`; on GPUs, return as soon as all work is queued."""
        self._settle()
        self._started = time.perf_counter()
        with torch.no_grad(), self._named_errors():
            self.proof.note_sources()
            self.move()

    def finish(self) -> ReshardReport:
        """Run the second half of `run()`: wait, and verify checksums."""
        with torch.no_grad(), self._named_errors():
            checked = self.proof.compare()
            self._settle()
        return ReshardReport(
            time.perf_counter() - self._started,
            self.bytes["received"],
            self.bytes["sent"],
            self.bytes["local"],
            checked,
        )

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except ReshardError:
            raise
        except RuntimeError as error:
            raise ReshardError(f"reshard stopped on rank {self.rank}: {error}") from error

    def move(self) -> None:
        """Run the copies and messages alone, without the proof."""
        if self.peers is not None:
            self._meet()  # the sources of all ranks are complete
        self.direct.run()
        (self._pull if self.plan.one_sided else self._send)()
        if self.peers is not None:
            self._meet()  # all ranks have read: the sources may change
        for hole in self.holes:
            hole.zero_()

    def _settle(self) -> None:
        """Synchronize this stream alone: other streams may still wait for other ranks."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _send(self) -> None:
        """Send the windows as messages: while one is sent, the next is packed and the previous unpacked."""
        if not self.windows:
            return
        self.packs[0].run()
        under_way = self._post(0)
        for number, unpack in enumerate(self.unpacks):
            following = number + 1 < len(self.windows)
            if following:
                self.packs[number + 1].run()
            try:
                for message in under_way:
                    message.wait()
            except RuntimeError as error:
                raise self._lost(number, error) from error
            if following:
                under_way = self._post(number + 1)
            unpack.run()

    def _post(self, number: int) -> list[dist.Work]:
        messages = self.windows[number].messages
        try:
            return dist.batch_isend_irecv(messages) if messages else []
        except RuntimeError as error:
            raise self._lost(number, error) from error

    def _lost(self, number: int, error: RuntimeError) -> RuntimeError:
        window = self.windows[number]
        return RuntimeError(
            f"window {number + 1} of {len(self.windows)}, exchanging with ranks {window.peers}, of which one"
            f" is gone or broken: {error}"
        )

    def _pull(self) -> None:
        """Read the windows from the peers' staging memory; a launch packs one and unpacks the previous."""
        for step in self.steps:
            step.run()
            self._meet()  # all ranks have packed this window and read the previous one

    def _meet(self) -> None:
        """Barrier between the GPU streams of the group; no host waits."""
        dist.all_reduce(self._flag, group=self.group)

    def _resolve_direct(self) -> Copies:
        peers = self.peers or {}
        pairs, givers = [], []
        for number, transfer in enumerate(self.plan.direct):
            if transfer.destination_rank == self.rank:
                own = transfer.source_rank == self.rank
                pairs.append(
                    (
                        self.writes[number],
                        self.reads[number]
                        if own
                        else _view(peers[transfer.source_rank], transfer.source, transfer.shape),
                    )
                )
                givers.append(transfer.source_rank)
        return Copies(pairs, groups=givers, device=self.device)

    def _resolve_windows(self, memory: Tensor | None) -> list[_Window]:
        """Resolve every window on this rank.

        A window in which this rank has no part still counts, so that even and odd windows agree on all ranks.
        """
        staging = _Staging(
            {rank: size // self.dtype.itemsize for rank, size in self.plan.staged_bytes.items()}
        )
        elements = staging.sizes.get(self.rank, 0)
        mine = (
            torch.empty(elements, dtype=self.dtype, device=self.device)
            if memory is None
            else memory[:elements]
        )
        theirs = (map_tensors({(0, "staging"): mine}, self.group) or {}) if self.plan.one_sided else {}
        buffers = {self.rank: mine} | {
            rank: mapped[0, "staging"] for rank, mapped in theirs.items() if mapped
        }
        windows, first = [], len(self.plan.direct)
        for number, planned in enumerate(self.plan.windows):
            staging.begin(number, self.plan.staged_elements(planned))
            windows.append(self._resolve_window(planned, first, staging, buffers))
            first += sum(map(len, planned.values()))
        return windows

    def _resolve_steps(self) -> list[Copies]:
        """Build the launches between two barriers: unpack one window and pack the next.

        A window never overwrites what a later one reads, so both kinds of copies can share a launch.
        """
        steps, before = [], _Window()
        for window in [*self.windows, _Window()]:
            pairs, groups = before.unpack + window.pack, before.givers + [-1] * len(window.pack)
            steps.append(Copies(pairs, groups=groups, device=self.device))
            before = window
        return steps

    def _resolve_window(
        self, planned: Window, number: int, staging: _Staging, buffers: dict[int, Tensor]
    ) -> _Window:
        window = _Window()
        for (giver, taker), message in planned.items():
            size = sum(transfer.elements for transfer in message)
            starts = {
                rank: staging.take(rank, size)
                for rank in ({giver} if self.plan.one_sided else {giver, taker})
            }
            if self.rank in (giver, taker):
                held_by = giver if self.plan.one_sided else self.rank
                held, end = buffers[held_by][starts[held_by] :][:size], 0
                for place, transfer in enumerate(message, number):
                    slot = held[end : end + transfer.elements].view(transfer.shape)
                    end += transfer.elements
                    if self.rank == giver:
                        window.pack.append((slot, self.reads[place]))
                    if self.rank == taker:
                        window.unpack.append((self.writes[place], slot))
                        window.givers.append(giver)
                if giver != taker:
                    window.peers.append(taker if self.rank == giver else giver)
                    if not self.plan.one_sided:
                        window.messages.append(
                            dist.P2POp(
                                dist.isend if self.rank == giver else dist.irecv,
                                held,
                                window.peers[-1],
                                self.group,
                            )
                        )
            number += len(message)
        return window

    def _agree(self) -> None:
        """Check that all ranks hold the same plan; with different plans they would deadlock.

        The collective also creates NCCL's communicator before the first message.
        """
        messages = [
            (pair, sum(transfer.elements for transfer in message))
            for window in self.plan.windows
            for pair, message in window.items()
        ]
        mark = zlib.crc32(repr([len(self.plan.direct), messages]).encode())
        marks = torch.tensor([mark, -mark], dtype=torch.int64, device=self.device)
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self.group)
        if marks[0] != -marks[1]:
            raise ValueError(
                "the ranks compiled different reshard plans; give every rank the same layouts, window_bytes"
                " and parameters"
            )


def _view(parameters: Mapping[tuple[int, str], Tensor], place: Position, shape: tuple[int, int]) -> Tensor:
    chunk, name, row, col = place
    if (chunk, name) not in parameters:
        raise ValueError(
            f"the reshard plan names parameter {name} of model chunk {chunk}, which this rank's model does"
            " not have; compile the plan for this model"
        )
    tensor_RC = parameters[chunk, name].detach()
    return tensor_RC.view(len(tensor_RC), -1)[row : row + shape[0], col : col + shape[1]]

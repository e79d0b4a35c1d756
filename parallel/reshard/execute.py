"""Carry out a plan: straight copies, then windows of packed messages, and the proof. All names are resolved once, beforehand.

Between ranks that reach each other's memory (`parallel.reshard.peers`) nothing is sent: the destination copies out of the source's
parameters, or out of its staging memory. Elsewhere a window is one message a pair of ranks, packed and unpacked while its
neighbours are on their way.
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
from parallel.reshard.transfer import Place, Window

Parameters = dict[tuple[int, str], Tensor]  # by (model chunk, name)


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What one run did on this rank."""

    seconds: float = 0.0  # with the proof
    bytes_received: int = 0  # from other ranks
    bytes_sent: int = 0
    bytes_local: int = 0  # copied from own parameters
    checked_slices: int = 0  # on all ranks


Pairs = list[tuple[Tensor, Tensor]]  # destinations and sources of copies


@dataclass(slots=True)
class _Window:
    """One window on this rank."""

    pack: Pairs = field(default_factory=list)  # parameters to staging memory
    unpack: Pairs = field(default_factory=list)  # staging memory, a peer's if it is pulled, to parameters
    givers: list[int] = field(default_factory=list)  # of `unpack`
    messages: list[dist.P2POp] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Staging:
    """Where a window's slices lie in the staging memory of every rank: even windows from its beginning, odd ones up to its end."""

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
    """Moves the values of one engine's parameters into another's, in place, again and again.

    Constructing it and `run()` are collective over `group`. The parameters have to stay where they are.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        source: Parameters,
        destination: Parameters,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        device: torch.device,
        verify: Literal["sample", "all", "none"] = "sample",
        peers: Mapping[int, Mapped] | None = None,
        staging: Tensor | None = None,
    ):
        """Resolve every slice.

        Args:
            rank: this process's world rank. It may give, take, do both or neither.
            source: this rank's parameters that the plan reads, on `device`; empty if it gives nothing.
            destination: those that it writes, on `device` and of type `dtype`; others in it are left alone.
            dtype: of an element on its way; the source casts before it sends.
            group: spans every rank of the plan; None is the world.
            peers: the sources of the other ranks, all of them, from `map_tensors`; needed by a plan compiled with `peer_memory`.
            staging: [N] of type `dtype` on `device`, to be used by the windows and, at other times, by other plans; by default memory of its own.

        Raises:
            ValueError: a parameter that the plan names is missing or of another type, or the ranks hold different plans.
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
        # By a transfer's number: the slice of this rank's parameter that it reads, or writes.
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
        self.packs, self.unpacks, self.steps = [], [], []  # ready to be launched
        if plan.pulled:
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
        """Write the source's present values into the destination, zeros into its padding, and prove it.

        Raises:
            ReshardError: on every rank of the group, if a checked slice differs; or a peer is gone.
        """
        self.start()
        return self.finish()

    def start(self) -> None:
        """The first half of `run()`: on GPUs everything is queued, and this returns."""
        self._settle()
        self._started = time.perf_counter()
        with torch.no_grad(), self._named_errors():
            self.proof.note_sources()
            self.move()

    def finish(self) -> ReshardReport:
        """The second half: wait and prove."""
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
        """Only the copies and messages."""
        if self.peers is not None:
            self._meet()  # everyone's source is complete
        self.direct.run()
        (self._pull if self.plan.pulled else self._send)()
        if self.peers is not None:
            self._meet()  # all have read: sources may change
        for hole in self.holes:
            hole.zero_()

    def _settle(self) -> None:
        """Wait for this stream only: others may be waiting for what other ranks have yet to do."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _send(self) -> None:
        """Window after window as messages: while one is on its way, the next is packed and the last one unpacked."""
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
        """Window after window out of the peers' staging memory; one launch packs a window and unpacks the one before."""
        for step in self.steps:
            step.run()
            self._meet()  # all have packed this window and read the one before

    def _meet(self) -> None:
        """Everything queued on the GPUs of the group before is done before anything queued after; no host waits."""
        dist.all_reduce(self._flag, group=self.group)

    def _resolve_direct(self) -> Copies:
        pairs, givers = [], []
        for number, transfer in enumerate(self.plan.direct):
            if transfer.destination_rank == self.rank:
                own = transfer.source_rank == self.rank
                pairs.append(
                    (
                        self.writes[number],
                        self.reads[number]
                        if own
                        else _view(self.peers[transfer.source_rank], transfer.source, transfer.shape),
                    )
                )
                givers.append(transfer.source_rank)
        return Copies(pairs, groups=givers, device=self.device)

    def _resolve_windows(self, memory: Tensor | None) -> list[_Window]:
        """Each window on this rank. All ranks count all of them: a window without a part of this one keeps its place, even or odd."""
        staging = _Staging(
            {rank: size // self.dtype.itemsize for rank, size in self.plan.staged_bytes.items()}
        )
        elements = staging.sizes.get(self.rank, 0)
        mine = (
            torch.empty(elements, dtype=self.dtype, device=self.device)
            if memory is None
            else memory[:elements]
        )
        theirs = map_tensors({(0, "staging"): mine}, self.group) if self.plan.pulled else {}
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
        """What happens between two meetings. A window never writes over what a later one reads, so that both kinds of copies mix."""
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
                rank: staging.take(rank, size) for rank in ({giver} if self.plan.pulled else {giver, taker})
            }
            if self.rank in (giver, taker):
                held_by = giver if self.plan.pulled else self.rank
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
                    if not self.plan.pulled:
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
        """Different plans would wait for each other for ever. The collective also makes NCCL's communicator before the first message."""
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


def _view(parameters: Mapping[tuple[int, str], Tensor], place: Place, shape: tuple[int, int]) -> Tensor:
    chunk, name, row, col = place
    if (chunk, name) not in parameters:
        raise ValueError(
            f"the reshard plan names parameter {name} of model chunk {chunk}, which this rank's model does"
            " not have; compile the plan for this model"
        )
    tensor_RC = parameters[chunk, name].detach()
    return tensor_RC.view(len(tensor_RC), -1)[row : row + shape[0], col : col + shape[1]]

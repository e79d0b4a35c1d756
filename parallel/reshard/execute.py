"""Execute a reshard plan: direct copies, windows of packed messages, and checksums of the slices.

All names are resolved once, when the `Resharder` is constructed. Where ranks cannot read each other's memory,
a window is one message per pair of ranks, and three windows overlap:

    time ------>     (every row is one window; even and odd ones use opposite ends of the staging memory)
    window 0     pack | send   | unpack
    window 1            pack   | send   | unpack
    window 2                     pack   | send   | unpack        (packed after window 0 is unpacked)

Ranks that can read each other's memory (`ipc_tensors`) send nothing. The destination rank copies out of the
source rank's parameters, or out of its staging memory (a one-sided plan):

    launch 0     pack 0             barrier
    launch 1     unpack 0, pack 1   barrier
    launch 2     unpack 1, pack 2   barrier
"""

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel.reshard.checksum_verifier import ChecksumVerifier, ReshardError
from parallel.reshard.kernels import Copies
from parallel.reshard.plan import Plan
from parallel.reshard.resolve import RankWindow, resolve_direct, resolve_slices, resolve_windows
from parallel.reshard.transport import Parameters, Transport


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """Statistics of one run on this rank."""

    seconds: float = 0.0  # including verification
    bytes_received: int = 0  # from other ranks
    bytes_sent: int = 0
    bytes_local: int = 0  # copied from this rank's own parameters
    checked_slices: int = 0  # on all ranks


class Resharder:
    """Copies the parameters of one engine into those of another, in place and repeatedly.

    The constructor and `run()` are collective over the transport's group. The parameters must keep their
    addresses. A rank may be a source, a destination, both or neither.
    """

    def __init__(self, plan: Plan, source: Parameters, destination: Parameters, transport: Transport):
        """Resolve every slice.

        Args:
            source: this rank's parameters that the plan reads; empty if it is no source.
            destination: the parameters that the plan writes, of the transport's dtype; others are left alone.

        Raises:
            ValueError: a parameter that the plan names is missing or of another dtype, or the ranks hold
                different plans.
        """
        self.plan, self.transport, self.rank = plan, transport, transport.rank
        self.slices = resolve_slices(plan, source, destination, transport)
        self.bytes = {
            name: getattr(plan, f"{name}_bytes").get(self.rank, 0) for name in ("received", "sent", "local")
        }
        self._flag = torch.zeros(1, device=transport.device)
        self._check_plans_match()
        direct = resolve_direct(plan, self.slices, transport)
        self.direct = Copies(direct.pairs, groups=direct.src_ranks, device=transport.device)
        self.windows = resolve_windows(plan, self.slices, transport)
        self.packs, self.unpacks, self.steps = [], [], []  # prepared launches
        if plan.one_sided:
            self.steps = self._prepare_steps()
        else:
            self.packs = [Copies(window.pack, device=transport.device) for window in self.windows]
            self.unpacks = [
                Copies(window.unpack, groups=window.src_ranks, device=transport.device)
                for window in self.windows
            ]
        self.verifier = ChecksumVerifier(self.slices, transport)
        self.verifier.prepare()

    def run(self) -> ReshardReport:
        """Write the source's values into the destination, zeros into its padding, and verify checksums.

        Raises:
            ReshardError: a checked slice differs (on every rank of the group), or a peer is gone.
        """
        self.start()
        return self.finish()

    def start(self) -> None:
        """Run the first half of `run()`; on GPUs, return as soon as all work is queued."""
        self._synchronize()
        self._started = time.perf_counter()
        with torch.no_grad(), self._named_errors():
            self.verifier.record_source()
            self.move()

    def finish(self) -> ReshardReport:
        """Run the second half of `run()`: wait, and verify checksums."""
        with torch.no_grad(), self._named_errors():
            checked = self.verifier.compare()
            self._synchronize()
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
        """Run the copies and messages alone, without verification."""
        if self.transport.ipc_tensors is not None:
            self._barrier()  # the sources of all ranks are complete
        self.direct.run()
        (self._read_windows if self.plan.one_sided else self._send_windows)()
        if self.transport.ipc_tensors is not None:
            self._barrier()  # all ranks have read: the sources may change
        for padding in self.slices.padding:
            padding.zero_()

    def _synchronize(self) -> None:
        """Synchronize this stream alone: other streams may still wait for other ranks."""
        if self.transport.device.type == "cuda":
            torch.cuda.current_stream(self.transport.device).synchronize()

    def _send_windows(self) -> None:
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
                raise self._peer_lost(number, error) from error
            if following:
                under_way = self._post(number + 1)
            unpack.run()

    def _post(self, number: int) -> list[dist.Work]:
        messages = self.windows[number].messages
        try:
            return self.transport.exchange(messages)
        except RuntimeError as error:
            raise self._peer_lost(number, error) from error

    def _peer_lost(self, number: int, error: RuntimeError) -> RuntimeError:
        window = self.windows[number]
        return RuntimeError(
            f"window {number + 1} of {len(self.windows)}, exchanging with ranks {window.peers}, of which one"
            f" is gone or broken: {error}"
        )

    def _read_windows(self) -> None:
        """Read the windows from the peers' staging memory; a launch packs one and unpacks the previous."""
        for step in self.steps:
            step.run()
            self._barrier()  # all ranks have packed this window and read the previous one

    def _barrier(self) -> None:
        """Barrier between the GPU streams of the group; no host waits."""
        dist.all_reduce(self._flag, group=self.transport.group)

    def _prepare_steps(self) -> list[Copies]:
        """Return the launches between two barriers: unpack one window and pack the next.

        A window never overwrites what a later one reads, so both kinds of copies can share a launch.
        """
        steps, before = [], RankWindow()
        for window in [*self.windows, RankWindow()]:
            pairs, groups = before.unpack + window.pack, before.src_ranks + [-1] * len(window.pack)
            steps.append(Copies(pairs, groups=groups, device=self.transport.device))
            before = window
        return steps

    def _check_plans_match(self) -> None:
        """Check that all ranks hold the same plan; with different plans they would deadlock.

        Within one world, the collective also creates NCCL's communicator before the first message. Between
        worlds it is on the CPU: gloo notices a world that ends meanwhile, and NCCL would wait.
        """
        device = self.transport.device if self.transport.ranks is None else torch.device("cpu")
        messages = []
        for window in self.plan.windows:
            for pair, message in window.items():
                messages.append((pair, sum(transfer.elements for transfer in message)))
        digest = zlib.crc32(repr([len(self.plan.direct), messages]).encode())
        digests = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
        self.transport.all_max(digests)
        if digests[0] != -digests[1]:
            raise ValueError(
                "the ranks compiled different reshard plans; give every rank the same layouts, window_bytes"
                " and parameters"
            )

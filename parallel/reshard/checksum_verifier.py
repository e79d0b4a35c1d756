"""Verification of slices: every checked transfer has equal checksums at its source and destination."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.reshard.checksum import checksum
from parallel.reshard.kernels import Checksums
from parallel.reshard.resolve import Slices
from parallel.reshard.transfer import Transfer
from parallel.reshard.transport import Transport

SAMPLE = 16  # a weight sync checks one transfer in SAMPLE, and SAMPLE syncs check all of them


class ReshardError(RuntimeError):
    """The destination's weights differ from the source's, or may differ because a rank was lost."""


@dataclass(slots=True)
class _Side:
    """The checked slices of one side on this rank."""

    sums: Checksums
    indices: Tensor  # [n] int64: of these slices among all checked transfers


class ChecksumVerifier:
    """Checks a rotating share of the slices at every sync.

    Call `record_source()` before the slices move and `compare()` after.
    """

    def __init__(self, slices: Slices, transport: Transport):
        """
        Args:
            slices: compared as the transport's dtype.
        """
        self.transfers, self.reads, self.writes = slices.transfers, slices.reads, slices.writes
        self.dtype, self.device, self.verify = transport.dtype, transport.device, transport.verify
        self._transport = transport
        self.syncs = 0
        # By phase and side; their kernels read the parameters' values at the time of the launch.
        self._sides: dict[tuple[int, str], _Side] = {}
        self._difference = torch.zeros(0, dtype=torch.int64, device=self.device)

    def prepare(self) -> None:
        """Build all tables of tiles now rather than at the first syncs that need them."""
        before = self.syncs
        for phase in range(0 if self.verify == "none" else self.stride):
            self.syncs = phase
            self._side("reads", self.reads)
            self._side("writes", self.writes)
        self.syncs = before

    @property
    def stride(self) -> int:
        return 1 if self.verify == "all" else SAMPLE

    @property
    def phase(self) -> int:
        return self.syncs % self.stride

    @property
    def checked(self) -> Sequence[Transfer]:
        """The transfers that this sync checks."""
        return self.transfers[self.phase :: self.stride]

    def record_source(self) -> None:
        """Compute the checksums of the source slices."""
        if self.verify == "none":
            return
        self._difference = torch.zeros(len(self.checked), dtype=torch.int64, device=self.device)
        self._add("reads", self.reads, 1)

    def compare(self) -> int:
        """Compute the checksums of the destination slices and compare; collective over the group.

        Returns:
            The number of checked slices.

        Raises:
            ReshardError: slices differ; raised on every rank, naming the first of them.
        """
        if self.verify == "none":
            return 0
        # The source adds and the destination subtracts: modulo 2**64 the sum over the ranks is 0 if and only
        # if both checksums are equal.
        self._add("writes", self.writes, -1)
        self._transport.all_sum(self._difference)
        checked, wrong = self.checked, self._difference.nonzero().flatten().tolist()
        self.syncs += 1
        if wrong:
            named = "; ".join(str(checked[index]) for index in wrong[:4])
            raise ReshardError(
                f"{len(wrong)} of {len(checked)} checked slices did not arrive as they were sent:"
                f" {named}{'; …' if len(wrong) > 4 else ''}"
            )
        return len(checked)

    def _add(self, side: str, slices: Mapping[int, Tensor], sign: int) -> None:
        known = self._side(side, slices)
        if all(slice_RC.dtype == self.dtype for slice_RC in known.sums.slices):
            sums = known.sums.run()
        else:  # checksums of the values after the cast
            sums = torch.stack([checksum(slice_RC.to(self.dtype)) for slice_RC in known.sums.slices])
        self._difference.index_add_(0, known.indices, sums, alpha=sign)

    def _side(self, side: str, slices: Mapping[int, Tensor]) -> _Side:
        key = (self.phase if self.verify != "all" else -1, side)
        if key not in self._sides:
            numbers = [number for number in slices if number % self.stride == self.phase]
            indices = torch.tensor(
                [number // self.stride for number in numbers], dtype=torch.int64, device=self.device
            )
            self._sides[key] = _Side(
                Checksums([slices[number] for number in numbers], device=self.device), indices
            )
        return self._sides[key]


class Fingerprint:
    """A number for all the weights that a rank holds under a plan, which both sides can compute.

    It is the sum over the plan's slices of the rank of odd factor x checksum, modulo 2**64, so that a changed
    element of one slice always changes it. A rank's number is the sum of what the ranks compute that send its
    slices.
    """

    def __init__(self, transfers: Sequence[Transfer], slices: Mapping[int, Tensor], ranks: Sequence[int]):
        """
        Args:
            transfers: of the plan, in its order.
            slices: [R, C] views of this rank's parameters by transfer number, in the plan's dtype: those that
                it sends, or those that it holds.
            ranks: of the plan whose numbers are wanted.
        """
        numbers = list(slices)
        self._sums = None
        self._count = len(ranks)
        if not numbers:
            return
        device = slices[numbers[0]].device
        self._sums = Checksums([slices[number] for number in numbers], device=device)
        place = {rank: index for index, rank in enumerate(ranks)}
        self._places = torch.tensor([place[transfers[number].destination_rank] for number in numbers])
        self._factors = 2 * torch.tensor(numbers, dtype=torch.int64) + 1

    def run(self) -> Tensor:
        """Return this rank's part of the numbers [len(ranks)], int64 on the CPU."""
        total = torch.zeros(self._count, dtype=torch.int64)
        if self._sums is None:
            return total
        return total.index_add_(0, self._places, self._sums.run().cpu() * self._factors)

"""Prove that slices arrived: the same checksum at the source's parameter and at the destination's, for every checked transfer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.reshard.checksum import checksum
from parallel.reshard.kernels import Checksums
from parallel.reshard.transfer import Transfer

SAMPLE = 16  # a sync checks one transfer in SAMPLE, and SAMPLE syncs check all of them


class ReshardError(RuntimeError):
    """The weights at the destination are not those of the source, or may not be: a rank was lost on the way."""


@dataclass(slots=True)
class _Side:
    """The checked slices of one side on this rank: what sums them up, and their places among all checked transfers."""

    sums: Checksums
    places: Tensor  # [n] int64


class Proof:
    """Checks a rotating share of the slices at every sync: `note_sources()` before they move, `compare()` after."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        reads: Mapping[int, Tensor],
        writes: Mapping[int, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
        verify: Literal["sample", "all", "none"],
    ):
        """
        Args:
            transfers: all of the plan, in its order.
            reads: this rank's slices of the source [R, C] by a transfer's number; they are compared as `dtype`.
            writes: its slices of the destination.
            group: spans every rank of the plan.
        """
        self.transfers, self.reads, self.writes = transfers, reads, writes
        self.dtype, self.device, self.group, self.verify = dtype, device, group, verify
        self.syncs = 0
        self._sides: dict[
            tuple[int, str], _Side
        ] = {}  # by phase and side; a kernel reads what the parameters hold then
        self._difference: Tensor | None = None

    def prepare(self) -> None:
        """Make all tables of tiles now rather than at the syncs that need them first."""
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
        """This sync's share."""
        return self.transfers[self.phase :: self.stride]

    def note_sources(self) -> None:
        """Take the checksums of what is about to be moved."""
        if self.verify == "none":
            return
        self._difference = torch.zeros(len(self.checked), dtype=torch.int64, device=self.device)
        self._add("reads", self.reads, 1)

    def compare(self) -> int:
        """Take the checksums of what arrived, and compare; returns how many slices were checked. Collective over the group.

        Raises:
            ReshardError: on every rank, naming the first slices that differ.
        """
        if self.verify == "none":
            return 0
        # The source adds and the destination subtracts; modulo 2**64 the sum over the ranks is 0 exactly if they are equal.
        self._add("writes", self.writes, -1)
        dist.all_reduce(self._difference, group=self.group)
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
        else:  # as they look after the cast
            sums = torch.stack([checksum(slice_RC.to(self.dtype)) for slice_RC in known.sums.slices])
        self._difference.index_add_(0, known.places, sums, alpha=sign)

    def _side(self, side: str, slices: Mapping[int, Tensor]) -> _Side:
        key = (self.phase if self.verify != "all" else -1, side)
        if key not in self._sides:
            numbers = [number for number in slices if number % self.stride == self.phase]
            places = torch.tensor(
                [number // self.stride for number in numbers], dtype=torch.int64, device=self.device
            )
            self._sides[key] = _Side(
                Checksums([slices[number] for number in numbers], device=self.device), places
            )
        return self._sides[key]

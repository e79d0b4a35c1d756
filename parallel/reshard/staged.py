"""Reshard into parameters that the destination holds in another form, by way of bounded staging memory.

    source shards --Resharder--> staging memory --write--> the destination's own form
                         group after group, all in the same memory

Values are verified in the staging memory, bit by bit, before they are converted.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from parallel.reshard.execute import Resharder, ReshardReport
from parallel.reshard.plan import Plan
from parallel.reshard.transfer import Window
from parallel.reshard.transport import Parameters, Transport

Key = tuple[int, str]  # model chunk, parameter
ALIGNMENT = 128  # elements between which parameters begin, for kernels with wide loads


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedParameters:
    """The parameters of a plan that its destination holds in another form."""

    shapes: Mapping[Key, tuple[int, ...]]  # as the plan has them
    # Converts some of them, of the transport's dtype, into the destination's own form. It returns, on GPUs
    # once the work is queued, and the values are overwritten then.
    write: Callable[[Parameters], None]


class StagedResharder:
    """As `Resharder`, with parameters that pass through staging memory.

    The constructor and all methods are collective over the transport's group.
    """

    def __init__(
        self,
        plan: Plan,
        source: Parameters,
        destination: Parameters,
        transport: Transport,
        *,
        staged: StagedParameters,
        limit_bytes: int,
    ):
        """
        Args:
            destination: the parameters that the plan writes and that are not staged.
            staged: with the same shapes on all ranks.
            limit_bytes: of the staging memory, unless one parameter is larger.

        Raises:
            ValueError: as `Resharder`.
        """
        self._write, self._device = staged.write, transport.device
        dtype, device = transport.dtype, transport.device
        groups = list(groups_of(staged.shapes, limit_bytes, element_bytes=dtype.itemsize))
        parts = [part_of(plan, keys) for keys in (destination.keys(), *groups)]
        window_bytes = max(part.staged_bytes.get(transport.rank, 0) for part in parts)
        window = torch.empty(window_bytes // dtype.itemsize, dtype=dtype, device=device)
        transport = replace(transport, staging=window)
        shapes = [dict(zip(group, map(staged.shapes.__getitem__, group))) for group in groups]
        largest = max((sum(map(_aligned, group.values())) for group in shapes), default=0)
        memory = torch.empty(largest, dtype=dtype, device=device)
        self.staging_bytes = memory.nbytes + window.nbytes
        self._plain = Resharder(parts[0], source, destination, transport)
        self._groups: list[tuple[Resharder, Parameters]] = []
        for group, part in zip(shapes, parts[1:]):
            values = _views(memory, group)
            self._groups.append((Resharder(part, source, values, transport), values))

    def run(self) -> ReshardReport:
        """Write the source's values into the destination, and verify; errors as of `Resharder.run`."""
        self.start()
        return self.finish()

    def start(self) -> None:
        """Run the first part of `run()`; on GPUs, return as soon as all work is queued."""
        self._started = time.perf_counter()
        self._plain.start()

    def finish(self) -> ReshardReport:
        """Run the second part of `run()`; what is staged moves here."""
        reports = [self._plain.finish()]
        for resharder, values in self._groups:
            reports.append(resharder.run())
            with torch.no_grad():
                self._write(values)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return ReshardReport(
            time.perf_counter() - self._started,
            *(sum(counts) for counts in zip(*map(_counts, reports))),
        )


def groups_of(
    shapes: Mapping[Key, tuple[int, ...]], limit_bytes: int, *, element_bytes: int
) -> Iterator[list[Key]]:
    """Yield consecutive parameters that fill at most `limit_bytes` together; a larger one is alone."""
    group: list[Key] = []
    size = 0
    for key, shape in shapes.items():
        nbytes = prod(shape) * element_bytes
        if group and size + nbytes > limit_bytes:
            yield group
            group, size = [], 0
        group.append(key)
        size += nbytes
    if group:
        yield group


def part_of(plan: Plan, keys: Collection[Key]) -> Plan:
    """Return the part of a plan that writes these parameters; its bounds remain those of the whole plan."""
    written = frozenset(keys)
    windows = (_part_of_window(window, written) for window in plan.windows)
    return replace(
        plan,
        direct=tuple(transfer for transfer in plan.direct if transfer.destination[:2] in written),
        windows=tuple(filter(None, windows)),
        padding=tuple(part for part in plan.padding if (part.chunk, part.name) in written),
    )


def _part_of_window(window: Window, written: frozenset[Key]) -> Window:
    part: Window = {}
    for pair, message in window.items():
        if kept := [transfer for transfer in message if transfer.destination[:2] in written]:
            part[pair] = kept
    return part


def _views(memory: Tensor, shapes: Mapping[Key, tuple[int, ...]]) -> Parameters:
    """Return tensors of these shapes, one after the other in memory [N]."""
    views, start = {}, 0
    for key, shape in shapes.items():
        views[key] = memory[start : start + prod(shape)].view(shape)
        start += _aligned(shape)
    return views


def _aligned(shape: tuple[int, ...]) -> int:
    """Return the elements of a parameter up to the next aligned address."""
    return -(-prod(shape) // ALIGNMENT) * ALIGNMENT


def _counts(report: ReshardReport) -> tuple[int, int, int, int]:
    return report.bytes_received, report.bytes_sent, report.bytes_local, report.checked_slices

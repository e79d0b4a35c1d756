"""In-place (aliased) reshard plans: one copy of the weights in memory for training and for rollout.

The destination parameters are placed in the memory of the source parameters, and a reshard permutes them
there. Two modes:

`share`: a destination parameter that equals one contiguous block of a source parameter of its rank aliases
    that block; nothing is copied.
`swap`: the other destination parameters overwrite source memory, too, as far as there is room. The plan
    `to_rollout` packs every overwritten value first, in the same window or an earlier one. The plan
    `to_train` restores what was overwritten.

Moves that overwrite each other in a cycle must share one window (`schedule`). If a cycle is too large for a
window, its destination parameters are relocated, which costs memory:

    memory of a rank   | 0      | 1      | 2      |
    training layout    |   A    |   B    |   C    |
    rollout layout     |   C    |   A    |   B    |     A -> B -> C -> A, a cycle

    relocated          |        |   A    |   B    |   + own memory: C
    A -> B -> C:    a chain; C moves first, then B, then A, each in its own window if need be

Pure Python: the same result on every rank.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from parallel.reshard.in_place.memory_layout import (
    Address,
    Addresses,
    Interval,
    Key,
    MemoryLayout,
    RankSides,
    fill_by_name,
    fill_in_order,
    share,
)
from parallel.reshard.in_place.schedule import Cycle, Scheduler, SideMemory, Widths, widths_of
from parallel.reshard.plan import Plan, compile_plan
from parallel.weights.shard import Shards

MemoryLayouts = dict[int, MemoryLayout]  # by rank
WORTH_ANOTHER = 64  # another layout is tried if the excess is more than 1/64 of the larger copy
_NO_LIMIT = 2**62
_SMALL = 16  # a cycle of at most 1/16 of the larger copy is relocated as a whole


@dataclass(frozen=True, kw_only=True)
class Sides:
    """Both sides of an in-place reshard, and the memory that they share."""

    source: Shards
    destination: Shards
    memory: Mapping[int, Addresses]  # of the source parameters, by rank
    element_bytes: int

    @cached_property
    def widths(self) -> tuple[Widths, Widths]:
        """Columns of the source's and of the destination's parameters."""
        return widths_of(self.source), widths_of(self.destination)

    @cached_property
    def homes(self) -> dict[str, Key]:
        """The source parameter that holds each tensor, on any rank."""
        homes: dict[str, Key] = {}
        for parameters in self.source.values():
            for parameter in parameters:
                if parameter.owner:
                    key = (parameter.chunk, parameter.name)
                    homes |= {block.tensor: key for block in parameter.blocks}
        return homes

    def lay_out(self, place: Callable[[RankSides], MemoryLayout]) -> MemoryLayouts:
        """Return every rank's memory layout by `share`, `fill_by_name` or `fill_in_order`."""
        return {
            rank: place(
                RankSides(
                    source=self.source.get(rank, ()),
                    destination=parameters,
                    memory=self.memory.get(rank, {}),
                    element_bytes=self.element_bytes,
                    homes=self.homes,
                )
            )
            for rank, parameters in self.destination.items()
        }


@dataclass(frozen=True, slots=True)
class InPlacePlan:
    """Addresses of the destination parameters in the source's memory, and the plans in both directions."""

    addresses: Mapping[int, Addresses]  # by rank; a parameter without an address has its own memory
    to_rollout: Plan
    to_train: Plan | None  # None: the source's memory is never overwritten

    def own_bytes(self, destination: Shards) -> dict[int, int]:
        """Bytes of the destination parameters with their own memory, per rank."""
        own = {}
        for rank, parameters in destination.items():
            placed = self.addresses[rank]
            elements = sum(prod(p.shape) for p in parameters if (p.chunk, p.name) not in placed)
            own[rank] = elements * self.to_rollout.element_bytes
        return own


@dataclass(frozen=True, slots=True)
class _Candidate:
    plan: InPlacePlan
    layouts: MemoryLayouts


def plan_in_place(
    sides: Sides,
    *,
    in_place: bool,
    window_bytes: int,
    host_of: Callable[[int], int] | None = None,
    peer_memory: bool = False,
) -> InPlacePlan:
    """Place the destination in the memory of the source and plan both directions.

    Of the memory layouts that allow a complete plan, the one with the least extra memory is chosen.

    Args:
        in_place: False only aliases (`share`); True also overwrites (`swap`).
        window_bytes: staging memory of a rank.
        host_of: as in `compile_plan`.
        peer_memory: all ranks can read each other's memory.

    Raises:
        ValueError: as `compile_plan`.
    """
    # Without a window limit transfers stay whole; `Scheduler` cuts them, so that the pieces of a cycle match.
    common: dict[str, Any] = dict(element_bytes=sides.element_bytes, window_bytes=_NO_LIMIT, host_of=host_of)
    to_rollout = compile_plan(
        source=sides.source, destination=sides.destination, peer_memory=peer_memory, **common
    )
    if not in_place:
        planner = _Planner(sides, to_rollout, None, window_bytes, peer_memory)
        return planner.break_cycles(sides.lay_out(share)).plan
    to_train = compile_plan(source=sides.destination, destination=sides.source, **common)
    planner = _Planner(sides, to_rollout, to_train, window_bytes, peer_memory)
    candidates = [planner.break_cycles(sides.lay_out(fill_by_name))]
    if not is_tight(candidates[0].layouts):
        in_order = sides.lay_out(fill_in_order)
        # Breaking a cycle never reduces the excess, so neither a larger layout nor one with cycles is tried.
        if excess_bytes(in_order) < excess_bytes(candidates[0].layouts):
            plan, cycles = planner.plan(in_order)
            if not cycles:
                candidates.append(_Candidate(plan, in_order))
    return min(candidates, key=lambda candidate: excess_bytes(candidate.layouts)).plan


def least_layouts(sides: Sides, *, in_place: bool) -> MemoryLayouts:
    """Return the memory layouts of `plan_in_place` if every cycle fits into a window."""
    if not in_place:
        return sides.lay_out(share)
    by_name = sides.lay_out(fill_by_name)
    return by_name if is_tight(by_name) else min(by_name, sides.lay_out(fill_in_order), key=excess_bytes)


def excess_bytes(layouts: MemoryLayouts) -> int:
    """Return the excess memory of the rank that has the most."""
    return max((layout.excess_bytes for layout in layouts.values()), default=0)


def is_tight(layouts: MemoryLayouts) -> bool:
    """Return whether so little memory is in excess that no other layout is worth trying."""
    largest = max((layout.larger_bytes for layout in layouts.values()), default=0)
    return excess_bytes(layouts) * WORTH_ANOTHER <= largest


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans both directions for a memory layout of every rank."""

    sides: Sides
    to_rollout: Plan  # as between separate memories
    to_train: Plan | None
    window_bytes: int
    one_sided: bool

    def break_cycles(self, layouts: MemoryLayouts) -> _Candidate:
        """Plan for `layouts`, with parameters relocated until every cycle fits into a window."""
        plan, cycles = self.plan(layouts)
        while cycles:
            _relocate(cycles, layouts)
            plan, cycles = self.plan(layouts)
        return _Candidate(plan, layouts)

    def plan(self, layouts: MemoryLayouts) -> tuple[InPlacePlan, list[Cycle]]:
        """Return the plans, and the cycles that fit into no window: with any, the plans are incomplete."""
        addresses = {rank: dict(layout.addresses) for rank, layout in layouts.items()}
        source, destination = (
            SideMemory(of, widths, self.sides.element_bytes)
            for of, widths in zip((self.sides.memory, addresses), self.sides.widths)
        )
        outward = Scheduler(
            reads=source,
            writes=destination,
            to_rollout=True,
            window_bytes=self.window_bytes,
            one_sided=self.one_sided,
        )
        to_rollout, cycles = outward.schedule(self.to_rollout)
        if self.to_train is None:
            return InPlacePlan(addresses, to_rollout, None), cycles
        homeward = replace(outward, reads=destination, writes=source, to_rollout=False)
        overwritten = {rank: layout.overwritten() for rank, layout in layouts.items()}
        to_train, more = homeward.schedule(self.to_train, partial(_is_overwritten, overwritten))
        return InPlacePlan(addresses, to_rollout, to_train), cycles + more


def _relocate(cycles: Sequence[Cycle], layouts: MemoryLayouts) -> None:
    """Break cycles by relocating their parameters.

    The first cycle's parameters get their own memory; each next cycle moves into the space that earlier ones
    left. Layers have cycles of the same sizes, so all of them form one chain, and the extra memory is that of
    one cycle. From a cycle larger than 1/_SMALL of the model only the parameter with the most elements moves.
    """

    def first_address(cycle: Cycle) -> tuple[int, Address]:
        return min((rank, layouts[rank].addresses[key]) for rank, key in cycle)

    relocated: set[tuple[int, Key]] = set()
    for cycle in sorted(cycles, key=first_address):
        if not relocated.isdisjoint(cycle):
            continue  # the same cycle in the other direction
        sizes: Counter[int] = Counter()  # bytes, by rank
        for rank, key in cycle:
            sizes[rank] += layouts[rank].sizes[key]
        is_small = all(size * _SMALL <= layouts[rank].larger_bytes for rank, size in sizes.items())
        moving = cycle if is_small else cycle[:1]
        for rank in sizes:
            layouts[rank].relocate([key for other, key in moving if other == rank])
        relocated.update(moving)


def _is_overwritten(overwritten: Mapping[int, list[Interval]], rank: int, interval: Interval) -> bool:
    """Return whether one of a rank's intervals (sorted, disjoint) overlaps `interval`."""
    (space, start, end), intervals = interval, overwritten.get(rank, [])
    at = bisect_left(intervals, (space, end))
    return at > 0 and intervals[at - 1][0] == space and intervals[at - 1][2] > start

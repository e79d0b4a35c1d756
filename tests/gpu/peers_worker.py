"""Resharding out of peers' memory against whole tensors, bit by bit, on any number of GPUs.

On a CPU, where no memory of peers is reached, the same cases go by messages.
"""

from collections.abc import Iterator
from itertools import accumulate, product

import torch
import torch.distributed as dist

from parallel import device
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.reshard.execute import Resharder
from parallel.reshard.in_place.addresses import addresses_of, views_at
from parallel.reshard.in_place.memory_layout import Addresses
from parallel.reshard.in_place.planner import Sides, plan_in_place
from parallel.reshard.ipc_tensors import IpcTensors, map_tensors
from parallel.reshard.plan import Plan, compile_plan
from parallel.reshard.transport import Parameters, Transport
from tests.distributed.reshard_worker import (
    TIED,
    UNTIED,
    Shards,
    filled,
    first_error,
    rollout_shards,
    train_shards,
    whole_tensors,
)
from tests.toy_shards import Toy, layouts_of

KEPT_WINDOW_BYTES, IN_PLACE_WINDOW_BYTES = 200, 2048  # small: many windows
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
RUNS = 3
IN_WINDOWS = {"read": 0, "sent": 0}  # plans with more than one window, by how their slices travel


def cases() -> Iterator[tuple[Toy, Layout, int, torch.dtype]]:
    """Every layout of the world, every tensor-parallel size of vLLM, in both types."""
    world = dist.get_world_size()
    for toy, dtype in ((UNTIED, torch.float32), (TIED, torch.bfloat16)):
        for layout, tp in product(layouts_of(world, layers=toy.layers), (1, 2, 4)):
            if world % tp == 0:
                yield toy, layout, tp, dtype


def sides(toy: Toy, layout: Layout, tp: int) -> tuple[Shards, Shards]:
    return train_shards(toy, layout), rollout_shards(toy, tp, ranks=layout.ranks)


def in_one_allocation(parameters: Parameters) -> Parameters:
    """Copies one after the other, as Megatron's distributed optimizer keeps them."""
    ends = list(accumulate((-(-value.numel() // 64) * 64 for value in parameters.values()), initial=0))
    memory = torch.zeros(ends[-1], dtype=next(iter(parameters.values())).dtype, device=device.device())
    views = {
        key: memory[start:][: value.numel()].view(value.shape)
        for start, (key, value) in zip(ends, parameters.items())
    }
    for key, value in parameters.items():
        views[key].copy_(value)
    return views


def ipc_tensors_of(source: Parameters) -> IpcTensors | None:
    ipc_tensors = map_tensors(source, world().device_group)
    assert (ipc_tensors is not None) == device.is_gpu(), "the memory of the other ranks cannot be read"
    return ipc_tensors


def resharder(
    plan: Plan,
    source: Parameters,
    destination: Parameters,
    *,
    dtype: torch.dtype,
    ipc_tensors: IpcTensors | None = None,
    kind=Resharder,
) -> Resharder:
    if len(plan.windows) > 1:
        IN_WINDOWS["read" if plan.one_sided else "sent"] += 1
    transport = Transport(
        dtype=dtype,
        group=world().device_group,
        device=device.device(),
        verify="all",
        ipc_tensors=ipc_tensors,
    )
    return kind(plan, source, destination, transport)


def assert_equal(held: Parameters, expected: Parameters, factor: int, what: object) -> None:
    wrong = [key for key, value in expected.items() if not torch.equal(held[key], value * factor)]
    assert not wrong, (what, dist.get_rank(), factor, wrong)


def run(mover: Resharder) -> None:
    """Once, every slice proved."""
    report = mover.run()
    assert report.checked_slices == len(mover.verifier.transfers)
    assert report.bytes_received == mover.plan.received_bytes[dist.get_rank()]


class Kept:
    """A destination with memory of its own, filled out of the peers' parameters."""

    def __init__(
        self, toy: Toy, layout: Layout, tp: int, dtype: torch.dtype, *, ranks_per_host: int, kind=Resharder
    ):
        rank, tensors, (source, destination) = dist.get_rank(), whole_tensors(toy), sides(toy, layout, tp)
        self.given, self.expected = (
            filled(source[rank], tensors, torch.nan, dtype),
            filled(destination[rank], tensors, 0, dtype),
        )
        self.target = {key: torch.full_like(value, torch.nan) for key, value in self.expected.items()}
        common = dict(
            element_bytes=dtype.itemsize,
            window_bytes=KEPT_WINDOW_BYTES,
            host_of=lambda rank: rank // ranks_per_host,
        )
        plan = compile_plan(source=source, destination=destination, peer_memory=device.is_gpu(), **common)
        self.mover = resharder(
            plan, self.given, self.target, dtype=dtype, ipc_tensors=ipc_tensors_of(self.given), kind=kind
        )

    def check(self, what: object) -> None:
        """The present values arrive at every run."""
        for turn in range(RUNS):
            run(self.mover)
            assert_equal(self.target, self.expected, 2**turn, what)
            for value in self.given.values():
                value *= 2


class InPlace:
    """A destination that aliases the source: to it and back, windows read from peers' staging memory."""

    def __init__(
        self, toy: Toy, layout: Layout, tp: int, dtype: torch.dtype, *, in_place: bool, kind=Resharder
    ):
        rank, tensors, (source, destination) = dist.get_rank(), whole_tensors(toy), sides(toy, layout, tp)
        self.at_source, self.at_destination = (
            filled(side[rank], tensors, 0, dtype) for side in (source, destination)
        )
        self.given = in_one_allocation(self.at_source)
        memory: list[Addresses] = [{}] * dist.get_world_size()
        dist.all_gather_object(memory, addresses_of(self.given))
        both = Sides(
            source=source,
            destination=destination,
            memory=dict(enumerate(memory)),
            element_bytes=dtype.itemsize,
        )
        plans = plan_in_place(
            both, in_place=in_place, window_bytes=IN_PLACE_WINDOW_BYTES, peer_memory=device.is_gpu()
        )
        for plan in filter(None, (plans.to_rollout, plans.to_train)):
            assert plan.one_sided == (device.is_gpu() and bool(plan.windows))
        own = {key: torch.full_like(value, torch.nan) for key, value in self.at_destination.items()}
        self.target = own | views_at(plans.addresses[rank], destination[rank], self.given, dtype)
        self.to_rollout = resharder(
            plans.to_rollout,
            self.given,
            self.target,
            dtype=dtype,
            ipc_tensors=ipc_tensors_of(self.given),
            kind=kind,
        )
        self.to_train = (
            resharder(plans.to_train, self.target, self.given, dtype=dtype, kind=kind)
            if plans.to_train
            else None
        )

    def check(self, what: object) -> None:
        """The present values go out and come back; in memory that is only shared nothing has to come back."""
        for turn in range(RUNS):
            run(self.to_rollout)
            assert_equal(self.target, self.at_destination, 2**turn, what)
            if self.to_train is not None:
                run(self.to_train)
            assert_equal(self.given, self.at_source, 2**turn, what)
            for value in self.given.values():
                value *= 2


def every_layout_kept() -> None:
    """All ranks on one host; then hosts of two, between which slices travel as messages."""
    world = dist.get_world_size()
    for case in cases():
        for ranks_per_host in {world, 2}:
            Kept(*case, ranks_per_host=ranks_per_host).check((*case, ranks_per_host))


def every_layout_in_place() -> None:
    for case in cases():
        for in_place in (False, True):
            InPlace(*case, in_place=in_place).check((*case, in_place))


class Corrupting(Resharder):
    """A transport that flips the lowest bit of the last rank's first slice after it arrived."""

    def move(self) -> None:
        super().move()
        if self.rank == dist.get_world_size() - 1:
            first = self.slices.writes[min(self.slices.writes)]
            first.view(BITS[self.transport.dtype])[0, 0] ^= 1


def corruption_is_named() -> None:
    world = dist.get_world_size()
    layout = Layout.parse(f"pp{world}", ranks=tuple(range(world)))
    for dtype in BITS:
        kept = Kept(UNTIED, layout, world, dtype, ranks_per_host=world, kind=Corrupting)
        in_place_case = InPlace(UNTIED, layout, world, dtype, in_place=True, kind=Corrupting)
        for mover in (kept.mover, in_place_case.to_rollout, in_place_case.to_train):
            error = first_error(mover.run, 1)
            corrupted = next(
                transfer for transfer in mover.plan.transfers() if transfer.destination_rank == world - 1
            )
            assert (
                f"1 of {len(mover.verifier.transfers)} checked slices" in error and str(corrupted) in error
            ), error


def main() -> None:
    device.initialize()
    for each in (every_layout_kept, every_layout_in_place, corruption_is_named):
        each()
    assert IN_WINDOWS["read" if device.is_gpu() else "sent"] and (
        IN_WINDOWS["sent"] or dist.get_world_size() == 2
    ), IN_WINDOWS
    dist.barrier()
    if dist.get_rank() == 0:
        print(
            f"all checks of {'peers' if device.is_gpu() else 'messages'} passed; plans of several "
            f"windows: {IN_WINDOWS}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Versions of weights on four ranks (gloo or NCCL), bit by bit against whole tensors times the version."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.layout import Layout
from parallel.rank_set import group_of
from parallel.reshard import versions
from parallel.reshard.checksum_verifier import ReshardError
from parallel.reshard.execute import Resharder
from parallel.reshard.plan import compile_plan
from parallel.reshard.staged import StagedParameters
from parallel.reshard.transport import Transport
from parallel.reshard.versions import VersionedReshard, background_group
from tests.distributed.reshard_worker import (
    UNTIED,
    Shards,
    filled,
    rollout_shards,
    train_shards,
    whole_tensors,
)

Parameters = dict[tuple[int, str], Tensor]
TRAINING, ROLLOUT, EVERYONE = (0, 1), (2, 3), (0, 1, 2, 3)
APART = (train_shards(UNTIED, Layout.parse("pp2", ranks=TRAINING)), rollout_shards(UNTIED, 2, ranks=ROLLOUT))
COLOCATED = (train_shards(UNTIED, Layout.parse("tp2pp2", ranks=EVERYONE)), rollout_shards(UNTIED, 2))
STEPS = 20


class Rank:
    """One rank's weights on both sides: version v is v times the toy's tensors; rollout begins with 0."""

    def __init__(
        self,
        source: Shards,
        destination: Shards,
        *,
        dtype=torch.float32,
        buffers: torch.device | None = None,
        verify="all",
        negated: str = "",
    ):
        """
        Args:
            negated: the end of the names of parameters that rollout holds in another form, the negative.
        """
        self.rank, tensors, where = dist.get_rank(), whole_tensors(UNTIED), buffers or device.device()
        plan = compile_plan(
            source=source, destination=destination, element_bytes=dtype.itemsize, window_bytes=200
        )  # more than a hundred windows
        self.first, self.expected = (
            filled(source.get(self.rank, []), tensors, torch.nan, torch.float32),
            filled(destination.get(self.rank, []), tensors, 0, dtype),
        )
        self.live, self.front = (
            {key: value.clone() for key, value in self.first.items()},
            {key: torch.zeros_like(value) for key, value in self.expected.items()},
        )
        group = background_group(plan.ranks)
        transport = Transport(dtype=dtype, group=group, device=where, verify=verify)
        names = [key for key in self.front if negated and key[1].endswith(negated)]
        self.negatives = {key: self.front.pop(key) for key in names}
        shapes = {key: tuple(value.shape) for key, value in self.negatives.items()}
        staged = StagedParameters(shapes=shapes, write=self._negate)
        self.versions = VersionedReshard(plan, self.live, self.front, transport, staged=staged)

    def _negate(self, values: Parameters) -> None:
        for key, value in values.items():
            self.negatives[key].copy_(-value)

    def train_to(self, version: int) -> None:
        for key, value in self.live.items():
            value.copy_(self.first[key] * version)

    def step(self) -> None:
        for value in self.live.values():
            value *= 2

    def holds(self, version: int) -> bool:
        found = self.front | {key: -value for key, value in self.negatives.items()}
        return all(torch.equal(found[key], value * version) for key, value in self.expected.items())


@contextmanager
def exchange(*layouts: Shards, **options):
    threads = threading.active_count()
    rank = Rank(*layouts, **options)
    yield rank
    rank.versions.close()
    assert rank.versions.closed and threading.active_count() == threads
    dist.barrier()


def error_of(call: Callable, kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"rank {dist.get_rank()}: no {kind.__name__}")


def hold_back(rank: Rank) -> threading.Event:
    """Stop in the middle of a transfer, for the other ranks, until the event is set."""
    gate, run = threading.Event(), rank.versions.resharder.run

    def run_later():
        gate.wait()
        return run()

    rank.versions.resharder.run = run_later
    return gate


def training_goes_on_during_a_transfer() -> None:
    ours = group_of(TRAINING)
    with exchange(*APART) as rank:
        gate = hold_back(rank) if rank.rank == 2 else None
        if rank.rank in TRAINING:
            rank.versions.publish(1)
            total = torch.ones(1, device=device.device())
            for _ in range(STEPS):
                rank.step()
                dist.all_reduce(total, group=ours)  # training's own collectives
            assert total.item() == 2**STEPS and rank.versions.in_flight()
        else:
            assert rank.holds(0) and not rank.versions.ready()
        dist.barrier()  # all steps were made; only now may the transfer end
        if gate:
            gate.set()
        if rank.rank in ROLLOUT:
            assert rank.holds(0) and rank.versions.version == 0
            assert rank.versions.adopt() == 1 == rank.versions.version and rank.holds(1)
            assert not rank.versions.ready() and rank.versions.report.checked_slices > 100


def publishing_waits_for_the_version_before() -> None:
    with exchange(*APART) as rank:
        gate = hold_back(rank) if rank.rank == 2 else None
        if rank.rank in TRAINING:
            rank.versions.publish(1)
            rank.train_to(2)
            dist.barrier()
            assert rank.versions.transferred == 0
            rank.versions.publish(2)
            assert rank.versions.transferred >= 1
            rank.train_to(3)
            rank.versions.publish(3)
            rank.train_to(99)
        else:
            dist.barrier()
            if gate:
                time.sleep(
                    0.2
                )  # both publish(2) have begun to wait; were they late, the check would only be weaker
                gate.set()
            for version in (1, 2, 3):
                assert rank.versions.adopt() == version and rank.holds(version)


def versions_flow_freely(**options) -> None:
    """No rank waits for another beyond what the class does: every read of the front is a whole version."""
    steps, last = 0, 4
    with exchange(*APART, **options) as rank:
        if rank.rank in TRAINING:
            for version in range(1, last + 1):
                rank.train_to(version)
                rank.versions.publish(version)
                rank.step()
                while rank.versions.in_flight() and version < last:
                    rank.step()
                    steps += 1
        else:
            for version in range(1, last + 1):
                while not rank.versions.ready():
                    assert rank.holds(version - 1)
                    steps += 1
                assert rank.holds(version - 1)
                assert rank.versions.adopt() == version and rank.holds(version)
    if rank.rank in (0, 2):
        steps_of = "training steps" if rank.rank == 0 else "readings of the front"
        print(f"rank {rank.rank}: {steps} {steps_of} while {last} versions were in flight")


def another_form_is_made_of_the_back_buffer() -> None:
    """Before the next version arrives there; of both forms, what arrived can be recorded."""
    with exchange(*APART, negated="gate_up") as rank:
        for version in (1, 2, 3):
            if rank.rank in TRAINING:
                rank.train_to(version)
                rank.versions.publish(version)
                continue

            def record(version: int = version) -> None:
                arrived = rank.versions.back
                assert rank.holds(version) and arrived.keys() == rank.expected.keys()
                assert all(torch.equal(arrived[k], v * version) for k, v in rank.expected.items())

            assert rank.versions.adopt(record) == version and len(rank.negatives) == 4


def buffers_have_one_copy_each() -> None:
    with exchange(*APART, dtype=torch.bfloat16, verify="sample") as rank:
        assert (
            rank.versions.snapshot_bytes == sum(value.numel() for value in rank.live.values()) * 2
        )  # of the type that travels
        assert rank.versions.back_bytes == sum(value.nbytes for value in rank.front.values())
        if rank.rank in TRAINING:
            rank.versions.publish(1)
            rank.step()
        else:
            assert rank.versions.adopt() == 1 and rank.holds(1)


def every_rank_is_both() -> None:
    with exchange(*COLOCATED) as rank:
        for version in (1, 2):
            rank.train_to(version)
            rank.versions.publish(version)
            rank.step()
            assert rank.holds(version - 1)
            assert rank.versions.adopt() == version and rank.holds(version)
        for version in (3, 4):
            rank.train_to(version)
            rank.versions.publish(version)
        assert rank.holds(2)
        error = error_of(lambda: rank.versions.publish(5), RuntimeError)  # would wait for itself for ever
        assert "version 4 cannot leave" in error and "before it adopts version 3" in error, error
        time.sleep(0.2)  # time enough for version 4 to overwrite version 3, were it not held back
        assert rank.versions.transferred == 3 and rank.holds(2)
        assert rank.versions.adopt() == 3 and rank.holds(3)
        assert rank.versions.adopt() == 4 and rank.holds(4)


def replicas_take_part() -> None:
    """A rank that the plan takes nothing from publishes with the others, and does not wait."""
    source = train_shards(UNTIED, Layout(ranks=(0, 1, 3), dp=3))
    with exchange(source, rollout_shards(UNTIED, 1, ranks=(2,))) as rank:
        if rank.rank != 2:
            for version in (1, 2, 3):
                rank.train_to(version)
                rank.versions.publish(version)
            error_of(rank.versions.adopt, ValueError)
        else:
            assert [rank.versions.adopt() for _ in range(3)] == [1, 2, 3] and rank.holds(3)


class Corrupting(Resharder):
    """A transport that flips a bit of rank 2's second version after it arrived."""

    moved = 0

    def move(self) -> None:
        super().move()
        self.moved += 1
        if self.rank == 2 and self.moved == 2:
            next(iter(self.slices.writes.values())).view(torch.int32)[0, 0] ^= 1


def corruption_reaches_every_rank() -> None:
    versions.Resharder = Corrupting
    try:
        rank = Rank(*APART)
    finally:
        versions.Resharder = Resharder
    if rank.rank in TRAINING:
        rank.versions.publish(1)
        rank.versions.publish(2)
        found = {error_of(lambda: rank.versions.publish(3), ReshardError)}
        found.add(error_of(rank.versions.in_flight, ReshardError))
    else:
        assert rank.versions.adopt() == 1
        found = {error_of(rank.versions.adopt, ReshardError), error_of(rank.versions.ready, ReshardError)}
        assert rank.holds(1)  # nothing unverified reaches the front
    found.add(error_of(rank.versions.close, ReshardError))
    assert len(found) == 1 and "to rank 2" in found.pop() and rank.versions.closed
    dist.barrier()


def sources_must_agree() -> None:
    rank = Rank(*APART)
    if rank.rank in TRAINING:
        rank.versions.publish(rank.rank + 1)
        error = error_of(lambda: rank.versions.publish(3), RuntimeError)
    else:
        error = error_of(rank.versions.adopt, RuntimeError)
        assert rank.holds(0)
    assert "published versions [1, 2]" in error, error
    assert error_of(rank.versions.close, RuntimeError) == error
    dist.barrier()


def a_close_ends_it_for_all() -> None:
    with exchange(*APART) as rank:
        pass  # nobody ever published
    error = error_of(
        rank.versions.adopt if rank.rank in ROLLOUT else lambda: rank.versions.publish(1), RuntimeError
    )
    assert "closed the exchange" in error and rank.holds(0)
    with exchange(*APART) as rank:  # what was published leaves before a close, and can be adopted after it
        if rank.rank in TRAINING:
            rank.versions.publish(1)
            rank.versions.close()
        else:
            while not rank.versions.closed:
                time.sleep(0.01)
            assert rank.versions.ready() and rank.versions.adopt() == 1 and rank.holds(1)
    with exchange(*APART) as rank:  # the rollout has enough: training hears of it
        if rank.rank in TRAINING:
            error = error_of(
                lambda: [rank.versions.publish(version) for version in range(1, 5)], RuntimeError
            )
            assert "rank 2, 3 closed" in error or "rank 2 closed" in error or "rank 3 closed" in error, error
            assert not rank.versions.in_flight()


def a_failed_publish_blocks_nobody() -> None:
    with exchange(*APART) as rank:
        if rank.rank == 0:
            error = error_of(lambda: rank.versions.publish(0), ValueError)
            assert "cannot follow" in error
            rank.versions.close()  # as a scope does on the way out
        elif rank.rank == 1:
            error = error_of(lambda: [rank.versions.publish(version) for version in (1, 2)], RuntimeError)
            assert "rank 0 closed" in error
        else:
            assert "rank 0 closed" in error_of(rank.versions.adopt, RuntimeError) and rank.holds(0)


def a_group_of_its_own_is_demanded() -> None:
    source, destination = APART
    plan = compile_plan(source=source, destination=destination, element_bytes=4, window_bytes=2**20)
    for group in (None, dist.group.WORLD):
        transport = Transport(dtype=torch.float32, group=group, device=device.device())
        assert "background_group" in error_of(
            lambda transport=transport: VersionedReshard(plan, {}, {}, transport), ValueError
        )


def a_dead_peer_is_an_error() -> None:
    """Rank 3 ends while the others wait for its report and for version 1; the last check of a world."""
    rank = Rank(*APART)
    dist.barrier()
    if rank.rank == 3:
        os._exit(0)
    if rank.rank in TRAINING:
        error = error_of(lambda: [rank.versions.publish(version) for version in (1, 2)], RuntimeError)
    else:
        error = error_of(rank.versions.adopt, RuntimeError)
    assert "closed the exchange" not in error and error_of(rank.versions.close, RuntimeError) == error
    assert rank.holds(0)
    print(f"rank {rank.rank} saw that a peer is gone: {error}", flush=True)
    os._exit(0)  # collectives over the world are impossible now


CHECKS = [
    training_goes_on_during_a_transfer,
    publishing_waits_for_the_version_before,
    versions_flow_freely,
    another_form_is_made_of_the_back_buffer,
    buffers_have_one_copy_each,
    every_rank_is_both,
    replicas_take_part,
    corruption_reaches_every_rank,
    sources_must_agree,
    a_close_ends_it_for_all,
    a_failed_publish_blocks_nobody,
    a_group_of_its_own_is_demanded,
]


def through_host_memory() -> None:
    """Parameters on GPUs, buffers and messages on the CPU."""
    versions_flow_freely(buffers=torch.device("cpu"))


if __name__ == "__main__":
    device.initialize()
    if sys.argv[1:] == ["dying"]:
        a_dead_peer_is_an_error()
    for each in [*CHECKS, through_host_memory] if device.is_gpu() else CHECKS:
        each()
    dist.barrier()
    if dist.get_rank() == 0:
        print("all checks of versions passed")
    dist.destroy_process_group()

"""Methods that `bench/reshard.py` times: link rates, other systems' methods, and each mode of our reshard."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups
from parallel.rank_set import world
from parallel.reshard.execute import Resharder
from parallel.reshard.in_place.addresses import addresses_of, views_at
from parallel.reshard.in_place.memory_layout import Addresses
from parallel.reshard.in_place.planner import Sides, plan_in_place
from parallel.reshard.ipc_tensors import IpcTensors, map_tensors
from parallel.reshard.plan import Plan, compile_plan
from parallel.reshard.transport import Parameters, Transport
from parallel.weights.shard import ShardedParameter
from verl_megatron.benchmarks.case import ReshardCase, bytes_of, say, trained_weights

WIRE, CARD = "point to point, both ways", "on-card copy"  # the links


@dataclass(slots=True, kw_only=True)
class Contender:
    """One method to time; byte counts are of this rank."""

    kind: str  # link, gather, megatron or ours
    name: str
    run: Callable[[], object]
    received_bytes: int
    plan: Plan | None = None  # required transfers, which set the floor; a link has none
    staging_bytes: int = 0  # memory kept between repetitions
    second_copy_bytes: int = 0  # destination memory in addition to the source
    target: Parameters = field(default_factory=dict)  # parameters that it writes
    described: list[ShardedParameter] = field(default_factory=list)  # contents of the target afterwards
    # part of the target that may be overwritten beforehand: no memory shared with the source
    overwritable: Parameters = field(default_factory=dict)


def links(link_bytes: int) -> list[Contender]:
    """Measure link rates: each rank exchanges with the one half a world away, and copies on its GPU."""
    world, rank, copies = dist.get_world_size(), dist.get_rank(), 4
    out, back = (torch.zeros(link_bytes, dtype=torch.uint8, device=device.device()) for _ in range(2))

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, out, (rank + world // 2) % world),
            dist.P2POp(dist.irecv, back, (rank - world // 2) % world),
        ]
        for message in dist.batch_isend_irecv(operations):
            message.wait()

    def copy() -> None:
        for _ in range(copies):
            back.copy_(out)

    wire = Contender(kind="link", name=WIRE, run=exchange, received_bytes=link_bytes)
    return [wire] * (world > 1) + [
        Contender(kind="link", name=CARD, run=copy, received_bytes=copies * link_bytes)
    ]


def megatron_refit(case: ReshardCase, groups: list[ProcessGroups]) -> tuple[Contender, Parameters]:
    """Return Megatron-Core's resharding between models in the two layouts, and the first model's tensors.

    Those tensors are the source for all contenders. Megatron-Core does not report the bytes it moves; the
    number given is what our plan needs for the same job, so it may receive more.
    """
    from megatron.core.resharding.refit import swap_model_weights

    from parallel import megatron
    from verl_megatron.models.build import Compute, build_chunks

    models = []
    for members in groups:
        megatron.seed(members, 1)
        models += [
            model.requires_grad_(False)
            for model in build_chunks(
                case.arch, members, Compute(dtype=case.dtype, spec=case.spec), head="lm"
            )
        ]
    source, target = (
        trained_weights(case),
        {(0, name): parameter.data for name, parameter in models[1].named_parameters()},
    )
    for name, parameter in models[0].named_parameters():
        parameter.data = source[0, name]

    run, rank = partial(swap_model_weights, *models, refit_method="nccl"), dist.get_rank()
    run()  # plans
    into = {rank: case.train_shards(rank, case.rollout) for rank in case.rollout.ranks}
    plan = compile_plan(**{**case.sides(), "destination": into})
    what: dict[str, Any] = dict(
        plan=plan,
        received_bytes=plan.received_bytes[rank],
        second_copy_bytes=bytes_of(target),
        target=target,
        described=into[rank],
        overwritable=target,
    )
    return Contender(
        kind="megatron", name="Megatron-Core's refit, into Megatron's layout", run=run, **what
    ), source


class Ours:
    """Our contenders, mode by mode, over the same source."""

    def __init__(self, case: ReshardCase, source: Parameters, verify: str):
        """Build the contenders.

        Args:
            verify: checksums in the timed repetitions of the contender with verification; all are verified
                once beforehand.
        """
        self.case, self.source, self.verify, self.rank = case, source, verify, dist.get_rank()
        self.sides, self.ipc_tensors = case.sides(), map_tensors(source, world().device_group)
        self.plan = compile_plan(**self.sides, peer_memory=self.ipc_tensors is not None)
        self.described = self.sides["destination"][self.rank]
        self.destination = {(0, p.name): self._empty(p) for p in self.described}
        kept: dict[str, Any] = dict(
            target=self.destination, overwritable=self.destination, described=self.described
        )
        # columns of a destination with its own memory
        self.kept: dict[str, Any] = kept | dict(second_copy_bytes=bytes_of(self.destination))

    def contenders(self, mode: str) -> list[Contender]:
        """Return the contenders of a mode (keep, share or swap); swap's two form a pair, in this order.

        Collective over the world.
        """
        say(f"{self.case}, {mode}:")
        return self._keep() if mode == "keep" else self._in_place(mode)

    def _keep(self) -> list[Contender]:
        keep = self._resharder(self.plan, self.source, self.destination, self.ipc_tensors)
        contenders = [self._contender("keep", keep, **self.kept)]
        if self.verify != "none":
            contenders.append(
                self._contender(f"keep, verified ({self.verify})", keep, run=keep.run, **self.kept)
            )
        if self.ipc_tensors is not None:
            by_messages = self._resharder(compile_plan(**self.sides), self.source, self.destination)
            contenders.append(self._contender("keep, by messages", by_messages, **self.kept))
        return contenders

    def _in_place(self, mode: str) -> list[Contender]:
        """Return vLLM's parameters placed in Megatron's memory; those that do not fit have their own."""
        memory: list[Addresses] = [{}] * dist.get_world_size()
        dist.all_gather_object(memory, addresses_of(self.source))
        sides = Sides(
            source=self.sides["source"],
            destination=self.sides["destination"],
            memory=dict(enumerate(memory)),
            element_bytes=self.case.dtype.itemsize,
        )
        plans = plan_in_place(
            sides,
            in_place=mode == "swap",
            window_bytes=self.case.window_bytes,
            host_of=device.host_of,
            peer_memory=self.ipc_tensors is not None,
        )
        target = views_at(plans.addresses[self.rank], self.described, self.source, self.case.dtype)
        own = {(p.chunk, p.name): self._empty(p) for p in self.described if (p.chunk, p.name) not in target}
        target |= own
        to_rollout = self._resharder(plans.to_rollout, self.source, target, self.ipc_tensors)
        second: dict[str, Any] = dict(second_copy_bytes=bytes_of(own))
        contenders = [
            self._contender(
                f"{mode}, to rollout",
                to_rollout,
                target=target,
                overwritable=own,
                described=self.described,
                **second,
            )
        ]
        if plans.to_train is not None:
            to_train = self._resharder(plans.to_train, target, self.source)
            train_shards = self.sides["source"][self.rank]
            contenders.append(
                self._contender(
                    f"{mode}, back to training",
                    to_train,
                    target=self.source,
                    described=train_shards,
                    **second,
                )
            )
        return contenders

    def _empty(self, parameter: ShardedParameter) -> Tensor:
        """Return zeros: other methods leave the padding as an engine initializes it."""
        return torch.zeros(parameter.shape, dtype=self.case.dtype, device=device.device())

    def _resharder(
        self,
        plan: Plan,
        source: Parameters,
        destination: Parameters,
        ipc_tensors: IpcTensors | None = None,
    ) -> Resharder:
        """Return a resharder after a first run, in which all slices were verified."""
        transport = Transport(
            dtype=self.case.dtype,
            group=world().device_group,
            device=device.device(),
            verify="all",
            ipc_tensors=ipc_tensors,
        )
        resharder = Resharder(plan, source, destination, transport)
        count = resharder.run().checked_slices  # raises on a difference, naming the slices
        say(f"{plan}\n  all {count} slices verified at both ends")
        resharder.verifier.verify = self.verify
        resharder.verifier.prepare()
        return resharder

    def _contender(
        self, name: str, resharder: Resharder, *, run: Callable[[], object] | None = None, **what
    ) -> Contender:
        sizes = dict(
            received_bytes=resharder.bytes["received"], staging_bytes=resharder.plan.staged_bytes[self.rank]
        )
        return Contender(
            kind="ours", name=f"ours, {name}", run=run or resharder.move, plan=resharder.plan, **sizes, **what
        )

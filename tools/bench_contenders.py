"""What `bench_reshard.py` times: the machine's own rates, what others do, and our reshard in each of its modes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from bench_case import Case, bytes_of, say, trained_weights
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups
from parallel.reshard.addresses import addresses_of, views_at
from parallel.reshard.execute import Parameters, Resharder
from parallel.reshard.overlay import Addresses, overlay
from parallel.reshard.peers import Mapped, map_tensors
from parallel.reshard.plan import Plan, compile_plan
from parallel.weights.shard import ShardedParameter

WIRE, CARD = "point to point, both ways", "on-card copy"  # the links


@dataclass(slots=True, kw_only=True)
class Contender:
    """One thing to time. What it says of bytes holds for this rank."""

    kind: str  # link, gather, megatron or ours
    name: str
    run: Callable[[], object]
    received_bytes: int
    plan: Plan | None = None  # of what has to move, which sets the floor; a link has none
    staging_bytes: int = 0  # memory it keeps between repetitions
    second_copy_bytes: int = 0  # what the destination takes beside the source
    target: Parameters = field(default_factory=dict)  # what it writes
    described: list[ShardedParameter] = field(default_factory=list)  # what the target holds afterwards
    spoiled: Parameters = field(
        default_factory=dict
    )  # what of the target may be overwritten before: nothing that lies over the source


def links(link_bytes: int) -> list[Contender]:
    """The machine's own rates: each rank exchanges with the one half a world away, and copies on its card."""
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


def megatron_refit(case: Case, groups: list[ProcessGroups]) -> tuple[Contender, Parameters]:
    """Megatron-Core's resharding between models in the two layouts, and the tensors of the first, which serve as source for all.

    It says nothing of the bytes it moves. Received are those that our plan for the same job needs: it may receive more.
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
    into = {rank: case.trained(rank, case.rollout) for rank in case.rollout.ranks}
    plan = compile_plan(**case.sides() | {"destination": into})
    what = dict(
        plan=plan,
        received_bytes=plan.received_bytes[rank],
        second_copy_bytes=bytes_of(target),
        target=target,
        described=into[rank],
        spoiled=target,
    )
    return Contender(
        kind="megatron", name="Megatron-Core's refit, into Megatron's layout", run=run, **what
    ), source


class Ours:
    """Our own contenders, mode by mode, over the same source."""

    def __init__(self, case: Case, source: Parameters, verify: str):
        """Args: verify: the proof in the timed repetitions of the contender with proof; all are proved once beforehand."""
        self.case, self.source, self.verify, self.rank = case, source, verify, dist.get_rank()
        self.sides, self.peers = case.sides(), map_tensors(source, None)
        self.plan = compile_plan(**self.sides, peer_memory=self.peers is not None)
        self.described = self.sides["destination"][self.rank]
        self.destination = {(0, p.name): self._empty(p) for p in self.described}
        kept = dict(target=self.destination, spoiled=self.destination, described=self.described)
        self.kept = kept | dict(
            second_copy_bytes=bytes_of(self.destination)
        )  # what is said of a destination with memory of its own

    def contenders(self, mode: str) -> list[Contender]:
        """Of one of the modes keep, share and swap; swap's two belong together, in this order. Collective over the world."""
        say(f"{self.case}, {mode}:")
        return self._keep() if mode == "keep" else self._laid_over(mode)

    def _keep(self) -> list[Contender]:
        keep = self._resharder(self.plan, self.source, self.destination, self.peers)
        found = [self._contender("keep", keep, **self.kept)]
        if self.verify != "none":
            found.append(
                self._contender(f"keep, with proof ({self.verify})", keep, run=keep.run, **self.kept)
            )
        if self.peers is not None:
            by_messages = self._resharder(compile_plan(**self.sides), self.source, self.destination)
            found.append(self._contender("keep, by messages", by_messages, **self.kept))
        return found

    def _laid_over(self, mode: str) -> list[Contender]:
        """vLLM's parameters in Megatron's memory; those for which there is no place have their own."""
        memory: list[Addresses] = [{}] * dist.get_world_size()
        dist.all_gather_object(memory, addresses_of(self.source))
        found = overlay(
            **self.sides,
            memory=dict(enumerate(memory)),
            in_place=mode == "swap",
            peer_memory=self.peers is not None,
        )
        taken = views_at(found.addresses[self.rank], self.described, self.source, self.case.dtype)
        own = {(p.chunk, p.name): self._empty(p) for p in self.described if (p.chunk, p.name) not in taken}
        taken |= own
        out = self._resharder(found.forth, self.source, taken, self.peers)
        second = dict(second_copy_bytes=bytes_of(own))
        contenders = [
            self._contender(
                f"{mode}, to rollout", out, target=taken, spoiled=own, described=self.described, **second
            )
        ]
        if found.back is not None:
            home = self._resharder(found.back, taken, self.source)
            trained = self.sides["source"][self.rank]
            contenders.append(
                self._contender(
                    f"{mode}, back to training", home, target=self.source, described=trained, **second
                )
            )
        return contenders

    def _empty(self, parameter: ShardedParameter) -> Tensor:
        """Zeros: what others do leaves the padding as an engine has it from the start."""
        return torch.zeros(parameter.shape, dtype=self.case.dtype, device=device.device())

    def _resharder(
        self, plan: Plan, source: Parameters, destination: Parameters, peers: dict[int, Mapped] | None = None
    ) -> Resharder:
        """After a first run, in which all slices were proved."""
        common = dict(rank=self.rank, dtype=self.case.dtype, group=None, device=device.device(), peers=peers)
        resharder = Resharder(plan, source=source, destination=destination, verify="all", **common)
        count = resharder.run().checked_slices  # raises and names them if one differs
        say(f"{plan}\n  all {count} slices proved at both ends")
        resharder.proof.verify = self.verify
        resharder.proof.prepare()
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

"""The torch process groups of a `Layout`: created once, passed on as arguments."""

from typing import Any, cast

import torch.distributed as dist

from parallel import device
from parallel.layout import Coordinates, Layout

_made: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of these world ranks, created on the first call.

    Every rank of the world must call this, in the same order.
    """
    if ranks not in _made:
        made = dist.new_group(list(ranks), backend=device.backend(), timeout=device.COLLECTIVE_TIMEOUT)
        _made[ranks] = cast(dist.ProcessGroup, made)
    return _made[ranks]


class ProcessGroups:
    """All groups of one model on this rank.

    Every rank of the world constructs it, in the same order. A rank outside the layout has `is_member` False
    and no groups.
    """

    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    tp_cp: dist.ProcessGroup
    mp: dist.ProcessGroup
    tp_dp_cp: dist.ProcessGroup
    world: dist.ProcessGroup

    def __init__(self, layout: Layout):
        self.layout = layout
        self.rank = dist.get_rank()
        self.is_member = self.rank in layout.ranks
        for name, axes in dict(
            tp=["tp"],
            cp=["cp"],
            dp=["dp"],
            pp=["pp"],
            dp_cp=["cp", "dp"],
            tp_cp=["tp", "cp"],
            mp=["tp", "pp"],
            tp_dp_cp=["tp", "cp", "dp"],
            world=["tp", "cp", "dp", "pp"],
        ).items():
            setattr(self, name, self._mine(layout.group_ranks(*axes)))
        self.alone = self._mine([[rank] for rank in layout.ranks])
        # The first and the last stage share a tied embedding. The other stages get a group of one rank: None
        # would make Megatron look the group up in its globals.
        pipelines = layout.group_ranks("pp")
        ends = [sorted({stages[0], stages[-1]}) for stages in pipelines]
        self.embedding = self._mine(ends + [[rank] for stages in pipelines for rank in stages[1:-1]])

    def _mine(self, lists: list[list[int]]) -> Any:
        """Return this rank's group, None outside the layout; members need not look for None."""
        groups = {tuple(ranks): group_of(tuple(ranks)) for ranks in lists}
        return next((group for ranks, group in groups.items() if self.rank in ranks), None)

    @property
    def coordinates(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    @property
    def is_first_stage(self) -> bool:
        return self.is_member and self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.is_member and self.coordinates.pp == self.layout.pp - 1

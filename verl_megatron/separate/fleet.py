"""All rollout worlds of a run, as the training world sees them: who is there, and with which weights."""

from functools import partial

import torch
from torch import Tensor

from parallel.bridge import BridgeLostError
from parallel.reshard.execute import ReshardReport
from parallel.reshard.plan import Plan
from parallel.reshard.source import WeightSource
from parallel.reshard.transport import Parameters
from verl_megatron.config import TrainerConfig
from verl_megatron.model_specs import rollout_worlds
from verl_megatron.separate.link import RolloutLink, TrainingEnd
from verl_megatron.separate.orders import shares_of
from verl_megatron.separate.roster import Meeting, Roster


class Fleet(Roster[RolloutLink]):
    """The rollout worlds. Construction waits for the first; others may join later.

    All methods are collective over the training world.

    With stale samples in order, it keeps a copy in host memory of each version whose samples may still be
    missing, so that another rollout world makes the same ones.

    Args:
        source: the trained model's weights.
        dtype: of vLLM's weights.
    """

    def __init__(self, config: TrainerConfig, meeting: Meeting, source: WeightSource, *, dtype: torch.dtype):
        super().__init__(meeting, rollout_worlds(config))
        self._source, self._dtype = source, dtype
        self._keeps = config.async_.max_staleness > 0 and config.async_.buffer == "in_order"
        # Host copies by version, and by the size of the worlds whose plans read these parameters; 0: all.
        self._kept: dict[tuple[int, int], Parameters] = {}
        self.version = 0  # of the present weights
        self.kv_cache_tokens = 0  # of a replica of the world that has joined last
        self.num_ended = 0  # worlds that have ended, since the last iteration's metrics
        self.shares = shares_of(self.worlds, config.rollout.tp)
        self._last_report = ReshardReport()
        self._end = TrainingEnd(
            config=config,
            world=self.world,
            store=meeting.store,
            settings=meeting.settings,
            source=source,
            dtype=dtype,
            wait=self.work,
        )
        self.admit_any()
        self.plan: Plan = next(iter(self.links.values())).plan

    @property
    def report(self) -> ReshardReport:
        """Sums over the latest weight syncs that have ended, one of each world."""
        reports = [link.report for link in self.links.values()] or [self._last_report]
        return ReshardReport(
            bytes_received=sum(report.bytes_received for report in reports),
            bytes_sent=sum(report.bytes_sent for report in reports),
            bytes_local=sum(report.bytes_local for report in reports),
            checked_slices=sum(report.checked_slices for report in reports),
            seconds=max(report.seconds for report in reports),
        )

    # ---- worlds --------------------------------------------------------------------------------------------

    def admit_any(self) -> list[int]:
        """Join the worlds that have come, and wait for one if none is there; as of `admit`."""
        return self.admit(until=lambda: bool(self.links))

    def admit_able(self, version: int) -> list[int]:
        """Join the worlds that have come, and wait for one that can get a version; as of `admit`."""
        return self.admit(until=lambda: any(self.can_provide(place, version) for place in self.links))

    def _connect(self, place: int, number: int) -> RolloutLink:
        keep = partial(self._keep, len(self.worlds[place].ranks)) if self._keeps else None
        link = RolloutLink(self._end, self.worlds[place], number=number, keep=keep)
        self.kv_cache_tokens = link.kv_cache_tokens
        return link

    def lose(self, place: int, reason: str) -> None:
        link = self.links[place]
        self.num_ended += 1
        self._last_report = link.report
        if (left := link.unsent()) is not None and self._keeps:
            self._keep(len(link.served_by.ranks), *left)
        super().lose(place, reason)

    # ---- weights -------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Begin to send the present version to all worlds; the weights may change at once.

        A world that is not there, or found lost, gets what it needs when the next one has joined.
        """
        kept_for = set()  # sizes of worlds
        for link in self.links.values():
            try:
                link.send(self.version)
                kept_for.add(len(link.served_by.ranks))
            except BridgeLostError:
                pass
        if self._keeps and kept_for != {len(world.ranks) for world in self.worlds}:
            self._keep(0, self.version, self._source.tensors)

    def is_unchanged(self) -> bool:
        """Whether the version that was sent last has the weights of the one before."""
        here = all(link.is_unchanged for link in self.links.values())
        return bool(self.links) and all(self.world.all_gather_object(here))

    def can_provide(self, place: int, version: int) -> bool:
        """Whether a world that is there can get a version: it has it, it is the present one, or kept."""
        if self.links[place].version == version or version == self.version:
            return True
        return all(self.world.all_gather_object(self._copy_of(place, version) is not None))

    def provide(self, place: int, version: int) -> None:
        """See to it that a world's latest weight sync brings a version, which `can_provide` says it can.

        Raises:
            BridgeLostError: the world has ended.
        """
        if self.links[place].version != version:
            is_present = version == self.version
            self.links[place].send(version, None if is_present else self._copy_of(place, version))

    def provide_any(self, place: int) -> None:
        """Send the present weights to a world that has none yet; errors as of `provide`."""
        if self.links[place].version is None:
            self.links[place].send(self.version)

    def _copy_of(self, place: int, version: int) -> Parameters | None:
        own = self._kept.get((version, len(self.worlds[place].ranks)))
        return self._kept.get((version, 0)) if own is None else own

    def work(self) -> None:
        """Go on with weight syncs that wait; called again and again while this rank waits."""
        super().work()
        for link in self.links.values():
            try:
                link.work()
            except BridgeLostError:
                pass  # noticed when its samples are received

    def _keep(self, size: int, version: int, values: Parameters) -> None:
        """Copy a version to host memory."""
        if (version, size) not in self._kept:
            copies = {key: _host_copy(tensor, self._dtype) for key, tensor in values.items()}
            self._kept[version, size] = copies

    def forget(self, before: int) -> None:
        """Drop the copies of versions before this one, whose samples have all arrived."""
        for version, size in list(self._kept):
            if version < before:
                del self._kept[version, size]


def _host_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)

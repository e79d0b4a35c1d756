"""All rollout worlds of a run, as the training world sees them: who is there, and with which weights."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from parallel.bridge import JOIN_S, POLL_S, BridgeLostError, newest, open_store, together
from parallel.rank_set import RankSet
from parallel.reshard.execute import ReshardReport
from parallel.reshard.plan import Plan
from parallel.reshard.source import WeightSource
from parallel.reshard.transport import Parameters
from verl_megatron.config import TrainerConfig
from verl_megatron.model_specs import ServingWorld, rollout_worlds
from verl_megatron.separate.link import RolloutLink, TrainingEnd
from verl_megatron.separate.orders import shares_of

MOST_FRUITLESS = 3  # worlds that may end one after the other in a place without having made a sample


class Fleet:
    """The rollout worlds. Construction waits for the first; others may join later.

    All methods are collective over the training world.

    With stale samples in order, it keeps a copy in host memory of each version whose samples may still be
    missing, so that another rollout world makes the same ones.

    Args:
        world: all training ranks.
        source: the trained model's weights.
        dtype: of vLLM's weights.
        wait: called again and again while this rank waits for another world.
        say: prints a message on one rank.
    """

    def __init__(
        self,
        config: TrainerConfig,
        world: RankSet,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        wait: Callable[[], None],
        say: Callable[[str], None],
    ):
        self.world, self._source, self._dtype = world, source, dtype
        self._beat, self._say = wait, say
        self._keeps = config.async_.max_staleness > 0 and config.async_.buffer == "in_order"
        # Host copies by version, and by the size of the worlds whose plans read these parameters; 0: all.
        self._kept: dict[tuple[int, int], Parameters] = {}
        self.version = 0  # of the present weights
        self.num_ended = 0  # worlds that have ended, since the last iteration's metrics
        self.worlds: Sequence[ServingWorld] = rollout_worlds(config)
        self.links: dict[int, RolloutLink] = {}  # of the worlds that are there, by place in `worlds`
        self.shares = shares_of(self.worlds, config.rollout.tp)
        self._numbers = [0] * len(self.worlds)  # of the newest bridge that was joined
        self._fruitless = [0] * len(self.worlds)
        self._last_report = ReshardReport()
        self._store = open_store(world, serves=True, wait=self._beat)
        self._end = TrainingEnd(
            config=config, world=world, store=self._store, source=source, dtype=dtype, wait=self.work
        )
        self.admit(waits=True)
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

    @property
    def kv_cache_tokens(self) -> int:
        """Size of a replica's cache."""
        return next(iter(self.links.values())).kv_cache_tokens

    # ---- worlds --------------------------------------------------------------------------------------------

    def admit(self, *, waits: bool = False) -> list[int]:
        """Join the worlds that have come since the last call, and return their places.

        Args:
            waits: for one, if none is there.

        Raises:
            ValueError: no world has come within JOIN_S.
        """
        joined: list[int] = []
        end = time.monotonic() + JOIN_S
        while True:
            for place, number in self._arrivals():
                if place in self.links:
                    self.lose(place, "another has joined")
                self._numbers[place] = number
                try:
                    self.links[place] = together(self.world, partial(self._connect, place, number))
                    joined.append(place)
                except BridgeLostError:
                    continue  # it ended meanwhile; the next one may come
            if self.links or not waits:
                return joined
            if self.world.broadcast_object(time.monotonic() > end):
                raise ValueError(
                    f"no rollout world has joined for {JOIN_S:.0f} s; look at its output, and start it"
                )
            self.work()
            time.sleep(POLL_S)

    def _arrivals(self) -> list[tuple[int, int]]:
        """Return places and bridge numbers of worlds that have come, the same on every rank."""
        found = []
        if self.world.is_first:
            found = [(place, newest(self._store, world.name)) for place, world in enumerate(self.worlds)]
        found = self.world.broadcast_object(found)
        return [(place, number) for place, number in found if number > self._numbers[place]]

    def _connect(self, place: int, number: int) -> RolloutLink:
        keep = partial(self._keep, len(self.worlds[place].ranks)) if self._keeps else None
        return RolloutLink(self._end, self.worlds[place], number=number, keep=keep)

    def lose(self, place: int, reason: str) -> None:
        """Let go of a world that has ended.

        Raises:
            ValueError: several ended in this place, one after the other, without having made a sample.
        """
        link = self.links.pop(place)
        self.num_ended += 1
        self._last_report = link.report
        if (left := link.unsent()) is not None and self._keeps:
            self._keep(len(link.served_by.ranks), *left)
        link.abandon()
        made = any(self.world.all_gather_object(link.has_made_samples))
        self._fruitless[place] = 0 if made else self._fruitless[place] + 1
        if self._fruitless[place] >= MOST_FRUITLESS:
            raise ValueError(
                f"the {self.worlds[place].name} world ended {MOST_FRUITLESS} times without having made a "
                f"sample ({reason}); its last lines say why"
            )

    def say_joined(self, place: int, text: str) -> None:
        """Print that a world has joined."""
        self._say(f"{self.worlds[place].name} world {self._numbers[place]} has joined; {text}")

    # ---- weights -------------------------------------------------------------------------------------------

    def send(self, version: int) -> None:
        """Begin to send the present weights to all worlds; the weights may change at once.

        A world that is found lost gets what it needs when the next one has joined.
        """
        self.version = version
        is_complete = bool(self.links)
        for link in self.links.values():
            try:
                link.send(version)
            except BridgeLostError:
                is_complete = False
        if self._keeps and not is_complete:
            self._keep(0, version, self._source.tensors)

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

    def _copy_of(self, place: int, version: int) -> Parameters | None:
        own = self._kept.get((version, len(self.worlds[place].ranks)))
        return self._kept.get((version, 0)) if own is None else own

    def work(self) -> None:
        """Go on with weight syncs that wait; called again and again while this rank waits."""
        self._beat()
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

    def close(self) -> None:
        """Let all worlds end."""
        self.world.barrier()
        for link in self.links.values():
            link.close()


def _host_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)

"""What the training loop takes for its rollout where other worlds generate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from parallel.bridge import Bridge
from parallel.reshard.checksum_verifier import ReshardError
from parallel.reshard.execute import ReshardReport
from verl_megatron.config import TrainerConfig
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.residency import Tag
from verl_megatron.rewards.shaping import has_variance
from verl_megatron.rollout.sampler import Draw
from verl_megatron.separate.fleet import Fleet
from verl_megatron.separate.ordered_sampler import OrderedSampler
from verl_megatron.separate.remote_sampler import Demand, RemoteSampler
from verl_megatron.separate.window.window_sampler import WindowSampler


class SeparateChannel:
    """Publishes weights to the rollout worlds, which adopt each version when they need it.

    Args:
        is_validated: whether validation will ask for a version.
    """

    def __init__(
        self,
        fleet: Fleet,
        gather: Callable[[], None],
        sampler: RemoteSampler,
        *,
        is_validated: Callable[[int], bool],
    ):
        self._fleet, self._gather, self._sampler = fleet, gather, sampler
        self._is_validated = is_validated
        self._version = 0
        self._is_published = False

    @property
    def report(self) -> ReshardReport:
        """Report of the latest weight syncs that have ended."""
        return self._fleet.report

    def publish(self, version: int, *, was_updated: bool = False) -> None:
        """Start to send a version if it will be asked for; the weights may change at once.

        Raises:
            ReshardError: an update was made, and the weights to send are those of the version before.
        """
        first, self._version, self._is_published = not self._is_published, version, True
        is_sent = first or self._sampler.needs(version) or self._is_validated(version)
        self._gather()
        self._fleet.version = version
        if is_sent:
            self._fleet.send()
            if was_updated and self._fleet.is_unchanged():
                raise ReshardError(
                    f"version {version} of the weights equals the one before, though the update had a "
                    "gradient: the rollout would generate with old weights; raise actor.lr if it is tiny"
                )
        self._sampler.published(version, is_sent=is_sent)

    def adopt(self) -> int:
        """Return the newest version; the first one is published now."""
        if not self._is_published:
            self.publish(self._version)
        return self._version


class RemoteEngine:
    """Stands for the rollout worlds' engines where training makes room for one: there is nothing to do."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet

    @property
    def kv_cache_tokens(self) -> int:
        """Size of a replica's cache."""
        return self._fleet.kv_cache_tokens

    def sleep(self) -> None:
        pass

    def wake(self, tag: Tag) -> None:
        pass

    def has_room(self, tag: Tag) -> bool:
        return True

    def run(self, meanwhile: Callable[[], None]) -> ReshardReport:
        raise AssertionError("the rollout worlds' weights go over bridges")

    def restore(self) -> bool:
        return False

    @property
    def bridges(self) -> list[tuple[Bridge, Sequence[int]]]:
        """Bridges to the rollout worlds; as of `Roster`."""
        return self._fleet.bridges

    def close(self) -> None:
        """Let the rollout worlds end. Collective over the training world."""
        self._fleet.close()


@dataclass(frozen=True, kw_only=True)
class RolloutSide:
    """What training needs of the rollout worlds."""

    engine: RemoteEngine
    sampler: RemoteSampler
    channel: SeparateChannel


def rollout_side(
    config: TrainerConfig, fleet: Fleet, draw: Draw, cursor: PromptCursor, *, gather: Callable[[], None]
) -> RolloutSide:
    """Return what stands for the rollout worlds.

    Args:
        cursor: of the training prompts.
        gather: makes the trained weights complete before they are sent.
    """
    drops, asynchrony = config.algorithm.dynamic_sampling, config.async_
    demand = Demand(
        draw=draw,
        cursor=cursor,
        max_staleness=asynchrony.max_staleness,
        last=config.run.iterations,
        sync_interval=config.async_.sync_interval,
    )
    sampler: RemoteSampler
    if asynchrony.buffer == "window":
        sampler = WindowSampler(fleet, demand, keep_group=has_variance if drops else None)
    else:
        sampler = OrderedSampler(fleet, demand, keeps_all=not drops)
    channel = SeparateChannel(fleet, gather, sampler, is_validated=partial(_is_validated, config))
    return RolloutSide(engine=RemoteEngine(fleet), sampler=sampler, channel=channel)


def _is_validated(config: TrainerConfig, version: int) -> bool:
    interval = config.run.validate_interval
    is_due = version in (0, config.run.iterations) or (interval > 0 and version % interval == 0)
    return bool(config.data.validation) and is_due

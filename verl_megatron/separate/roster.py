"""The worlds of one kind that serve training: who is there, who comes, and who has ended."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from parallel.bridge import (
    LEFT,
    PATIENCE,
    POLL_S,
    SIGNS,
    Bridge,
    BridgeLostError,
    give_up,
    losing,
    newest,
    together,
)
from parallel.pulse import Listener, Pulse
from parallel.rank_set import RankSet
from parallel.sealed_store import JOIN_S, open_store
from verl_megatron.config import TrainerConfig
from verl_megatron.lifecycle.agreement import agreed_by_worlds
from verl_megatron.model_specs import ServingWorld

MOST_FRUITLESS = 3  # worlds that may end one after the other in a place without having served


class Meeting:
    """Where the training world meets the worlds that serve it. Serves the store of the bridges.

    Until `close`, each training rank gives signs of life there.

    Args:
        config: has the settings that the other worlds must have, too, and `run.stall_timeout_s`, the patience
            with a world that shows no sign of life; 0: any number of seconds.
        world: all training ranks.
        beat: tells the watchdog that this rank is at work.

    Raises:
        ValueError: the environment names no store.
    """

    def __init__(self, config: TrainerConfig, world: RankSet, beat: Callable[[], None]):
        self.world, self.patience_s, self._beat = world, config.run.stall_timeout_s, beat
        self.settings = agreed_by_worlds(config)
        self.store = open_store(world, serves=True, wait=beat)
        self.chores: list[Callable[[], None]] = []  # done by `work`; they do not wait for other ranks
        self._is_at_chores = False
        self._signs = self.store.part(SIGNS)
        if world.is_first:
            self._signs.put(PATIENCE, f"{world.size} {self.patience_s}")
        self._pulse = Pulse(self._signs, world.rank)

    def close(self) -> None:
        """End the signs of life of this rank, which looks at the store no more. Collective."""
        self._pulse.stop()
        self._signs.put(f"{LEFT}/{self.world.rank}", "")
        self.world.barrier()  # the store ends with the first rank

    def work(self) -> None:
        """Do the chores; called again and again while this rank waits or computes."""
        self._beat()
        if self._is_at_chores:
            return
        self._is_at_chores = True
        try:
            for chore in self.chores:
                chore()
        finally:
            self._is_at_chores = False

    def say(self, text: str) -> None:
        """Print a message on one rank."""
        if self.world.is_first:
            print(text, flush=True)


class Link(Protocol):
    """The exchange with a world over one bridge, until either ends."""

    @property
    def bridge(self) -> Bridge: ...

    @property
    def has_served(self) -> bool:
        """Whether this rank has received something that the world has made."""
        ...

    def abandon(self) -> None:
        """Let go of a world that is lost."""

    def close(self) -> None:
        """Let the world end."""


AnyLink = TypeVar("AnyLink", bound=Link)


class Roster(ABC, Generic[AnyLink]):
    """Worlds that join, end and are followed by others. All methods are collective over the training world.

    Args:
        worlds: that may join.
    """

    def __init__(self, meeting: Meeting, worlds: Sequence[ServingWorld]):
        self.world, self.worlds, self._meeting = meeting.world, worlds, meeting
        self.links: dict[int, AnyLink] = {}  # of the worlds that are there, by place in `worlds`
        self._numbers = [0] * len(worlds)  # of the newest bridge that was joined
        self._fruitless = [0] * len(worlds)
        self._listeners: dict[int, Listener] = {}  # to the worlds that are there

    @property
    def bridges(self) -> list[tuple[Bridge, Sequence[int]]]:
        """Bridges to the worlds that are there, with the ranks of the run that each has."""
        return [(link.bridge, self.worlds[place].ranks) for place, link in self.links.items()]

    @abstractmethod
    def _connect(self, place: int, number: int) -> AnyLink:
        """Join a bridge.

        Raises:
            BridgeLostError: the world ended meanwhile.
        """

    @property
    def chores(self) -> list[Callable[[], None]]:
        """What this rank does now and then while it waits or computes; see `Meeting`."""
        return self._meeting.chores

    def work(self) -> None:
        """Give up worlds that show no sign of life; called again and again while this rank waits."""
        self._meeting.work()
        for place, listener in self._listeners.items():
            with suppress(BridgeLostError), losing("the training world has ended"):
                if silent := listener.silent(self.links[place].bridge.store):
                    self._give_up(place, silent)

    def _give_up(self, place: int, silent: Mapping[int, float]) -> None:
        """Take a world for lost; this is noticed on all ranks when what it makes is received."""
        bridge, name = self.links[place].bridge, self.worlds[place].name
        ranks = ", ".join(str(rank - bridge.num_training) for rank in silent)
        named = f"rank{'s' * (len(silent) > 1)} {ranks} of the {name} world"
        reason = f"{named} gave no sign of life for {max(silent.values()):.0f} s (stopped, or out of reach)"
        if bridge.give_up(reason):
            print(f"{reason}; its work is dealt out again", flush=True)

    def admit(self, *, until: Callable[[], bool] = lambda: True) -> list[int]:
        """Join the worlds that have come since the last call, and return their places.

        Args:
            until: waits until this holds on every rank.

        Raises:
            ValueError: no world has come within JOIN_S.
        """
        joined: list[int] = []
        end = time.monotonic() + JOIN_S
        while True:
            for place, number in self._arrivals():
                if place in self.links:
                    self.lose(place, "another has joined")
                    joined = [other for other in joined if other != place]
                self._numbers[place] = number
                if (link := self._joined_link(place, number)) is None:
                    continue  # it ended meanwhile; the next one may come
                self.links[place] = link
                joined.append(place)
                self._listeners[place] = Listener(link.bridge.serving_ranks, self._meeting.patience_s)
            if until():
                return joined
            if self.world.broadcast_object(time.monotonic() > end):
                missing = [world.name for place, world in enumerate(self.worlds) if place not in self.links]
                raise ValueError(
                    f"no {' or '.join(missing)} world has joined for {JOIN_S:.0f} s; look at its output, and "
                    "start it"
                )
            self.work()
            time.sleep(POLL_S)

    def _joined_link(self, place: int, number: int) -> AnyLink | None:
        """Join a bridge; None if a rank could not: then all ranks of both worlds let go of it."""
        made: list[AnyLink] = []
        try:
            together(self.world, lambda: made.append(self._connect(place, number)))
        except BridgeLostError as error:
            for link in made:
                link.abandon()
            if self.world.is_first:
                with suppress(BridgeLostError):
                    give_up(self._meeting.store.part(self.worlds[place].name), number, str(error))
            return None
        return made[0]

    def _arrivals(self) -> list[tuple[int, int]]:
        """Return places and bridge numbers of worlds that have come, the same on every rank."""
        found, store = [], self._meeting.store
        if self.world.is_first:
            found = [(place, newest(store, world.name)) for place, world in enumerate(self.worlds)]
        found = self.world.broadcast_object(found)
        return [(place, number) for place, number in found if number > self._numbers[place]]

    def lose(self, place: int, reason: str) -> None:
        """Let go of a world that has ended.

        Raises:
            ValueError: several ended in this place, one after the other, without having served.
        """
        link = self.links.pop(place)
        self._listeners.pop(place, None)
        link.abandon()
        served = any(self.world.all_gather_object(link.has_served))
        self._fruitless[place] = 0 if served else self._fruitless[place] + 1
        if self._fruitless[place] >= MOST_FRUITLESS:
            raise ValueError(
                f"the {self.worlds[place].name} world ended {MOST_FRUITLESS} times without having made a "
                f"sample ({reason}); its last lines say why"
            )

    def say_joined(self, place: int, text: str) -> None:
        """Print that a world has joined."""
        self._meeting.say(f"{self.worlds[place].name} world {self._numbers[place]} has joined; {text}")

    def close(self) -> None:
        """Let all worlds end."""
        self.world.barrier()
        for link in self.links.values():
            link.close()

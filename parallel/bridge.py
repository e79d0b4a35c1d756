"""A bridge between torchrun worlds: the ranks of a training world and of a world that serves it.

A training world may have several bridges, each to a world with a name. A bridge is lost when either world
ends. The one that is left joins the next bridge of that name, which has a new number, new keys and new
groups; nothing of the old one is used again.

Each world has its own torchrun and its own default group. The bridge adds keys in a store, which the first
training rank serves, and process groups over the ranks of both worlds. These groups are in none of
torch.distributed's tables. Collectives take them, but functions that look up ranks do not: `Transport.ranks`
numbers them.

On the bridge, ranks are numbered from 0: first those of the training world, then those of the other world.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parallel import device
from parallel.pulse import Pulse
from parallel.rank_set import RankSet
from parallel.sealed_store import JOIN_S, SealedStore

T = TypeVar("T")
START = "VERL_MEGATRON_START"  # environment variable: which start of its world a rank belongs to
POLL_S = 0.002  # between two looks at the store
CONNECT_S = 60.0  # until all ranks, which have all started, are connected
LEAVE_S = 10.0  # until ranks that have been told to end have done so
QUIET = timedelta(days=2)  # limit of an operation; a peer that has ended is noticed at once


WORLDS = "worlds"  # key of the store: how many worlds of a bridge's name have joined
SETTINGS = "settings"  # key of a bridge: those of the training world
LEFT = "left"  # before a rank: it has ended well
SIGNS = "training"  # before the signs of life of training ranks
PATIENCE = "patience"  # key among these: number of the ranks, and seconds for which they may be silent
STARTED, GONE = "started", "gone"  # before a bridge's number: which start has joined; why it was given up


class BridgeLostError(RuntimeError):
    """The other world has ended, or the store with it."""


def together(own: RankSet, step: Callable[[], T]) -> T:
    """Run `step` on all ranks of a world and return its result. Collective over that world.

    Raises:
        BridgeLostError: on all ranks, if `step` raises it on one.
    """
    result: Any = None
    reason = ""
    try:
        result = step()
    except BridgeLostError as error:
        reason = str(error)
    if reasons := list(filter(None, own.all_gather_object(reason))):
        raise BridgeLostError(reasons[0])
    return result


def newest(store: SealedStore, name: str) -> int:
    """Return the number of the newest bridge of a name; 0 until a world of that name has joined."""
    return store.part(name).add(WORLDS, 0)


def give_up(root: SealedStore, number: int, reason: str) -> bool:
    """Let all ranks of both worlds take a bridge for lost; return whether this call is the first.

    Args:
        root: keys of the bridges of its name.

    Raises:
        BridgeLostError: the training world's store is gone.
    """
    with losing("the training world has ended"):
        root.put(f"{GONE}/{number}", reason)
        return root.add(f"{GONE}/{number}/times", 1) == 1


@dataclass(frozen=True, kw_only=True)
class Bridge:
    """This process's end of the bridge."""

    own: RankSet  # the ranks of this process's world
    name: str  # of the world that serves training
    num_training: int  # ranks of the training world
    num_serving: int  # ranks of the other world
    rank: int  # of this process on the bridge
    number: int  # of the bridges of this name, from 1
    root: SealedStore  # what all bridges of this name share
    store: SealedStore  # what is this bridge's alone
    wait: Callable[[], None]  # called while waiting for the other world, on the thread that has joined
    _groups: list[dist.ProcessGroup] = field(default_factory=list)
    _pulses: list[Pulse] = field(default_factory=list)  # of this rank, if its world serves
    _thread: int = field(default_factory=threading.get_ident)

    @classmethod
    def join(
        cls,
        own: RankSet,
        store: SealedStore,
        name: str,
        *,
        num_other: int,
        number: int | None = None,
        wait: Callable[[], None] = lambda: None,
    ) -> "Bridge":
        """Join a bridge. Collective over both worlds.

        Args:
            own: all ranks of this process's world.
            store: of `open_store`.
            name: of the world that serves training.
            num_other: ranks of the other world.
            number: in the training world, the bridge's number, as `newest` tells it; None in the other.
            wait: called again and again while this rank waits.

        Raises:
            ValueError: the worlds have other sizes than expected, or the training world does not answer.
            BridgeLostError: the other world ended before all ranks had joined.
        """
        root, trains = store.part(name), number is not None
        if number is None:
            number = _next_number(own, root)
        num_training, num_serving = (own.size, num_other) if trains else (num_other, own.size)
        bridge = cls(
            own=own,
            name=name,
            num_training=num_training,
            num_serving=num_serving,
            rank=own.rank + (0 if trains else num_training),
            number=number,
            root=root,
            store=root.part(str(number)),
            wait=wait,
        )
        with bridge.abandoned_if_lost():
            if not trains:
                with losing("the training world has ended"):
                    bridge._pulses.append(Pulse(bridge.store, bridge.rank))
            bridge._await_ranks(trains=trains)
        return bridge

    def _await_ranks(self, *, trains: bool) -> None:
        """Wait until all ranks of both worlds have joined; arguments and errors as of `join`."""
        here = f"{self.num_training}+{self.num_serving}"
        self.put(f"joined/{self.rank}", here)
        within_s = CONNECT_S if trains else JOIN_S  # the serving ranks are there, but training may be busy
        for rank in range(self.size):
            try:
                sizes = self.value(f"joined/{rank}", within_s=within_s).decode()
            except TimeoutError as error:
                if trains:
                    raise BridgeLostError(f"the {self.name} world did not connect ({error})") from None
                raise ValueError(f"{self.name}: {error}; look at training's output, or start it") from None
            if sizes != here:
                raise ValueError(
                    f"{self.name}: this world has {self.num_training} training and {self.num_serving} other "
                    f"ranks, and rank {rank} of the bridge expects {sizes}; start both worlds with the same "
                    "settings"
                )

    def agree_on(self, settings: Mapping[str, str]) -> None:
        """Compare the settings of both worlds, whose ranks all call this, in the one that serves.

        Args:
            settings: by name, what both worlds must have been started with.

        Raises:
            ValueError: the training world has others, or does not answer.
            BridgeLostError: the training world's store is gone.
        """
        if self.rank in self.training_ranks:
            if self.rank == 0:
                self.put(SETTINGS, json.dumps(dict(settings)))
            return
        try:
            of_training = json.loads(self.value(SETTINGS, within_s=JOIN_S))
        except TimeoutError as error:
            raise ValueError(f"{self.name}: {error}; look at training's output, or start it") from None
        names = sorted(settings.keys() | of_training.keys())
        values = {name: (settings.get(name, "unknown"), of_training.get(name, "unknown")) for name in names}
        if other := [f"{name}={a[:99]} is {b[:99]} there" for name, (a, b) in values.items() if a != b]:
            raise ValueError(
                f"{self.name}: not the settings of the training world: {', '.join(other[:5])}"
                f"{f' and {len(other) - 5} more' if len(other) > 5 else ''}; start both worlds with the same"
            )

    @contextlib.contextmanager
    def abandoned_if_lost(self) -> Iterator[None]:
        """Let go of this bridge if the block finds that it is lost."""
        try:
            yield
        except BridgeLostError:
            self.abandon()
            raise

    @property
    def size(self) -> int:
        return self.num_training + self.num_serving

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def training_ranks(self) -> range:
        return range(self.num_training)

    @property
    def serving_ranks(self) -> range:
        return range(self.num_training, self.size)

    def group(self, name: str) -> dist.ProcessGroup:
        """Create a group over all ranks of the bridge, which call this with the same name.

        Raises:
            BridgeLostError: the ranks did not connect.
        """
        self._meet(name)
        store = self.store.unsealed(f"group/{name}")
        store.set_timeout(timedelta(seconds=CONNECT_S))
        group = dist.ProcessGroup(store, self.rank, self.size)
        with losing("connecting"):
            self._connect(group, store)
        self._groups.append(group)
        return group

    def _meet(self, name: str) -> None:
        """Wait until all ranks are here: unlike what follows, a rank that does not come may be waited for."""
        self.put(f"met/{name}/{self.rank}", "")
        for rank in self.ranks:
            try:
                self.value(f"met/{name}/{rank}", within_s=CONNECT_S)
            except TimeoutError as error:
                raise BridgeLostError(f"the {self.name} world did not connect ({error})") from None

    def _connect(self, group: dist.ProcessGroup, store: dist.Store) -> None:
        kinds = dist.ProcessGroup.BackendType
        connect = timedelta(seconds=CONNECT_S)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), self.rank, self.size, timeout=connect)
        gloo._set_default_timeout(QUIET)
        gloo._set_sequence_number_for_group()
        group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        group._set_default_backend(kinds.GLOO)
        if device.is_gpu():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = QUIET
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), self.rank, self.size, options)
            nccl._set_sequence_number_for_group()
            nccl.eager_connect_single_device(device.device())
            group._register_backend(device.device(), kinds.NCCL, nccl)

    def abandon(self) -> None:
        """Let go of the groups of a lost bridge, so that operations which wait for its ranks end."""
        for pulse in self._pulses:
            pulse.stop()
        for group in self._groups if device.is_gpu() else []:
            group._get_backend(device.device()).abort()
        self._groups.clear()

    def leave(self) -> None:
        """Say that this rank, whose world serves, has ended well and looks at the store no more."""
        for pulse in self._pulses:
            pulse.stop()
        with contextlib.suppress(BridgeLostError):  # training has not waited for it
            self.put(f"{LEFT}/{self.rank}", "")

    def await_leaving(self) -> None:
        """Wait until all ranks that serve have left, a few seconds at most: the store ends with training.

        Raises:
            BridgeLostError: the other world has ended by a fault.
        """
        end = time.monotonic() + LEAVE_S
        while time.monotonic() < end and not all(self.has(f"{LEFT}/{rank}") for rank in self.serving_ranks):
            self.pause()

    # ---- values in the store

    def beside(self) -> "Bridge":
        """Return this end over connections of its own, whose calls another thread's do not hold up.

        Raises:
            BridgeLostError: the training world's store is gone.
        """
        with losing("the training world has ended"):
            return replace(self, root=self.root.clone(), store=self.store.clone())

    def put(self, key: str, value: bytes | str) -> None:
        """Set a key.

        Raises:
            BridgeLostError: the training world's store is gone.
        """
        with losing("the training world has ended"):
            self.store.put(key, value)

    def has(self, key: str) -> bool:
        """Whether a key has been set; errors as of `value`."""
        return self._found(key) is not None

    def found(self, *keys: str) -> list[bytes | None]:
        """Return the values of keys, None of those that nobody has set; errors as of `value`."""
        self.check()
        with losing("the training world has ended"):
            return [self.store.get(key) for key in keys]

    def _found(self, key: str) -> bytes | None:
        return self.found(key)[0]

    def check(self) -> None:
        """Raise a `BridgeLostError` if either world has ended, or was given up."""
        with losing("the training world has ended"):
            if self.root.add(WORLDS, 0) != self.number:
                raise BridgeLostError(f"the {self.name} world has ended")
            if (reason := self.root.get(f"{GONE}/{self.number}")) is not None:
                raise BridgeLostError(reason.decode())

    def give_up(self, reason: str) -> bool:
        """Let all ranks of both worlds take the world that serves for lost; return whether this one is first.

        Raises:
            BridgeLostError: the training world's store is gone.
        """
        return give_up(self.root, self.number, reason)

    def value(self, key: str, *, within_s: float | None = None) -> bytes:
        """Wait for a key and return its value.

        Raises:
            TimeoutError: nobody has set it within `within_s` seconds.
            ValueError: somebody without the run's token has set it.
            BridgeLostError: the training world's store is gone, or another world of this name has joined.
        """
        begin = time.monotonic()
        while (found := self._found(key)) is None:
            if within_s is not None and time.monotonic() > begin + within_s:
                raise TimeoutError(f"nothing of the other world for {within_s:.0f} s, {key} is missing")
            self.pause()
        return found

    def pause(self) -> None:
        """Wait a moment. Only the thread that has joined does other work meanwhile."""
        if threading.get_ident() == self._thread:
            self.wait()
        time.sleep(POLL_S)

    def take(self, key: str) -> bytes:
        """Wait for a key that only this rank reads, remove it and return its value."""
        found = self.value(key)
        self.drop(key)
        return found

    def drop(self, key: str) -> None:
        """Remove a key that nobody reads any more."""
        with losing("the training world has ended"):
            self.store.drop(key)


@contextlib.contextmanager
def losing(what: str) -> Iterator[None]:
    """Turn errors of torch.distributed into a `BridgeLostError`; too little memory is no loss."""
    try:
        yield
    except (BridgeLostError, torch.OutOfMemoryError):
        raise
    except (dist.DistError, RuntimeError) as error:
        raise BridgeLostError(f"{what}: {str(error).splitlines()[0]}") from None


def _next_number(own: RankSet, root: SealedStore) -> int:
    """Return the number of the next bridge of a name. Collective over the world that serves training."""
    number, problem = 0, ""
    if own.is_first:
        try:
            with losing("the training world has ended"):
                number = root.add(WORLDS, 1)
                root.put(f"{STARTED}/{number}", os.environ.get(START, ""))
        except BridgeLostError as error:
            problem = str(error)
    number, problem = own.broadcast_object((number, problem))
    if problem:
        raise BridgeLostError(problem)
    return number

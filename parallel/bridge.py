"""A bridge between torchrun worlds: the ranks of a training world and of the rollout world that serves it.

Each world has its own torchrun and its own default group. The bridge adds a store, which the first training
rank serves, and process groups over the ranks of both worlds. These groups are in none of torch.distributed's
tables. Collectives take them, but functions that look up ranks do not: `Transport.ranks` numbers them.

On the bridge, ranks are numbered from 0: first those of the training world, then those of the rollout world.
"""

import os
import pickle
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.rank_set import RankSet
from parallel.runtime import store as stores

ADDRESS, TOKEN = "VERL_MEGATRON_BRIDGE", "VERL_MEGATRON_TOKEN"  # environment variables of every rank
POLL_S = 0.002  # between two looks at the store
JOIN_S = 600.0  # until the other world has started
QUIET = timedelta(days=2)  # limit of an operation; a peer that has ended is noticed at once


class BridgeLostError(RuntimeError):
    """The other world has ended, or the store with it."""


def new_address() -> dict[str, str]:
    """Return the environment variables of a new bridge on this host."""
    with socket.socket() as listener:
        listener.bind((stores.LOCAL, 0))
        port = listener.getsockname()[1]
    return {ADDRESS: f"{stores.LOCAL}:{port}", TOKEN: secrets.token_hex(16)}


@dataclass(frozen=True, kw_only=True)
class Bridge:
    """This process's end of the bridge."""

    own: RankSet  # the ranks of this process's world
    num_training: int  # ranks of the training world
    num_rollout: int
    rank: int  # of this process on the bridge
    store: dist.Store
    wait: Callable[[], None]  # called while waiting for the other world

    @classmethod
    def join(
        cls, own: RankSet, *, trains: bool, num_other: int, wait: Callable[[], None] = lambda: None
    ) -> "Bridge":
        """Join the bridge that the environment names. Collective over both worlds.

        Args:
            own: all ranks of this process's world.
            trains: whether that is the training world.
            num_other: ranks of the other world.
            wait: called again and again while this rank waits.

        Raises:
            ValueError: the environment names no bridge, or the other world does not start.
        """
        for name in (ADDRESS, TOKEN):
            if not os.environ.get(name):
                raise ValueError(
                    f"{name} is not set, and rollout.devices gives the rollout a world of its own; "
                    "start both with verl-megatron train, or give both the same address (HOST:PORT) and token"
                )
        host, _, port = os.environ[ADDRESS].rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"{ADDRESS}={os.environ[ADDRESS]!r} is no address; write HOST:PORT")
        num_training, num_rollout = (own.size, num_other) if trains else (num_other, own.size)
        served = trains and own.is_first
        local = host in (stores.LOCAL, "localhost")
        if served:
            stores.serve_apart(host, int(port), one_host=local)
        store = dist.PrefixStore(os.environ[TOKEN], _connected(host, int(port)))
        bridge = cls(
            own=own,
            num_training=num_training,
            num_rollout=num_rollout,
            rank=own.rank + (0 if trains else num_training),
            store=store,
            wait=wait,
        )
        bridge.put(f"joined/{bridge.rank}", f"{num_training}+{num_rollout}")
        for rank in range(bridge.size):
            sizes = bridge.value(f"joined/{rank}", within_s=JOIN_S).decode()
            if sizes != f"{num_training}+{num_rollout}":
                raise ValueError(
                    f"this world has {num_training} training and {num_rollout} rollout ranks, and "
                    f"rank {rank} of the bridge expects {sizes}; start both worlds with the same settings"
                )
        return bridge

    @property
    def size(self) -> int:
        return self.num_training + self.num_rollout

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def training_ranks(self) -> range:
        return range(self.num_training)

    @property
    def rollout_ranks(self) -> range:
        return range(self.num_training, self.size)

    def group(self, name: str) -> dist.ProcessGroup:
        """Create a group over all ranks of the bridge, which call this with the same name."""
        store = dist.PrefixStore(f"group/{name}", self.store)
        store.set_timeout(timedelta(seconds=JOIN_S))
        group = dist.ProcessGroup(store, self.rank, self.size)
        kinds = dist.ProcessGroup.BackendType
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), self.rank, self.size, timeout=QUIET)
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
        return group

    # ---- values in the store

    def put(self, key: str, value: bytes | str) -> None:
        self.store.set(key, value)  # pyright: ignore[reportArgumentType]  # bytes as well

    def has(self, key: str) -> bool:
        """Whether a key has been set.

        Raises:
            BridgeLostError: the training world's store is gone.
        """
        try:
            return self.store.check([key])
        except dist.DistError as error:
            raise BridgeLostError(f"the training world has ended: {str(error).splitlines()[0]}") from None

    def value(self, key: str, *, within_s: float | None = None) -> bytes:
        """Wait for a key and return its value.

        Raises:
            ValueError: nobody has set it `within_s` seconds.
        """
        begin = time.monotonic()
        while not self.has(key):
            if within_s is not None and time.monotonic() > begin + within_s:
                raise ValueError(
                    f"nothing of the other world for {within_s:.0f} s ({key}); look at its output, "
                    "and start both worlds together"
                )
            self.wait()
            time.sleep(POLL_S)
        return self.store.get(key)

    def take(self, key: str) -> bytes:
        """Wait for a key that only this rank reads, remove it and return its value."""
        found = self.value(key)
        self.store.delete_key(key)
        return found


class Parcels:
    """Python objects sent from rank to rank of a bridge. Collective to construct.

    A parcel is announced in the store, and sent once its receiver asks for it: both sides wait for the store
    alone.
    """

    def __init__(self, bridge: Bridge, name: str):
        self._bridge, self._name, self._group = bridge, name, bridge.group(name)

    def send(self, value: Any, *, to: int, label: str) -> None:
        """Send an object; returns when it has been received."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        key = self._key(label, self._bridge.rank, to)
        self._bridge.put(key, str(len(payload)).encode())
        self._bridge.take(f"{key}/wanted")  # may take long; waiting inside `send` could not be interrupted
        self._group.send([payload], to, 0).wait()

    def receive(self, *, source: int, label: str) -> Any:
        """Wait for the object with this label, and return it. Objects of a rank come in its order."""
        key = self._key(label, source, self._bridge.rank)
        length = int(self._bridge.take(key))
        self._bridge.put(f"{key}/wanted", b"")
        payload: Tensor = torch.empty(length, dtype=torch.uint8)
        self._group.recv([payload], source, 0).wait()
        return pickle.loads(payload.numpy().tobytes())

    def _key(self, label: str, source: int, to: int) -> str:
        return f"{self._name}/{label}/{source}/{to}"


def _connected(host: str, port: int) -> dist.TCPStore:
    """Return a client of the store, which may not be served yet."""
    end = time.monotonic() + JOIN_S
    while True:
        try:
            return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_S))
        except (dist.DistError, RuntimeError) as error:
            if time.monotonic() > end:
                raise ValueError(
                    f"{ADDRESS}={host}:{port}: no training world answers there ({error}); start it"
                ) from None
            time.sleep(0.1)

"""Part of a store whose values are sealed: who reaches its port learns no secret, and cannot forge a value.

The token itself is nowhere in the store, neither in keys nor in values.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallel.rank_set import RankSet
from parallel.runtime import store as stores
from parallel.runtime.refusal import short_repr
from parallel.runtime.seal import seal, unseal

ADDRESS, TOKEN = "VERL_MEGATRON_BRIDGE", "VERL_MEGATRON_TOKEN"  # environment variables of every rank
ROOT = "bridge/"  # before all keys of the run's store
JOIN_S = 600.0  # until the training world has started, or started again
TRY_S = 2.0  # for one connection to the store, which may not be served yet


class SealedStore:
    """The keys below a prefix. A value is sealed under its whole name, so it fits no other key.

    Args:
        store: that all parts have in common.
        token: secret of the run.
        prefix: of the keys; "" for all.
    """

    def __init__(self, store: dist.Store, token: str, prefix: str = ""):
        self._store, self._token, self._prefix = store, token, prefix

    def clone(self) -> "SealedStore":
        """Return the same keys over a connection of its own, for another thread."""
        store: Any = self._store  # torch does not declare it
        return SealedStore(store.clone(), self._token, self._prefix)

    def part(self, name: str) -> "SealedStore":
        """Return the keys below a name."""
        return SealedStore(self._store, self._token, f"{self._prefix}{name}/")

    def unsealed(self, name: str) -> dist.Store:
        """Return the keys below a name as torch's process groups take them."""
        return dist.PrefixStore(f"{self._prefix}{name}", self._store)

    def put(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        value = value.encode() if isinstance(value, str) else value
        self._store.set(self._prefix + key, self.seal(key, value))  # pyright: ignore[reportArgumentType]  # bytes

    def get(self, key: str) -> bytes | None:
        """Return a key's value; None if it has not been set.

        Raises:
            ValueError: somebody without the run's token has set it.
        """
        if not self._store.check([self._prefix + key]):
            return None
        return self.unseal(key, self._store.get(self._prefix + key))

    def drop(self, key: str) -> None:
        """Remove a key."""
        self._store.delete_key(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        """Add to a count and return it. It is not sealed, as the store itself adds."""
        return self._store.add(self._prefix + key, amount)

    def seal(self, key: str, value: bytes) -> bytes:
        """Return a value as this key has it; also for values that go another way."""
        return seal(self._prefix + key, value, self._token)

    def unseal(self, key: str, sealed: bytes) -> bytes:
        """Return the value that `seal` got.

        Raises:
            ValueError: it was sealed with another token, or for another key.
        """
        return unseal(self._prefix + key, sealed, self._token)


def given_address() -> tuple[str, int]:
    """Return host and port of the bridge that the environment names.

    Raises:
        ValueError: it names none.
    """
    for name in (ADDRESS, TOKEN):
        if not os.environ.get(name):
            raise ValueError(
                f"{name} is not set, and this run has worlds of its own for rollout or scores; start all "
                "with verl-megatron train without --role, or give all the same address (HOST:PORT) and token"
            )
    host, _, port = os.environ[ADDRESS].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise ValueError(f"{ADDRESS}={short_repr(os.environ[ADDRESS])} is no address; write HOST:PORT")
    return host, int(port)


def open_store(own: RankSet, *, serves: bool = False, wait: Callable[[], None] = lambda: None) -> SealedStore:
    """Return the store that the environment names, which the training world's first rank serves.

    Args:
        own: all ranks of this process's world.
        serves: whether that is the training world.
        wait: called again and again while this rank waits for the training world.

    Raises:
        ValueError: the environment names no store, or nobody serves it.
    """
    host, port = given_address()
    if serves and own.is_first:
        stores.serve_apart(host, port, one_host=host in (stores.LOCAL, "localhost"))
    return SealedStore(_connected(host, port, wait), os.environ[TOKEN], ROOT)


def _connected(host: str, port: int, wait: Callable[[], None]) -> dist.TCPStore:
    """Return a client of the store, which may not be served yet."""
    end = time.monotonic() + JOIN_S
    while True:
        try:
            store = stores.connect(host, port, within_s=TRY_S)
            store.set_timeout(timedelta(seconds=JOIN_S))
            return store
        except (OSError, RuntimeError) as error:
            if time.monotonic() > end:
                raise ValueError(
                    f"{ADDRESS}={host}:{port}: no training world answers there ({error}); start it"
                ) from None
            wait()
            time.sleep(0.1)

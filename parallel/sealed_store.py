"""Part of a store whose values are sealed: who reaches its port learns no secret, and cannot forge a value.

The token itself is nowhere in the store, neither in keys nor in values.
"""

from typing import Any

import torch.distributed as dist

from parallel.runtime.seal import seal, unseal


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

"""What the hosts of a run tell each other about its worlds: notes in a store that the first host serves."""

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from parallel.runtime import store as stores
from parallel.runtime.seal import seal, unseal

COME_S = 600.0  # until hosts that are waited for have started
TRY_S = 2.0  # for one connection to the store, which may not be served yet
ANSWER_S = timedelta(seconds=60)
POLL_S = 0.1


class BoardLostError(RuntimeError):
    """The first host does not answer."""


class Board:
    """Notes that any host may write once, and all read. They are sealed with the run's token.

    Args:
        store: of the first host; one in memory if there is no other.
        token: secret of the run.
    """

    def __init__(self, store: dist.Store, token: str):
        self._store, self._token = store, token

    @classmethod
    def at(cls, host: str, port: int, token: str, work: Callable[[], None]) -> "Board":
        """Connect to the store that the first host serves.

        Args:
            work: called again and again while nobody answers.

        Raises:
            ValueError: nobody serves it within COME_S.
        """
        end = time.monotonic() + COME_S
        while True:
            try:
                store = stores.connect(host, port, within_s=TRY_S)
                store.set_timeout(ANSWER_S)
                return cls(store, token)
            except (OSError, RuntimeError) as error:
                if time.monotonic() > end:
                    raise ValueError(
                        f"MASTER_ADDR={host}, MASTER_PORT={port}: the first host does not answer there "
                        f"({str(error).splitlines()[0]}); start it"
                    ) from None
                work()
                time.sleep(POLL_S)

    @stores.quiet()
    def write(self, name: str, text: str) -> bool:
        """Write a note unless there is one of this name; return whether it has this text now.

        Raises:
            BoardLostError, ValueError: as of `read`.
        """
        try:
            found = self._store.compare_set(name, "", self._sealed(name, text))
        except (dist.DistError, RuntimeError) as error:
            raise BoardLostError(str(error).splitlines()[0]) from None
        return self._opened(name, found) == text

    @stores.quiet()
    def read(self, name: str) -> str | None:
        """Return a note; None if there is none.

        Raises:
            BoardLostError: the first host does not answer.
            ValueError: somebody without the run's token wrote it.
        """
        try:
            sealed = self._store.get(name) if self._store.check([name]) else None
        except (dist.DistError, RuntimeError) as error:
            raise BoardLostError(str(error).splitlines()[0]) from None
        return None if sealed is None else self._opened(name, sealed)

    def wait(self, name: str, missing: str, work: Callable[[], None]) -> str:
        """Wait for a note and return it.

        Args:
            missing: what is missing if it does not come.
            work: called again and again meanwhile.

        Raises:
            ValueError: it has not come within COME_S.
        """
        end = time.monotonic() + COME_S
        while (found := self.read(name)) is None:
            if time.monotonic() > end:
                raise ValueError(f"{missing} for {COME_S:.0f} s; look at the other hosts' output")
            work()
            time.sleep(POLL_S)
        return found

    def _sealed(self, name: str, text: str) -> str:
        return seal(name, text.encode(), self._token).hex()

    def _opened(self, name: str, sealed: bytes) -> str:
        return unseal(name, bytes.fromhex(sealed.decode()), self._token).decode()

"""What a supervisor sees of the bridges between worlds.

It ends a world that training has given up, and training if all of its ranks are silent.
"""

from dataclasses import dataclass

from parallel.bridge import GONE, LEFT, PATIENCE, SIGNS, STARTED, newest
from parallel.pulse import Listener
from parallel.runtime import store as stores
from parallel.sealed_store import ROOT, SealedStore

TRY_S = 1.0  # for an answer of the training world, which may be starting or ending


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known of a start of a world."""

    has_joined: bool = False
    was_given_up: bool = False  # by training


class Lookout:
    """Looks into the store that the training world serves, while it does.

    Each look has a connection of its own, because the training world may have started again.

    Args:
        address: HOST:PORT of the store.
        token: secret of the run.
    """

    def __init__(self, address: str, token: str):
        host, _, port = address.rpartition(":")
        self._place, self._token = (host, int(port)), token
        self._training: tuple[bytes, Listener] | None = None  # what its ranks have said of themselves

    def look(self, name: str, start: int) -> Seen:
        """Return what the store says of a start of a world."""
        return self._ask(name, start, "")

    def tell_end(self, name: str, start: int, reason: str) -> None:
        """Tell training that a start of a world has ended, which it would see when the next one joins."""
        self._ask(name, start, reason)

    @stores.quiet()
    def silence_of_training(self) -> float:
        """Return for how many seconds all training ranks have been silent, if that is too long; else 0.

        One of several that is stopped is noticed by the others. Ranks that have ended well may be silent.
        Once it is told, ranks that follow are listened to.
        """
        if self._training is not None and not self._training[1].is_due:
            return 0.0
        try:
            signs = self._store().part(SIGNS)
            if (said := signs.get(PATIENCE)) is None:
                return 0.0
            size, patience_s = said.split()
            if self._training is None or self._training[0] != said:
                self._training = said, Listener(range(int(size)), float(patience_s))
            silent = self._training[1].silent(signs)
            has_left = any(signs.get(f"{LEFT}/{rank}") is not None for rank in silent)
            if has_left or len(silent) < int(size):
                return 0.0
            self._training = None
            return min(silent.values())
        except (OSError, RuntimeError):  # the store is not served yet, or no longer
            return 0.0

    def _store(self) -> SealedStore:
        """Connect to the store, and return it."""
        return SealedStore(stores.connect(*self._place, within_s=TRY_S), self._token, ROOT)

    @stores.quiet()
    def _ask(self, name: str, start: int, reason: str) -> Seen:
        """Return what is known of a start of a world; with a reason, it is given up."""
        try:
            store = self._store()
            number, part = newest(store, name), store.part(name)
            if not number or part.get(f"{STARTED}/{number}") != str(start).encode():
                return Seen()
            if reason:
                part.put(f"{GONE}/{number}", reason)
            return Seen(has_joined=True, was_given_up=part.get(f"{GONE}/{number}") is not None)
        except (OSError, RuntimeError):  # the store is not served yet, or no longer
            return Seen()

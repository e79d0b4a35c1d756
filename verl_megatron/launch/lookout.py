"""What a supervisor sees of the bridges between worlds: it ends a world that training has given up."""

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from parallel.bridge import GONE, ROOT, STARTED, newest
from parallel.sealed_store import SealedStore

TRY_S = 1.0  # for an answer of the training world, which may be starting or ending


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known of a start of a world."""

    has_joined: bool = False
    was_given_up: bool = False  # by training


class Lookout:
    """Looks into the store that the training world serves, while it does.

    Each look has a connection of its own: torch prints a stack when the store of an older one has ended.

    Args:
        address: HOST:PORT of the store.
        token: secret of the run.
    """

    def __init__(self, address: str, token: str):
        host, _, port = address.rpartition(":")
        self._place, self._token = (host, int(port)), token

    def look(self, name: str, start: int) -> Seen:
        """Return what the store says of a start of a world."""
        return self._ask(name, start, "")

    def tell_end(self, name: str, start: int, reason: str) -> None:
        """Tell training that a start of a world has ended, which it would see when the next one joins."""
        self._ask(name, start, reason)

    def _ask(self, name: str, start: int, reason: str) -> Seen:
        """Return what is known of a start of a world; with a reason, it is given up."""
        try:
            socket.create_connection(self._place, TRY_S).close()  # the store's client would wait longer
            client = dist.TCPStore(*self._place, is_master=False, timeout=timedelta(seconds=TRY_S))
            store = SealedStore(client, self._token, ROOT)
            number, part = newest(store, name), store.part(name)
            if not number or part.get(f"{STARTED}/{number}") != str(start).encode():
                return Seen()
            if reason:
                part.put(f"{GONE}/{number}", reason)
            return Seen(has_joined=True, was_given_up=part.get(f"{GONE}/{number}") is not None)
        except (OSError, RuntimeError):  # the store is not served yet, or no longer
            return Seen()

"""Signs of life of the ranks of several worlds, told through the store that they share.

A rank whose process is stopped, or whose host is not reached, neither ends nor works. Each rank therefore
counts in the store while it runs, on a thread of its own. The training ranks look at the counts of the other
worlds while they wait, and supervisors at those of the training ranks.
"""

import contextlib
import threading
import time
from collections.abc import Sequence

from parallel.sealed_store import SealedStore

INTERVAL_S = 1.0  # between two counts
SILENCE_S = 2.0  # added to the patience: counts and looks are a second apart


class Pulse:
    """Counts in the store that this process runs, until `stop` or the end of the store.

    Args:
        store: of a bridge, or of the signs of training.
        rank: of this process there.
    """

    def __init__(self, store: SealedStore, rank: int):
        self._store, self._key = store.clone(), _key(rank)  # a waiting call blocks a client for other threads
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended
            while not self._ends.is_set():
                self._store.add(self._key, 1)
                self._ends.wait(INTERVAL_S)

    def stop(self) -> None:
        """Stop counting; a count that is under way is waited for a moment."""
        self._ends.set()
        self._thread.join(INTERVAL_S)


class Listener:
    """Notices which ranks have stopped counting.

    Only the time in which this process looks counts: it may do other things for long.

    Args:
        ranks: that count.
        patience_s: seconds without a sign of life; 0: any number of them.
    """

    def __init__(self, ranks: Sequence[int], patience_s: float):
        self._ranks, self._patience_s = ranks, patience_s
        self._every_s = max(INTERVAL_S, patience_s / 10)
        self._counts = dict.fromkeys(ranks, 0)
        self._silent_s = dict.fromkeys(ranks, 0.0)
        self._looked_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether another look can find something new."""
        return self._patience_s > 0 and time.monotonic() >= self._looked_at + self._every_s

    def silent(self, store: SealedStore) -> dict[int, float]:
        """Return the ranks that have been silent for too long, and for how many seconds.

        Args:
            store: where they count.

        Raises:
            RuntimeError: the store has ended.
        """
        if not self.is_due:
            return {}
        now = time.monotonic()
        since_s, self._looked_at = now - self._looked_at, now
        for rank in self._ranks:
            count = store.add(_key(rank), 0)
            known_s = self._silent_s[rank] + min(since_s, 2 * self._every_s)
            self._silent_s[rank] = known_s if count == self._counts[rank] else 0.0
            self._counts[rank] = count
        patience_s = self._patience_s + SILENCE_S
        return {rank: silent_s for rank, silent_s in self._silent_s.items() if silent_s > patience_s}


def _key(rank: int) -> str:
    return f"pulse/{rank}"

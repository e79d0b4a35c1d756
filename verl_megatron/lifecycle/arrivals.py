"""What is said while weights of a URL arrive."""

import time
from collections.abc import Callable

SAY_EVERY_S = 10.0


class Arrivals:
    """Counts bytes that this rank fetches: says now and then how many, and keeps the watchdog quiet."""

    def __init__(self, say: Callable[[str], None], beat: Callable[[], None]):
        self._say, self._beat = say, beat
        self._bytes, self._began = 0, time.monotonic()
        self._said_at = self._began

    def __call__(self, num_bytes: int) -> None:
        self._beat()
        self._bytes += num_bytes
        now = time.monotonic()
        if now >= self._said_at + SAY_EVERY_S:
            rate = self._bytes / (now - self._began)
            self._say(f"{self._bytes / 1e9:.1f} GB of weights have arrived here, {rate / 1e6:.0f} MB/s")
            self._said_at = now

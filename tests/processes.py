"""Waiting for what other processes and threads do."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path


def eventually(condition: Callable[[], bool], *, within_s: float = 30.0) -> bool:
    """Whether the condition comes true within that time."""
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def is_alive(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_ended(pids: Iterable[int]) -> bool:
    """Whether all these processes end soon."""
    return eventually(lambda: not any(map(is_alive, pids)))

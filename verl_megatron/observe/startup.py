"""Seconds from the command that starts a run until its models are built, by stage."""

import contextlib
import os
import time
from collections.abc import Iterator

from parallel.runtime import leftovers, process


class StartClock:
    """Seconds of the stages of a start.

    For a rank of the launcher, `launch` is the time from the launcher's start to its own, and `imports` the
    time from there until the clock is made. Other stages are contexts.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}  # by stage
        if os.environ.get(process.LAUNCHER) == str(os.getppid()):
            own, now = _start_of(os.getpid()), time.clock_gettime(time.CLOCK_BOOTTIME)
            self.seconds["launch"] = max(0.0, own - _start_of(os.getppid()))
            self.seconds["imports"] = max(0.0, now - own)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds within the context to a stage."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items())
        return f"started in {sum(self.seconds.values()):.0f} s: {stages}"


def _start_of(pid: int) -> float:
    """Return when a process started, seconds since boot; now if the system does not tell."""
    try:
        return leftovers.started_at(pid) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

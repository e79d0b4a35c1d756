"""Seconds from the command that starts a run until its models are built, by stage."""

import os
import time

from parallel.runtime import leftovers, process


class StartClock:
    """Stages of a start, one after the other.

    `launch` is the time from the start of the launcher, if there is one, to that of this process.
    """

    def __init__(self):
        own = _start_of(os.getpid())
        self.seconds: dict[str, float] = {}  # by stage
        if os.environ.get(process.LAUNCHER) == str(os.getppid()):
            self.seconds["launch"] = max(0.0, own - _start_of(os.getppid()))
        self._end = own

    def end(self, stage: str) -> None:
        """End a stage, which began when the one before it ended, or with this process."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.seconds[stage] = max(0.0, now - self._end)
        self._end = now

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.seconds.items())
        return f"started in {sum(self.seconds.values()):.0f} s: {stages}"


def _start_of(pid: int) -> float:
    """Return when a process started, seconds since boot; now if the system does not tell."""
    try:
        return leftovers.started_at(pid) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

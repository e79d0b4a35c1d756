"""Seconds from the command that starts a run until its models are built, by stage."""

import contextlib
import os
import time
from collections.abc import Iterator

from parallel.runtime import forking, leftovers, process

BEGAN = "LAUNCH_BEGAN"  # environment variable: when a recipe began with this run, seconds since 1970


class StartClock:
    """Seconds of the stages of a start.

    For a rank of the launcher, `launch` is the time from the launcher's start to its own, and `imports` the
    time from there until the clock is made. A rank may be a process, or a fork of one, that has begun to
    import before (`parallel.runtime.forking`). Other stages are contexts. A recipe's shell, which becomes the
    launcher, may have done other work before; ranks that are started again were not waited for.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}  # by stage
        if os.environ.get(process.LAUNCHER) == str(os.getppid()):
            own, now = _start_of(os.getpid()), time.clock_gettime(time.CLOCK_BOOTTIME)
            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                own = forking.began or own
                began = max(_start_of(os.getppid()), now - time.time() + _seconds(BEGAN))
                self.seconds["launch"] = max(0.0, own - began)
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


def _seconds(name: str) -> float:
    """Return the number of an environment variable; 0 if it is none."""
    try:
        return float(os.environ.get(name, "0"))
    except ValueError:
        return 0.0


def _start_of(pid: int) -> float:
    """Return when a process started, seconds since boot; now if the system does not tell."""
    try:
        return leftovers.started_at(pid) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

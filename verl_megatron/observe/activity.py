"""What the ranks of a world beside training did and when, for the timeline of a run.

Each rank notes when it begins to do something else. At the end of the run the first training rank asks for
these notes, over the bridge. The clocks of two hosts may differ: the answer has the time at which it was
given, which lies between question and arrival. A difference that this cannot tell from none counts as none.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence

from parallel.bridge import Bridge, BridgeLostError
from verl_megatron.observe.timeline import WAITING, Activity

ASK = "activity/ask"  # key of the store
LOOK_S = 0.05  # between two looks for the question
ANSWER_S = 10.0  # in which a rank that takes decoding steps answers
MOST = 20_000  # notes that a rank keeps: those of many iterations


class ActivityLog:
    """Notes of one rank of such a world; it keeps none unless the run records a timeline."""

    def __init__(self, *, is_kept: bool):
        self._notes: deque[tuple[str, float]] | None = deque(maxlen=MOST) if is_kept else None
        self._bridge: Bridge | None = None
        self._looks_at = 0.0

    def enter(self, name: str = WAITING) -> None:
        """Note that this rank begins to do something, or goes on with it."""
        notes = self._notes
        if notes is not None and (not notes or notes[-1][0] != name):
            notes.append((name, time.time()))

    def answers(self, bridge: Bridge) -> None:
        """Answer over this bridge from now on."""
        self._bridge = bridge

    def beating(self, beat: Callable[[], None]) -> Callable[[], None]:
        """Return what is to be called again and again instead of `beat`: it answers as well."""
        if self._notes is None:
            return beat

        def both() -> None:
            beat()
            self._look()

        return both

    def _look(self) -> None:
        now, bridge = time.monotonic(), self._bridge
        if bridge is None or now < self._looks_at:
            return
        self._looks_at = now + LOOK_S
        try:
            if bridge.has(ASK):
                bridge.put(_key(bridge.rank), json.dumps([list(self._notes or ()), time.time()]))
                self._bridge = None
        except BridgeLostError:
            self._bridge = None  # noticed where samples are sent


def activities_of(bridges: Sequence[tuple[Bridge, Sequence[int]]]) -> list[Activity]:
    """Ask all ranks of other worlds; those that do not answer within `ANSWER_S` are left out.

    Args:
        bridges: to these worlds, with the ranks of the run that they have.
    """
    asked_at, found = time.time(), []
    for bridge, _ in bridges:
        try:
            bridge.put(ASK, b"")
        except BridgeLostError:
            pass  # it does not answer
    for bridge, ranks in bridges:
        for rank, key in zip(ranks, map(_key, bridge.serving_ranks)):
            try:
                left_s = max(0.0, asked_at + ANSWER_S - time.time())
                notes, answered_at = json.loads(bridge.value(key, within_s=left_s))
            except (BridgeLostError, TimeoutError):
                continue
            ahead_s = clock_difference(asked_at, answered_at, time.time())
            states = [(name, begin - ahead_s) for name, begin in notes]
            found.append(Activity(rank=rank, world=bridge.name, states=states))
    return found


def clock_difference(asked_at: float, answered_at: float, arrived_at: float) -> float:
    """Return the seconds by which the other clock is ahead: 0 if that is possible, else the middle."""
    most, least = answered_at - asked_at, answered_at - arrived_at
    return 0.0 if least <= 0 <= most else (most + least) / 2


def _key(rank: int) -> str:
    return f"activity/{rank}"

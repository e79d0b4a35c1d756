"""Timeline of one iteration: a trace for chrome://tracing or ui.perfetto.dev, and a plot.

It shows where each rank works and where it waits. Recording adds a barrier over all ranks to the end of every
phase. A rank is busy until its own work is done; the rest of the phase is waiting. Waiting inside the work,
in the collectives of a model or of vLLM, counts as busy.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel.rank_set import RankSet
from verl_megatron.observe.metrics import PhaseEvent, PhaseTimer, RecordedIteration
from verl_megatron.observe.pictures import draw_timeline
from verl_megatron.observe.tracking import replace_text, whole

TRACE_FILE, PICTURE_FILE = "timeline.json", "timeline.png"


def record_timeline(clock: PhaseTimer, track_metrics: Sequence[str], world: RankSet) -> None:
    """Start recording with `clock` if `track_metrics` contains "timeline"; all ranks of `world` call it."""
    if "timeline" in track_metrics:
        # A CPU barrier: it waits for ranks, not for their GPUs, which the clock has synchronized.
        clock.record(lambda: world.all_sum(torch.zeros(1)))


def write_timeline(clock: PhaseTimer, output_dir: str | Path, world: RankSet) -> None:
    """Write the last recorded iteration, if any, from the first rank. Collective over `world`."""
    if clock.recorded is None or not clock.recorded.events:
        return
    gathered: list[RecordedIteration] | None = world.gather_object(clock.recorded)
    if gathered is not None:
        folder = Path(output_dir)
        replace_text(folder / TRACE_FILE, json.dumps(chrome_trace(gathered)) + "\n")
        draw_timeline(folder / PICTURE_FILE, [iteration.events for iteration in gathered])


def chrome_trace(iterations: Sequence[RecordedIteration]) -> dict:
    """Convert one iteration of all ranks to the Trace Event Format: microseconds; pid and tid are the rank.

    Every phase is a complete event ("X") of category "work", followed by one named "wait" of category "wait"
    until the phase ends. `otherData` has the wall-clock time at 0 and the first rank's seconds from the end
    of the previous iteration to the end of this one.
    """
    events = []
    for rank, iteration in enumerate(iterations):
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank, "tid": rank, "args": {"name": f"rank {rank}"}}
        )
        events.append(
            {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": rank, "args": {"sort_index": rank}}
        )
        for event in iteration.events:
            events.append(_complete(rank, event.name, "work", event.start_s, event.busy_end_s, event.name))
            events.append(_complete(rank, "wait", "wait", event.busy_end_s, event.end_s, event.name))
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(iterations[0].began_at))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"began_at": began, "wall_s": iterations[0].wall_s},
    }


def _complete(rank: int, name: str, category: str, start_s: float, end_s: float, phase: str) -> dict:
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": rank,
        "tid": rank,
        **times,
        "args": {"phase": phase},
    }


@dataclass(frozen=True, slots=True)
class Timeline:
    """A timeline read from its trace file."""

    events: tuple[tuple[PhaseEvent, ...], ...]  # by rank
    wall_s: float

    @classmethod
    def read(cls, path: str | Path) -> "Timeline":
        """Read `timeline.json`.

        Raises:
            ValueError: no such file, or one that `write_timeline` did not write.
        """
        try:
            trace = json.loads(whole(Path(path)))
            by_rank: dict[int, list[dict]] = {}
            for event in trace["traceEvents"]:
                if event["ph"] == "X":
                    by_rank.setdefault(event["pid"], []).append(event)
            ranks = tuple(_phases_of(by_rank[rank]) for rank in sorted(by_rank))
            return cls(ranks, trace["otherData"]["wall_s"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path} is no timeline ({error!r}); a run with timeline in run.track_metrics writes one"
            ) from None

    @property
    def phases_s(self) -> float:
        """Seconds of all phases on the first rank."""
        return sum(event.end_s - event.start_s for event in self.events[0])

    @property
    def waiting_share(self) -> float:
        """Waiting time as a share of all ranks' phase time."""
        events = [event for rank in self.events for event in rank]
        return sum(event.end_s - event.busy_end_s for event in events) / sum(
            event.end_s - event.start_s for event in events
        )


def _phases_of(events: list[dict]) -> tuple[PhaseEvent, ...]:
    """Join each "work" event of a rank with the "wait" event after it."""
    return tuple(_joined(work, wait) for work, wait in zip(events[::2], events[1::2], strict=True))


def _joined(work: dict, wait: dict) -> PhaseEvent:
    start, busy_end = work["ts"] / 1e6, wait["ts"] / 1e6
    return PhaseEvent(work["name"], start, busy_end, busy_end + wait["dur"] / 1e6)

"""Timeline of an iteration: a trace for chrome://tracing or ui.perfetto.dev, and a plot.

With rollout worlds it has some iterations, and the ranks of all worlds on one clock.

It shows where each rank works and where it waits. Recording adds a barrier over all ranks to the end of every
phase. A rank is busy until its own work is done; the rest of the phase is waiting. Waiting inside the work,
in the collectives of a model or of vLLM, counts as busy.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

import torch

from parallel.rank_set import RankSet
from verl_megatron.observe.metrics import PhaseEvent, PhaseTimer, RecordedIteration
from verl_megatron.observe.pictures import draw_timeline
from verl_megatron.observe.tracking import replace_text, whole

TRACE_FILE, PICTURE_FILE = "timeline.json", "timeline.png"
TRAINING, WAITING = "training", "waiting"  # the world that trains; what a rank of another world does
SHOWN = 3  # iterations of a run with rollout worlds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPhases:
    """The phases of a rank."""

    rank: int  # of the run
    events: tuple[PhaseEvent, ...]
    world: str = ""  # TRAINING, "rollout", "rollout:1", ...; empty if there is one world


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a rank of another world did: names with the times at which each began, in order."""

    rank: int  # of the run
    world: str
    states: Sequence[tuple[str, float]]  # seconds since 1970, by the first training rank's clock


def record_timeline(
    clock: PhaseTimer, track_metrics: Sequence[str], world: RankSet, *, ahead: int | None = None
) -> None:
    """Start recording with `clock` if `track_metrics` contains "timeline"; all ranks of `world` call it.

    Args:
        ahead: iterations for which rollout worlds make samples ahead of time; None without such worlds.
    """
    if "timeline" in track_metrics:
        # In the last iterations there is nothing to make ahead, so those before are shown.
        kept = 1 if ahead is None else SHOWN + ahead
        # A CPU barrier: it waits for ranks, not for their GPUs, which the clock has synchronized.
        clock.record(lambda: world.all_sum(torch.zeros(1)), iterations=kept)


def write_timeline(
    clock: PhaseTimer,
    output_dir: str | Path,
    world: RankSet,
    others: Callable[[], Sequence[Activity]] = lambda: (),
) -> None:
    """Write the recorded iterations, if any, from the first rank. Collective over `world`.

    Args:
        others: returns what the ranks of other worlds did; called on the first rank.
    """
    if not any(iteration.events for iteration in clock.iterations):
        return
    gathered: list[list[RecordedIteration]] | None = world.gather_object(list(clock.iterations)[:SHOWN])
    if gathered is not None:
        ranks, folder = on_one_clock(gathered, others()), Path(output_dir)
        first, last = gathered[0][0], gathered[0][-1]
        wall_s = last.began_at - first.began_at + last.wall_s
        trace = chrome_trace(ranks, began_at=first.began_at, wall_s=wall_s)
        replace_text(folder / TRACE_FILE, json.dumps(trace) + "\n")
        draw_timeline(folder / PICTURE_FILE, [phases_of.events for phases_of in ranks], labels_of(ranks))


def on_one_clock(
    training: Sequence[Sequence[RecordedIteration]], others: Sequence[Activity]
) -> list[RankPhases]:
    """Return the phases of all ranks, in seconds from the first of these iterations on.

    The phases in which training ranks receive samples or scores of other worlds are waiting.

    Args:
        training: iterations of each training rank; all ranks meet where one begins.
    """
    waits = ["scores"] + ["rollout"] * any(other.world.startswith("rollout") for other in others)
    starts = [iteration.began_at - training[0][0].began_at for iteration in training[0]]
    found = []
    for rank, iterations in enumerate(training):
        events = [
            _moved(event, start, is_waiting=bool(others) and event.name in waits)
            for start, iteration in zip(starts, iterations)
            for event in iteration.events
        ]
        found.append(RankPhases(rank=rank, events=tuple(events), world=TRAINING if others else ""))
    end_s = max((event.end_s for event in found[0].events), default=0.0)
    for other in sorted(others, key=lambda other: other.rank):
        events = phases_of(other.states, began_at=training[0][0].began_at, end_s=end_s)
        found.append(RankPhases(rank=other.rank, events=events, world=other.world))
    return found


def _moved(event: PhaseEvent, by_s: float, *, is_waiting: bool) -> PhaseEvent:
    busy_end_s = event.start_s if is_waiting else event.busy_end_s
    return PhaseEvent(event.name, event.start_s + by_s, busy_end_s + by_s, event.end_s + by_s)


def phases_of(
    states: Sequence[tuple[str, float]], *, began_at: float, end_s: float
) -> tuple[PhaseEvent, ...]:
    """Return what a rank did from `began_at` on, for `end_s` seconds."""
    events = []
    ends = [begin for _, begin in states[1:]] + [inf]
    for (name, begin), end in zip(states, ends):
        start, stop = max(begin - began_at, 0.0), min(end - began_at, end_s)
        if start < stop:
            events.append(PhaseEvent(name, start, start if name == WAITING else stop, stop))
    return tuple(events)


def labels_of(ranks: Sequence[RankPhases]) -> list[str]:
    """Return what a picture calls each rank."""
    return [f"rank {each.rank}" + f" · {each.world}" * bool(each.world) for each in ranks]


def chrome_trace(ranks: Sequence[RankPhases], *, began_at: float, wall_s: float) -> dict:
    """Convert phases to the Trace Event Format: microseconds; pid and tid are the rank.

    Every phase is a complete event ("X") of category "work", followed by one named "wait" of category "wait"
    until the phase ends. `otherData` has the wall-clock time at 0, and the first rank's seconds from the end
    of the iteration before to the end of the last one.
    """
    events = []
    for each in ranks:
        rank = each.rank
        for name, value in (
            ("process_name", {"name": f"rank {rank}"}),
            ("process_labels", {"labels": each.world}),
            ("process_sort_index", {"sort_index": rank}),
        ):
            events.append({"name": name, "ph": "M", "pid": rank, "tid": rank, "args": value})
        for event in each.events:
            events.append(_complete(rank, event.name, "work", event.start_s, event.busy_end_s, event.name))
            events.append(_complete(rank, "wait", "wait", event.busy_end_s, event.end_s, event.name))
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began_at))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"began_at": began, "wall_s": wall_s},
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

    ranks: tuple[RankPhases, ...]
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
            worlds: dict[int, str] = {}
            for event in trace["traceEvents"]:
                if event["ph"] == "X":
                    by_rank.setdefault(event["pid"], []).append(event)
                elif event["name"] == "process_labels":
                    worlds[event["pid"]] = str(event["args"]["labels"])
            ranks = [
                RankPhases(rank=int(rank), events=_phases_of(events), world=worlds.get(rank, ""))
                for rank, events in sorted(by_rank.items())
            ]
            return cls(tuple(ranks), trace["otherData"]["wall_s"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} is no timeline ({error!r}); a run with timeline in run.track_metrics writes one"
            ) from None

    @property
    def phases_s(self) -> float:
        """Seconds of all phases on the first rank."""
        return sum(event.end_s - event.start_s for event in self.ranks[0].events)

    @property
    def waiting_share(self) -> float:
        """Waiting time as a share of all ranks' phase time."""
        events = [event for each in self.ranks for event in each.events]
        return sum(event.end_s - event.busy_end_s for event in events) / sum(
            event.end_s - event.start_s for event in events
        )


def _phases_of(events: list[dict]) -> tuple[PhaseEvent, ...]:
    """Join each "work" event of a rank with the "wait" event after it."""
    return tuple(_joined(work, wait) for work, wait in zip(events[::2], events[1::2], strict=True))


def _joined(work: dict, wait: dict) -> PhaseEvent:
    start, busy_end = work["ts"] / 1e6, wait["ts"] / 1e6
    end = busy_end + wait["dur"] / 1e6
    if not isfinite(start + end):
        raise ValueError(f"a phase from {start} to {end} s")
    return PhaseEvent(str(work["name"]), start, busy_end, end)

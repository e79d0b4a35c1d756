"""Timeline of one iteration on two ranks (threads with their own barrier), and its trace file."""

import json
import threading
import time

import pytest

from tests.one_rank import ONE_RANK
from tests.processes import eventually
from verl_megatron.observe.metrics import PhaseEvent, PhaseTimer, RecordedIteration
from verl_megatron.observe.pictures import draw_timeline
from verl_megatron.observe.timeline import (
    WAITING,
    Activity,
    Timeline,
    chrome_trace,
    labels_of,
    on_one_clock,
    record_timeline,
)
from verl_megatron.observe.tracking import MetricsTracker, check_sinks

SLOWER = {"rollout": 1, "update": 0}  # rank by phase
LONGER_S = 0.05


def iteration(rank: int, clock: PhaseTimer, barrier: threading.Barrier) -> None:
    for name, slower in SLOWER.items():
        with clock.phase(name):
            if rank == slower:
                assert eventually(lambda: barrier.n_waiting == 1), "the other one is there"
                time.sleep(LONGER_S)


def two_ranks() -> list[PhaseTimer]:
    """The clocks of both, which have recorded their second iteration."""
    barrier, clocks = threading.Barrier(2), [PhaseTimer(), PhaseTimer()]

    def work(rank: int) -> None:
        clocks[rank].record(lambda: barrier.wait(60))
        for _ in range(2):
            iteration(rank, clocks[rank], barrier)
            clocks[rank].pop()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clocks


def test_a_rank_waits_where_the_other_works_longer():
    clocks = two_ranks()
    recorded = [clock.iterations[-1] for clock in clocks]
    for rank, iteration in enumerate(recorded):
        assert [event.name for event in iteration.events] == list(SLOWER)
        assert iteration.wall_s >= iteration.events[-1].end_s
        for event, slower in zip(iteration.events, SLOWER.values()):
            works, waits = event.busy_end_s - event.start_s, event.end_s - event.busy_end_s
            assert (works if rank == slower else waits) >= LONGER_S and min(works, waits) >= 0
    began = [clock._began_s for clock in clocks]  # on the clock that both threads read
    for events in zip(*(iteration.events for iteration in recorded)):
        busy = [origin + event.busy_end_s for origin, event in zip(began, events)]
        ends = [origin + event.end_s for origin, event in zip(began, events)]
        assert min(ends) >= max(busy)  # the barrier


def test_nothing_is_recorded_and_nobody_waits_unless_asked():
    clock = PhaseTimer()
    record_timeline(clock, ["console", "jsonl"], ONE_RANK)
    with clock.phase("rollout"):
        clock.own_work_ends()
    clock.pop()
    assert not clock.iterations


def test_waiting_inside_a_phase_can_be_told_apart_and_a_failed_phase_waits_for_nobody():
    waits, clock = [], PhaseTimer()
    clock.record(lambda: waits.append(1))
    began = time.perf_counter()
    with clock.phase("rollout"):
        clock.own_work_ends()
        worked_s = time.perf_counter() - began
        time.sleep(0.05)
    with pytest.raises(RuntimeError), clock.phase("update"):
        raise RuntimeError
    assert len(waits) == 2  # before the first phase and after it
    clock.pop()
    (event,) = clock.iterations[-1].events
    assert event.end_s - event.busy_end_s >= 0.05 and worked_s >= event.busy_end_s - event.start_s >= 0
    with clock.phase("update"):
        time.sleep(0.05)
    clock.pop()
    (event,) = clock.iterations[-1].events
    assert event.busy_end_s - event.start_s >= 0.05, "where the waiting began is of one phase only"


RECORDED = [
    RecordedIteration(
        (PhaseEvent("rollout", 0.0, 1.0, 2.0), PhaseEvent("update", 2.0, 3.5, 4.0)),
        began_at=86_400.0,
        wall_s=5.0,
    ),
    RecordedIteration(
        (PhaseEvent("rollout", 0.0, 2.0, 2.0), PhaseEvent("update", 2.0, 4.0, 4.0)),
        began_at=86_400.5,
        wall_s=5.1,
    ),
]
RANKS = on_one_clock([[iteration] for iteration in RECORDED], ())


def test_the_trace_has_a_complete_event_of_work_and_one_of_waiting_for_each_phase(tmp_path):
    trace = chrome_trace(RANKS, began_at=86_400.0, wall_s=5.0)
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(
        event.keys() == {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}
        and event["pid"] == event["tid"]
        for event in complete
    )
    first = [
        (event["name"], event["cat"], event["ts"], event["dur"]) for event in complete if event["pid"] == 0
    ]
    assert first == [
        ("rollout", "work", 0, 1e6),
        ("wait", "wait", 1e6, 1e6),
        ("update", "work", 2e6, 1.5e6),
        ("wait", "wait", 3.5e6, 0.5e6),
    ]
    names = [
        (event["pid"], event["args"]["name"])
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    ]
    assert names == [(0, "rank 0"), (1, "rank 1")] and trace["otherData"] == {
        "began_at": "1970-01-02T00:00:00Z",
        "wall_s": 5.0,
    }
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(trace))
    timeline = Timeline.read(path)
    assert timeline.ranks == tuple(RANKS)
    assert (timeline.phases_s, timeline.wall_s, timeline.waiting_share) == (4.0, 5.0, 1.5 / 8)


def trace_from(start: str, *, rank: str = "0") -> str:
    """The text of a trace with one phase."""
    work, wait = (f'{{"ph": "X", "pid": {rank}, "name": "a", "ts": {at}, "dur": 1}}' for at in (start, 2))
    return f'{{"traceEvents": [{work}, {wait}], "otherData": {{"wall_s": 1}}}}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": {}, "otherData": 1}'),
        *(trace_from("NaN"), trace_from("1e999"), trace_from("9" * 400), trace_from("0", rank="NaN")),
    ],
)
def test_what_is_no_timeline_is_refused_by_name(tmp_path, text):
    (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(ValueError, match=r"timeline\.json is no timeline"):
        Timeline.read(tmp_path / "timeline.json")


def iterations_from(began_at: float) -> list[RecordedIteration]:
    """Two iterations, 10 s apart, of a training rank with this clock."""
    events = (PhaseEvent("rollout", 0.0, 2.0, 2.0), PhaseEvent("update", 2.0, 8.0, 9.0))
    return [RecordedIteration(events, began_at=began_at + 10 * i, wall_s=10.0) for i in range(2)]


def test_worlds_are_shown_on_the_clock_of_the_first_rank(tmp_path):
    """The second training rank's clock is an hour ahead, which its barriers make up for."""
    rollout = Activity(
        rank=2,
        world="rollout",
        states=[
            (WAITING, 90.0),
            ("rollout", 98.0),
            (WAITING, 103.0),
            ("reshard", 104.0),
            ("rollout", 105.0),
        ],
    )
    ranks = on_one_clock([iterations_from(100.0), iterations_from(3_700.0)], [rollout])
    assert [(each.rank, each.world) for each in ranks] == [(0, "training"), (1, "training"), (2, "rollout")]
    assert labels_of(ranks)[1:] == ["rank 1 · training", "rank 2 · rollout"]
    assert (
        ranks[0].events
        == ranks[1].events
        == (
            PhaseEvent("rollout", 0.0, 0.0, 2.0),  # training waits for samples
            PhaseEvent("update", 2.0, 8.0, 9.0),
            PhaseEvent("rollout", 10.0, 10.0, 12.0),
            PhaseEvent("update", 12.0, 18.0, 19.0),
        )
    )
    assert ranks[2].events == (
        PhaseEvent("rollout", 0.0, 3.0, 3.0),
        PhaseEvent(WAITING, 3.0, 3.0, 4.0),
        PhaseEvent("reshard", 4.0, 5.0, 5.0),
        PhaseEvent("rollout", 5.0, 19.0, 19.0),
    )
    (tmp_path / "timeline.json").write_text(json.dumps(chrome_trace(ranks, began_at=100.0, wall_s=20.0)))
    assert Timeline.read(tmp_path / "timeline.json").ranks == tuple(ranks)


def test_the_picture_shows_work_and_waiting(tmp_path):
    from matplotlib import pyplot

    draw_timeline(tmp_path / "timeline.png", [each.events for each in RANKS], labels_of(RANKS))
    image = pyplot.imread(tmp_path / "timeline.png")
    assert min(image.shape[:2]) > 250 and image[..., :3].std() > 0.05


def test_timeline_is_a_known_name_and_writes_no_rows(tmp_path):
    check_sinks(["timeline"])
    with MetricsTracker(tmp_path, ["timeline"], total_steps=1) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert not list(tmp_path.iterdir())

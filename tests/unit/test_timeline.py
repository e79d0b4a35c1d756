"""Timeline of one iteration on two ranks (threads with their own barrier), and its trace file."""

import json
import threading
import time

import pytest

from tests.one_rank import ONE_RANK
from verl_megatron.observe.metrics import PhaseEvent, PhaseTimer, RecordedIteration
from verl_megatron.observe.pictures import draw_timeline
from verl_megatron.observe.timeline import Timeline, chrome_trace, record_timeline
from verl_megatron.observe.tracking import MetricsTracker, check_sinks

WORK_S = {"rollout": (0.02, 0.1), "update": (0.08, 0.02)}  # by phase: of rank 0 and 1


def iteration(rank: int, clock: PhaseTimer) -> None:
    for name, seconds in WORK_S.items():
        with clock.phase(name):
            time.sleep(seconds[rank])


def two_ranks() -> list[RecordedIteration]:
    """What both record of their second iteration."""
    barrier, clocks = threading.Barrier(2), [PhaseTimer(), PhaseTimer()]

    def work(rank: int) -> None:
        clocks[rank].record(lambda: barrier.wait(10))
        for _ in range(2):
            iteration(rank, clocks[rank])
            clocks[rank].pop()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [clock.recorded for clock in clocks]


def test_a_rank_waits_where_the_other_works_longer():
    recorded = two_ranks()
    for rank, iteration in enumerate(recorded):
        assert [event.name for event in iteration.events] == list(WORK_S)
        assert iteration.wall_s >= iteration.events[-1].end_s
        for event, seconds in zip(iteration.events, WORK_S.values()):
            assert event.busy_end_s - event.start_s >= seconds[rank]
            waits = event.end_s - event.busy_end_s
            assert waits > 0.03 if seconds[rank] < seconds[1 - rank] else waits >= 0
    for one, other in zip(*(iteration.events for iteration in recorded)):
        assert one.end_s == pytest.approx(other.end_s, abs=0.03)  # the barrier


def test_nothing_is_recorded_and_nobody_waits_unless_asked():
    clock = PhaseTimer()
    record_timeline(clock, ["console", "jsonl"], ONE_RANK)
    with clock.phase("rollout"):
        clock.own_work_ends()
    clock.pop()
    assert clock.recorded is None


def test_waiting_inside_a_phase_can_be_told_apart_and_a_failed_phase_waits_for_nobody():
    waits, clock = [], PhaseTimer()
    clock.record(lambda: waits.append(1))
    with clock.phase("rollout"):
        clock.own_work_ends()
        time.sleep(0.05)
    with pytest.raises(RuntimeError), clock.phase("update"):
        raise RuntimeError
    assert len(waits) == 2  # before the first phase and after it
    clock.pop()
    (event,) = clock.recorded.events
    assert event.end_s - event.busy_end_s >= 0.05 > event.busy_end_s - event.start_s
    with clock.phase("update"):
        time.sleep(0.05)
    clock.pop()
    (event,) = clock.recorded.events
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


def test_the_trace_has_a_complete_event_of_work_and_one_of_waiting_for_each_phase(tmp_path):
    trace = chrome_trace(RECORDED)
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
    assert timeline.events == tuple(iteration.events for iteration in RECORDED)
    assert (timeline.phases_s, timeline.wall_s, timeline.waiting_share) == (4.0, 5.0, 1.5 / 8)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": {}, "otherData": 1}']
)
def test_what_is_no_timeline_is_refused_by_name(tmp_path, text):
    (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(ValueError, match=r"timeline\.json is no timeline"):
        Timeline.read(tmp_path / "timeline.json")


def test_the_picture_shows_work_and_waiting(tmp_path):
    from matplotlib import pyplot

    draw_timeline(tmp_path / "timeline.png", [iteration.events for iteration in RECORDED])
    image = pyplot.imread(tmp_path / "timeline.png")
    assert min(image.shape[:2]) > 250 and image[..., :3].std() > 0.05


def test_timeline_is_a_known_name_and_writes_no_rows(tmp_path):
    check_sinks(["timeline"])
    with MetricsTracker(tmp_path, ["timeline"], total_steps=1) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert not list(tmp_path.iterdir())

"""What ranks of a rollout world note for the timeline, and how training asks for it."""

import threading
import time

import pytest

from parallel.bridge import BridgeLostError
from verl_megatron.observe.activity import ActivityLog, activities_of, clock_difference
from verl_megatron.observe.timeline import WAITING


class Bridge:
    """The keys of a store that two ranks of a rollout world share with training."""

    def __init__(self, rank: int, keys: dict[str, bytes]):
        self.rank, self.keys, self.serving_ranks, self.name = rank, keys, range(2, 4), "rollout:1"
        self.is_lost = False

    def put(self, key, value):
        if self.is_lost:
            raise BridgeLostError("the training world has ended")
        self.keys[key] = value

    def has(self, key):
        if self.is_lost:
            raise BridgeLostError("the training world has ended")
        return key in self.keys

    def value(self, key, *, within_s):
        end = time.monotonic() + within_s
        while key not in self.keys:
            if time.monotonic() > end or "3" in key.split("/"):  # nobody answers for rank 3
                raise TimeoutError
            time.sleep(0.001)
        return self.keys[key]


def ask(keys: dict[str, bytes], *beats) -> list:
    """Ask while other threads beat, as ranks do between decoding steps."""
    ended = threading.Event()

    def beating(beat) -> None:
        while not ended.is_set():
            beat()
            time.sleep(0.001)

    threads = [threading.Thread(target=beating, args=(beat,)) for beat in beats]
    for thread in threads:
        thread.start()
    try:
        return activities_of([(Bridge(0, keys), (5, 6))])
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_ranks_answer_with_what_they_did_and_those_that_do_not_are_left_out(monkeypatch):
    keys, log, beats = {}, ActivityLog(is_kept=True), []
    log.answers(Bridge(2, keys))
    begin = time.time()
    for name in (WAITING, "reshard", "rollout", "rollout", WAITING):
        log.enter(name)
    (found,) = ask(keys, log.beating(lambda: beats.append(1)))  # the rank 3 of the bridge does not answer
    assert (found.rank, found.world) == (5, "rollout:1") and beats
    assert [name for name, _ in found.states] == [WAITING, "reshard", "rollout", WAITING]
    assert all(begin <= at <= time.time() for _, at in found.states), "both have one clock"


def test_without_a_timeline_nothing_is_kept_and_the_store_is_not_asked():
    log, beats = ActivityLog(is_kept=False), []
    log.enter("rollout")
    assert log.beating(beats.append) == beats.append and not log._notes


def test_a_lost_bridge_is_no_fault_of_the_timeline():
    log, bridge = ActivityLog(is_kept=True), Bridge(2, {})
    bridge.is_lost = True
    log.answers(bridge)
    log.beating(lambda: None)()
    assert activities_of([(bridge, (5, 6))]) == []


@pytest.mark.parametrize(
    ("asked", "answered", "arrived", "ahead"),
    [
        (100.0, 100.02, 100.05, 0.0),
        (100.0, 100.0, 100.0, 0.0),
        (100.0, 160.0, 100.04, 59.98),  # between 59.96 and 60
        (100.0, 40.0, 100.04, -60.02),
    ],
)
def test_clocks_that_may_agree_do(asked, answered, arrived, ahead):
    assert clock_difference(asked, answered, arrived) == pytest.approx(ahead)

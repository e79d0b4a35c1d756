"""async.buffer=window from a checkpoint: nothing is lost, repeated, too old or waited for in vain."""

import pytest

from tests.unit.test_window_sampler import (
    DRAW,
    LAST,
    SAMPLES,
    Fleet,
    P,
    has_variance,
    one_iteration,
    sampler_of,
    trained_on,
)
from verl_megatron.separate.ordered_sampler import OrderedSampler
from verl_megatron.separate.remote_sampler import Demand, Resumed

AT = 5  # iteration of the checkpoint


class PatientFleet(Fleet):
    """Does not let training wait for ever."""

    looks = 3000

    def work(self):
        self.looks -= 1
        assert self.looks, "training waits for groups that nobody makes"
        super().work()


def started(seed=2, *, staleness, interval=1, alike=0.0):
    """A run up to the checkpoint."""
    fleet, keep_group = PatientFleet(seed, speed=0.2, alike=alike), has_variance if alike else None
    sampler, source = sampler_of(fleet, staleness=staleness, interval=interval, keep_group=keep_group)
    for iteration in range(1, AT + 1):
        one_iteration(fleet, sampler, source, iteration, staleness, interval)
    return fleet, sampler, source


def resumed(state, cursor, *, staleness, interval=1, alike=0.0, usable=True):
    """The run that goes on from it; no state: under another layout."""
    fleet, keep_group = PatientFleet(3, speed=0.2, alike=alike), has_variance if alike else None
    sampler, source = sampler_of(fleet, staleness=staleness, interval=interval, keep_group=keep_group)
    fleet.publish(AT, sampler, is_first=True)
    if state is not None:
        sampler.load_state_dict(state, usable=usable)
    source.cursor.load_state_dict(cursor)
    return fleet, sampler, source


def finished(fleet, sampler, source, *, staleness, interval=1, begin=AT + 1):
    """The groups of each iteration that is left."""
    return [
        one_iteration(fleet, sampler, source, iteration, staleness, interval)
        for iteration in range(begin, LAST + 1)
    ]


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, 1), (0, 1)),
        ((0, 1), (3, 1)),
        ((1, 4), (1, 1)),
        ((2, 3), (1, 5)),
        ((0, 4), (0, 1)),
        ((1, 1), (0, 4)),
    ],
)
def test_another_staleness_or_interval_bounds_the_age_of_what_was_in_flight(before, after, usable):
    _, sampler, source = started(staleness=before[0], interval=before[1])
    state, cursor = sampler.state_dict(), source.cursor.state_dict()
    old = {found["number"] for found in state["table"]["samples"]}
    fleet, sampler, source = resumed(state, cursor, staleness=after[0], interval=after[1], usable=usable)
    used = sum(finished(fleet, sampler, source, staleness=after[0], interval=after[1]), [])
    assert len(set(used)) == P * (LAST - AT)
    made = {number for link in fleet.all_links for number in link.given}
    assert usable or old <= made, "made again with the present settings"


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("is_attached", [True, False])
def test_a_checkpoint_between_collection_and_update_is_of_the_iteration_before(staleness, is_attached):
    """After SIGTERM; without the attached samples they are collected again."""
    _, sampler, source = started(staleness=staleness)
    drawn_from = source.cursor.state_dict()
    taken = trained_on(sampler.collect(source, DRAW, iteration=AT + 1, version=AT))
    state, spent, cursor = sampler.state_dict(), sampler.spent(), source.cursor.state_dict()
    fleet, sampler, source = resumed(state, drawn_from, staleness=staleness)
    if not is_attached:
        used = finished(fleet, sampler, source, staleness=staleness)
        assert used[0] == taken
        return
    sampler.begin(AT + 2, cursor, Resumed(num_samples=P * SAMPLES, groups=spent))
    fleet.publish(AT + 1, sampler)
    used = sum(finished(fleet, sampler, source, staleness=staleness, begin=AT + 2), taken)
    assert len(set(used)) == P * (LAST - AT)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_numbers_of_another_layout_name_no_groups_of_this_one(staleness):
    _, sampler, source = started(staleness=staleness)
    sampler.collect(source, DRAW, iteration=AT + 1, version=AT)
    spent, cursor = sampler.spent(), source.cursor.state_dict()
    fleet, sampler, source = resumed(None, cursor, staleness=staleness)
    sampler.begin(AT + 2, cursor, Resumed(num_samples=P * SAMPLES, groups=spent))
    fleet.publish(AT + 1, sampler)
    for iteration in range(AT + 2, LAST + 1):
        assert len(sampler.collect(source, DRAW, iteration=iteration, version=iteration - 1)) == P * SAMPLES
        fleet.publish(iteration, sampler)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_dropped_beside_attached_samples_is_not_made_again(seed, staleness):
    _, sampler, source = started(seed, staleness=staleness, alike=0.7)
    state = sampler.state_dict()
    sampler.collect(source, DRAW, iteration=AT + 1, version=AT)
    spent, cursor = sampler.spent(), source.cursor.state_dict()
    fleet, sampler, source = resumed(state, cursor, staleness=staleness, alike=0.7)
    sampler.begin(AT + 2, cursor, Resumed(num_samples=P * SAMPLES, groups=spent))
    fleet.publish(AT + 1, sampler)
    finished(fleet, sampler, source, staleness=staleness, begin=AT + 2)
    assert not set(spent) & {number for link in fleet.all_links for number in link.given}


def test_samples_in_flight_of_another_buffer_are_none():
    _, sampler, source = started(staleness=0)
    state = sampler.state_dict()
    _, other, _ = resumed({"iterations": [], "counts": {}}, source.cursor.state_dict(), staleness=0)
    assert not other.state_dict()["table"]["groups"]
    demand = Demand(draw=DRAW, cursor=source.cursor, max_staleness=1, last=LAST)
    ordered = OrderedSampler(PatientFleet(1), demand, keeps_all=True)
    ordered.load_state_dict(state)
    assert not ordered.state_dict()["iterations"]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_under_another_layout_every_prompt_is_trained_on_once(seed, staleness):
    """The samples in flight of two ranks are made again by one."""
    fleet = PatientFleet(seed, speed=0.2)
    sampler, source = sampler_of(fleet, staleness=staleness, interval=1)
    used = [one_iteration(fleet, sampler, source, iteration, staleness, 1) for iteration in range(1, AT + 1)]
    state, cursor = sampler.state_dict(), source.cursor.state_dict()
    counts = state["counts"]
    parts = []
    for rank in range(2):
        samples = state["table"]["samples"][rank::2]
        own = {name: count // 2 + rank * (count % 2) for name, count in counts.items()}
        parts.append(state | {"table": state["table"] | {"samples": samples}, "counts": own})
    fleet, sampler, source = resumed(sampler.without_samples(parts), cursor, staleness=staleness)
    used += finished(fleet, sampler, source, staleness=staleness)
    assert sorted(sum(used, [])) == list(range(P * LAST))
    assert sampler._counts.trained == P * LAST * SAMPLES


def test_states_without_samples_in_flight():
    _, window, source = started(staleness=0)
    demand = Demand(draw=DRAW, cursor=source.cursor, max_staleness=1, last=LAST)
    sampler = OrderedSampler(PatientFleet(1), demand, keeps_all=True)
    assert sampler.without_samples([]) == {}
    assert "iterations" not in sampler.without_samples([window.state_dict()]), "of another async.buffer"
    counts = {"sampled": 9, "trained": 4, "dropped": 1, "dropped_tokens": 7}
    found = sampler.without_samples([{"iterations": [{"iteration": 6}], "counts": counts}] * 2)
    assert found["iterations"] == [] and found["counts"] == {
        "sampled": 10,
        "trained": 8,
        "dropped": 2,
        "dropped_tokens": 14,
    }

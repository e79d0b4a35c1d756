"""The lead of a window, in a simulation of both sides' seconds, against a window that is always full."""

import math
import random
from dataclasses import dataclass, field
from functools import partial
from statistics import mean

import pytest

from verl_megatron.separate.orders import Block
from verl_megatron.separate.window.group_table import (
    GROWTH,
    MEMORY,
    SHORT,
    SPARE,
    Arrival,
    Entry,
    GroupTable,
    Lead,
)

P, TRAINING_S, LOOK_S = 32, 1.0, 0.01
BLOCK = Block(first=0, count=P, draw=None, cursor=None)  # type: ignore[arg-type]  # nothing draws here


class Full(Lead):
    """As many groups as can still be used, whatever the speeds."""

    def __init__(self, wanted: int, *, max_staleness: int):
        super().__init__(wanted, max_staleness=max_staleness)
        self.groups = wanted * max_staleness

    def adapt(self, *, is_short: bool, left: int) -> None:
        pass


@dataclass(kw_only=True)
class Speeds:
    """Of a rollout whose groups share it: `most` a second, and `alone` a second for one of mean length."""

    most: float
    alone: float
    spread: float  # of the logarithm of a group's length
    wave: float = 0.0  # share by which `most` rises and falls, in about 19 iterations


@dataclass(kw_only=True)
class Simulated:
    """A rollout that works while the clock goes on."""

    speeds: Speeds
    table: GroupTable = field(default_factory=GroupTable)
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 0.0
    num_ordered: int = 0
    left: dict[int, float] = field(default_factory=dict)  # of the length of each running group

    def order(self, allowed: int, version: int) -> None:
        for number in range(self.num_ordered, allowed):
            self.table.entries[number] = Entry(block=BLOCK, version=version)
            spread = self.speeds.spread
            self.left[number] = self.draw.lognormvariate(-(spread**2) / 2, spread)
        self.num_ordered = max(self.num_ordered, allowed)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.left and self.now < end:
            most = self.speeds.most * (1 + self.speeds.wave * math.sin(self.now / 3))
            rate = min(self.speeds.alone, most / len(self.left))
            number = min(self.left, key=self.left.__getitem__)
            step = min(end - self.now, self.left[number] / rate)
            self.left = {each: left - rate * step for each, left in self.left.items()}
            self.now += step
            if self.left[number] <= 1e-12:
                del self.left[number]
                self.table.complete(
                    Arrival(number=number, size=1, versions=(0, 0), is_kept=True, failed=0, complaint="")
                )
        self.now = end


def _iterations_left(iteration: int, staleness: int, version: int) -> int:
    return max(0, version - (iteration - 1 - staleness))


def simulate(lead: Lead, speeds: Speeds, *, staleness: int, iterations: int = 150) -> tuple[float, float]:
    """Return the mean seconds of an iteration and the mean staleness, after the first 30 iterations."""
    rollout, took_s, behind, since = Simulated(speeds=speeds), [], [], 0.0
    rollout.order(P + lead.groups, 0)
    for iteration in range(1, iterations + 1):
        begin = short_until = rollout.now
        later = partial(_iterations_left, iteration, staleness)
        while (numbers := rollout.table.choose(P, later=later)) is None:
            is_short = rollout.table.num_complete < P
            rollout.advance(LOOK_S)
            short_until = rollout.now if is_short else short_until
        is_short = short_until - begin > SHORT * (rollout.now - since)
        lead.adapt(is_short=iteration > 1 and is_short, left=rollout.table.num_complete - P)
        took_s.append(rollout.now - since)
        since = rollout.now
        behind.append(mean(iteration - 1 - rollout.table.entries[number].version for number in numbers))
        rollout.table.take(numbers)
        rollout.advance(TRAINING_S)
        rollout.order(P * (iteration + 1) + lead.groups, iteration)
    return mean(took_s[30:]), mean(behind[30:])


@pytest.mark.parametrize(
    ("speeds", "most_stale"),
    [
        pytest.param(Speeds(most=2 * P, alone=8, spread=0.3), 1.01, id="fast"),
        pytest.param(Speeds(most=1.05 * P, alone=8, spread=0.3), 1.6, id="hardly faster than training"),
        pytest.param(Speeds(most=1.6 * P, alone=8, spread=0.3, wave=0.3), 1.6, id="fast and slow by turns"),
        pytest.param(Speeds(most=math.inf, alone=0.6, spread=0.3), 3.0, id="as fast as groups are many"),
        pytest.param(Speeds(most=math.inf, alone=2, spread=1.0), 2.0, id="a few long ones"),
        pytest.param(Speeds(most=1.3 * P, alone=1.5, spread=1.0), 2.0, id="a few long ones, shared"),
    ],
)
@pytest.mark.parametrize("staleness", [4, 8])
def test_samples_are_fresher_than_those_of_a_full_window_and_training_waits_no_longer(
    speeds, most_stale, staleness
):
    full_s, full_stale = simulate(Full(P, max_staleness=staleness), speeds, staleness=staleness)
    seconds, stale = simulate(Lead(P, max_staleness=staleness), speeds, staleness=staleness)
    assert seconds < 1.03 * full_s
    assert stale <= most_stale < full_stale


def test_a_rollout_too_slow_for_training_is_given_all_that_can_be_used():
    slow = Speeds(most=math.inf, alone=0.1, spread=0.3)
    lead = Lead(P, max_staleness=2)
    simulate(lead, slow, staleness=2, iterations=40)
    assert lead.groups == 2 * P


def test_the_lead_grows_at_once_and_shrinks_by_what_was_never_needed():
    lead, step, spare = Lead(P, max_staleness=3), round(P * GROWTH), round(P * SPARE)
    lead.adapt(is_short=False, left=P)
    assert lead.groups == P, "at least one iteration's, so that both sides work"
    for _ in range(3):
        lead.adapt(is_short=True, left=0)
    assert lead.groups == P + 3 * step
    for left in (30, 30, spare + 5, 30, 30, 30, 30):
        lead.adapt(is_short=False, left=left)
    assert lead.groups == P + 3 * step, "one iteration more"
    lead.adapt(is_short=False, left=30)
    assert lead.groups == P + 3 * step - 5
    for _ in range(MEMORY):
        lead.adapt(is_short=False, left=spare)
    assert lead.groups == P + 3 * step - 5, "a few are kept in reserve"
    for _ in range(100):
        lead.adapt(is_short=True, left=0)
    assert lead.groups == 3 * P


@pytest.mark.parametrize(("staleness", "expected"), [(0, 0), (1, P), (2, 2 * P), (4, 3 * P)])
def test_a_restored_lead_is_within_what_is_allowed_now(staleness, expected):
    lead = Lead(P, max_staleness=staleness)
    lead.restore(3 * P)
    assert lead.groups == expected
    if staleness < 2:
        for is_short in (True, False):
            lead.adapt(is_short=is_short, left=5)
            assert lead.groups == expected

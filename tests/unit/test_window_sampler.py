"""async.buffer=window against rollout worlds that answer in any order, die and return."""

import random
from collections import Counter

import pytest
import torch

from parallel.bridge import BridgeLostError
from parallel.runtime.refusal import RefusalError
from tests.one_rank import ONE_RANK
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.data.prompts import TrainingPrompts
from verl_megatron.model_specs import ServingWorld
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.sampler import Draw, Numbers, batch_of
from verl_megatron.rollout.sampling import Generation, Sampling
from verl_megatron.separate.orders import VALIDATION, GroupSamples, Reply, shares_of
from verl_megatron.separate.remote_sampler import Demand, Resumed
from verl_megatron.separate.window import window_sampler
from verl_megatron.separate.window.window_sampler import WindowSampler

P, SAMPLES, LAST = 4, 2, 12
DRAW = Draw(num_prompts=P, samples_per_prompt=SAMPLES, sampling=Sampling(max_tokens=4), max_rounds=3)
PROMPTS = [f"prompt {i}" for i in range(7)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(window_sampler, "WAIT_S", 0.0)


def has_variance(scores):
    return len(set(scores)) > 1


class Link:
    """A rollout world: completes some of its groups between two questions, while it is `alive`."""

    num_replicas = 2
    transfer_s = received_s = 0.0

    def __init__(self, fleet, random):
        self.fleet, self.random, self.alive, self.version = fleet, random, True, None
        self.groups, self.given = {}, []  # those under way: number → version when it started; all numbers

    def give(self, order):
        assert self.version is not None  # weights come first
        if not self.alive:
            raise BridgeLostError("the rollout world has ended")
        for index in (index for own in order.indices for index in own):
            number = order.block.first + index
            assert not any(number in link.groups for link in self.fleet.links.values() if link.alive)
            self.groups[number] = self.version
            self.given.append(number)
            self.fleet.prompt_of[number] = self.fleet.prompt(order.block, index)

    def fetch(self, replicas, *, waits):
        assert list(replicas) == [0, 1] and self in self.fleet.links.values()
        if not self.alive:
            raise BridgeLostError("the rollout world has ended")
        able = [number for number in self.groups if number not in self.fleet.stuck]
        done = [number for number in able if self.random.random() < self.fleet.speed]
        self.random.shuffle(done)
        groups = [self.samples(number, self.groups.pop(number)) for number in done]
        return [
            Reply(
                groups=groups,
                sums={"totals": {}, "maxima": {}},
                interrupted=2,
                aborted_tokens=5,
                idle_s=1.0,
                busy_s=2.0,
            )
        ]

    def samples(self, number, version):
        """Both samples of a group: the first was begun with `version`, the last token has the newest."""
        sampled = [
            Generation(i, [1, 2], [5, 6, 7][: 1 + i * 2], [-1.0] * (1 + i * 2), "stop") for i in range(2)
        ]
        numbers = Numbers()
        numbers.add([SAMPLES])
        batch = batch_of(sampled, [], numbers, DRAW, policy_version=version)
        batch.token_versions = torch.where(batch.response_mask, version, 0)
        batch.token_versions[1, -1] = self.version
        batch.source_id = torch.tensor([number, number])  # so that tests recognize it
        alike = self.random.random() < self.fleet.alike
        rewards_B = torch.tensor([1.0, 1.0 if alike else 0.0])
        failed, complaint = (2, "the reward failed on all") if self.fleet.fails else (0, "")
        return GroupSamples(
            number=number,
            batch=batch.tensors(),
            rewards_B=rewards_B,
            sums=Sums().state_dict(),
            failed=failed,
            complaint=complaint,
        )


class Fleet:
    """Rollout worlds that may end at any question, and are started again."""

    world = ONE_RANK
    worlds = (ServingWorld(name="rollout:0", ranks=(1, 2)), ServingWorld(name="rollout:1", ranks=(3, 4)))

    def __init__(self, seed, *, deaths=0.0, speed=0.5, alike=0.0, fails=False):
        self.random, self.deaths, self.speed, self.alike, self.fails = (
            random.Random(seed),
            deaths,
            speed,
            alike,
            fails,
        )
        self.shares, self.version = shares_of(self.worlds, 1), 0
        self.links = {0: Link(self, self.random)}
        self.all_links, self.prompt_of = [self.links[0]], {}
        self.num_lost = self.num_ended = self.told_lost = 0
        self.chores: list = []
        self.stuck = {}  # number of a group → how often training looks again before it can be complete

    def prompt(self, block, index):
        if block.cursor is None:
            return f"validation {index}"
        cursor = PromptCursor(num_prompts=len(PROMPTS), seed=1)
        cursor.load_state_dict(block.cursor)
        return PROMPTS[cursor.draw(block.count)[index]]

    def admit_any(self):
        for link in self.links.values():
            link.alive = link.alive and self.random.random() >= self.deaths
        missing = [place for place in (0, 1) if place not in self.links]
        joined = [place for place in missing if self.random.random() < 0.3 or not self.links]
        for place in joined[:1] if not self.links else joined:
            self.links[place] = Link(self, self.random)
            self.all_links.append(self.links[place])
        return [place for place in joined if place in self.links]

    def lose(self, place, reason):
        assert not self.links.pop(place).alive
        self.num_lost += 1
        self.num_ended += 1

    def provide_any(self, place):
        if not self.links[place].alive:
            raise BridgeLostError("the rollout world has ended")
        if self.links[place].version is None:
            self.links[place].version = self.version

    def publish(self, version, sampler, *, is_first=False):
        self.version = version
        is_sent = is_first or sampler.needs(version)
        for link in self.links.values() if is_sent else ():
            link.version = version
        sampler.published(version, is_sent=is_sent)

    def say_joined(self, place, text):
        pass

    def work(self):
        self.stuck = {number: looks - 1 for number, looks in self.stuck.items() if looks > 1}


def sampler_of(fleet, *, staleness, interval=1, keep_group=None):
    cursor = PromptCursor(num_prompts=len(PROMPTS), seed=1)
    demand = Demand(draw=DRAW, cursor=cursor, max_staleness=staleness, last=LAST, sync_interval=interval)
    sampler = WindowSampler(fleet, demand, keep_group=keep_group)
    return sampler, TrainingPrompts([], cursor)


def trained_on(batch):
    """Numbers of the groups, in the batch's order."""
    return list(dict.fromkeys(batch.source_id.tolist()))


def one_iteration(fleet, sampler, source, iteration, staleness, interval=1):
    """Collect, check what may be checked of a batch, publish; return the groups."""
    batch = sampler.collect(source, DRAW, iteration=iteration, version=iteration - 1)
    assert len(batch) == P * SAMPLES and batch.sample_id.tolist() == list(range(P * SAMPLES))
    assert batch.group_id.tolist() == [i // SAMPLES for i in range(P * SAMPLES)]
    syncs = (iteration - 1) // interval - batch.token_versions // interval
    behind = syncs[batch.response_mask]
    assert 0 <= int(behind.min()) and int(behind.max()) <= staleness
    sums = Sums()
    sampler.score(batch, sums)
    numbers = sums.reduce(ONE_RANK)
    assert numbers["async/staleness_max"] == int(behind.max())
    fleet.told_lost += numbers["async/worlds_lost"]
    made = numbers["async/samples_sampled"]
    assert made == sum(numbers[f"async/samples_{name}"] for name in ("trained", "dropped", "in_flight"))
    assert numbers["async/samples_trained"] == iteration * P * SAMPLES
    assert numbers["async/tokens_dropped"] == 2 * numbers["async/samples_dropped"]  # of 1 and of 3 tokens
    assert 2 * numbers["async/tokens_aborted"] == 5 * numbers["async/interrupted"]
    fleet.publish(iteration, sampler)
    return trained_on(batch)


@pytest.mark.parametrize(("staleness", "interval"), [(0, 1), (1, 1), (3, 1), (0, 3), (1, 3), (2, 5)])
@pytest.mark.parametrize("deaths", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_each_group_is_used_once_and_none_is_too_old(staleness, interval, deaths, seed):
    fleet = Fleet(seed, deaths=deaths, speed=0.3)
    sampler, source = sampler_of(fleet, staleness=staleness, interval=interval)
    used = []
    for iteration in range(1, LAST + 1):
        used += one_iteration(fleet, sampler, source, iteration, staleness, interval)
        started = {number for link in fleet.all_links for number in link.given}
        allowed = interval * (iteration // interval + 1 + staleness)  # the capacity
        assert len(started) <= P * min(allowed, LAST)
    assert sorted(used) == list(range(P * LAST))  # without drops every prompt, once
    if (staleness, interval) == (0, 1):
        assert used == sorted(used)
    assert fleet.told_lost == fleet.num_lost and bool(deaths) == bool(fleet.num_lost)
    seen = [fleet.prompt_of[number] for number in sorted(used)]
    plain = PromptCursor(num_prompts=len(PROMPTS), seed=1)
    assert seen == [PROMPTS[i] for i in plain.draw(P * LAST)]


@pytest.mark.parametrize("stalenesses", [(2,), (0, 1, 2)])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_started_again_loses_and_repeats_nothing(seed, interval, stalenesses):
    """Also under another staleness."""
    draw, fleet, staleness = random.Random(seed), Fleet(seed, deaths=0.1), 2
    sampler, source = sampler_of(fleet, staleness=staleness, interval=interval)
    iteration, used, saved = 1, {}, None
    while iteration <= LAST:
        if saved is not None and draw.random() < 0.3:  # from the checkpoint, with or without its collection
            state, at, cursor, collected = saved
            fleet, staleness = Fleet(seed + iteration, deaths=0.1), draw.choice(stalenesses)
            sampler, source = sampler_of(fleet, staleness=staleness, interval=interval)
            sampler.load_state_dict(state)
            fleet.publish(at, sampler, is_first=True)
            source.cursor.load_state_dict(cursor)
            if collected and draw.random() < 0.5:
                groups, after = collected
                sampler.begin(at + 2, after, Resumed(num_samples=P * SAMPLES, groups=groups))
                fleet.publish(at + 1, sampler)
                used[at + 1] = groups
                iteration, saved = at + 2, None
                continue
            iteration = at + 1
        used[iteration] = one_iteration(fleet, sampler, source, iteration, staleness, interval)
        if saved is not None and saved[1] == iteration - 1:
            saved = (*saved[:3], (sampler.spent(), source.cursor.state_dict()))
        if draw.random() < 0.5:
            saved = sampler.state_dict(), iteration, source.cursor.state_dict(), None
        iteration += 1
    assert sorted(number for groups in used.values() for number in groups) == list(range(P * LAST))


def test_what_a_resumed_collection_spent_stays_spent_however_often_a_run_resumes():
    """Even a number that is not drawn yet, as under a lower staleness, once others were dropped."""
    sampler, source = sampler_of(Fleet(1), staleness=2)
    sampler.begin(1, source.cursor.state_dict())
    state = sampler.state_dict()
    spent = [0, 1, state["next"] + 2 * P]
    for resumed in (Resumed(num_samples=P * SAMPLES, groups=spent), Resumed()):
        fleet = Fleet(1)
        sampler, source = sampler_of(fleet, staleness=0)
        sampler.load_state_dict(state)
        sampler.begin(3, source.cursor.state_dict(), resumed)
        state = sampler.state_dict()
    fleet.publish(LAST - 1, sampler, is_first=True)  # everything may start
    assert max(sampler._table.entries) > spent[2] and not set(spent) & set(sampler._table.entries)


def test_groups_without_variance_are_replaced_within_bounds():
    fleet = Fleet(1, speed=0.5, alike=0.4)
    sampler, source = sampler_of(fleet, staleness=1, keep_group=has_variance)
    used = Counter()
    for iteration in range(1, LAST + 1):
        used.update(one_iteration(fleet, sampler, source, iteration, 1))
    assert sum(used.values()) == P * LAST and max(used.values()) == 1
    assert max(used) >= P * LAST  # further prompts took the place of others
    fleet = Fleet(1, alike=1.0)  # none has variance: after two iterations' prompts the rest stays
    sampler, source = sampler_of(fleet, staleness=0, keep_group=has_variance)
    one_iteration(fleet, sampler, source, 1, 0)
    assert len([number for number in fleet.prompt_of if number < 3 * P]) == 3 * P


def test_validation_is_the_newest_weights_and_comes_between():
    fleet = Fleet(3, speed=0.2)
    sampler, source = sampler_of(fleet, staleness=2)
    validated = Draw(num_prompts=5, samples_per_prompt=SAMPLES, sampling=Sampling(max_tokens=4))
    for iteration in range(1, 4):
        answers = sampler.collect(object(), validated, iteration=0, version=iteration - 1)
        numbers = trained_on(answers)
        assert [fleet.prompt_of[number] for number in numbers] == [f"validation {i}" for i in range(5)]
        assert min(numbers) >= VALIDATION and set(answers.policy_version.tolist()) == {iteration - 1}
        one_iteration(fleet, sampler, source, iteration, 2)


def staleness_of(sampler, source, fleet, *, iterations=LAST):
    """Versions by which the oldest token of each iteration lags behind."""
    found = []
    for iteration in range(1, iterations + 1):
        batch = sampler.collect(source, DRAW, iteration=iteration, version=iteration - 1)
        found.append(int((iteration - 1 - batch.token_versions)[batch.response_mask].max()))
        fleet.publish(iteration, sampler)
    return found


def test_samples_are_no_staler_than_it_takes_to_keep_training_busy():
    """A rollout that has completed all that it was given needs a lead of one iteration, a slow one more."""
    fleet = Fleet(1, speed=1.0)
    assert staleness_of(*sampler_of(fleet, staleness=4), fleet) == [0] + [1] * (LAST - 1)
    slow = Fleet(1, speed=0.15)
    sampler, source = sampler_of(slow, staleness=4)
    assert max(staleness_of(sampler, source, slow)) > 2
    state = sampler.state_dict()
    assert P < state["lead"] <= 4 * P
    resumed, _ = sampler_of(Fleet(1), staleness=2)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["lead"] <= 2 * P, "as much as is allowed now"


def test_the_wait_for_an_old_group_is_no_lack_of_groups():
    fleet = Fleet(1, speed=1.0)
    fleet.stuck = {1: 200}
    sampler, source = sampler_of(fleet, staleness=2)
    assert staleness_of(sampler, source, fleet, iterations=3) == [0, 1, 2], "as long as it can be used"
    assert not fleet.stuck and sampler.state_dict()["lead"] == P


def test_a_reward_that_always_fails_ends_the_run_by_name():
    fleet = Fleet(1, fails=True)
    sampler, source = sampler_of(fleet, staleness=0)
    batch = sampler.collect(source, DRAW, iteration=1, version=0)
    with pytest.raises(RefusalError, match="the reward failed on all"):
        sampler.score(batch, Sums())


class FollowedFleet(Fleet):
    """Worlds may be followed by others, several at once, before anybody has noticed their end."""

    def admit_any(self):
        for place in [place for place in self.links if self.random.random() < 0.2]:
            self.links[place].alive = False
            self.lose(place, "another has joined")
        joined = [place for place in (0, 1) if place not in self.links and self.random.random() < 0.6]
        joined = joined or [0, 1] * (not self.links)
        for place in joined:
            self.links[place] = Link(self, self.random)
        for link in self.links.values():
            link.alive = link.alive and self.random.random() >= self.deaths  # noticed when it is asked
        return joined


@pytest.mark.parametrize("seed", range(5))
def test_worlds_that_others_follow_leave_each_group_to_one(seed):
    fleet = FollowedFleet(seed, speed=0.2, deaths=0.3)
    sampler, source = sampler_of(fleet, staleness=2)
    used = [one_iteration(fleet, sampler, source, iteration, 2) for iteration in range(1, LAST + 1)]
    assert sorted(sum(used, [])) == list(range(P * LAST))


def test_validation_neither_lengthens_the_lead_nor_takes_metrics_away():
    fleet = Fleet(1, speed=1.0)
    sampler, source = sampler_of(fleet, staleness=4)
    validated = Draw(num_prompts=5, samples_per_prompt=SAMPLES, sampling=Sampling(max_tokens=4))
    for iteration in range(1, LAST + 1):
        fleet.speed = 0.01  # validation takes long, and training's groups with it
        answers = sampler.collect(object(), validated, iteration=0, version=iteration - 1)
        fleet.speed = 1.0
        sampler.score(answers, Sums())
        batch = sampler.collect(source, DRAW, iteration=iteration, version=iteration - 1)
        sampler.score(batch, sums := Sums())
        assert sums.reduce(ONE_RANK)["async/interrupted"] > 100, "two of each reply, also of validation's"
        fleet.publish(iteration, sampler)
    assert sampler.state_dict()["lead"] == P

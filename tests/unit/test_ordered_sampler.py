"""async.buffer=in_order against rollout worlds that end, return, and cannot get every version."""

import random

import pytest
import torch

from parallel.bridge import BridgeLostError
from tests.one_rank import ONE_RANK
from tests.unit.test_curriculum import cursor_of
from verl_megatron.data.order.curriculum import variance_weights
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.data.prompts import TrainingPrompts
from verl_megatron.model_specs import ServingWorld
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.sampler import Draw, Numbers, batch_of
from verl_megatron.rollout.sampling import Generation, Sampling
from verl_megatron.separate.ordered_sampler import OrderedSampler
from verl_megatron.separate.orders import Samples, shares_of
from verl_megatron.separate.remote_sampler import Demand, Resumed

P, LAST = 6, 10
DRAW = Draw(num_prompts=P, samples_per_prompt=1, sampling=Sampling(max_tokens=4))


class Link:
    """A rollout world: carries out its orders one after the other, while it is `alive`."""

    transfer_s = received_s = 0.0

    def __init__(self, version: int):
        self.version, self.alive = version, True
        self.orders: list = []

    def give(self, order):
        if not self.alive:
            raise BridgeLostError("the rollout world has ended")
        assert order.version == self.version  # its weights are ordered first
        self.orders.append(order)
        return len(self.orders) - 1

    def forget(self, number):
        self.orders[number] = None  # everybody has received its samples
        if not self.alive:
            raise BridgeLostError("the rollout world has ended")

    def receive(self, number, order):
        if not self.alive:
            raise BridgeLostError("the rollout world has ended")
        assert self.orders[number] is order
        groups = order.share.groups(P)
        made = [Generation(i, [1, 2], [5 + order.version], [-1.0], "stop") for i in groups]
        numbers = Numbers()
        numbers.add([1] * P)
        batch = batch_of(made, [], numbers, DRAW, policy_version=order.version)
        batch.source_id = torch.tensor([order.iteration * P + i for i in groups])
        return [Samples(batch=batch.tensors(), rewards_B=torch.ones(len(groups)), sums=Sums().state_dict())]


class Fleet:
    """Two worlds of other sizes. A world that has ended leaves its versions to one of its own size alone."""

    world = ONE_RANK
    worlds = (ServingWorld(name="rollout:0", ranks=(1,)), ServingWorld(name="rollout:1", ranks=(2, 3)))

    def __init__(self, seed: int, deaths: float):
        self.random, self.deaths, self.version = random.Random(seed), deaths, 0
        self.shares, self.links = shares_of(self.worlds, 1), {0: Link(0), 1: Link(0)}
        self.has = {0: {0}, 1: {0}}  # versions that can be sent to a place again
        self.num_lost = self.num_ended = self.waits = 0
        self.chores: list = []

    def published(self, version):
        self.version = version
        for place, link in self.links.items():
            link.version = version
            self.has[place].add(version)

    def can_provide(self, place, version):
        return version == self.version or version in self.has[place]

    def provide(self, place, version):
        if not self.links[place].alive:
            raise BridgeLostError("the rollout world has ended")
        assert self.can_provide(place, version)
        self.links[place].version = version

    def _join(self, place):
        self.links[place] = Link(self.version)

    def admit_any(self):
        for link in self.links.values():
            link.alive = link.alive and self.random.random() >= self.deaths
        joined = [place for place in (0, 1) if place not in self.links and self.random.random() < 0.3]
        if not self.links and not joined:
            joined = [self.random.randrange(2)]
        for place in joined:
            self._join(place)
        return joined

    def admit_able(self, version):
        self.waits += 1
        joined = [place for place in (0, 1) if place not in self.links]
        assert joined, "the worlds that are there cannot, and none is missing"
        for place in joined:
            self._join(place)
        return joined

    def lose(self, place, reason):
        assert not self.links.pop(place).alive
        self.num_lost += 1
        self.num_ended += 1

    def say_joined(self, place, text):
        pass

    def forget(self, before):
        pass


@pytest.mark.parametrize("deaths", [0.0, 0.3])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_each_iteration_gets_its_own_samples_of_its_version(seed, staleness, deaths):
    fleet = Fleet(seed, deaths)
    cursor = PromptCursor(num_prompts=7, seed=1)
    demand = Demand(draw=DRAW, cursor=cursor, max_staleness=staleness, last=LAST)
    sampler, source = OrderedSampler(fleet, demand, keeps_all=True), TrainingPrompts([], cursor)
    for iteration in range(1, LAST + 1):
        batch = sampler.collect(source, DRAW, iteration=iteration, version=iteration - 1)
        assert batch.source_id.tolist() == [iteration * P + i for i in range(P)]
        assert set(batch.policy_version.tolist()) == {max(0, iteration - 1 - staleness)}
        sampler.score(batch, sums := Sums())
        found = sums.reduce(ONE_RANK)
        assert found["async/samples_trained"] == iteration * P
        fleet.published(iteration)
        sampler.published(iteration, is_sent=True)
    assert (fleet.num_lost > 0) == (deaths > 0)


def test_samples_wait_for_a_world_that_can_get_their_version():
    """Stale samples are missing, and the world that is left never had that version."""
    waits = 0
    for seed in range(10):
        fleet = Fleet(seed, 0.0)
        fleet.has[0].clear()  # it joined late
        cursor = PromptCursor(num_prompts=7, seed=1)
        demand = Demand(draw=DRAW, cursor=cursor, max_staleness=2, last=LAST)
        sampler, source = OrderedSampler(fleet, demand, keeps_all=True), TrainingPrompts([], cursor)
        sampler.begin(1, cursor.state_dict())
        fleet.published(1)
        sampler.published(1, is_sent=True)
        fleet.links[1].alive = False
        batch = sampler.collect(source, DRAW, iteration=1, version=0)
        assert batch.source_id.tolist() == [P + i for i in range(P)]
        waits += fleet.waits
    assert waits > 0


class FollowedFleet(Fleet):
    """Worlds may be followed by others, which may end at once, before anybody has noticed their end."""

    def admit_any(self):
        for place in [place for place in self.links if self.random.random() < 0.3]:
            self.links[place].alive = False
            self.lose(place, "another has joined")
        return super().admit_any()


def sampler_of(fleet, staleness, cursor=None):
    cursor = cursor or PromptCursor(num_prompts=7, seed=1)
    demand = Demand(draw=DRAW, cursor=cursor, max_staleness=staleness, last=LAST)
    return OrderedSampler(fleet, demand, keeps_all=True), TrainingPrompts([], cursor)


@pytest.mark.parametrize("seed", range(6))
def test_worlds_that_others_follow_leave_their_shares_to_others(seed):
    fleet = FollowedFleet(seed, deaths=0.2)
    sampler, source = sampler_of(fleet, staleness=2)
    for iteration in range(1, LAST + 1):
        batch = sampler.collect(source, DRAW, iteration=iteration, version=iteration - 1)
        assert batch.source_id.tolist() == [iteration * P + i for i in range(P)]
        fleet.published(iteration)
        sampler.published(iteration, is_sent=True)
    assert fleet.num_lost


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("usable", [True, False])
def test_a_checkpoint_between_collection_and_update_is_of_the_iteration_before(
    staleness, is_attached, usable
):
    """After SIGTERM; without the attached samples they are collected again."""
    at, fleet = 4, Fleet(1, deaths=0.0)
    sampler, source = sampler_of(fleet, staleness)
    for iteration in range(1, at + 2):
        drawn_from = source.cursor.state_dict()
        batch = sampler.collect(source, DRAW, iteration=iteration, version=iteration - 1)
        if iteration <= at:
            fleet.published(iteration)
            sampler.published(iteration, is_sent=True)
    state, after = sampler.state_dict(), source.cursor.state_dict()
    known = [found["iteration"] for found in state["iterations"]]
    assert known == ([at + 1, at + 2] if staleness else []), "of weights that no checkpoint has"
    fleet = Fleet(1, deaths=0.0)
    sampler, source = sampler_of(fleet, staleness)
    fleet.published(at)
    sampler.published(at, is_sent=True)
    sampler.load_state_dict(state, usable=usable)
    source.cursor.load_state_dict(drawn_from)
    begin = at + 1
    if is_attached:
        sampler.begin(at + 2, after, Resumed(num_samples=len(batch)))
        source.cursor.load_state_dict(after)
        fleet.published(at + 1)
        sampler.published(at + 1, is_sent=True)
        begin = at + 2
    for iteration in range(begin, LAST + 1):
        batch = sampler.collect(source, DRAW, iteration=iteration, version=iteration - 1)
        is_known = usable and iteration in known
        oldest = iteration - 1 - staleness if is_known else at
        assert set(batch.policy_version.tolist()) == {max(oldest, iteration - 1 - staleness)}
        sampler.score(batch, sums := Sums())
        found = sums.reduce(ONE_RANK)
        assert found["async/samples_trained"] == iteration * P
        fleet.published(iteration)
        sampler.published(iteration, is_sent=True)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_curriculum_draws_by_what_was_known_before_the_attached_samples(staleness):
    """Scores of samples that are not trained on yet choose no prompts that were chosen without them."""
    at = 3

    def collected(fleet, sampler, source, iteration):
        """One iteration up to its update; the scores of source "b" differ once."""
        sampler.collect(source, DRAW, iteration=iteration, version=iteration - 1)
        source.cursor.observe([[0.0, float(at_b and iteration == at + 1)] for at_b in source.cursor.recent])
        source.cursor.weigh(variance_weights(source.cursor.sources))
        return source.cursor.state_dict()

    def published(fleet, sampler, iteration):
        fleet.published(iteration)
        sampler.published(iteration, is_sent=True)
        return [order.cursor for link in fleet.links.values() for order in link.orders if order]

    fleet = Fleet(1, deaths=0.0)
    sampler, source = sampler_of(fleet, staleness, cursor_of(counts={"a": 40, "b": 40}))
    for iteration in range(1, at + 1):
        collected(fleet, sampler, source, iteration)
        published(fleet, sampler, iteration)
    state, before = sampler.state_dict(), source.cursor.state_dict()
    after = collected(fleet, sampler, source, at + 1)
    expected = published(fleet, sampler, at + 1)

    fleet = Fleet(1, deaths=0.0)
    sampler, source = sampler_of(fleet, staleness, cursor_of(counts={"a": 40, "b": 40}))
    source.cursor.load_state_dict(before)
    published(fleet, sampler, at)
    sampler.load_state_dict(state)
    source.cursor.load_state_dict(after)
    sampler.begin(at + 2, after, Resumed(num_samples=P))
    assert published(fleet, sampler, at + 1) == expected

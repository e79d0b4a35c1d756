"""async.buffer=in_order against rollout worlds that end, return, and cannot get every version."""

import random

import pytest
import torch

from parallel.bridge import BridgeLostError
from tests.one_rank import ONE_RANK
from verl_megatron.data.order.cursor import PromptCursor
from verl_megatron.data.prompts import TrainingPrompts
from verl_megatron.model_specs import ServingWorld
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.sampler import Draw, Numbers, batch_of
from verl_megatron.rollout.sampling import Generation, Sampling
from verl_megatron.separate.ordered_sampler import OrderedSampler
from verl_megatron.separate.orders import Samples, shares_of
from verl_megatron.separate.remote_sampler import Demand

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

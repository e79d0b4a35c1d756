"""Which worlds have joined, while others are waited for."""

from types import SimpleNamespace

import pytest

from parallel.bridge import BridgeLostError
from tests.one_rank import ONE_RANK
from verl_megatron.model_specs import ServingWorld
from verl_megatron.separate import roster
from verl_megatron.separate.roster import Roster


class Worlds(Roster):
    """Worlds that come in this order, by place and number; those of a negative number end as they connect."""

    def __init__(self, arrivals):
        store = SimpleNamespace(part=lambda name: None)
        meeting = SimpleNamespace(world=ONE_RANK, patience_s=0.0, work=lambda: None, store=store)
        super().__init__(meeting, [ServingWorld(name=name, ranks=(1,)) for name in ("reward", "teacher")])
        self.coming = [(place, abs(number), number > 0) for place, number in arrivals]

    def _arrivals(self):
        place, number, self.connects = self.coming.pop(0)
        return [(place, number)]

    def _connect(self, place, number):
        if not self.connects:
            raise BridgeLostError("it ended meanwhile")
        bridge = SimpleNamespace(serving_ranks=range(1, 2), store=None)
        return SimpleNamespace(bridge=bridge, has_served=True, abandon=lambda: None)


@pytest.mark.parametrize(
    ("arrivals", "joined"),
    [
        ([(0, 1), (1, 1)], [0, 1]),
        ([(0, 1), (0, 2), (1, 1)], [0, 1]),
        ([(0, 1), (0, -2), (1, 1)], [1]),
        ([(0, 1), (0, -2), (0, 3), (1, 1)], [0, 1]),
    ],
)
def test_a_world_that_is_waited_for_beside_one_that_restarts(arrivals, joined, monkeypatch):
    """Each place is named once, if its world is there: what it has to do is asked once."""
    worlds, given_up = Worlds(arrivals), []
    monkeypatch.setattr(roster, "give_up", lambda root, number, reason: given_up.append(number))
    assert worlds.admit(until=lambda: 1 in worlds.links) == joined == sorted(worlds.links)
    assert given_up == [-number for _, number in arrivals if number < 0], "its ranks learn of it"

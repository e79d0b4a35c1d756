"""Scoring worlds: passes that begin before their iteration, and the end of a run in the middle of one."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.one_rank import ONE_RANK
from verl_megatron.config import TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.separate.orders import STOP
from verl_megatron.separate.scoring.jobs import columns_key
from verl_megatron.separate.scoring.link import Asked, ScoringLink
from verl_megatron.separate.scoring.server import ScoringServer
from verl_megatron.separate.scoring.side import RemoteScorer


class Fleet:
    """Notes which jobs were asked, dropped and received."""

    world, config = ONE_RANK, TrainerConfig()

    def __init__(self):
        self.said: list[tuple[str, str]] = []

    def begin(self, asked: Asked) -> None:
        self.said.append(("begin", asked.job.name))

    def drop(self, asked: Asked) -> None:
        self.said.append(("drop", asked.job.name))

    def receive(self, asked: Asked) -> None:
        self.said.append(("receive", asked.job.name))


def batch_of(*tokens: int) -> RolloutBatch:
    ids = list(range(len(tokens)))
    return RolloutBatch.from_lists(ids, [[1]] * len(tokens), [[token] for token in tokens])


def test_samples_that_are_made_again_are_asked_for_anew():
    """Another rank may own what this one owned, and have asked for other samples under the old name."""
    fleet = Fleet()
    scorer = RemoteScorer(cast(Any, fleet), "reward", ("values",), last_token=True)
    scorer.begin_early(3, batch_of(5, 6), deal=0)
    scorer.begin_early(3, batch_of(5, 6), deal=0)
    scorer.begin_early(4, batch_of(7), deal=0)
    scorer.begin_early(3, batch_of(6), deal=1)
    scorer.take_early(3, batch_of(6), deal=1)
    scorer.take_early(4, batch_of(7), deal=0)
    assert fleet.said == [
        ("begin", "reward/iteration 3/0"),
        ("begin", "reward/iteration 4/0"),
        ("drop", "reward/iteration 3/0"),
        ("begin", "reward/iteration 3/1"),
    ]


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_job_that_not_all_ranks_have_asked_for_is_forgotten(is_asked):
    """One that all have asked for may have begun: its samples are sent."""
    values = {columns_key("job", 0)} | ({columns_key("job", 1)} if is_asked else set())
    link = object.__new__(ScoringLink)
    link.bridge = cast(Any, SimpleNamespace(has=values.__contains__, training_ranks=range(2)))
    link._dropped, link._tables = set(), {}
    asked = cast(Any, SimpleNamespace(job=SimpleNamespace(name="job")))
    if not is_asked:
        assert not link._send(asked)
    link.drop("job")
    if is_asked:
        with pytest.raises(AttributeError, match="table_of"):  # it goes on to read the columns
            link._send(asked)
    else:
        assert link._send(asked)


def test_the_end_of_a_run_is_seen_by_a_rank_that_waits_for_samples():
    values: set[str] = set()
    server = object.__new__(ScoringServer)
    layout = SimpleNamespace(dp=1, coordinates=lambda rank: SimpleNamespace(dp=0))
    server._roles = cast(Any, {"reward": SimpleNamespace(engine=SimpleNamespace(layout=layout))})
    server._world, server._bridge = cast(Any, ONE_RANK), cast(Any, SimpleNamespace(has=values.__contains__))
    server._parcels = cast(Any, SimpleNamespace(has_come=lambda source, label: False))
    server._beat = lambda: values.add(STOP)
    table = cast(Any, SimpleNamespace(assign=lambda dp: torch.zeros(2, dtype=torch.int64)))
    job = cast(Any, SimpleNamespace(model="reward", name="job"))
    assert server._receive(job, table, [torch.tensor([[0, 1]])]) is None

"""Seeds, token budgets and the queue of samples, without an engine."""

from dataclasses import dataclass

import pytest

from tests.scripted_engine import admission_of
from verl_megatron.config import RolloutConfig
from verl_megatron.rollout.dispatch import Dispatcher, WorkQueue
from verl_megatron.rollout.sampling import Request, Sampling, sample_seed, token_budget


def test_sample_seeds_are_distinct_and_mixed():
    seeds = [
        sample_seed(run, iteration, sample)
        for run in (1, 2)
        for iteration in range(40)
        for sample in range(256)
    ]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 63 for seed in seeds)
    low_bits = [seed & 0xFFFFFFFF for seed in seeds]  # all that a Mersenne Twister takes
    assert len(set(low_bits)) == len(low_bits)
    flips = [(a ^ b).bit_count() for a, b in zip(seeds, seeds[1:], strict=False)]
    assert 31 < sum(flips) / len(flips) < 32  # of 63


def test_the_mixing_loses_nothing():
    """Seeds far apart in (iteration, sample) stay distinct, because every step can be undone."""
    assert len({sample_seed(-3, 1 << i, (1 << j) - 1) for i in range(31) for j in range(33)}) == 31 * 33


def test_sampling_from_config_takes_every_field():
    same = dict(temperature=0.0, top_p=0.5, top_k=7, min_tokens=2, max_tokens=9, ignore_eos=True)
    config = RolloutConfig(**same, stop=["."], stop_token_ids=[4])
    expected = Sampling(**same, stop=(".",), stop_token_ids=(4,))
    assert Sampling.from_config(config) == expected and expected.greedy and not Sampling().greedy


def test_token_budget():
    sampling = Sampling(max_tokens=20)
    assert token_budget(Request(0, [1] * 10, 0, sampling), max_model_len=40, vocab_size=9) == 20
    assert token_budget(Request(0, [1] * 39, 0, sampling), max_model_len=40, vocab_size=9) == 1


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "sample 3 has an empty prompt"),
        ([1] * 40, "sample 3: a prompt of 40 tokens .* max_model_len=40"),
        ([1, 9], "sample 3: token id 9 .* vocabulary of 9"),
        ([-1, 3], "sample 3: token id -1"),
    ],
)
def test_token_budget_refuses(prompt, message):
    with pytest.raises(ValueError, match=message):
        token_budget(Request(3, prompt, 0), max_model_len=40, vocab_size=9)


def test_local_queue_gives_each_number_once():
    queue = WorkQueue(10)
    assert [list(queue.take(4)) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and not queue.take(
        4
    )
    assert not WorkQueue(0).take(1)


@dataclass
class _Queue:
    """What a dispatcher asks of a queue, without a store."""

    total: int
    num_replicas: int
    given: int = 0

    def take(self, count):
        taken = range(self.given, min(self.given + count, self.total))
        self.given = taken.stop
        return taken


@pytest.mark.parametrize(("total", "replicas", "limit"), [(10, 4, 8), (64, 2, 256), (3, 4, 8), (100, 4, 8)])
def test_replicas_end_as_early_as_possible(total, replicas, limit):
    """Steps cost the same for every number of samples: samples wait only while all slots are taken."""
    lengths = [1 + 7 * sample % 23 for sample in range(total)]
    queue = _Queue(total, replicas)
    dispatchers = [Dispatcher(queue, admission=admission_of(limit), group=None) for _ in range(replicas)]
    left = [[] for _ in dispatchers]  # steps that the samples of each replica still need
    steps, idle = 0, 0
    while True:
        for dispatcher, mine in zip(dispatchers, left):
            mine += [lengths[sample] for sample in dispatcher.draw(len(mine))]
        if not any(left):
            break
        idle += queue.given < total and any(len(mine) < limit for mine in left)
        steps += 1
        for mine in left:
            mine[:] = [sample - 1 for sample in mine if sample > 1]
    assert queue.given == total and not idle
    if total <= replicas * limit:
        assert steps == max(lengths)


def test_one_replica_keeps_its_slots_full():
    dispatcher = Dispatcher(WorkQueue(10), admission=admission_of(4), group=None)
    assert dispatcher.draw(0) == range(4)
    assert dispatcher.draw(4) == range(0) and not dispatcher.exhausted
    assert dispatcher.draw(1) == range(4, 7)
    assert dispatcher.draw(0) == range(7, 10) and dispatcher.draw(0) == range(0) and dispatcher.exhausted

"""Properties over many random lengths, and small cases against exhaustive search."""

import random
from itertools import product

import pytest

from verl_megatron.data.packing import balance, micro_batches


def random_lengths(seed: int) -> list[int]:
    rng = random.Random(seed)
    longest = rng.choice([1, 10, 1000])
    return [rng.randint(0, longest) for _ in range(rng.randint(0, 60))]


def total(samples: list[int], lengths: list[int]) -> int:
    return sum(lengths[sample] for sample in samples)


def sums(samples_of: list[list[int]], lengths: list[int]) -> list[int]:
    return [total(samples, lengths) for samples in samples_of]


def largest_bin(bins: tuple[int, ...], lengths: list[int]) -> int:
    """Tokens of the fullest bin, if sample i goes to `bins[i]`."""
    totals = [0] * 3
    for place, length in zip(bins, lengths):
        totals[place] += length
    return max(totals)


@pytest.mark.parametrize("seed", range(100))
def test_balance_deals_every_sample_once_and_leaves_no_bin_empty(seed):
    lengths, bins = random_lengths(seed), 1 + seed % 9
    dealt = balance(lengths, bins)
    assert len(dealt) == bins
    assert sorted(sample for samples in dealt for sample in samples) == list(range(len(lengths)))
    assert sum(not samples for samples in dealt) == max(0, bins - len(lengths))
    assert all(samples == sorted(samples) for samples in dealt)
    assert balance(list(lengths), bins) == dealt


@pytest.mark.parametrize("seed", range(30))
def test_balance_is_close_to_the_best_split(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 50) for _ in range(7)]
    best = min(largest_bin(bins, lengths) for bins in product(range(3), repeat=7))
    assert max(sums(balance(lengths, 3), lengths)) <= 1.2 * best


def test_balance_of_many_samples_is_nearly_even():
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(6, 1)) for _ in range(512)]
    totals = sums(balance(lengths, 8), lengths)
    assert max(totals) - min(totals) <= 0.001 * max(totals)


def test_balance_refuses_no_bins():
    with pytest.raises(ValueError, match="bins=0"):
        balance([1], 0)


@pytest.mark.parametrize("seed", range(100))
def test_micro_batches_hold_every_sample_once_within_the_budget(seed):
    lengths, budget, multiple = random_lengths(seed), 5 + 37 * (seed % 7), 1 + seed % 4
    packed = micro_batches(lengths, tokens_per_micro_batch=budget, multiple_of=multiple)
    assert sorted(sample for samples in packed for sample in samples) == list(range(len(lengths)))
    for samples, total in zip(packed, sums(packed, lengths)):
        assert total <= budget or len(samples) == 1
    assert len(packed) % multiple == 0
    used = [samples for samples in packed if samples]
    assert packed == used + [[]] * (len(packed) - len(used)) and len(packed) - len(used) < multiple
    assert micro_batches(list(lengths), tokens_per_micro_batch=budget, multiple_of=multiple) == packed


def test_micro_batches_are_well_filled():
    rng = random.Random(1)
    lengths = [rng.randint(50, 1000) for _ in range(400)]
    packed = micro_batches(lengths, tokens_per_micro_batch=4096)
    assert len(packed) <= -(-sum(lengths) // 4096) + 1


@pytest.mark.parametrize("seed", range(50))
def test_two_micro_batches_are_never_both_half_empty(seed):
    """First fit opens a new micro-batch only if no earlier one has room."""
    lengths = random_lengths(seed)
    totals = sorted(sums(micro_batches(lengths, tokens_per_micro_batch=700), lengths))
    assert len(totals) < 2 or totals[0] + totals[1] > 700


def test_micro_batches_of_nothing():
    assert micro_batches([], tokens_per_micro_batch=8, multiple_of=4) == []


@pytest.mark.parametrize(
    "settings", [dict(tokens_per_micro_batch=0), dict(tokens_per_micro_batch=1, multiple_of=0)]
)
def test_micro_batches_refuse_no_budget(settings):
    with pytest.raises(ValueError, match="at least 1"):
        micro_batches([1], **settings)

"""The table of an iteration's samples, built by hand: who works on which sample, and in which micro-batch."""

import random
from dataclasses import replace

import pytest
import torch

from verl_megatron.algorithms.normalizers import token_mean
from verl_megatron.data.sample_table import SampleTable


def make_table(lengths: list[int], num_mini_batches: int = 1) -> SampleTable:
    size = len(lengths) // num_mini_batches
    lengths_B = torch.tensor(lengths)
    return SampleTable(
        lengths_B,
        lengths_B - 1,
        torch.zeros_like(lengths_B),
        torch.zeros_like(lengths_B),
        [range(first, first + size) for first in range(0, len(lengths), size)],
    )


def drawn_lengths(count: int) -> list[int]:
    generator = random.Random(4)
    return [generator.randint(2, 60) for _ in range(count)]


def test_assign_by_hand():
    """5 + 5 = 6 + 4 in the first mini-batch, 9 = 4 + 3 + 2 in the second; each is balanced for itself."""
    table = make_table([5, 6, 4, 5, 9, 2, 3, 4], num_mini_batches=2)
    index_B = table.assign(2)
    for samples, halves in ((range(4), [{0, 3}, {1, 2}]), (range(4, 8), [{4}, {5, 6, 7}])):
        first = {sample for sample in samples if index_B[sample] == 0}
        found = [first, set(samples) - first]
        assert sorted(map(sorted, found)) == sorted(map(sorted, halves))


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("mini_batches", [1, 2, 4])
def test_assign_balances_every_mini_batch(dp, mini_batches):
    table = make_table(drawn_lengths(32), mini_batches)
    index_B = table.assign(dp)
    assert index_B.shape == (32,) and index_B.min() >= 0 and index_B.max() < dp
    for samples in table.mini_batches:
        mine = slice(samples.start, samples.stop)
        sums = [int(table.lengths_B[mine][index_B[mine] == place].sum()) for place in range(dp)]
        assert min(sums) > 0 and max(sums) - min(sums) <= int(table.lengths_B.max())


@pytest.mark.parametrize("multiple_of", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_micro_batches_cover_each_sample_once_per_mini_batch(dp, multiple_of):
    table = make_table(drawn_lengths(32), 4)
    index_B = table.assign(dp)
    for place in range(dp):
        sample_id = (index_B == place).nonzero().squeeze(1)
        groups_of = table.micro_batches(sample_id, tokens_per_micro_batch=70, multiple_of=multiple_of)
        assert len(groups_of) == 4
        for samples, groups in zip(table.mini_batches, groups_of):
            covered = sorted(int(sample_id[i]) for group in groups for i in group)
            assert covered == [sample for sample in samples if index_B[sample] == place]
            assert all(table.lengths_B[sample_id[group]].sum() <= 70 for group in groups)
            assert groups and len(groups) % multiple_of == 0


@pytest.mark.parametrize(
    "order", [list(range(15, -1, -1)), random.Random(2).sample(range(16), 16)], ids=["reversed", "shuffled"]
)
def test_micro_batches_hold_the_same_samples_in_any_order(order):
    """Samples of equal length may change places: the tokens of every micro-batch stay."""
    table = make_table(drawn_lengths(16), 2)

    def composition(sample_id: torch.Tensor) -> list[list[list[int]]]:
        groups_of = table.micro_batches(sample_id, tokens_per_micro_batch=80, multiple_of=1)
        found = []
        for groups in groups_of:
            found.append([sorted(table.lengths_B[sample_id[group]].tolist()) for group in groups])
        return found

    assert composition(torch.tensor(order)) == composition(torch.arange(16))


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_groups_that_share_their_prompt_are_whole_and_within_the_budget(dp):
    """Sixteen groups of four in two mini-batches; their samples are not next to each other."""
    lengths_B = torch.tensor(drawn_lengths(64)) + 20
    table = replace(
        make_table(lengths_B.tolist(), 2), group_B=torch.arange(64) % 16, prompt_B=torch.full((64,), 20)
    )
    index_B, budget = table.assign(dp), 150
    assert all(len(index_B[first::16].unique()) <= 2 for first in range(16))  # once in each mini-batch
    for samples in table.mini_batches:
        mine = torch.arange(samples.start, samples.stop)
        for group in range(16):
            assert len(index_B[mine][table.group_B[mine] == group].unique()) == 1
    for place in range(dp):
        sample_id = (index_B == place).nonzero().squeeze(1)
        for samples, found in zip(
            table.mini_batches,
            table.micro_batches(sample_id, tokens_per_micro_batch=budget, multiple_of=1),
            strict=True,
        ):
            covered = sorted(int(sample_id[i]) for micro in found for i in micro)
            assert covered == [sample for sample in samples if index_B[sample] == place]
            for micro in found:
                groups = table.group_B[sample_id[micro]]
                tokens = table.lengths_B[sample_id[micro]].sum() - 20 * (len(micro) - len(groups.unique()))
                assert tokens <= budget
    assert table.largest_tokens == max(
        int(table.lengths_B[half].sum()) - 20 * (32 - 16) for half in (slice(0, 32), slice(32, 64))
    )


def test_a_rank_without_samples_has_no_micro_batches():
    """The pipeline schedule lets it take part all the same."""
    table, nothing = make_table([3, 4, 5, 6], 2), torch.zeros(0, dtype=torch.int64)
    for multiple in (1, 2):
        options = {"tokens_per_micro_batch": 10, "multiple_of": multiple}
        assert table.micro_batches(nothing, **options) == [[], []]
        assert table.micro_batches(torch.tensor([2]), **options) == [[], [[0]] + [[]] * (multiple - 1)]


def test_a_sample_above_the_budget_is_alone():
    groups = make_table([30, 4, 5]).micro_batches(torch.arange(3), tokens_per_micro_batch=10, multiple_of=1)
    assert sorted(map(sorted, groups[0])) == [[0], [1, 2]]


def test_the_token_mean_of_a_mini_batch():
    table = make_table([3, 4, 5, 6], 2)
    assert [token_mean(table.response_B, samples).divisor for samples in table.mini_batches] == [2 + 3, 4 + 5]

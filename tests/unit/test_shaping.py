"""Overlong penalty and greedy baselines, against their definitions sample by sample."""

import pytest
import torch

from tests.policy_case import reduced
from tests.simulated_ranks import Ranks
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.rewards.shaping import has_variance, lacks_eos, overlong_penalty, take_baselines


def soft_punishment(length: int, max_length: int, cache: int) -> float:
    """R_length (Yu et al. 2025, equation 13)."""
    if length <= max_length - cache:
        return 0.0
    if length <= max_length:
        return ((max_length - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("max_tokens", "overlong_tokens"), [(20, 4), (20, 20), (7, 1), (20480, 4096)])
def test_the_overlong_penalty_is_dapos(max_tokens, overlong_tokens):
    step = max(max_tokens // 100, 1)
    lengths = [0, *range(1, max_tokens + 3 * step, step), max_tokens]
    found_B = overlong_penalty(torch.tensor(lengths), max_tokens=max_tokens, overlong_tokens=overlong_tokens)
    expected = [soft_punishment(length, max_tokens, overlong_tokens) for length in lengths]
    assert found_B.dtype == torch.float32 and found_B.tolist() == pytest.approx(expected, abs=1e-6)


def test_groups_have_variance_if_any_two_scores_differ():
    assert has_variance([0.0, 0.0, 1e-6]) and not has_variance([0.5] * 3) and not has_variance([1.0])


@pytest.mark.parametrize("split", [[12], [5, 0, 7], [1, 11], [4, 4, 4]], ids=str)
def test_baselines_are_the_scores_of_the_greedy_samples_wherever_they_lie(split):
    """Three prompts with three samples and a greedy one, out of order."""
    order = [7, 2, 11, 0, 3, 9, 1, 8, 5, 10, 6, 4]
    scores = [0.5 * number for number in range(12)]
    whole = RolloutBatch.from_lists(order, [[1, 2]] * 12, [[number] for number in order])
    whole.group_id = whole.sample_id // 4
    whole.rewards = torch.tensor([scores[number] for number in order])
    parts = [whole.select(index_B) for index_B in torch.arange(12).split(split)]
    metrics: list[Sums] = []

    def one_rank(part: RolloutBatch, all_sum) -> RolloutBatch:
        metrics.append(Sums())
        return take_baselines(part, metrics[-1], num_groups=3, all_sum=all_sum)

    batch = RolloutBatch.concatenate(Ranks(parts).run(one_rank))
    assert batch.sample_id.tolist() == list(range(9)) and batch.group_id.tolist() == [
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        2,
    ]
    assert batch.generated_ids[:, 2].tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10], "samples keep their order"
    assert batch.rewards.tolist() == [scores[number] for number in (0, 1, 2, 4, 5, 6, 8, 9, 10)]
    assert batch.baselines.tolist() == [scores[3]] * 3 + [scores[7]] * 3 + [scores[11]] * 3
    assert batch.baselines.dtype == torch.float32
    assert reduced(*metrics[-len(parts) :])["reward/greedy_mean"] == pytest.approx(3.5)


def test_a_response_lacks_the_end_unless_its_last_own_token_is_one():
    """Two ends, 7 and 8; a tool's output is not the model's own, and an end inside is not at the end."""
    responses = [[3, 7], [8], [7, 3], [], [3, 4], [3, 7, 5, 8], [3, 7, 8], [7, 7]]
    own = [[1, 1], [1], [1, 1], [], [1, 1], [1, 1, 0, 1], [1, 1, 0], [1, 1]]
    batch = RolloutBatch.from_lists(list(range(8)), [[7, 8]] * 8, responses)
    for b, is_own in enumerate(own):
        batch.set_targets(b, [bool(x) for x in is_own])
    expected = []
    for ids, is_own in zip(responses, own):
        generated = [token for token, mine in zip(ids, is_own) if mine]
        expected.append(not generated or generated[-1] not in (7, 8))
    assert lacks_eos(batch, {7, 8}).tolist() == expected
    assert (
        lacks_eos(batch, set()).all() and len(lacks_eos(batch.select(torch.tensor([], dtype=int)), {7})) == 0
    )

import math

import pytest
import torch

from tests.simulated_ranks import Ranks
from verl_megatron.algorithms.advantages.estimators import gae, group_advantages, token_rewards, whiten


def ragged(samples: int = 6, length: int = 11, seed: int = 0):
    """Random fields [samples, length] with junk outside ragged responses, one of one token, one full."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(samples, length, dtype=torch.bool)
    spans = [(3, 8), (0, length), (5, 6), (2, 4), (9, 11), (1, 10)]
    for sample, (begin, end) in enumerate(spans[:samples]):
        mask[sample, begin:end] = True
    rewards, values = (torch.randn(samples, length, generator=generator) for _ in range(2))
    return rewards, values, mask


def gae_by_samples(rewards, values, mask, gamma, lam):
    """The definition, A_t = sum_k (gamma lam)^k delta_{t+k}, token by token."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for sample in range(len(rewards)):
        positions = [t for t in range(mask.shape[1]) if mask[sample, t]]
        reward, value = (
            [rewards[sample, t].item() for t in positions],
            [values[sample, t].item() for t in positions] + [0.0],
        )
        delta = [reward[i] + gamma * value[i + 1] - value[i] for i in range(len(positions))]
        for i, t in enumerate(positions):
            advantages[sample, t] = sum((gamma * lam) ** (k - i) * delta[k] for k in range(i, len(positions)))
            returns[sample, t] = advantages[sample, t] + value[i]
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0)])
def test_gae_matches_a_loop_over_ragged_samples(gamma, lam):
    rewards, values, mask = ragged()
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    expected_advantages, expected_returns = gae_by_samples(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(advantages, expected_advantages)
    torch.testing.assert_close(returns, expected_returns)


def test_gae_with_lambda_one_gives_the_sum_of_later_rewards_as_returns():
    rewards, values, mask = ragged()
    _, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, (rewards * mask).flip(-1).cumsum(-1).flip(-1) * mask)


def test_gae_of_no_samples_and_of_a_sample_without_response():
    assert gae(torch.zeros(0, 5), torch.zeros(0, 5), torch.zeros(0, 5, dtype=torch.bool), gamma=1, lam=1)[
        0
    ].shape == (0, 5)
    advantages, returns = gae(
        torch.ones(1, 5), torch.ones(1, 5), torch.zeros(1, 5, dtype=torch.bool), gamma=1, lam=1
    )
    assert not advantages.any() and not returns.any()


def test_token_rewards_put_the_score_last_and_the_kl_everywhere():
    _, kl, mask = ragged()
    mask[3] = False  # a sample without a response
    scores = torch.tensor([1.0, -2.0, 0.5, 7.0, 0.0, 3.0])
    got = token_rewards(scores, mask, kl, 0.3)
    expected = torch.zeros_like(kl)
    for sample in range(len(mask)):
        positions = mask[sample].nonzero().flatten().tolist()
        for t in positions:
            expected[sample, t] = -0.3 * kl[sample, t] + (scores[sample] if t == positions[-1] else 0.0)
    torch.testing.assert_close(got, expected)
    assert torch.equal(token_rewards(scores, mask, None, 0.3).sum(-1), scores * mask.any(-1))


SPLITS = [[6], [3, 3], [1, 4, 1], [0, 6], [2, 0, 1, 3]]


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_matches_the_statistics_of_all_tokens(shift_mean):
    x, _, mask = ragged()
    tokens = [x[b, t].item() for b in range(6) for t in range(11) if mask[b, t]]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((token - mean) ** 2 for token in tokens) / len(tokens))
    expected = ((x - mean) / std + (0.0 if shift_mean else mean)) * mask
    torch.testing.assert_close(whiten(x, mask, shift_mean=shift_mean), expected)


@pytest.mark.parametrize("split", SPLITS)
def test_whitening_does_not_depend_on_where_samples_lie(split):
    x, _, mask = ragged()
    parts = list(zip(x.split(split), mask.split(split), strict=True))
    got = Ranks(parts).run(lambda part, all_sum: whiten(*part, all_sum=all_sum))
    torch.testing.assert_close(
        torch.cat(got), whiten(x, mask), rtol=0, atol=1e-6
    )  # float64 sums in another order


def test_whitening_keeps_the_digits_of_large_equal_values_and_takes_no_tokens():
    x, mask = torch.full((2, 4), 1e4), torch.ones(2, 4, dtype=torch.bool)
    assert whiten(x, mask).abs().max() == 0
    assert not whiten(x, torch.zeros_like(mask)).any()


def groups_by_loop(rewards, groups, scale_by_std):
    result = []
    for reward, group in zip(rewards.tolist(), groups.tolist(), strict=True):
        peers = [r for r, g in zip(rewards.tolist(), groups.tolist(), strict=True) if g == group]
        mean = sum(peers) / len(peers)
        std = torch.tensor(peers, dtype=torch.float64).std().item() if len(peers) > 1 else 0.0
        result.append((reward - mean) / (std + 1e-6) if scale_by_std else reward - mean)
    return torch.tensor(result)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("scale_by_std", [True, False])
def test_group_advantages_match_a_loop_wherever_samples_lie(split, scale_by_std):
    rewards = torch.tensor([1.0, 0.0, 0.3, 1.0, 5.0, 0.0])
    groups = torch.tensor(
        [2, 0, 2, 0, 3, 2]
    )  # group 1 is empty, group 3 has one sample, samples of a group are apart
    parts = list(zip(rewards.split(split), groups.split(split), strict=True))

    def one_rank(part, all_sum):
        return group_advantages(*part, 4, scale_by_std=scale_by_std, all_sum=all_sum)

    got = torch.cat(Ranks(parts).run(one_rank))
    torch.testing.assert_close(got, groups_by_loop(rewards, groups, scale_by_std))
    assert got[4] == 0


def test_a_group_of_equal_scores_gets_no_advantage():
    rewards = torch.full((6,), 0.1)
    advantages = group_advantages(rewards, torch.zeros(6, dtype=torch.int64), 1, scale_by_std=True)
    torch.testing.assert_close(
        advantages, torch.zeros(6), rtol=0, atol=1e-9
    )  # rounding of the mean over 1e-6

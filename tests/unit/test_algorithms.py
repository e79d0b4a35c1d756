"""The two algorithms on a small batch, against their definitions sample by sample."""

from dataclasses import fields

import pytest
import torch

from verl_megatron.algorithms import ALGORITHMS, get_algorithm
from verl_megatron.algorithms.advantages import own_samples
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch

SPANS = [(2, 6), (1, 3), (4, 8), (3, 4), (2, 8), (1, 7)]  # of the responses


@pytest.fixture
def batch() -> RolloutBatch:
    """Three prompts with two samples each, samples out of order."""
    generator = torch.Generator().manual_seed(0)
    response = torch.zeros(6, 8, dtype=torch.bool)
    attention = torch.zeros(6, 8, dtype=torch.bool)
    for sample, (begin, end) in enumerate(SPANS):
        response[sample, begin:end] = True
        attention[sample, :end] = True
    logprobs, ref_logprobs, values = (torch.randn(6, 8, generator=generator) * response for _ in range(3))
    return RolloutBatch(
        sample_id=torch.tensor([4, 0, 1, 5, 3, 2]),
        group_id=torch.tensor([4, 0, 1, 5, 3, 2]) // 2,
        input_ids=torch.zeros(6, 4, dtype=torch.int64),
        generated_ids=torch.zeros(6, 8, dtype=torch.int64),
        attention_mask=attention,
        response_mask=response,
        rewards=torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 1.0]),
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        values=values,
    )


def run(batch, config, kl_coef=0.1):
    return get_algorithm(config.name).advantages(
        batch, config, kl_coef=kl_coef, num_groups=3, all_sum=own_samples
    )


def penalized_rewards(batch, sample, kl_coef):
    begin, end = SPANS[sample]
    rewards = [
        -kl_coef * (batch.logprobs[sample, t] - batch.ref_logprobs[sample, t]).item()
        for t in range(begin, end)
    ]
    rewards[-1] += batch.rewards[sample].item()
    return rewards


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("whiten", [False, True])
def test_ppo(batch, kl_in, whiten):
    config = AlgorithmConfig(name="ppo", gamma=0.9, gae_lambda=0.8, whiten=whiten, kl_in=kl_in)
    result = run(batch, config)
    advantages, returns = torch.zeros(6, 8), torch.zeros(6, 8)
    for sample, (begin, end) in enumerate(SPANS):
        rewards = penalized_rewards(batch, sample, 0.1 if kl_in == "reward" else 0.0)
        torch.testing.assert_close(result.token_rewards[sample, begin:end], torch.tensor(rewards))
        next_value = next_advantage = 0.0
        for t in reversed(range(begin, end)):
            value = batch.values[sample, t].item()
            next_advantage = rewards[t - begin] + 0.9 * next_value - value + 0.9 * 0.8 * next_advantage
            advantages[sample, t], returns[sample, t], next_value = (
                next_advantage,
                next_advantage + value,
                value,
            )
    if whiten:
        tokens = advantages[batch.response_mask]
        advantages = (advantages - tokens.mean()) / tokens.std(correction=0) * batch.response_mask
    torch.testing.assert_close(result.advantages, advantages)
    torch.testing.assert_close(result.returns, returns)


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("scale_by_std", [False, True])
def test_grpo(batch, kl_in, scale_by_std):
    config = AlgorithmConfig(name="grpo", scale_by_std=scale_by_std, kl_in=kl_in)
    batch.values = None
    result = run(batch, config)
    scores = {
        batch.sample_id[sample].item(): sum(
            penalized_rewards(batch, sample, 0.1 if kl_in == "reward" else 0.0)
        )
        for sample in range(6)
    }
    for sample, (begin, end) in enumerate(SPANS):
        sample_id = batch.sample_id[sample].item()
        own, other = scores[sample_id], scores[sample_id ^ 1]  # samples 2p and 2p + 1 share prompt p
        advantage = (own - other) / 2
        if scale_by_std:
            advantage /= abs(own - other) / 2**0.5 + 1e-6  # standard deviation of two over n - 1
        expected = torch.zeros(8)
        expected[begin:end] = advantage
        torch.testing.assert_close(result.advantages[sample], expected, rtol=1e-5, atol=1e-6)
    assert result.returns is None and not get_algorithm("grpo").needs_critic


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_new_batch_comes_back_and_the_old_one_stays(batch, name):
    before = {field.name: getattr(batch, field.name) for field in fields(batch)}
    result = run(batch, AlgorithmConfig(name=name))
    assert all(getattr(batch, name) is value for name, value in before.items())
    assert result.advantages.dtype == result.token_rewards.dtype == torch.float32
    assert result.sample_id is batch.sample_id and batch.advantages is None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_a_reference_there_is_no_penalty(batch, name):
    batch.ref_logprobs = None
    result = run(batch, AlgorithmConfig(name=name))
    torch.testing.assert_close(result.token_rewards.sum(-1), batch.rewards)


def test_an_unknown_algorithm_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"algorithm\.name='reinforce' is not known; choose one of ppo, grpo"
    ):
        get_algorithm("reinforce")


def spread_out(values: torch.Tensor, places: torch.Tensor, width: int) -> torch.Tensor:
    """Per-token values [B, T] at other positions of samples of `width` tokens."""
    wide = torch.zeros(len(values), width, dtype=values.dtype)
    wide[:, places] = values
    return wide


@pytest.mark.parametrize(
    "config",
    [AlgorithmConfig(name="ppo", gamma=0.9, gae_lambda=0.8), AlgorithmConfig(name="grpo")],
    ids=lambda config: config.name,
)
def test_tokens_that_are_not_the_models_own_take_no_part(batch, config):
    """Samples with gaps, in which values and log-probs are not 0, give what the same samples without gaps give."""
    places = torch.tensor([0, 1, 2, 5, 6, 9, 11, 12])  # of the eight tokens among thirteen
    gaps = torch.ones(13, dtype=torch.bool).index_fill(0, places, False)
    wide = {
        name: spread_out(value, places, 13) if value.dim() > 1 and value.size(1) == 8 else value
        for name, value in batch.tensors().items()
    }
    for name in ("logprobs", "ref_logprobs", "values"):
        wide[name][:, gaps] = 100.0
    found, expected = run(RolloutBatch(**wide), config), run(batch, config)
    for name in ("advantages", "token_rewards", *(("returns",) if config.name == "ppo" else ())):
        assert torch.equal(getattr(found, name)[:, places], getattr(expected, name)), name
        assert not getattr(found, name)[:, gaps].any(), name

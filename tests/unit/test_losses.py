import math

import pytest
import torch

from tests.one_rank import ONE_RANK
from verl_megatron.algorithms.losses import (
    PolicyTokens,
    cross_entropy,
    importance_weights,
    policy_loss,
    value_loss,
)
from verl_megatron.config import AlgorithmConfig


def reduced(sums):
    return sums.reduce(ONE_RANK)


def policy_case(count: int = 40, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    old = -1.5 + normal(0.5)
    tokens = PolicyTokens(
        torch.arange(count),
        old,
        normal(1.0),
        ref_logprobs_N=old + normal(0.4),
        rollout_logprobs_N=old + normal(0.5),
    )
    return (old + normal(0.4)).requires_grad_(), normal(0.1).add(1.0).requires_grad_(), tokens


def naive_policy_loss(logprobs, entropy, tokens, config, kl_coef):
    """Token by token with Python's branches, as the papers write it."""
    total = 0.0
    for i in range(len(logprobs)):
        advantage = tokens.advantages_N[i].item()
        ratio = torch.exp(logprobs[i] - tokens.old_logprobs_N[i])
        if ratio > 1 + config.clip_ratio_high:
            limited = torch.tensor(1 + config.clip_ratio_high, dtype=torch.float64)
        elif ratio < 1 - config.clip_ratio_low:
            limited = torch.tensor(1 - config.clip_ratio_low, dtype=torch.float64)
        else:
            limited = ratio
        objective = (
            ratio * advantage
            if (ratio * advantage).item() < (limited * advantage).item()
            else limited * advantage
        )
        weight = 1.0
        if config.tis_cap > 0:
            weight = min(math.exp(tokens.old_logprobs_N[i] - tokens.rollout_logprobs_N[i]), config.tis_cap)
        total = total - weight * objective - config.entropy_coef * entropy[i]
        if config.kl_in == "loss":
            d = logprobs[i] - tokens.ref_logprobs_N[i]
            total = (
                total + kl_coef * {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[config.kl_estimator]
            )
    return total


def test_a_log_ratio_beyond_float32_leaves_loss_and_gradient_finite():
    logprobs = torch.tensor([-1.0, -100.0, -0.5], requires_grad=True)
    old = torch.tensor(
        [-1.0, -1.0, -120.0]
    )  # exp(119.5) is infinite in float32, and infinity times 0 is no number
    tokens = PolicyTokens(
        torch.zeros(3, dtype=torch.int64), old, torch.tensor([1.0, 0.0, 0.0]), ref_logprobs_N=old.flip(0)
    )
    for estimator in ("k2", "k3"):
        loss_N, _ = policy_loss(
            logprobs, None, tokens, AlgorithmConfig(kl_in="loss", kl_estimator=estimator), 0.1
        )
        (gradient,) = torch.autograd.grad(loss_N.sum(), logprobs)
        assert torch.isfinite(loss_N).all() and torch.isfinite(gradient).all()


CONFIGS = [
    AlgorithmConfig(),
    AlgorithmConfig(clip_ratio_low=0.1, clip_ratio_high=0.3),
    AlgorithmConfig(entropy_coef=0.02),
    AlgorithmConfig(kl_in="loss", kl_estimator="k2"),
    AlgorithmConfig(kl_in="loss", kl_estimator="k3", entropy_coef=0.01, tis_cap=1.2),
    AlgorithmConfig(kl_in="loss", kl_estimator="k1", tis_cap=2.0),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_policy_loss_and_gradients_match_a_loop(config):
    logprobs, entropy, tokens = policy_case()
    loss = policy_loss(logprobs, entropy, tokens, config, 0.05)[0].sum()
    expected = naive_policy_loss(logprobs, entropy, tokens, config, 0.05)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, (logprobs, entropy), materialize_grads=True)
    expected_gradients = torch.autograd.grad(expected, (logprobs, entropy), materialize_grads=True)
    torch.testing.assert_close(gradients, expected_gradients)


def test_policy_loss_does_not_depend_on_the_micro_batches():
    config = CONFIGS[4]
    logprobs, entropy, tokens = policy_case()
    whole_N, sums = policy_loss(logprobs, entropy, tokens, config, 0.05)
    whole = whole_N.sum()
    parts = 0.0
    merged = None
    for piece in torch.arange(40).split([1, 0, 25, 14]):
        part = PolicyTokens(*(getattr(tokens, name)[piece] for name in PolicyTokens.__dataclass_fields__))
        loss_N, part_sums = policy_loss(logprobs[piece], entropy[piece], part, config, 0.05)
        parts = parts + loss_N.sum()
        if merged is None:
            merged = part_sums
        else:
            merged.merge(part_sums)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(
        torch.autograd.grad(parts, logprobs)[0], torch.autograd.grad(whole, logprobs)[0]
    )
    assert reduced(merged) == pytest.approx(reduced(sums))


def test_policy_metrics():
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    new = old + torch.tensor(
        [0.0, 0.5, -0.5, 0.5]
    )  # inside; clipped; lowered where the advantage is positive: no clip; no clip
    tokens = PolicyTokens(torch.arange(4), old, torch.tensor([1.0, 1.0, 1.0, -1.0]))
    _, sums = policy_loss(new, torch.full((4,), 2.0), tokens, AlgorithmConfig(), 0.0)
    metrics = reduced(sums)
    ratio = [1.0, math.exp(0.5), math.exp(-0.5), math.exp(0.5)]
    assert metrics["policy/clip_fraction"] == 0.25
    assert metrics["policy/ratio_max"] == pytest.approx(math.exp(0.5))
    assert metrics["policy/entropy"] == 2.0
    assert metrics["policy/loss"] == pytest.approx(-(ratio[0] + 1.2 + ratio[2] - ratio[3]) / 4)
    assert metrics["policy/approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratio) / 4, rel=1e-5)
    assert "kl/loss" not in metrics and "policy/importance_weight" not in metrics


def test_before_the_first_update_the_ratio_is_one_and_the_gradient_the_policy_gradient():
    logprobs, entropy, tokens = policy_case()
    tokens.old_logprobs_N = logprobs.detach().clone()
    loss_N, sums = policy_loss(logprobs, entropy, tokens, AlgorithmConfig(), 0.0)
    loss_N.sum().backward()
    torch.testing.assert_close(logprobs.grad, -tokens.advantages_N)
    metrics = reduced(sums)
    assert (
        metrics["policy/ratio_max"] == 1
        and metrics["policy/clip_fraction"] == 0
        and metrics["policy/approx_kl"] == 0
    )


def test_kl_in_the_reward_leaves_the_loss_alone():
    logprobs, entropy, tokens = policy_case()
    with_reference, _ = policy_loss(logprobs, entropy, tokens, AlgorithmConfig(kl_in="reward"), 10.0)
    tokens.ref_logprobs_N = None
    assert torch.equal(
        with_reference, policy_loss(logprobs, None, tokens, AlgorithmConfig(kl_in="reward"), 10.0)[0]
    )


def test_importance_weights_are_truncated_and_carry_no_gradient():
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    tokens = PolicyTokens(
        torch.arange(3), old, torch.ones(3), rollout_logprobs_N=torch.tensor([-1.0, -200.0, 0.0])
    )
    weights = importance_weights(tokens, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, math.exp(-1.0)]))
    assert not weights.requires_grad


@pytest.mark.parametrize("cliprange_value", [0.0, 0.2, 0.7])
def test_value_loss_and_gradient_match_a_loop(cliprange_value):
    generator = torch.Generator().manual_seed(1)
    old, returns, step = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(3))
    values = (old + 0.5 * step).requires_grad_()
    loss_N, sums = value_loss(values, old, returns, AlgorithmConfig(cliprange_value=cliprange_value))
    loss = loss_N.sum()

    expected, clipped = 0.0, 0
    for i in range(50):
        square = (values[i] - returns[i]) ** 2
        if cliprange_value:
            near = torch.minimum(torch.maximum(values[i], old[i] - cliprange_value), old[i] + cliprange_value)
            near_square = (near - returns[i]) ** 2
            if near_square > square:
                square, clipped = near_square, clipped + 1
        expected = expected + 0.5 * square
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, values)[0], torch.autograd.grad(expected, values)[0])
    metrics = reduced(sums)
    assert metrics["critic/loss"] == pytest.approx(expected.item() / 50)
    assert metrics["critic/return_mean"] == pytest.approx(returns.mean().item())
    assert metrics.get("critic/clip_fraction", 0.0) == clipped / 50
    assert bool(clipped) == bool(cliprange_value), "the case must reach the clipped branch"


def test_cross_entropy_is_the_negative_log_likelihood():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    loss_N, sums = cross_entropy(logprobs)
    loss_N.sum().backward()
    assert loss_N.tolist() == [1.0, 2.0, 0.5] and logprobs.grad.tolist() == [-1.0, -1.0, -1.0]
    assert reduced(sums) == {"sft/loss": pytest.approx(3.5 / 3)}

"""The policy loss's parts together, its KL term by exact enumeration, and the value loss."""

import math

import pytest
import torch

from tests.policy_case import policy_case, reduced
from verl_megatron.algorithms.losses import cross_entropy, policy_loss, value_loss
from verl_megatron.algorithms.objectives import OBJECTIVES
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig

CLIP, KL_COEF = OBJECTIVES["clip"], 0.05
CONFIGS = [
    AlgorithmConfig(entropy_coef=0.02, kl_in="none"),
    AlgorithmConfig(kl_in="loss", kl_estimator="k1"),
    AlgorithmConfig(kl_in="loss", kl_estimator="k2", entropy_coef=0.01),
    AlgorithmConfig(kl_in="loss", kl_estimator="k3", kl_unbiased=True),
]


def rest_by_loop(case, config):
    """All but the objective, token by token: -c H + beta KL, times p / p_old if unbiased."""
    losses = []
    for i, entropy in enumerate(case.entropy_N):
        loss = -config.entropy_coef * entropy
        if config.kl_in == "loss":
            x = case.logprobs_N[i] - case.tokens.ref_logprobs_N[i]
            kl = {"k1": x, "k2": x * x / 2, "k3": torch.exp(-x) - 1 + x}[config.kl_estimator]
            ratio = torch.exp(case.logprobs_N[i] - case.tokens.old_logprobs_N[i])
            loss = loss + KL_COEF * kl * (ratio if config.kl_unbiased else 1.0)
        losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.kl_in}-{config.kl_estimator}")
def test_policy_loss_is_the_objective_less_entropy_plus_kl(config):
    case = policy_case()
    loss_N, _ = policy_loss(case.logprobs_N, case.entropy_N, case.tokens, CLIP, config, KL_COEF)
    objective_N, _ = CLIP(case.logprobs_N, case.tokens, config)
    expected_N = objective_N + rest_by_loop(case, config)
    torch.testing.assert_close(loss_N, expected_N)
    inputs = (case.logprobs_N, case.entropy_N)
    gradients, expected = (
        torch.autograd.grad(x_N.sum(), inputs, retain_graph=True, materialize_grads=True)
        for x_N in (loss_N, expected_N)
    )
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_policy_loss_and_metrics_do_not_depend_on_the_micro_batches(name):
    case, config = policy_case(), AlgorithmConfig(kl_in="loss", kl_estimator="k3", entropy_coef=0.01)

    def loss_of(part):
        return policy_loss(part.logprobs_N, part.entropy_N, part.tokens, OBJECTIVES[name], config, KL_COEF)

    whole_N, sums = loss_of(case)
    parts = [loss_of(case.part(samples)) for samples in ([4], [], [2], [5, 0], [1, 3])]
    total = sum(loss_N.sum() for loss_N, _ in parts)
    torch.testing.assert_close(total, whole_N.sum())
    gradients = [torch.autograd.grad(loss, case.logprobs_N)[0] for loss in (total, whole_N.sum())]
    torch.testing.assert_close(*gradients)
    assert reduced(*(part_sums for _, part_sums in parts)) == pytest.approx(reduced(sums))


# ---- KL by exact enumeration ----------------------------------------------------------


def log_softmax(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)


def expected_gradient(estimator, *, unbiased, old):
    """Gradient in the logits of the expected KL term, over tokens drawn from softmax(old)."""
    logits = log_softmax(0).clone().requires_grad_()
    count = len(logits)
    tokens = PolicyTokens(
        torch.arange(count), old, torch.zeros(count, dtype=torch.float64), ref_logprobs_N=log_softmax(1)
    )
    config = AlgorithmConfig(kl_in="loss", kl_estimator=estimator, kl_unbiased=unbiased)
    loss_N, _ = policy_loss(logits.log_softmax(-1), None, tokens, CLIP, config, 1.0)
    return torch.autograd.grad((old.exp() * loss_N).sum(), logits)[0]


def divergence_gradient(*, forward=False):
    """Gradient in p's logits of KL(p, q) = sum p log p / q; of KL(q, p) if forward."""
    logits, q = log_softmax(0).clone().requires_grad_(), log_softmax(1)
    p = logits.log_softmax(-1)
    divergence = (q.exp() * (q - p)).sum() if forward else (p.exp() * (p - q)).sum()
    return torch.autograd.grad(divergence, logits)[0]


@pytest.mark.parametrize("old", [0, 2], ids=["on_policy", "after_steps"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_kl_has_the_gradient_of_the_divergence(estimator, old):
    found = expected_gradient(estimator, unbiased=True, old=log_softmax(old))
    torch.testing.assert_close(found, divergence_gradient(), rtol=0, atol=1e-12)


def test_expected_gradients_without_the_ratio():
    """That of k1 is 0, that of k2 is right on policy, and that of k3 is the gradient of KL(q, p)."""
    found = {name: expected_gradient(name, unbiased=False, old=log_softmax(0)) for name in ("k1", "k2", "k3")}
    torch.testing.assert_close(found["k1"], torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["k2"], divergence_gradient(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["k3"], divergence_gradient(forward=True), rtol=0, atol=1e-12)
    assert (found["k3"] - divergence_gradient()).abs().max() > 0.01


@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_no_log_ratio_makes_a_kl_or_gradient_that_is_no_number(estimator, unbiased, log_ratio):
    logprobs_N = torch.full((3,), -1001.0, requires_grad=True)
    far_N, near_N, none_N = torch.full((3,), -1001.0 + log_ratio), torch.full((3,), -1001.0), torch.zeros(3)
    config = AlgorithmConfig(kl_in="loss", kl_estimator=estimator, kl_unbiased=unbiased)
    for old_N, ref_N in ((far_N, near_N), (near_N, far_N), (far_N, far_N)):
        tokens = PolicyTokens(torch.zeros(3, dtype=torch.int64), old_N, none_N, ref_logprobs_N=ref_N)
        loss_N, _ = policy_loss(logprobs_N, None, tokens, CLIP, config, 0.1)
        (gradient,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
        assert torch.isfinite(loss_N).all() and torch.isfinite(gradient).all()


# ---- metrics ----------------------------------------------------------


def test_policy_metrics():
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    # Inside; clipped; lowered where the advantage is positive: no clip; no clip.
    new = old + torch.tensor([0.0, 0.5, -0.5, 0.5])
    tokens = PolicyTokens(torch.arange(4), old, torch.tensor([1.0, 1.0, 1.0, -1.0]))
    _, sums = policy_loss(new, torch.full((4,), 2.0), tokens, CLIP, AlgorithmConfig(), 0.0)
    metrics = reduced(sums)
    ratio = [1.0, math.exp(0.5), math.exp(-0.5), math.exp(0.5)]
    assert metrics["policy/clip_fraction"] == 0.25
    assert metrics["policy/ratio_max"] == pytest.approx(math.exp(0.5))
    assert metrics["policy/entropy"] == 2.0
    assert metrics["policy/loss"] == pytest.approx(-(ratio[0] + 1.2 + ratio[2] - ratio[3]) / 4)
    assert metrics["policy/approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratio) / 4, rel=1e-5)
    assert "kl/loss" not in metrics and "policy/importance_weight" not in metrics


def test_before_the_first_update_the_ratio_is_one_and_nothing_is_clipped():
    case = policy_case()
    case.tokens.old_logprobs_N = case.logprobs_N.detach().clone()
    _, sums = policy_loss(case.logprobs_N, case.entropy_N, case.tokens, CLIP, AlgorithmConfig(), 0.0)
    metrics = reduced(sums)
    assert metrics["policy/ratio_max"] == 1
    assert metrics["policy/clip_fraction"] == 0 and metrics["policy/approx_kl"] == 0


@pytest.mark.parametrize("kl_in", ["reward", "none"])
def test_kl_that_is_not_in_the_loss_leaves_it_alone(kl_in):
    case, config = policy_case(), AlgorithmConfig(kl_in=kl_in)
    with_reference, _ = policy_loss(case.logprobs_N, None, case.tokens, CLIP, config, 10.0)
    case.tokens.ref_logprobs_N = None
    assert torch.equal(with_reference, policy_loss(case.logprobs_N, None, case.tokens, CLIP, config, 10.0)[0])


# ---- other losses ----------------------------------------------------------


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

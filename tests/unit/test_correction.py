"""Importance weights against the sampler's gap, as plain products and means of probability ratios."""

import math

import pytest
import torch

from tests.policy_case import LENGTHS, PolicyCase, policy_case, reduced
from verl_megatron.algorithms.correction import (
    OUTSIDE,
    SAMPLE_SIZE,
    SHORT_TOKENS,
    WEIGHT,
    WEIGHT_SQUARE,
    add_sample_size,
    importance_weights,
    with_correction,
)
from verl_megatron.algorithms.losses import policy_loss
from verl_megatron.algorithms.objectives import OBJECTIVES
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig, AsyncConfig, TrainerConfig

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "mask")
LOW, HIGH = 0.8, 1.3


def config_of(mode: str, level: str, **settings) -> AlgorithmConfig:
    bounds = {"correction_low": LOW, "correction_high": HIGH}
    return AlgorithmConfig(correction=mode, correction_level=level, **bounds, **settings)


def ratios_of_sample(case: PolicyCase, b: int, level: str) -> list[float]:
    """p_old / p_sampler at each token of a sample."""
    tokens = case.tokens
    gaps = [(tokens.old_logprobs_N[i] - tokens.rollout_logprobs_N[i]).item() for i in case.sample(b)]
    ratios = [math.exp(gap) for gap in gaps]
    if level == "sequence":
        return [math.prod(ratios)] * len(ratios)
    if level == "geometric":
        return [math.prod(ratios) ** (1 / len(ratios)) for _ in ratios]
    return ratios


def limited(ratio: float, mode: str) -> float:
    if mode == "truncate":  # Yao et al. 2025
        return min(max(ratio, LOW), HIGH)
    return ratio if LOW <= ratio <= HIGH else 0.0  # IcePop, Ling team 2025


def weights_by_loop(case: PolicyCase, mode: str, level: str) -> torch.Tensor:
    expected_N = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    for b in range(len(LENGTHS)):
        for place, ratio in zip(case.sample(b), ratios_of_sample(case, b, level)):
            expected_N[place] = limited(ratio, mode)
    return expected_N


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_weights_and_their_metrics_match_a_loop_over_samples(mode, level):
    case, config = policy_case(gap=0.15), config_of(mode, level)
    expected_N = weights_by_loop(case, mode, level)
    weight_N, _ = importance_weights(case.tokens.old_logprobs_N, case.tokens, config)
    torch.testing.assert_close(weight_N, expected_N, rtol=1e-6, atol=1e-9)
    parts = [case.part(samples).tokens for samples in ([0, 5], [], [1, 2, 3, 4])]
    found = [importance_weights(part.old_logprobs_N, part, config) for part in parts]
    assert sum(len(part_weight_N) for part_weight_N, _ in found) == len(expected_N)
    metrics = reduced(*(sums for _, sums in found))
    assert metrics[WEIGHT] == pytest.approx(expected_N.mean().item())
    is_outside_N = (expected_N == 0) | (expected_N == LOW) | (expected_N == HIGH)
    assert metrics[OUTSIDE] == pytest.approx(is_outside_N.double().mean().item()) and 0 < metrics[OUTSIDE] < 1
    add_sample_size(metrics)
    assert WEIGHT_SQUARE not in metrics  # Kong 1992: (sum w)^2 / sum w^2 samples count
    size = expected_N.sum() ** 2 / expected_N.square().sum() / len(expected_N)
    assert metrics[SAMPLE_SIZE] == pytest.approx(size.item())


def test_the_effective_sample_size_is_one_for_equal_weights_and_zero_if_all_are_masked():
    equal, none = {WEIGHT: 1.5, WEIGHT_SQUARE: 2.25}, {WEIGHT: 0.0, WEIGHT_SQUARE: 0.0}
    for metrics in (equal, none):
        add_sample_size(metrics)
    assert equal[SAMPLE_SIZE] == 1 and none[SAMPLE_SIZE] == 0
    add_sample_size(without := {"policy/loss": 1.0})
    assert without == {"policy/loss": 1.0}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_multiply_the_objective_but_neither_entropy_nor_kl(level, name):
    """And no gradient flows into them."""
    settings = {"entropy_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"}
    case, objective = policy_case(), OBJECTIVES[name]
    arguments = (case.logprobs_N, case.entropy_N, case.tokens, objective)
    loss_N, _ = policy_loss(*arguments, config_of("truncate", level, **settings), 0.2)
    plain_N, _ = objective(case.logprobs_N, case.tokens, AlgorithmConfig())
    others_N = policy_loss(*arguments, AlgorithmConfig(**settings), 0.2)[0] - plain_N
    expected_N = weights_by_loop(case, "truncate", level) * plain_N + others_N
    torch.testing.assert_close(loss_N, expected_N)
    gradients = [
        torch.autograd.grad(x_N.sum(), case.logprobs_N, retain_graph=True) for x_N in (loss_N, expected_N)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("level", LEVELS)
def test_without_old_log_probs_the_updates_own_take_their_place(level):
    case, config = policy_case(), config_of("truncate", level)
    case.tokens.old_logprobs_N = case.logprobs_N.detach().clone()
    expected_N, _ = policy_loss(case.logprobs_N, None, case.tokens, OBJECTIVES["clip"], config, 0.0)
    case.tokens.old_logprobs_N = None
    loss_N, _ = policy_loss(case.logprobs_N, None, case.tokens, OBJECTIVES["clip"], config, 0.0)
    assert torch.equal(loss_N, expected_N)
    gradients = [torch.autograd.grad(x_N.sum(), case.logprobs_N)[0] for x_N in (loss_N, expected_N)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_no_gap_makes_a_weight_that_is_no_number(mode, level, gap):
    old_N = torch.full((4,), -1.0)
    tokens = PolicyTokens(
        torch.tensor([0, 0, 1, 1]), old_N, torch.zeros(4), rollout_logprobs_N=old_N - gap * torch.ones(4)
    )
    for high in (HIGH, 1e6):
        config = AlgorithmConfig(correction=mode, correction_level=level, correction_high=high)
        weight_N, _ = importance_weights(old_N, tokens, config)
        expected = 0.0 if gap < 0 or mode == "mask" else high
        torch.testing.assert_close(weight_N, torch.full((4,), expected), rtol=0, atol=1e-8)
        loss_N, _ = policy_loss(old_N, None, tokens, OBJECTIVES["clip"], config, 0.0)
        assert not loss_N.any()


@pytest.mark.parametrize(
    ("staleness", "settings", "expected"),
    [
        (0, {}, ("none", "token")),
        (0, {"correction": "mask"}, ("mask", "token")),
        (1, {}, ("truncate", "sequence")),
        (4, {"correction": "mask"}, ("mask", "sequence")),
        (4, {"correction_level": "token"}, ("truncate", "token")),
        (4, {"old_logprobs": "sampler"}, ("none", "sequence")),
    ],
)
def test_auto_depends_on_staleness_and_length(staleness, settings, expected):
    config = TrainerConfig(algorithm=AlgorithmConfig(**settings), async_=AsyncConfig(max_staleness=staleness))
    config.rollout.max_tokens = SHORT_TOKENS
    found = with_correction(config)
    assert (found.correction, found.correction_level) == expected
    config.rollout.max_tokens += 1
    assert with_correction(config).correction_level == settings.get("correction_level", "token")


def gradients_of_two_tokens(level: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected gradient over the samples of an old policy, and that of the present policy's expected score.

    A sample has two of three tokens, of which the second depends on the first: all nine are enumerated.
    """
    generator = torch.Generator().manual_seed(1)
    logits, old_logits = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    score = torch.randn(9, generator=generator, dtype=torch.float64)
    first, second = torch.arange(9) // 3, torch.arange(9) % 3
    place = torch.stack([torch.zeros(9, dtype=torch.int64), 1 + first], 1).flatten()  # row of the logits
    token = torch.stack([first, second], 1).flatten()
    logprobs_N = logits.log_softmax(-1)[place, token]
    old_N = old_logits.log_softmax(-1)[place, token]
    sample_N = torch.arange(9).repeat_interleave(2)
    tokens = PolicyTokens(sample_N, None, score[sample_N], rollout_logprobs_N=old_N)
    config = AlgorithmConfig(correction="truncate", correction_level=level, correction_high=1e6)
    loss_N, _ = policy_loss(logprobs_N, None, tokens, OBJECTIVES["clip"], config, 0.0)
    chance_N = old_N.view(9, 2).sum(1).exp()[sample_N]
    exact = -(logprobs_N.view(9, 2).sum(1).exp() * score).sum()
    losses = ((chance_N * loss_N).sum(), exact)
    found, expected = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in losses)
    return found, expected


def test_weights_of_sequences_make_old_samples_teach_what_new_ones_would():
    """Those of tokens do not: the score is of what the old policy wrote after the token."""
    torch.testing.assert_close(*gradients_of_two_tokens("sequence"), rtol=0, atol=1e-12)
    found, expected = gradients_of_two_tokens("token")
    assert (found - expected).norm() > 0.2 * expected.norm()

"""Objectives and normalizers against plain float64 formulas, written down from the papers."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.policy_case import LENGTHS, PolicyCase, policy_case
from verl_megatron.algorithms.losses import policy_loss
from verl_megatron.algorithms.normalizers import NORMALIZERS
from verl_megatron.algorithms.objectives import OBJECTIVES, UNREAD
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig

LOW, HIGH = 0.1, 0.25
ONE = torch.ones((), dtype=torch.float64)
TokenLosses = dict[int, Tensor]  # place of the token -> its loss


def clipped(ratio: Tensor, advantage: Tensor, config: AlgorithmConfig) -> Tensor:
    """L^CLIP (Schulman et al. 2017, equation 7), its bound for A < 0 (dual clip, Ye et al. 2020); negated."""
    near = ratio
    if ratio > 1 + HIGH:
        near = ONE * (1 + HIGH)
    elif ratio < 1 - LOW:
        near = ONE * (1 - LOW)
    objective = ratio * advantage if ratio * advantage <= near * advantage else near * advantage
    if config.dual_clip and advantage < 0 and config.dual_clip * advantage > objective:
        objective = config.dual_clip * advantage
    return -objective


def token_ratios(case: PolicyCase, b: int) -> list[Tensor]:
    return [(case.logprobs_N[i] - case.tokens.old_logprobs_N[i]).exp() for i in case.sample(b)]


def clip(case: PolicyCase, b: int, config: AlgorithmConfig) -> list[Tensor]:
    ratios, places = token_ratios(case, b), case.sample(b)
    return [clipped(ratio, case.tokens.advantages_N[i], config) for ratio, i in zip(ratios, places)]


def gspo(case: PolicyCase, b: int, config: AlgorithmConfig) -> list[Tensor]:
    """s_i = (p(y_i) / p_old(y_i))^(1 / |y_i|) (Zheng et al. 2025, equation 7)."""
    ratio = math.prod(token_ratios(case, b)) ** (1 / max(LENGTHS[b], 1))
    advantage = case.tokens.advantages_N[case.sample(b)].mean()
    return [clipped(ratio, advantage, config) for _ in case.sample(b)]


def gspo_token(case: PolicyCase, b: int, config: AlgorithmConfig) -> list[Tensor]:
    """s_it = sg[s_i] p(y_it) / sg[p(y_it)] (Zheng et al. 2025, equation 14)."""
    ratio = math.prod(token_ratios(case, b)) ** (1 / max(LENGTHS[b], 1))
    ones = [case.logprobs_N[i].exp() / case.logprobs_N[i].exp().detach() for i in case.sample(b)]
    advantages = case.tokens.advantages_N[case.sample(b)]
    return [clipped(ratio.detach() * one, advantage, config) for one, advantage in zip(ones, advantages)]


def cispo(case: PolicyCase, b: int, config: AlgorithmConfig) -> list[Tensor]:
    """-sg[clip(r_t)] A_t log p (MiniMax-M1 2025, equations 4 and 5)."""
    weights = [min(max(ratio.item(), 1 - LOW), 1 + HIGH) for ratio in token_ratios(case, b)]
    advantages = case.tokens.advantages_N
    return [-w * advantages[i] * case.logprobs_N[i] for w, i in zip(weights, case.sample(b))]


def reinforce(case: PolicyCase, b: int, config: AlgorithmConfig) -> list[Tensor]:
    """-A_t log p (Williams 1992)."""
    return [-case.tokens.advantages_N[i] * case.logprobs_N[i] for i in case.sample(b)]


PAPER: dict[str, Callable[[PolicyCase, int, AlgorithmConfig], list[Tensor]]] = {
    "clip": clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "reinforce": reinforce,
}


def mean_of_tokens(losses: list[list[Tensor]]) -> Tensor:
    """1 / sum n_i sum_i sum_t (Yu et al. 2025, equation 12)."""
    return sum(sum(terms) for terms in losses) / sum(map(len, losses))


def mean_of_means(losses: list[list[Tensor]]) -> Tensor:
    """1 / G sum_i 1 / n_i sum_t (Shao et al. 2024, equation 3)."""
    return sum(sum(terms) / max(len(terms), 1) for terms in losses) / len(losses)


def mean_of_sums(losses: list[list[Tensor]]) -> Tensor:
    """1 / G sum_i sum_t over a constant, here 10 tokens (Dr. GRPO, Liu et al. 2025)."""
    return sum(sum(terms) for terms in losses) / len(losses) / 10


MEANS = {"token_mean": mean_of_tokens, "sequence_mean": mean_of_means, "sequence_sum": mean_of_sums}


def config_of(**settings) -> AlgorithmConfig:
    return AlgorithmConfig(clip_ratio_low=LOW, clip_ratio_high=HIGH, **settings)


def normalized(case: PolicyCase, micro_batches: list[list[int]], name: str, normalizer: str) -> Tensor:
    """The step's loss, added up over micro-batches as the engine does."""
    samples = sorted(b for micro in micro_batches for b in micro)
    scale = NORMALIZERS[normalizer](torch.tensor(LENGTHS), range(samples[0], samples[-1] + 1), max_tokens=10)
    total = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches:
        part = case.part(micro)
        loss_N, _ = policy_loss(part.logprobs_N, None, part.tokens, OBJECTIVES[name], config_of(), 0.0)
        weight_N = 1.0 if scale.weight_B is None else scale.weight_B[part.tokens.sample_N]
        total = total + (weight_N * loss_N).sum() / scale.divisor
    return total


@pytest.mark.parametrize("gap", [0.02, 0.3])
@pytest.mark.parametrize("dual_clip", [0.0, 1.1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient_of_each_token_are_those_of_the_paper(name, dual_clip, gap):
    case, config = policy_case(gap=gap), config_of(dual_clip=dual_clip)
    loss_N, is_clipped_N = OBJECTIVES[name](case.logprobs_N, case.tokens, config)
    expected_N = torch.zeros_like(loss_N)
    for b in range(len(LENGTHS)):
        for place, loss in zip(case.sample(b), PAPER[name](case, b, config)):
            expected_N[place] = loss
    torch.testing.assert_close(loss_N, expected_N, rtol=1e-6, atol=1e-9)
    for weight_N in (torch.ones_like(loss_N), torch.linspace(-1, 2, len(loss_N))):
        (found,) = torch.autograd.grad((weight_N * loss_N).sum(), case.logprobs_N, retain_graph=True)
        (expected,) = torch.autograd.grad((weight_N * expected_N).sum(), case.logprobs_N, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    if name in ("clip", "gspo_token"):  # here a token is clipped exactly if it has no gradient
        (own,) = torch.autograd.grad(loss_N.sum(), case.logprobs_N)
        assert torch.equal(is_clipped_N, own == 0)
    if gap > LOW:
        assert is_clipped_N.any() == (name != "reinforce"), "the case must reach the bounds"


@pytest.mark.parametrize("micro_batches", [[[0, 1, 2, 3, 4, 5]], [[5, 0], [2], [3, 1, 4]], [[3, 1], [], [2]]])
@pytest.mark.parametrize("normalizer", MEANS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_steps_loss_is_the_papers_mean_over_samples(name, normalizer, micro_batches):
    """Also if a mini-batch has only some of the samples, here 1 to 3, and whatever the micro-batches are."""
    case, samples = policy_case(), [b for micro in micro_batches for b in micro]
    expected = MEANS[normalizer]([PAPER[name](case, b, config_of()) for b in samples])
    found = normalized(case, micro_batches, name, normalizer)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    gradients = [torch.autograd.grad(loss, case.logprobs_N)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_gspo_and_gspo_token_agree_if_a_samples_tokens_share_their_advantage():
    """Zheng et al. 2025, section 4.3."""
    case = policy_case(per_sample=True)
    whole = [[0, 1, 2, 3, 4, 5]]
    losses = [normalized(case, whole, name, "sequence_mean") for name in ("gspo", "gspo_token")]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, case.logprobs_N)[0] for loss in losses]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("old", ["equal", "none"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_step_follows_the_policy_gradient(name, old):
    """Before any update the ratio is 1, and without old log-probs it is taken to be."""
    case = policy_case(per_sample=True)
    case.tokens.old_logprobs_N = case.logprobs_N.detach().clone() if old == "equal" else None
    loss_N, is_clipped_N = OBJECTIVES[name](case.logprobs_N, case.tokens, config_of())
    (gradient,) = torch.autograd.grad(loss_N.sum(), case.logprobs_N)
    torch.testing.assert_close(gradient, -case.tokens.advantages_N)
    assert not is_clipped_N.any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_settings_of_the_clip_that_an_objective_does_not_read_are_listed(name):
    logprobs_N = torch.full((4,), -1.0)  # of four samples: each ratio with each sign of the advantage
    tokens = PolicyTokens(
        torch.arange(4), logprobs_N - torch.tensor([1, 1, -1, -1]), torch.tensor([1.0, -1, 1, -1])
    )
    others = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.4, "dual_clip": 1.1}
    usual_N, _ = OBJECTIVES[name](logprobs_N, tokens, config_of())
    for setting, value in others.items():
        config = replace(config_of(), **{setting: value})
        loss_N, _ = OBJECTIVES[name](logprobs_N, tokens, config)
        assert torch.equal(loss_N, usual_N) == (setting in UNREAD.get(name, ())), setting


@pytest.mark.parametrize("log_ratio", [-1000.0, -100.0, 100.0, 1000.0])
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_log_ratio_makes_a_loss_or_gradient_that_is_no_number(name, dual_clip, log_ratio):
    """In float32, where exp of 89 is infinite, and infinity times an advantage of 0 is no number."""
    old_N = torch.full((6,), -1.0 - max(log_ratio, 0.0))
    logprobs_N = (old_N + log_ratio).requires_grad_()
    advantages_N = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0, 2.0])
    tokens = PolicyTokens(torch.tensor([0, 0, 1, 1, 2, 2]), old_N, advantages_N)
    loss_N, _ = OBJECTIVES[name](logprobs_N, tokens, config_of(dual_clip=dual_clip))
    (gradient,) = torch.autograd.grad(loss_N.sum(), logprobs_N)
    assert torch.isfinite(loss_N).all() and torch.isfinite(gradient).all()
    averaged_N = tokens.mean_of_sample(advantages_N) if name == "gspo" else advantages_N
    assert not loss_N[averaged_N == 0].any()

import pytest
import torch

from verl_megatron.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL, make_controller, reference_kl
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


def test_estimators_average_to_the_divergence_of_known_distributions():
    """Exact expectation over a small vocabulary: k1, k3 are unbiased; k2 to second order near q = p."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    q = (p + 0.02 * torch.randn(7, generator=generator, dtype=torch.float64)).log_softmax(-1)
    exact = sum(p[i].exp() * (p[i] - q[i]) for i in range(7))
    mean = {name: (p.exp() * estimator(p, q)).sum() for name, estimator in KL_ESTIMATORS.items()}
    torch.testing.assert_close(mean["k1"], exact, rtol=0, atol=1e-15)
    torch.testing.assert_close(mean["k3"], exact, rtol=0, atol=1e-15)
    torch.testing.assert_close(mean["k2"], exact, rtol=0.02, atol=0)


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [  # with d = log p - log q: d, d^2 / 2, exp(-d) - 1 + d; slopes in log p
        ("k1", lambda d: d, lambda d: torch.ones_like(d)),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: torch.exp(-d) - 1 + d, lambda d: 1 - torch.exp(-d)),
    ],
)
def test_estimators_and_their_gradients(name, value, slope):
    logprobs = torch.tensor([-0.5, -2.0, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.7, -1.0, -1.0, -6.0], dtype=torch.float64)
    kl = KL_ESTIMATORS[name](logprobs, ref)
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), value(logprobs.detach() - ref))
    torch.testing.assert_close(logprobs.grad, slope(logprobs.detach() - ref))


def test_k3_keeps_small_divergences_in_float32():
    d = torch.tensor([1e-3], dtype=torch.float32)
    torch.testing.assert_close(KL_ESTIMATORS["k3"](d, torch.zeros(1)), d * d / 2, rtol=1e-3, atol=0)


def test_reference_kl_is_zero_outside_the_response_and_none_without_reference():
    mask = torch.tensor([[False, True, True, False]])
    batch = RolloutBatch(
        torch.zeros(1),
        torch.zeros(1, 1),
        torch.zeros(1, 4),
        torch.ones(1, 4).bool(),
        mask,
        logprobs=torch.full((1, 4), -1.0),
    )
    assert reference_kl(batch, estimator="k1") is None
    batch.ref_logprobs = torch.tensor([[-9.0, -3.0, -0.5, -float("inf")]])
    assert reference_kl(batch, estimator="k1").tolist() == [[0.0, 2.0, -0.5, 0.0]]


def test_adaptive_coefficient_follows_the_published_rule():
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    controller.update(kl_per_sample=6.6, samples=100)  # error 0.1
    assert controller.coef == pytest.approx(0.1 * 1.01)
    controller.update(kl_per_sample=60.0, samples=100)  # error limited to 0.2
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(kl_per_sample=0.0, samples=100)  # and to -0.2
    assert controller.coef == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


def test_adaptive_coefficient_stays_positive_with_many_samples():
    controller = AdaptiveKL(0.1, target=6.0, horizon=10)
    for _ in range(20):
        controller.update(kl_per_sample=0.0, samples=1000)
    assert 0 < controller.coef < 0.1


def test_controller_resumes_where_it_stopped():
    config = AlgorithmConfig(kl_coef=0.1, kl_ctrl_target=1.0, kl_ctrl_horizon=100)
    first, second = make_controller(config), make_controller(config)
    first.update(5.0, 50)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef != 0.1


def test_fixed_coefficient_is_the_settings_one_after_a_resume():
    controller = make_controller(AlgorithmConfig(kl_coef=0.05))
    assert isinstance(controller, FixedKL)
    controller.update(100.0, 1000)
    controller.load_state_dict(AdaptiveKL(0.3, 1.0, 10).state_dict())
    assert controller.coef == 0.05


def test_adaptive_coefficient_cannot_start_at_zero():
    with pytest.raises(ValueError, match=r"kl_coef=0\.0"):
        make_controller(AlgorithmConfig(kl_coef=0.0, kl_ctrl_target=1.0))

"""Kullback-Leibler divergence from the reference policy: per-token estimators and coefficient controllers.

Estimators: Schulman, "Approximating KL Divergence" (2020). With x drawn from the policy p, reference q and
r = q(x) / p(x): k1 = -log r (unbiased, can be negative), k2 = (log r)^2 / 2 (biased, low variance),
k3 = r - 1 - log r (unbiased and never negative). As a loss, only k2 has the gradient of KL(p, q) in
expectation; that of k1 is 0.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch

MAX_LOG_RATIO = 20.0  # nats; exp() of more is not a useful ratio, and above 88 it is infinite in float32
MAX_RELATIVE_ERROR = 0.2  # largest error of one adaptive step, as in Ziegler et al.


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate log p - log q, in nats; same shape as both inputs."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate (log p - log q)^2 / 2, in nats; same shape as both inputs."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate q / p - 1 - log(q / p), in nats; same shape as both inputs."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1: near r = 1 the difference of large terms would be rounding noise.
    return torch.expm1(log_ratio) - log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def reference_kl(batch: RolloutBatch, *, estimator: str) -> Tensor | None:
    """KL from the reference, [B, T] float32, 0 outside the response; None without a reference model."""
    if batch.ref_logprobs is None:
        return None
    assert batch.logprobs is not None, "the actor's log-probs come before the reference KL"
    kl_BT = KL_ESTIMATORS[estimator](batch.logprobs, batch.ref_logprobs)
    return kl_BT.masked_fill(~batch.response_mask, 0.0)


class KLController(Protocol):
    """Holds the run's KL coefficient; `update` is called once per iteration."""

    coef: float

    def update(self, kl_per_sample: float, samples: int) -> None:
        """Update from the mean KL of a sample (nats, summed over its tokens) and the number of samples."""
        ...

    def state_dict(self) -> dict[str, float]:
        """State that a resumed run needs."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume from `state_dict()`."""
        ...


class FixedKL:
    """The configured coefficient, constant for the whole run."""

    def __init__(self, coef: float):
        self.coef = coef

    def update(self, kl_per_sample: float, samples: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        """Empty: a resumed run reads the coefficient from its settings, which the user may have changed."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to restore."""


class AdaptiveKL:
    """Proportional controller that steers a sample's KL to `target` nats (Ziegler et al. 2019, section 2.2).

    coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon), samples at most horizon
    """

    def __init__(self, coef: float, target: float, horizon: int):
        if coef <= 0 or target <= 0 or horizon <= 0:
            raise ValueError(
                f"an adaptive KL coefficient needs algorithm.kl_coef={coef}, kl_ctrl_target={target}"
                f" and kl_ctrl_horizon={horizon} above 0; set kl_ctrl_target=0 for a fixed coefficient"
            )
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl_per_sample: float, samples: int) -> None:
        """One step of the controller."""
        error = min(max(kl_per_sample / self.target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        # The step stops growing at `horizon` samples; without this limit the coefficient could turn negative.
        self.coef *= 1.0 + error * min(samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """The current coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume from `state_dict()`; keep the configured coefficient if the saved run had a fixed one."""
        self.coef = state.get("coef", self.coef)


def make_controller(config: AlgorithmConfig) -> KLController:
    """Build the configured controller.

    Raises:
        ValueError: an adaptive one without a positive coefficient, target and horizon.
    """
    if config.kl_ctrl_target:
        return AdaptiveKL(config.kl_coef, config.kl_ctrl_target, config.kl_ctrl_horizon)
    return FixedKL(config.kl_coef)

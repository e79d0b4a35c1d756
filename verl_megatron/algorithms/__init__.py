"""RL algorithms: one file with one advantage function each, and one entry in the table `ALGORITHMS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from verl_megatron.algorithms import grpo, ppo
from verl_megatron.algorithms.losses import PolicyTokens, policy_loss
from verl_megatron.algorithms.normalizers import Normalizer, token_mean
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import Sums


class AdvantageFunction(Protocol):
    """Computes advantages from scores, log-probs and values of the samples owned by this rank.

    Returns the batch with token_rewards, advantages and, for a critic, returns.
    """

    def __call__(
        self,
        batch: RolloutBatch,
        config: AlgorithmConfig,
        *,
        kl_coef: float,
        num_groups: int,  # prompts of the whole iteration
        all_sum: Callable[[Tensor], Tensor],  # over the ranks that own samples; float64 tensors
    ) -> RolloutBatch: ...


class PolicyLoss(Protocol):
    """Computes the loss of each of N response tokens, [N] float32, and metrics.

    `tokens.sample_N` gives the sample of each token.
    """

    def __call__(
        self,
        logprobs_N: Tensor,
        entropy_N: Tensor | None,
        tokens: PolicyTokens,
        config: AlgorithmConfig,
        kl_coef: float,
    ) -> tuple[Tensor, Sums]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An RL algorithm: its advantage function and its policy loss."""

    name: str
    advantages: AdvantageFunction
    loss: PolicyLoss = policy_loss
    normalizer: Normalizer = token_mean  # of the policy loss
    needs: frozenset[str] = frozenset()  # models besides the actor: "critic"
    min_samples: int = 1  # per prompt

    @property
    def needs_critic(self) -> bool:
        return "critic" in self.needs


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(name="ppo", advantages=ppo.advantages, needs=frozenset({"critic"})),
        Algorithm(name="grpo", advantages=grpo.advantages, min_samples=2),
    )
}


def get_algorithm(name: str) -> Algorithm:
    """Return the algorithm called `name`; ValueError with the known names if there is none."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm.name={name!r} is not known; choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]

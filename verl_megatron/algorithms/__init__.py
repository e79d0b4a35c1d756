"""The algorithms: one file with one function each, one entry in the table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from verl_megatron.algorithms import grpo, ppo
from verl_megatron.batch import RolloutBatch
from verl_megatron.config import AlgorithmConfig


class AdvantageFunction(Protocol):
    """Scores, log-probs and values of the rows at home → the batch with token_rewards, advantages and, for a critic, returns."""

    def __call__(
        self,
        batch: RolloutBatch,
        config: AlgorithmConfig,
        *,
        kl_coef: float,
        num_prompts: int,  # of the whole iteration
        samples_per_prompt: int,
        all_sum: Callable[[Tensor], Tensor],  # over the ranks that hold rows; float64 tensors
    ) -> RolloutBatch: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What one algorithm needs and how it credits tokens."""

    name: str
    needs_critic: bool
    advantages: AdvantageFunction


ALGORITHMS = {
    "ppo": Algorithm("ppo", needs_critic=True, advantages=ppo.advantages),
    "grpo": Algorithm("grpo", needs_critic=False, advantages=grpo.advantages),
}


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of that name; ValueError names those there are."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm.name={name!r} is not known; choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]

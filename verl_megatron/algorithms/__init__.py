"""RL algorithms: one file with one advantage function each, and one entry in the table `ALGORITHMS`.

The objective and the normalizer of an algorithm are entries of tables, too; settings may choose others.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from verl_megatron.algorithms.advantages import (
    distillation,
    dr_grpo,
    grpo,
    opo,
    ppo,
    reinforce_plus_plus,
    remax,
    rloo,
)
from verl_megatron.algorithms.normalizers import NORMALIZERS, Normalizer
from verl_megatron.algorithms.objectives import OBJECTIVES, Objective
from verl_megatron.algorithms.proximal import is_recomputed
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An RL algorithm: its advantages, and the objective and normalizer of its policy loss."""

    advantages: AdvantageFunction
    objective: str = "clip"  # of OBJECTIVES
    normalizer: str = "token_mean"  # of NORMALIZERS
    # Besides the actor: "critic", "teacher"; "greedy", a greedy sample of each prompt; "logprobs", the
    # actor's before the update.
    needs: frozenset[str] = frozenset()
    needs_rewards: bool = True  # False: advantages do not read them, and a run may have none
    min_samples: int = 1  # per prompt; above 1: advantages compare the samples of a prompt
    settings: tuple[str, ...] = ()  # that `advantages` reads; refused with algorithms that do not name them


ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(
        advantages=ppo.advantages,
        needs=frozenset({"critic"}),
        settings=("gamma", "gae_lambda", "whiten"),
    ),
    "grpo": Algorithm(advantages=grpo.advantages, min_samples=2, settings=("scale_by_std",)),
    "dr_grpo": Algorithm(advantages=dr_grpo.advantages, normalizer="sequence_sum", min_samples=2),
    "gspo": Algorithm(
        advantages=grpo.advantages,
        objective="gspo",
        normalizer="sequence_mean",
        min_samples=2,
        settings=("scale_by_std",),
    ),
    "cispo": Algorithm(
        advantages=grpo.advantages, objective="cispo", min_samples=2, settings=("scale_by_std",)
    ),
    "rloo": Algorithm(advantages=rloo.advantages, min_samples=2),
    "opo": Algorithm(advantages=opo.advantages, min_samples=2),
    "reinforce_plus_plus": Algorithm(advantages=reinforce_plus_plus.advantages, settings=("gamma",)),
    "reinforce_plus_plus_baseline": Algorithm(
        advantages=reinforce_plus_plus.baseline_advantages, min_samples=2
    ),
    "remax": Algorithm(
        advantages=remax.advantages,
        objective="reinforce",
        needs=frozenset({"greedy"}),
        settings=("gamma",),
    ),
    "distillation": Algorithm(
        advantages=distillation.advantages, needs=frozenset({"teacher"}), needs_rewards=False
    ),
}


def get_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Return the algorithm of the settings; ValueError with the known names if there is none."""
    if config.name not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ValueError(f"algorithm.name={config.name!r} is not known; choose one of {known}")
    return ALGORITHMS[config.name]


def reuses_logprobs(config: AlgorithmConfig, models: Collection[str]) -> bool:
    """Whether the first optimizer step of an iteration takes the old log-probs from its own forward pass.

    They are the same numbers, as no update lies between. Advantages must not need them.

    Args:
        models: names of the run's models.
    """
    return config.reuse_logprobs and is_recomputed(config) and not needs_logprobs(config, models)


def needs_logprobs(config: AlgorithmConfig, models: Collection[str]) -> bool:
    """Whether the advantages need old log-probs, so that they must be known before the update.

    Args:
        models: names of the run's models.
    """
    penalizes = "reference" in models and config.kl_in == "reward"
    return penalizes or "teacher" in models or "logprobs" in get_algorithm(config).needs


def get_objective(config: AlgorithmConfig) -> Objective:
    """Return the objective of the settings; for auto that of the algorithm."""
    name = config.objective if config.objective != "auto" else get_algorithm(config).objective
    return OBJECTIVES[name]


def get_normalizer(config: AlgorithmConfig) -> Normalizer:
    """Return the normalizer of the settings; for auto that of the algorithm."""
    name = config.normalizer if config.normalizer != "auto" else get_algorithm(config).normalizer
    return NORMALIZERS[name]

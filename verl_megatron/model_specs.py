"""Models of a run: name, settings, head, and whether they are trainable."""

from dataclasses import dataclass, replace

from parallel.weights.rules import Head
from verl_megatron.algorithms import get_algorithm
from verl_megatron.config import (
    DPOConfig,
    ModelConfig,
    RewardModelConfig,
    SFTConfig,
    SupervisedConfig,
    TrainerConfig,
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One of a run's Megatron-Core models."""

    name: str  # role name
    section: str  # settings section
    model: ModelConfig
    head: Head
    trainable: bool = False


def models_of(config: TrainerConfig | SupervisedConfig) -> tuple[ModelSpec, ...]:
    """Return the models of a run with these settings: the actor first, or the one that a supervised run trains."""
    if isinstance(config, RewardModelConfig):
        return (
            ModelSpec(name="reward", section="reward", model=config.reward, head="sequence", trainable=True),
        )
    actor = ModelSpec(name="actor", section="actor", model=config.actor, head="lm", trainable=True)
    reference = ModelSpec(name="reference", section="actor", model=config.actor, head="lm")
    if isinstance(config, SFTConfig):
        return (actor,)
    if isinstance(config, DPOConfig):
        return (actor, reference)
    specs = [actor]
    if get_algorithm(config.algorithm.name).needs_critic:
        critic = replace(config.critic, path=config.critic.path or config.actor.path)
        specs.append(ModelSpec(name="critic", section="critic", model=critic, head="token", trainable=True))
    if config.algorithm.kl_coef > 0:
        specs.append(reference)
    if config.reward.path:
        reward = ModelConfig(
            path=config.reward.path, layout=config.reward.layout, devices=config.reward.devices
        )
        specs.append(ModelSpec(name="reward", section="reward", model=reward, head="sequence"))
    return tuple(specs)

"""Checks of a critic on the actor's trunk."""

from collections.abc import Collection

from parallel.runtime.refusal import short_repr
from parallel.weights.architecture import read_architecture
from verl_megatron.config import CriticConfig, TrainerConfig


def check_trunk(config: TrainerConfig, needs: Collection[str]) -> list[str]:
    """Return what contradicts `critic.share_trunk`.

    Args:
        needs: what the algorithm needs besides the actor.
    """
    critic, defaults = config.critic, CriticConfig()
    if not critic.share_trunk or "critic" not in needs:
        return []
    problems = [
        f"critic.{name}={short_repr(getattr(critic, name))} with critic.share_trunk=true, which computes "
        f"values with the actor; leave it at {short_repr(getattr(defaults, name))}"
        for name in ("layout", "devices", "stage_layers")
        if getattr(critic, name) not in (getattr(defaults, name), getattr(config.actor, name))
    ]
    if config.engine.sharding == "full":
        problems.append(
            "critic.share_trunk=true with engine.sharding=full: the value head's own learning rate is not "
            "applied to its shards; use a critic of its own, or engine.sharding=replicated"
        )
    if critic.value_coef == 0:
        problems.append(
            "critic.value_coef=0 with critic.share_trunk=true trains no values; use a value above 0, such as "
            f"{defaults.value_coef}"
        )
    if config.algorithm.critic_warmup:
        problems.append(
            f"algorithm.critic_warmup={config.algorithm.critic_warmup} with critic.share_trunk=true, where "
            "one step trains actor and values; leave it at 0"
        )
    return problems + _check_width(config)


def _check_width(config: TrainerConfig) -> list[str]:
    """Compare the hidden size of the folder that has the value head's weights with the actor's."""
    try:
        widths = [read_architecture(path).hidden_size for path in (config.critic.path, config.actor.path)]
    except ValueError:  # a path that is empty, or refused elsewhere
        return []
    if widths[0] == widths[1]:
        return []
    return [
        f"critic.path={short_repr(config.critic.path)} has a value head of hidden size {widths[0]}, and the "
        f"actor's is {widths[1]}; leave critic.path empty for a new head"
    ]

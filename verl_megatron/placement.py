"""Which ranks train and which generate: all do both, unless `rollout.devices` names some of the latter."""

from parallel.layout import last_rank, parse_devices
from parallel.runtime.refusal import short_repr
from verl_megatron.config import TrainerConfig


def rollout_devices(config: TrainerConfig) -> tuple[int, ...]:
    """Return the ranks that only generate; empty if the ranks that train generate, too.

    Raises:
        ValueError: the devices are not understood, or other ranks come after them.
    """
    text = config.rollout.devices
    if not text:
        return ()
    ranks = parse_devices(text, last_rank(text) + 1)
    if ranks != tuple(range(ranks[0], ranks[-1] + 1)) or not ranks[0]:
        raise ValueError(
            f"rollout.devices={short_repr(text)} must be the last ranks of the run, after those that train, "
            "such as 2-3 of four"
        )
    return ranks


def num_training_ranks(config: TrainerConfig) -> int:
    """Return how many ranks train in a run with `rollout.devices`: those before them."""
    return rollout_devices(config)[0]


def num_rollout_ranks(config: TrainerConfig, world_size: int) -> int:
    """Return how many ranks generate beside, or among, `world_size` training ranks."""
    return len(rollout_devices(config)) or world_size

"""Search over placements: how many of a number of GPUs train, and how many generate beside them."""

from collections.abc import Callable
from dataclasses import replace

from parallel.weights.architecture import Architecture, read_architecture
from verl_megatron.config import TrainerConfig
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.rollout.lengths import Lengths
from verl_megatron.planner.search import Search, configured, search, seconds_of

PARTS = 16  # of many GPUs, one of which is the smallest step between two splits


def search_splits(
    base: TrainerConfig,
    *,
    world_size: int,
    machine: Machine,
    ranks_per_host: int = 8,
    read: Callable[[str], Architecture] = read_architecture,
    lengths: Lengths | None = None,
) -> Search:
    """Try every layout of every split of `world_size` GPUs into ranks that train and ranks that generate.

    The rollout's ranks are the last ones. Splits with training ranks that no layout divides are left out.

    Args:
        base: settings that all candidates share, `async.max_staleness` among them.
        read: returns the architecture of a model path.
        lengths: of the responses; None: all are as long as allowed.

    Raises:
        ValueError: a model that cannot be read, or settings with which no layout is valid.
    """
    result, reason = Search(), None
    for training in training_sizes(world_size):
        placed = {
            "rollout.devices": f"{training}-{world_size - 1}",
            "async.max_staleness": base.async_.max_staleness,
        }
        try:
            found = search(
                configured(base, placed),
                world_size=training,
                machine=machine,
                ranks_per_host=ranks_per_host,
                read=read,
                lengths=lengths,
            )
        except ValueError as error:
            reason = error
            continue
        for kept, new in ((result.fitting, found.fitting), (result.refused, found.refused)):
            kept += [replace(each, settings=placed | each.settings) for each in new]
    if not result.tried and reason is not None:
        raise reason
    result.fitting.sort(key=seconds_of)
    return result


def training_sizes(world_size: int) -> range:
    """Return how many of `world_size` GPUs may train: a step of 1, or a sixteenth of many."""
    step = max(1, world_size // PARTS)
    return range(step, world_size, step)

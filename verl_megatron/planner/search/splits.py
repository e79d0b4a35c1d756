"""Search over placements: how many of a number of GPUs train, generate beside them, and score."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import Head
from verl_megatron.config import SCORERS, TrainerConfig
from verl_megatron.model_specs import models_of
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.rollout.lengths import Lengths
from verl_megatron.planner.search.candidates import Search, search, seconds_of
from verl_megatron.planner.search.choices import Settings, configured
from verl_megatron.planner.static import smallest_tp

PARTS = 16  # of many GPUs, one of which is the smallest step between two splits
MOST_SCORING = 1 / 4  # of the GPUs
WEIGHTS_SHARE = 0.6  # of a GPU, at most, for the weights of a frozen model that shares it with no training


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
        base: settings that all candidates share, `async.max_staleness` among them. Frozen models with devices
            get a scoring world, of the ranks before the rollout's.
        read: returns the architecture of a model path.
        lengths: of the responses; None: all are as long as allowed.

    Raises:
        ValueError: a model that cannot be read, or settings with which no layout is valid.
    """
    result, reason = Search(), None
    frozen = [name for name in SCORERS if getattr(base, name).devices]
    shared = replace(base, **{name: replace(getattr(base, name), devices="") for name in frozen})
    paths: dict[str, tuple[str, Head]] = {
        spec.name: (spec.model.path, spec.head) for spec in models_of(shared)
    }
    for training, scoring in _splits(world_size, scores=bool(frozen)):
        placed: Settings = {
            "rollout.devices": _devices(training + scoring, world_size),
            "async.max_staleness": base.async_.max_staleness,
        }
        for name in frozen:
            path, head = paths[name]
            sizes = [size for size in range(1, ranks_per_host + 1) if scoring % size == 0]
            tp = smallest_tp(read(path), head, sizes, base, machine, share=WEIGHTS_SHARE / len(frozen))
            placed[f"{name}.devices"] = _devices(training, training + scoring)
            placed[f"{name}.layout"] = f"tp{tp}" + "sp" * (tp > 1)
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


def _devices(first: int, stop: int) -> str:
    return f"{first}-{stop - 1}" if stop > first + 1 else f"{first}"


def _splits(world_size: int, *, scores: bool) -> Iterator[tuple[int, int]]:
    """Yield how many of `world_size` GPUs train and how many score; some are left to generate."""
    sizes = [2**power for power in range(world_size.bit_length()) if 2**power <= MOST_SCORING * world_size]
    for scoring in (sizes or [1]) if scores else [0]:
        for training in training_sizes(world_size):
            if training + scoring < world_size:
                yield training, scoring


def training_sizes(world_size: int) -> range:
    """Return how many of `world_size` GPUs may train: a step of 1, or a sixteenth of many."""
    step = max(1, world_size // PARTS)
    return range(step, world_size, step)

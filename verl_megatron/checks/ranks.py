"""The ranks that a run needs, for programs that torchrun has not started."""

import math
import os
import shlex
import sys
from dataclasses import replace

from parallel.layout import last_rank, least_ranks
from parallel.runtime.process import LAUNCHER
from parallel.runtime.refusal import short_repr
from verl_megatron.checks.limits import check_types
from verl_megatron.config import SupervisedConfig, TrainerConfig
from verl_megatron.model_specs import has_worlds, models_of


def ranks_needed(config: TrainerConfig | SupervisedConfig) -> int:
    """Return the smallest number of ranks that all layouts and devices of a run go with.

    Raises:
        ValueError: a layout or devices cannot be read.
    """
    needs = [max(config.rollout.tp, 1)] if isinstance(config, TrainerConfig) else []  # 0 is refused later
    devices = config.rollout.devices if isinstance(config, TrainerConfig) else ""
    last = last_rank(devices)
    for spec in models_of(config):
        if spec.model.devices:
            last = max(last, last_rank(spec.model.devices))
        else:
            needs.append(least_ranks(spec.model.layout))
    if devices:
        return last + 1  # a rollout on the ranks that train is on all of them
    together = math.lcm(*needs)
    return together * math.ceil((last + 1) / together)


def not_started(config: TrainerConfig | SupervisedConfig, *, world_size: int) -> list[str]:
    """Return the problem of a single process whose run needs more ranks, with the command that starts them.

    Empty under torchrun, and if settings have wrong types, which other checks report.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ or LAUNCHER in os.environ
    if world_size > 1 or launched or check_types(config):
        return []
    if isinstance(config, TrainerConfig) and has_worlds(config):
        return []  # a part of a run of several worlds
    needed = ranks_needed(config)
    if needed == 1:
        return []
    return [
        f"{named_layouts(config)}: {needed} ranks are needed, and this is one process; "
        f"start them with: torchrun --nproc_per_node {needed} {_program()}"
    ]


def named_layouts(config: TrainerConfig | SupervisedConfig) -> str:
    """Return what says how many ranks there are, for a message: layouts, devices, perhaps rollout.tp."""
    named = []
    for spec in models_of(config):
        by_devices = spec.model.devices and f"{spec.section}.devices={short_repr(spec.model.devices)}"
        named.append(by_devices or f"{spec.section}.layout={spec.model.layout}")
    if isinstance(config, TrainerConfig):
        rollout = config.rollout
        named += [f"rollout.devices={short_repr(rollout.devices)}"] * bool(rollout.devices)
        without = replace(config, rollout=replace(rollout, tp=1))
        named += [f"rollout.tp={rollout.tp}"] * (ranks_needed(config) > ranks_needed(without))
    return " and ".join(dict.fromkeys(named))


def _program() -> str:
    """Return this program as torchrun's arguments; for a notebook what to make of it."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return shlex.join(["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]])
    if file:
        return shlex.join([os.path.relpath(file), *sys.argv[1:]])
    return "SCRIPT.py, with these cells saved as a script (a notebook is one rank)"

"""The ranks that a run needs, for programs that torchrun has not started, and what all of them agree on."""

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace

from parallel.layout import last_rank, least_ranks
from parallel.runtime.process import LAUNCHER
from parallel.runtime.refusal import short_repr
from verl_megatron.checks.limits import check_types
from verl_megatron.config import PATHS, SupervisedConfig, TrainerConfig
from verl_megatron.config.section import as_dict
from verl_megatron.lifecycle.secrets import masked_value
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


def agreed_settings(config: TrainerConfig | SupervisedConfig) -> dict[str, str]:
    """Return what all ranks of a run must be started with: values by `section.setting`, as JSON.

    Of paths only whether there is one, as hosts may differ in them; of a file of reward functions its name,
    and of one that Python was given not the digest, which may differ between processes. Secrets are masked.
    """
    agreed = {}
    for section, settings in masked_value("", as_dict(config)).items():
        for name, value in settings.items():
            if (setting := f"{section}.{name}") in PATHS:
                value = "..." if value else ""
            agreed[setting] = json.dumps(value, default=str)
    if function := agreed.get("reward.function"):
        without_folders = re.sub(r"[^\",:]*/([^\",:/]+\.py\b)", r"\1", function)
        digest = r"(reward_function_(?:\w+_)?)[0-9a-f]{12}\.py"
        agreed["reward.function"] = re.sub(digest, r"\1.py", without_folders)
    return agreed


def agreed_by_worlds(config: TrainerConfig) -> dict[str, str]:
    """Return what both worlds of a bridge must be started with: not how the training world itself runs."""
    return {
        name: value
        for name, value in agreed_settings(config).items()
        if not name.startswith("run.") or name == "run.seed"
    }


def different_settings(first: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return a problem for each setting that is not as on the first rank; both as of `agreed_settings`."""
    return [
        f"{name}={short_repr(json.loads(here[name]))} is {short_repr(json.loads(value))} on rank 0; "
        "start all ranks with the same settings"
        for name, value in first.items()
        if here.get(name, value) != value
    ]


def different_data(first: Mapping[str, tuple[int, int]], here: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return a problem for each data file that has other rows than on the first rank.

    Args:
        first, here: digest and number of the rows by setting, such as `data.train`.
    """
    return [
        f"{name} is not the same file on all hosts: {rows:,} rows with the digest {digest:012x} here, and "
        f"{first[name][1]:,} with {first[name][0]:012x} on rank 0; copy one of them to all hosts, or name "
        "one in a folder that they share"
        for name, (digest, rows) in here.items()
        if first.get(name, (digest, rows)) != (digest, rows)
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

"""What `verl-megatron plan` finds: layouts that fit, or one run beside its measurements."""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from verl_megatron.commands.plan.settings import architecture, base_config, ranks_per_host, training_ranks
from verl_megatron.config import TrainerConfig
from verl_megatron.config.section import sections_of
from verl_megatron.observe.tracking import METRICS_FILE, read_metrics
from verl_megatron.planner.as_json import as_json
from verl_megatron.planner.comparison import compare
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.search.candidates import search
from verl_megatron.planner.search.splits import search_splits
from verl_megatron.planner.seconds import plan_seconds
from verl_megatron.planner.text import comparison_lines, search_text


def plan(given: argparse.Namespace, machine: Machine) -> int:
    """Print what the options ask for, and return the exit status: 1 if nothing fits.

    Raises:
        ValueError: settings that cannot be planned.
    """
    config = base_config(given)
    searches_splits = given.separate and not given.compare
    world = {
        "world_size": given.gpus if searches_splits else training_ranks(config, given.gpus),
        "ranks_per_host": ranks_per_host(given.gpus, given.hosts),
        "read": architecture,
        "lengths": given.lengths,
    }
    if given.compare:
        print(compared(PlannedRun.of(config, **world), machine, given.compare))
        return 0
    result = (search_splits if searches_splits else search)(config, machine=machine, **world)
    print(search_text(result, best=given.best, machine=machine))
    if result.fitting:
        chosen = tuple(result.fitting[0].settings)
        print(f"\ntogether with {' '.join(common_settings(config, chosen=chosen))}")
    if given.json:
        given.json.write_text(json.dumps(as_json(result, machine), indent=1) + "\n")
    return 0 if result.fitting else 1


def common_settings(config: TrainerConfig, *, chosen: Sequence[str] = ()) -> list[str]:
    """Return the settings that all recipe lines share: those that differ from the defaults, without files.

    Args:
        chosen: settings of the lines themselves, which are left out.
    """
    found, usual = [], TrainerConfig()
    for section, values in sections_of(config).items():
        defaults = sections_of(usual)[section]
        names = (setting.name for setting in fields(values) if setting.name not in ("path", "train"))
        found += [
            shlex.quote(f"{section}.{name}={getattr(values, name)}")
            for name in names
            if getattr(values, name) != getattr(defaults, name) and f"{section}.{name}" not in chosen
        ]
    return found


def compared(run: PlannedRun, machine: Machine, folder: Path) -> str:
    """Return plan and measurements of a run; ValueError if `folder` contains none."""
    if not (folder / METRICS_FILE).is_file():
        raise ValueError(f"--compare {folder} holds no {METRICS_FILE}; name the run.output_dir of a run")
    memory = plan_memory(run, machine)
    return "\n".join(
        comparison_lines(compare(memory, plan_seconds(run, machine, memory), read_metrics(folder)))
    )

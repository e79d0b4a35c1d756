"""Checks of a run before anything is built: settings, memory, tokenizer, data and weight-file headers."""

from dataclasses import dataclass, field
from typing import Any

from parallel import device
from parallel.weights.architecture import read_architecture
from verl_megatron.checks.folders import inspect_folders, roles_of
from verl_megatron.checks.settings import check_config, check_supervised_config
from verl_megatron.checks.unused import unused_notes
from verl_megatron.config import SupervisedConfig, TrainerConfig
from verl_megatron.data.pairs import READERS
from verl_megatron.data.tokenizer import has_tokenizer, load_tokenizer
from verl_megatron.model_specs import models_of
from verl_megatron.planner import Machine, check_fits, check_supervised_fits
from verl_megatron.rewards.pool import columns_problem

SAMPLE_ROWS = 1000  # read from each data file in a dry run


@dataclass(kw_only=True)
class Inputs:
    """Files already read by an inspection, for the run to reuse."""

    tokenizer: Any = None  # Tokenizer
    train: Any = None  # RowReader of the program's kind of rows
    validation: Any = None  # as `train`; None without validation data
    notes: list[str] = field(default_factory=list)  # to print; not problems


def inspect_run(
    config: TrainerConfig,
    *,
    world_size: int,
    machine: Machine | None = None,
    rows: int | None = None,
    inputs: Inputs | None = None,
) -> list[str]:
    """Return all problems of an RL run on `world_size` ranks; empty if there are none.

    Files are checked only if the settings are valid.

    Args:
        machine: the models must fit in its memory; None: not checked.
        rows: samples of each data file to read in a dry run, which skips absent weights, tokenizer and data.
            None: a real run, which needs them all.
        inputs: filled with what was read.
    """
    if problems := check_config(config, world_size=world_size):
        return problems
    problems = check_fits(
        config, world_size=world_size, machine=machine, ranks_per_host=device.ranks_per_host()
    )
    inputs = inputs or Inputs()
    findings = inspect_folders(roles_of(config), rollout=True, dry=rows is not None)
    inputs.notes += findings.notes + unused_notes(config)
    return problems + (findings.problems or _inspect_data(config, rows, inputs))


def inspect_supervised(
    config: SupervisedConfig,
    *,
    world_size: int,
    machine: Machine | None = None,
    rows: int | None = None,
    inputs: Inputs | None = None,
) -> list[str]:
    """Return all problems of a supervised run; arguments as in `inspect_run`."""
    if problems := check_supervised_config(config, world_size=world_size):
        return problems
    problems = check_supervised_fits(
        config, world_size=world_size, machine=machine, ranks_per_host=device.ranks_per_host()
    )
    inputs = inputs or Inputs()
    findings = inspect_folders(roles_of(config), rollout=False, dry=rows is not None, new_score=True)
    inputs.notes += findings.notes
    return problems + (findings.problems or _inspect_data(config, rows, inputs))


def _inspect_data(config: TrainerConfig | SupervisedConfig, rows: int | None, inputs: Inputs) -> list[str]:
    """Return the tokenizer's problems, or else those of each data file; fill `inputs` with what was read."""
    folder, reader = models_of(config)[0].model.path, READERS[type(config.data)]
    if rows is not None and not (rows and has_tokenizer(folder)):
        return []
    problems = []
    try:
        inputs.tokenizer = load_tokenizer(folder)
        vocab_size = read_architecture(folder).vocab_size
    except ValueError as error:
        return [str(error)]
    for name, path in (("train", config.data.train), ("validation", config.data.validation)):
        if path:
            try:
                data = reader(path, inputs.tokenizer, config.data, vocab_size=vocab_size, max_rows=rows)
                inputs.notes += [note for note in data.notes if note not in inputs.notes]
                setattr(inputs, name, data)
            except ValueError as error:
                problems.append(str(error))
                continue
            if isinstance(config, TrainerConfig) and len(data):
                problem = columns_problem(config.reward.function, data[0].extra)
                problems += [f"{problem} ({path})"] * bool(problem)
    return problems

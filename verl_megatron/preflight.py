"""Checks of a run before anything is built: settings, memory, tokenizer, data and weight-file headers."""

from collections.abc import Callable
from dataclasses import dataclass, field

from parallel import device
from parallel.rank_set import RankSet, agree
from parallel.weights.architecture import read_architecture
from verl_megatron.checks.folders import inspect_folders, roles_of
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.settings import check_config, check_sft_config
from verl_megatron.config import SFTConfig, TrainerConfig
from verl_megatron.data.prompts import DemonstrationDataset, PromptDataset
from verl_megatron.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from verl_megatron.planner import Machine, check_fits, check_supervised_fits, machine_here

SAMPLE_ROWS = 1000  # read from each data file in a dry run


@dataclass(kw_only=True)
class Inputs:
    """Files already read by an inspection, for the run to reuse."""

    tokenizer: Tokenizer | None = None
    train: PromptDataset | DemonstrationDataset | None = None
    validation: PromptDataset | DemonstrationDataset | None = None
    notes: list[str] = field(default_factory=list)  # to print; not problems


def inspect_together(
    inspect: Callable[..., list[str]], config: TrainerConfig | SFTConfig, world: RankSet
) -> Inputs:
    """Inspect a run on all ranks of `world` and return what was read there.

    Args:
        inspect: `inspect_run` or `inspect_supervised`.

    Raises:
        ValueError: on every rank, with all problems of the first rank that has any.
    """
    inputs, machine = Inputs(), machine_here()
    agree(
        lambda: refuse(inspect(config, world_size=world.size, machine=machine, inputs=inputs)),
        world,
    )
    return inputs


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
    inputs.notes += findings.notes
    return problems + (findings.problems or _inspect_data(config, PromptDataset, rows, inputs))


def inspect_supervised(
    config: SFTConfig,
    *,
    world_size: int,
    machine: Machine | None = None,
    rows: int | None = None,
    inputs: Inputs | None = None,
) -> list[str]:
    """Return all problems of a supervised run; arguments as in `inspect_run`."""
    if problems := check_sft_config(config, world_size=world_size):
        return problems
    problems = check_supervised_fits(
        config, world_size=world_size, machine=machine, ranks_per_host=device.ranks_per_host()
    )
    inputs = inputs or Inputs()
    findings = inspect_folders({"actor": (config.actor.path, "lm")}, rollout=False, dry=rows is not None)
    inputs.notes += findings.notes
    return problems + (findings.problems or _inspect_data(config, DemonstrationDataset, rows, inputs))


def _inspect_data(
    config: TrainerConfig | SFTConfig, dataset: type, rows: int | None, inputs: Inputs
) -> list[str]:
    """Return the tokenizer's problems, or else those of each data file; fill `inputs` with what was read."""
    if rows is not None and not (rows and has_tokenizer(config.actor.path)):
        return []
    problems = []
    try:
        inputs.tokenizer = load_tokenizer(config.actor.path)
        vocab_size = read_architecture(config.actor.path).vocab_size
    except ValueError as error:
        return [str(error)]
    for name, path in (("train", config.data.train), ("validation", config.data.validation)):
        if path:
            try:
                data = dataset(path, inputs.tokenizer, config.data, vocab_size=vocab_size, max_rows=rows)
                inputs.notes += [note for note in data.notes if note not in inputs.notes]
                setattr(inputs, name, data)
            except ValueError as error:
                problems.append(str(error))
    return problems

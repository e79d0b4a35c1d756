"""Everything that is wrong with a run, found before anything of it is built: settings, memory, tokenizer, data and weights' headers."""

from dataclasses import dataclass, field

from parallel import device
from parallel.weights.architecture import read_architecture
from verl_megatron.checks.folders import inspect_folders, roles_of
from verl_megatron.checks.settings import check_config, check_sft_config
from verl_megatron.config import SFTConfig, TrainerConfig
from verl_megatron.data.prompts import DemonstrationDataset, PromptDataset
from verl_megatron.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from verl_megatron.planner import Machine, check_fits, check_supervised_fits

SAMPLE_ROWS = 1000  # of each data file that a dry run reads


@dataclass(kw_only=True)
class Inputs:
    """What an inspection has read, so that the run does not read it again."""

    tokenizer: Tokenizer | None = None
    train: PromptDataset | DemonstrationDataset | None = None
    validation: PromptDataset | DemonstrationDataset | None = None
    notes: list[str] = field(default_factory=list)  # what has to be said though nothing is wrong


def inspect_run(
    config: TrainerConfig,
    *,
    world_size: int,
    machine: Machine | None = None,
    rows: int | None = None,
    inputs: Inputs | None = None,
) -> list[str]:
    """Everything that is wrong with a reinforcement-learning run on `world_size` ranks; empty: nothing. Files are looked at once the settings are right.

    Args:
        machine: on which the models must have room; None: not checked.
        rows: of each data file that a dry run reads; it passes over weights, tokenizer and data that are not there. None: a run, which needs them all.
        inputs: is given what was read.
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
    """Everything that is wrong with a supervised run; arguments as in `inspect_run`."""
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
    """Problems of the tokenizer, or else of each data file; `inputs` gets what was read."""
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

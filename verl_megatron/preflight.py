"""Checks of a run before anything is built: settings, memory, tokenizer, data and weight-file headers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from parallel import device
from parallel.checkpoint import folders as checkpoints
from parallel.checkpoint.sealed import read_sealed
from parallel.weights.architecture import read_architecture
from verl_megatron.checks.folders import inspect_folders, roles_of
from verl_megatron.checks.rollout import sampling_notes
from verl_megatron.checks.settings import check_config, check_supervised_config
from verl_megatron.checks.unused import unused_notes
from verl_megatron.config import SupervisedConfig, TrainerConfig
from verl_megatron.data.pairs import READERS
from verl_megatron.data.shared import OncePerHost
from verl_megatron.data.tokenizer import has_tokenizer, load_tokenizer
from verl_megatron.manifest import manifest_problem, refuse_other_run
from verl_megatron.model_specs import models_of
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.preflight import check_fits
from verl_megatron.planner.supervised import check_supervised_fits
from verl_megatron.rewards.checks import answers_problem, columns_problem, sources_note, sources_problem

SAMPLE_ROWS = 1000  # read from each data file in a dry run


@dataclass(kw_only=True)
class Inputs:
    """Files already read by an inspection, for the run to reuse."""

    tokenizer: Any = None  # Tokenizer
    train: Any = None  # RowReader of the program's kind of rows
    validation: Any = None  # as `train`; None without validation data
    curriculum: Callable[..., Any] | None = None  # gives sources of prompts their weights
    once: OncePerHost | None = None  # reads the data for all ranks of a host; None: each rank does
    notes: list[str] = field(default_factory=list)  # to print; not problems

    @property
    def data(self) -> dict[str, Any]:
        """The rows that were read, by their setting in the section data."""
        read = {"train": self.train, "validation": self.validation}
        return {name: rows for name, rows in read.items() if rows is not None}


def inspect_run(
    config: TrainerConfig,
    *,
    world_size: int,
    machine: Machine | None = None,
    rows: int | None = None,
    inputs: Inputs | None = None,
    resumes: bool = True,
) -> list[str]:
    """Return all problems of an RL run on `world_size` ranks; empty if there are none.

    Files are checked only if the settings are valid.

    Args:
        machine: the models must fit in its memory; None: not checked.
        rows: samples of each data file to read in a dry run, which skips absent weights, tokenizer and data.
            None: a real run, which needs them all.
        inputs: filled with what was read.
        resumes: these ranks train, and resume from a checkpoint.
    """
    if problems := check_config(config, world_size=world_size):
        return problems
    problems = check_fits(
        config, world_size=world_size, machine=machine, ranks_per_host=device.ranks_per_host()
    )
    inputs = inputs or Inputs()
    findings = inspect_folders(roles_of(config), rollout=True, dry=rows is not None)
    inputs.notes += findings.notes + unused_notes(config) + sampling_notes(config)
    problems += findings.problems or _inspect_data(config, rows, inputs)
    if problems or not resumes:
        return problems
    return _checkpoint_problems(config, inputs.train if rows is None else None)


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
    problems += findings.problems or _inspect_data(config, rows, inputs)
    return problems or _checkpoint_problems(config, inputs.train if rows is None else None)


def _checkpoint_problems(config: TrainerConfig | SupervisedConfig, data: Any) -> list[str]:
    """Return why the newest checkpoint cannot be resumed from; damage is noticed when it is read.

    Args:
        data: all rows of data.train; None: they are not compared.
    """
    if config.run.resume == "never":
        return []
    try:
        newest = checkpoints.complete(Path(config.run.output_dir) / "checkpoint")[:1]
        saved = read_sealed(newest[0] / checkpoints.MANIFEST) if newest else {}
    except (OSError, ValueError):
        return []
    if not saved or manifest_problem(saved):
        return []
    trained = [spec for spec in models_of(config) if spec.trainable]
    models = {spec.name: read_architecture(spec.model.path).to_hf() for spec in trained}
    try:
        refuse_other_run(newest[0], saved, kind=type(config).__name__, models=models)
        if data is not None:
            data.cursor(seed=config.run.seed).load_state_dict(saved["cursor"])
    except ValueError as error:
        return [str(error)]
    return []


def _inspect_data(config: TrainerConfig | SupervisedConfig, rows: int | None, inputs: Inputs) -> list[str]:
    """Return the tokenizer's problems, or else those of each data file; fill `inputs` with what was read."""
    folder, reader = models_of(config)[0].model.path, READERS[type(config.data)]
    if rows is not None and not (rows and has_tokenizer(folder)):
        return []
    problems = []
    try:
        inputs.tokenizer = load_tokenizer(folder)
        vocab_size, ends = read_architecture(folder).vocab_size, inputs.tokenizer.end_token_ids
    except ValueError as error:
        return [str(error)]
    if isinstance(config, TrainerConfig) and config.reward.missing_eos_penalty and not ends:
        problems.append(
            f"reward.missing_eos_penalty={config.reward.missing_eos_penalty:g} needs an end-of-sequence "
            f"token, and neither tokenizer nor model in {folder} names one; name it as eos_token in its "
            "tokenizer_config.json, or set the penalty to 0"
        )
    for name, path in (("train", config.data.train), ("validation", config.data.validation)):
        if path:
            try:
                read = partial(
                    reader, path, inputs.tokenizer, config.data, vocab_size=vocab_size, max_rows=rows
                )
                data = inputs.once(read, inputs.tokenizer) if inputs.once else read()
                inputs.notes += [note for note in data.notes if note not in inputs.notes]
                setattr(inputs, name, data)
            except ValueError as error:
                problems.append(str(error))
                continue
            if name == "train" and (index := getattr(data, "source_index", None)) is not None:
                problem = index.why_not(is_whole=data.is_whole)
                problems += [problem] * bool(problem)
                inputs.notes.append(index.note)
            if isinstance(config, TrainerConfig) and config.reward.function:
                problem = reward_problem(config.reward.function, data)
                problems += [f"{problem} ({path})"] * bool(problem)
    if isinstance(config, TrainerConfig) and config.reward.function and rows is None and not problems:
        files = filter(None, (inputs.train, inputs.validation))
        note = sources_note(config.reward.function, sum((data.sources for data in files), Counter()))
        inputs.notes += [note] * bool(note)
    return problems


def reward_problem(function: str, data: Any) -> str:
    """Return what the reward functions lack for the rows of `data`, a PromptDataset; empty if nothing."""
    if problem := sources_problem(function, data.sources):
        return problem
    firsts = ((source, data[index].extra) for source, index in data.first_of.items())
    found = (columns_problem(function, extra, source) for source, extra in firsts)
    return next(filter(None, found), "") or answers_problem(function, data.without_answer)

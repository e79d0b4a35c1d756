"""The same job here and through verl: `benchmark verl`."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import torch

from parallel import device
from verl_megatron.benchmarks.beside_verl.job import Job, write_job
from verl_megatron.benchmarks.beside_verl.record import Record
from verl_megatron.benchmarks.beside_verl.report import planned, table
from verl_megatron.benchmarks.beside_verl.runs import (
    Measured,
    RunFailedError,
    run_ours,
    run_verl,
    version_of_verl,
)
from verl_megatron.benchmarks.beside_verl.settings import our_settings
from verl_megatron.benchmarks.options.verl import RECIPES, parser, read_options
from verl_megatron.benchmarks.scaling.command import check_out, planner_of, this_machine
from verl_megatron.benchmarks.scaling.runs import Recipe, architecture
from verl_megatron.checks.limits import check_values
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.settings import check_config
from verl_megatron.config import TrainerConfig
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.preflight import check_fits, machine_here

OURS, VERL = "ours", "verl"  # names of our run without a way, and of verl's


def job_of(given: argparse.Namespace) -> Job:
    """Return the checked job.

    Raises:
        ValueError: one of the programs could not run it.
    """
    own = {
        "folder": given.out.resolve(),
        "prompts": given.prompts or {"grpo": 64, "ppo": 256}[given.algorithm],
        "samples": given.samples or {"grpo": 4, "ppo": 1}[given.algorithm],
    }
    rest = {field.name: getattr(given, field.name) for field in fields(Job) if field.name not in own}
    job = Job(**own, **rest)
    job.check()
    check_out(given.out)
    if device.is_gpu() and job.gpus > torch.cuda.device_count():
        raise ValueError(f"--gpus {job.gpus} are more than the {torch.cuda.device_count()} of this host")
    return job


def ways_of(given: argparse.Namespace) -> dict[str, list[str]]:
    """Return the settings of our runs, by name.

    Raises:
        ValueError: a name that is no name of a folder, or that is taken.
    """
    ways: dict[str, list[str]] = {OURS: given.ours}
    for name, *settings in given.way:
        if not name.isidentifier() or name in (*ways, VERL, "model", "verl_model", "verl_checkpoints"):
            raise ValueError(
                f"--way {name} is no free name of letters and digits; write --way NAME SETTING=VALUE"
            )
        ways[name] = [*given.ours, *settings]
    return ways if given.only != "verl" else {}


def config_of(job: Job, name: str, settings: Sequence[str]) -> TrainerConfig:
    """Return the settings of a run of ours, each right by itself; needs no model and no prompts.

    Raises:
        ValueError: one is unknown, or its value cannot be.
    """
    try:
        recipe = Recipe.find(RECIPES[job.algorithm], tuple(settings))
        config = recipe.config(our_settings(job, name, settings), job.gpus)
        refuse(check_values(config))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return config


def plan_of(job: Job, name: str, config: TrainerConfig) -> PlannedRun:
    """Return a checked run of ours, whose model and prompts are written.

    Raises:
        ValueError: its settings do not fit each other or the model.
    """
    try:
        refuse(check_config(config, world_size=job.gpus))
        refuse(check_fits(config, world_size=job.gpus, machine=machine_here(), ranks_per_host=job.gpus))
        return PlannedRun.of(config, world_size=job.gpus, ranks_per_host=job.gpus, read=architecture)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def measure(given: argparse.Namespace) -> tuple[str, list[RunFailedError]]:
    """Run everything; return the table of what ran, and what failed.

    Raises:
        ValueError: wrong options, before anything has run.
    """
    job, ways = job_of(given), ways_of(given)
    verl = "" if given.only == "ours" else version_of_verl(given.verl_python)
    configs = {name: config_of(job, name, settings) for name, settings in ways.items()}
    made_of = write_job(job, shape=given.shape, layers=given.layers, hf=given.hf)
    plans = {name: plan_of(job, name, config) for name, config in configs.items()}
    seconds_of = planner_of(this_machine(None))
    lines: list[Measured] = []
    failures: list[RunFailedError] = []
    runs = {name: partial(run_ours, job, name, settings) for name, settings in ways.items()}
    if verl:
        runs = {VERL: partial(run_verl, job, given.verl_python, given.verl)} | runs
    for name, run in runs.items():
        settings = [verl, *given.verl] if name == VERL else ways[name]
        record = Record(job, name, made_of=made_of, settings=settings)
        line = record.read() if given.resume else None
        version = f" {verl}" if name == VERL else ""
        where = "measured by an earlier call" if line else record.folder / "log.txt"
        print(f"{name}{version}: {where}", flush=True)
        try:
            if line is None:
                line = run(limit_s=given.limit)
                record.write(line)
        except RunFailedError as error:
            failures.append(error)
            continue
        if line.problem:
            failures.append(RunFailedError(line.problem))
        lines.append(line)
        if name in plans and (seconds := seconds_of(plans[name])):
            lines.append(planned(name, seconds))
    hardware = torch.cuda.get_device_name() if device.is_gpu() else "CPU rank"
    return table(job, lines, device=hardware) if lines else "", failures


def main(arguments: list[str] | None = None) -> None:
    given = read_options(arguments)
    try:
        text, failures = measure(given)
    except ValueError as error:
        parser().exit(2, f"error: {error}\n")
    if text:
        (given.out / "table.md").write_text(text)
        print(f"{text}\nwritten: {given.out}/table.md")
    if failures:
        parser().exit(1, "".join(f"error: {error}\n" for error in failures))


if __name__ == "__main__":
    main()

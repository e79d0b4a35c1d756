"""Runs the same job here and through verl, one after the other on the same GPUs: seconds by phase.

Weights are random unless --hf names a model; prompts are random words, and all responses have the same
length. Both programs use Megatron-Core and vLLM with the same layouts, micro-batches and optimizer steps;
verl reaches Megatron-Core through Megatron-Bridge. The reference model takes part: in the loss of GRPO, in
the reward of PPO. Ours runs once as its recipe is, and once more for each --way, beside its plan. GRPO's
recipe computes a shared prompt once: `--way row_by_row engine.shared_prompts=false` does as verl does.
OUT/table.md has the table, and OUT/NAME the output of a run. --only ours needs no verl.

A call that was cut short goes on with --resume, which keeps what an earlier call has measured of the same
job on this machine since it started.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from parallel import device
from parallel.weights.shapes import SHAPES
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
from verl_megatron.benchmarks.beside_verl.settings import RECIPES, our_settings
from verl_megatron.benchmarks.scaling.command import check_out, planner_of, rate, this_machine
from verl_megatron.benchmarks.scaling.runs import Recipe, architecture
from verl_megatron.checks.limits import check_values
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.settings import check_config
from verl_megatron.config import TrainerConfig
from verl_megatron.launch.options import COUNT, Options
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.preflight import check_fits, machine_here

EXAMPLES = (
    "--gpus 2 --tp 2 --rollout-tp 2 --way fp8 engine.dtype=fp8 rollout.kv_cache_dtype=fp8",
    "--gpus 1 --layers 8 --algorithm ppo --verl-python /opt/verl/bin/python",
    "--gpus 1 --layers 12 --only ours --way row_by_row engine.shared_prompts=false",
)
OURS, VERL = "ours", "verl"  # names of our run without a way, and of verl's


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument("--gpus", type=COUNT, default=1, help="of this host; ranks that share a CPU without")
    options.add_argument("--algorithm", choices=sorted(RECIPES), default="grpo", help="of both programs")
    options.add_argument("--shape", choices=list(SHAPES), default="llama3-8b", help="of random weights")
    options.add_argument("--layers", type=int, default=0, help="another number of layers than published")
    options.add_argument("--hf", type=Path, metavar="DIR", help="a model of yours instead of random weights")
    options.add_argument("--tp", type=COUNT, default=1, help="tensor-parallel size in training")
    options.add_argument("--rollout-tp", type=COUNT, default=1, help="vLLM's tensor-parallel size")
    options.add_argument("--prompts", type=COUNT, help="of an iteration (default: 64, with PPO 256)")
    options.add_argument("--samples", type=COUNT, help="of each prompt (default: 4, with PPO 1)")
    options.add_argument("--steps", type=COUNT, default=4, help="optimizer steps of an iteration")
    options.add_argument("--prompt-tokens", type=COUNT, default=512, help="of every prompt")
    options.add_argument("--response-tokens", type=COUNT, default=512, help="of every response")
    options.add_argument("--tokens", type=COUNT, default=8192, help="most of a micro-batch")
    options.add_argument(
        "--iterations", type=COUNT, default=5, help="of each run; the first two do not count"
    )
    options.add_argument(
        "--gpu-memory-utilization", type=rate, default=0.3, metavar="SHARE", help="vLLM's share of the GPU"
    )
    options.add_argument("--only", choices=("ours", "verl"), help="one of the programs")
    options.add_argument(
        "--resume", action="store_true", help="keep the runs of an earlier call on this machine"
    )
    options.add_argument(
        "--way",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "SECTION.SETTING=VALUE"),
        help="one more run of ours with these settings; may be repeated",
    )
    options.add_argument(
        "--ours", nargs="+", default=[], metavar="SECTION.SETTING=VALUE", help="settings of all our runs"
    )
    options.add_argument(
        "--verl", nargs="+", default=[], metavar="SETTING=VALUE", help="further settings of verl"
    )
    options.add_argument(
        "--verl-python", default="python3", metavar="PYTHON", help="the Python that verl is installed for"
    )
    options.add_argument("--limit", type=rate, default=900.0, metavar="SECONDS", help="that a run may take")
    options.add_argument(
        "--out", type=Path, default=Path("outputs/beside_verl"), metavar="DIR", help="for job, runs and table"
    )
    return options


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
    options = parser()
    given = options.parse_args(arguments)
    try:
        text, failures = measure(given)
    except ValueError as error:
        options.exit(2, f"error: {error}\n")
    if text:
        (given.out / "table.md").write_text(text)
        print(f"{text}\nwritten: {given.out}/table.md")
    if failures:
        options.exit(1, "".join(f"error: {error}\n" for error in failures))


if __name__ == "__main__":
    main()

"""Runs of a recipe on several numbers of ranks, and their report: `benchmark scaling`."""

import argparse
import os
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile

import torch

from parallel import device
from verl_megatron.benchmarks.options.scaling import parser, read_options
from verl_megatron.benchmarks.scaling.model import Scaling
from verl_megatron.benchmarks.scaling.report import Report, markdown, write_csv, write_png
from verl_megatron.benchmarks.scaling.rows import Row, at_best, disturbance, measured_row
from verl_megatron.benchmarks.scaling.runs import (
    SHAPE_TOKENS,
    Recipe,
    Size,
    Sizing,
    check_sizes,
    make_prompts,
    size_of,
    start_and_wait,
)
from verl_megatron.checks.limits import check_values
from verl_megatron.checks.problems import refuse
from verl_megatron.config import TrainerConfig
from verl_megatron.planner.machine import MACHINES, Machine, find_machine
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.preflight import machine_here
from verl_megatron.planner.seconds import plan_seconds

# bytes per second: assumed, for a published shape
CPU_LINKS = replace(MACHINES["h200"], same_host_rate=2e9, other_host_rate=1.25e9)


def sizes_to_run(given: argparse.Namespace) -> list[Size]:
    """Return all runs, checked, and write their prompts.

    Raises:
        ValueError: any problem that would make one of them fail.
    """
    if given.steps < 2:
        raise ValueError(
            f"--steps {given.steps} leaves nothing to measure, as the first iteration does not count; use at "
            "least 2"
        )
    for option in ("layouts", "rollout"):
        if strangers := sorted(getattr(given, option).keys() - set(given.gpus)):
            raise ValueError(
                f"--{option} speaks of {strangers[0]} ranks, which --gpus does not name; take them out or "
                "add them there"
            )
    check_out(given.out)
    recipe = Recipe.find(given.recipe, tuple(given.settings))
    lengths = {"data.max_prompt_tokens": given.prompt_tokens, "rollout.max_tokens": given.response_tokens}
    config = recipe.config({name: tokens for name, tokens in lengths.items() if tokens})
    refuse(check_values(config))
    if not config.actor.path:
        raise ValueError(f"{recipe.path.name} names no model; add actor.path=DIR")
    has_folder = Path(config.actor.path).is_dir()
    sizing = Sizing(
        recipe=config,
        steps=given.steps,
        prompt_tokens=_prompt_tokens(given, config, has_folder),
        response_tokens=given.response_tokens or (config.rollout.max_tokens if has_folder else SHAPE_TOKENS),
        prompts=given.prompts or config.data.prompts_per_iteration,
        largest=given.gpus[-1],
        strong=given.strong,
        layouts=given.layouts,
        rollout_tp=given.rollout,
    )
    out = given.out.resolve()
    prompts = out / "prompts.jsonl" if has_folder else None
    sizes = [size_of(recipe, sizing, ranks, out / f"n{ranks}", prompts) for ranks in given.gpus]
    check_sizes(sizes)
    if prompts:
        out.mkdir(parents=True, exist_ok=True)
        make_prompts(
            prompts, config.actor.path, rows=sizing.prompts, tokens=sizing.prompt_tokens, seed=config.run.seed
        )
    return sizes


def check_out(out: Path) -> None:
    """Raise ValueError if `out` is not a folder or cannot be created; tested with an unnamed file."""
    try:
        with TemporaryFile(
            dir=next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
        ):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written ({error.strerror}); name another folder") from None


def _prompt_tokens(given: argparse.Namespace, config: TrainerConfig, has_folder: bool) -> int:
    if has_folder:
        return given.prompt_tokens or config.data.max_prompt_tokens
    if given.prompt_tokens not in (None, SHAPE_TOKENS):
        raise ValueError(
            f"--prompt-tokens {given.prompt_tokens}: prompts for random weights have {SHAPE_TOKENS} tokens; "
            "leave it out, or name a model folder with MODEL"
        )
    return SHAPE_TOKENS


def this_machine(name: str | None) -> Machine | None:
    """Return the planner's machine: the one given, or this GPU's; None on a CPU."""
    if name is not None:
        return find_machine(name)
    if not device.is_gpu():
        return None
    with ProcessPoolExecutor(
        1,
        mp_context=get_context("spawn"),
        # a separate process, so that its GPU memory is freed when it exits
    ) as pool:
        return pool.submit(machine_here).result()


def planner_of(machine: Machine | None) -> Callable[[PlannedRun], dict[str, float]]:
    """Return a function for a run's predicted seconds by phase; empty for an unknown machine."""
    if machine is None:
        return lambda run: {}
    return lambda run: plan_seconds(run, machine, plan_memory(run, machine)).seconds


def links_of(given: argparse.Namespace, machine: Machine | None) -> Machine:
    """Return the machine whose links are assumed for modelled sizes."""
    links = machine or CPU_LINKS
    if given.link_gbytes:
        links = replace(links, same_host_rate=given.link_gbytes * 1e9)
    return replace(links, other_host_rate=given.host_gbps * 1e9 / 8) if given.host_gbps else links


def measured(sizes: list[Size], planned: Callable[[PlannedRun], dict[str, float]]) -> list[Row]:
    """Run the sizes one after another."""
    rows = []
    for size in sizes:
        rollout = f"{size.run.replicas} x tp{size.config.rollout.tp}"
        print(
            f"{size.ranks} ranks: actor {size.run.actor.layout}, vLLM {rollout}, "
            f"{size.run.samples} samples; log in {size.output_dir}/log.txt",
            flush=True,
        )
        start_and_wait(size)
        rows.append(measured_row(size.run, size.output_dir, planned(size.run)))
    return rows


def report_of(given: argparse.Namespace, sizes: list[Size]) -> Report:
    """Measure, then model."""
    machine = this_machine(given.gpu)
    planned, links = planner_of(machine), links_of(given, machine)
    rows = measured(sizes, planned)
    # kept, whatever becomes of the model
    alone = Report(title="", device=_device(), rows=rows, peak_flops=None, notes=[])
    write_csv(given.out / "scaling.csv", alone)
    scaling = Scaling(
        runs=[size.run for size in sizes],
        rows=rows,
        links=links,
        ranks_per_host=given.ranks_per_host,
        strong=given.strong,
    )
    modelled, ended = scaling.model(given.to, planned)
    run = sizes[-1].run
    notes = [
        "modelled sizes keep the largest measured layout and grow data parallelism; links "
        f"{links.same_host_rate / 1e9:g} GB/s in a host of {given.ranks_per_host}"
        f" and {links.other_host_rate * 8e-9:g} Gbit/s a GPU between hosts "
        f"({'assumed' if machine is None else machine.source}; --link-gbytes, --host-gbps)."
        " Formulas: `verl_megatron/benchmarks/scaling/model.py`."
    ]
    if all(role.layout.dp == 1 for size in sizes for role in size.run.roles):
        notes.append(
            "no measured size has data parallelism, so modelled sizes leave out how long its ranks wait for "
            "each other in updates."
        )
    if not device.is_gpu() and sizes[-1].ranks > (os.cpu_count() or 1):
        notes.append(
            f"{sizes[-1].ranks} ranks share {os.cpu_count()} cores: the measured times, and what is modelled "
            "from them, say nothing of machines of their own."
        )
    if disturbances := [note for note in map(disturbance, rows) if note]:
        notes += [*disturbances, at_best(rows)]
    if ended:
        notes.append(f"larger sizes are not modelled: {ended}.")
    kind = "same rows in all" if given.strong else "rows in proportion to GPUs"
    name = f"{sizes[0].recipe.path.name}: {run.prompt_tokens} + {run.response_tokens} tokens a row, {kind}"
    # MFU is reported for GPUs only: on a CPU, the prediction's machine did not run this.
    return Report(
        title=name,
        device=_device(),
        rows=rows + modelled,
        peak_flops=machine.peak_flops if machine and device.is_gpu() else None,
        notes=notes,
    )


def _device() -> str:
    name = (
        torch.cuda.get_device_name()
        if device.is_gpu()
        else f"CPU ({platform.processor() or platform.machine()}), whose cores the ranks share"
    )
    return f"{name}, torch {torch.__version__}"


def main(arguments: list[str] | None = None) -> None:
    given = read_options(arguments)
    try:
        report = report_of(given, sizes_to_run(given))
    except ValueError as error:
        parser().exit(2, f"error: {error}\n")
    except RuntimeError as error:
        parser().exit(1, f"error: {error}\n")
    text = markdown(report)
    (given.out / "scaling.md").write_text(text)
    write_csv(given.out / "scaling.csv", report)
    write_png(given.out / "scaling.png", report)
    print(
        f"{text}\nwritten: {given.out}/scaling.md, scaling.csv, scaling.png; timeline.json and timeline.png "
        f"in {given.out}/n*"
    )


if __name__ == "__main__":
    main()

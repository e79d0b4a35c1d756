"""Runs a recipe on several numbers of ranks, reports its scaling, and models larger sizes.

A recipe is a .yaml file with actor.path in the settings, or a script with MODEL in the environment or random
weights. All responses have the same length, prompts are random words, and nothing is saved, validated or
exported. The number of prompts is proportional to the ranks, or constant with --strong. Layouts are the
recipe's, with data parallelism adjusted, unless --layouts and --rollout give others.

OUT/scaling.md, .csv and .png: the table, its numbers and a picture. OUT/nN: the run on N ranks, with
timeline.json and timeline.png. Larger sizes, up to --to GPUs, are modelled from the measured ones and are
marked as such everywhere (verl_megatron/benchmarks/scaling/model.py has the formulas).
"""

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
from parallel.runtime.environment import MOST_RANKS
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
from verl_megatron.launch.options import COUNT, Options
from verl_megatron.planner.machine import MACHINES, Machine, find_machine
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.preflight import machine_here
from verl_megatron.planner.seconds import plan_seconds

EXAMPLES = (
    "--recipe ppo_toy_cpu --gpus 1,2,4 actor.path=outputs/toy/model",
    "--recipe llama3_8b_ppo.sh --gpus 2,4 --layouts 2:tp2,4:tp2pp2 --rollout 2:2,4:2",
)

# bytes per second: assumed, for a published shape
CPU_LINKS = replace(MACHINES["h200"], same_host_rate=2e9, other_host_rate=1.25e9)


def by_size(text: str) -> dict[int, str]:
    """Argument type: 1:tp1,2:tp2 as a dictionary."""
    pairs = [part.split(":") for part in text.split(",") if part]
    if not all(len(pair) == 2 and pair[0].isdecimal() and pair[1] for pair in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not understood; write RANKS:VALUE, such as 1:tp1,2:tp2"
        )
    return {int(ranks): value for ranks, value in pairs}


def sizes_by_size(text: str) -> dict[int, int]:
    """Argument type: 1:1,2:2 as a dictionary of integers."""
    found = by_size(text)
    if not all(value.isdecimal() and int(value) for value in found.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not understood; write RANKS:SIZE, such as 1:1,2:2")
    return {ranks: int(value) for ranks, value in found.items()}


def numbers(text: str) -> list[int]:
    """Argument type: 1,2,4 as an increasing list."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts) or len({int(part) for part in parts}) < len(
        parts
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not understood; write distinct numbers of ranks, such as 1,2,4"
        )
    if max(map(int, parts)) > MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text[:200]!r} is more than {MOST_RANKS} ranks; write those that are there to measure"
        )
    return sorted(int(part) for part in parts)


def rate(text: str) -> float:
    """Argument type: a number above 0."""
    try:
        if float(text) > 0:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted; write a number above 0")


def parser() -> argparse.ArgumentParser:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument(
        "--recipe",
        required=True,
        metavar="RECIPE",
        help="a .yaml or .sh file, or the name of one in recipes/",
    )
    options.add_argument(
        "--gpus",
        type=numbers,
        required=True,
        metavar="N,...",
        help="numbers of ranks to measure, such as 1,2,4",
    )
    options.add_argument(
        "--steps", type=COUNT, default=5, help="iterations of a run; the first does not count"
    )
    options.add_argument(
        "--layouts",
        type=by_size,
        default={},
        metavar="RANKS:LAYOUT,...",
        help="of all models, by number of ranks; default: the recipe's",
    )
    options.add_argument(
        "--rollout",
        type=sizes_by_size,
        default={},
        metavar="RANKS:SIZE,...",
        help="vLLM's tensor-parallel size, by number of ranks",
    )
    options.add_argument(
        "--prompts", type=COUNT, help="of an iteration on the largest number of ranks; default: the recipe's"
    )
    options.add_argument(
        "--prompt-tokens",
        type=COUNT,
        help="of every prompt; default: data.max_prompt_tokens, for random weights 512",
    )
    options.add_argument(
        "--response-tokens", type=COUNT, help="of every response; default: rollout.max_tokens"
    )
    options.add_argument("--strong", action="store_true", help="as many prompts on every number of ranks")
    options.add_argument(
        "--out", type=Path, default=Path("outputs/scaling"), metavar="DIR", help="for table and runs"
    )
    options.add_argument(
        "settings",
        nargs="*",
        metavar="SECTION.SETTING=VALUE",
        help="other settings of the run, such as actor.path=DIR",
    )
    _add_modelled(options)
    return options


def _add_modelled(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--gpu",
        help=(
            f"machine of predictions and MFU: {', '.join(MACHINES)} or a file of `benchmark calibrate`; "
            "default: this one's, none on a CPU"
        ),
    )
    options.add_argument(
        "--to", type=COUNT, default=16_384, help="GPUs up to which larger sizes are modelled"
    )
    options.add_argument("--ranks-per-host", type=COUNT, default=8, help="of modelled sizes")
    options.add_argument(
        "--link-gbytes",
        type=rate,
        help="GB/s of a GPU to others of its host, for modelled sizes; default: the machine's",
    )
    options.add_argument(
        "--host-gbps",
        type=rate,
        help="Gbit/s of a GPU to other hosts, for modelled sizes; default: the machine's",
    )


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
    options = parser()
    given = options.parse_intermixed_args(arguments)
    try:
        report = report_of(given, sizes_to_run(given))
    except ValueError as error:
        options.exit(2, f"error: {error}\n")
    except RuntimeError as error:
        options.exit(1, f"error: {error}\n")
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

"""Finds the layouts for a run on a number of GPUs, and predicts their memory and time per iteration.

Needs neither a GPU nor weights: a model is a folder with a config.json, a hub name, or a built-in shape.
Settings after the options are those of `verl-megatron train`. With --compare OUTPUT_DIR there is no search:
the plan of exactly these settings is shown next to that run's measurements. With --separate the rollout has
GPUs of its own, and the search also chooses how many; compare its best iteration with that of a search
without.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.remote.models import is_remote, local_folder
from parallel.weights.shapes import SHAPES, shape
from verl_megatron.algorithms import ALGORITHMS
from verl_megatron.checks.limits import check_values
from verl_megatron.checks.overrides import structured
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.settings import check_planned
from verl_megatron.config import TrainerConfig
from verl_megatron.config.gpus import USUAL, machine_here
from verl_megatron.config.section import sections_of
from verl_megatron.launch.command_line import settings_of
from verl_megatron.launch.options import COUNT, Options, check_output, words_of
from verl_megatron.model_specs import (
    SCORERS,
    has_worlds,
    named_devices,
    num_ranks,
    num_training_ranks,
)
from verl_megatron.observe.tracking import METRICS_FILE, read_metrics
from verl_megatron.planner.as_json import as_json
from verl_megatron.planner.comparison import compare
from verl_megatron.planner.machine import MACHINES, Machine, find_machine
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.rollout.lengths import Lengths
from verl_megatron.planner.search import CHOSEN, search
from verl_megatron.planner.seconds import plan_seconds
from verl_megatron.planner.splits import search_splits
from verl_megatron.planner.text import comparison_lines, search_text

HOST_RANKS = 8
SCORING = tuple(f"{name}.devices" for name in SCORERS)
# The setting without which a run has no such frozen model, and what to set.
GIVEN_BY = {
    "reference": ("algorithm.kl_coef", "set it above 0"),
    "reward": ("reward.path", "name a model"),
    "teacher": ("teacher.path", "name a model"),
}
OPTIONS = {  # options that stand for a setting
    "actor.path": "model",
    "critic.path": "critic",
    "data.max_prompt_tokens": "prompt",
    "data.samples_per_prompt": "samples_per_prompt",
    "rollout.max_tokens": "response",
    "algorithm.name": "algorithm",
    "algorithm.num_mini_batches": "mini_batches",
}
EXAMPLES = (
    "--model llama3-8b --gpus 8",
    "--model qwen2.5-32b --gpus 16 --gpu h100 --algorithm grpo --best 3 --json plan.json",
    "--model llama3-8b --gpus 8 --separate algorithm.kl_coef=0",
)
MAX_GPUS = 2**12


@cache
def architecture(name: str) -> Architecture:
    """Return the architecture of a folder or of a built-in shape."""
    if name in SHAPES:
        return Architecture.from_hf(shape(name), source=name)
    if is_remote(name):
        return read_architecture(local_folder(name, weights=False))
    if not Path(name).is_dir():
        raise ValueError(
            f"{name!r} is neither a folder nor a built-in shape; give a folder with a config.json or one of "
            f"{', '.join(SHAPES)}"
        )
    return read_architecture(name)


def _check_model(option: str, name: str) -> None:
    """Raise ValueError, with the option that gave it, if `name` is given but not a model."""
    try:
        if name:
            architecture(name)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _placed(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings of --separate and --apart, with devices that the search replaces.

    Raises:
        ValueError: --apart is alone, or there are too few GPUs.
    """
    if given.apart and not given.separate:
        raise ValueError("--apart is for a search with --separate; give both, or SECTION.devices=RANKS")
    if not given.separate:
        return {}
    fewest = 2 + bool(given.apart)
    if given.gpus < fewest:
        raise ValueError(
            "--separate needs a GPU to train and one to generate, and --apart one to score; "
            f"raise --gpus to {fewest} or more"
        )
    rollout, scoring = {"devices": str(given.gpus - 1)}, {"devices": str(given.gpus - 2)}
    return {"rollout": rollout, "async": {"max_staleness": 1}} | dict.fromkeys(given.apart, scoring)


def _check_own(given: argparse.Namespace, own: dict[str, Any]) -> None:
    """Raise ValueError if an option and a setting give one thing two values."""
    for setting, option in OPTIONS.items():
        section, _, name = setting.partition(".")
        values, said = own.get(section), getattr(given, option)
        is_given = said != parser().get_default(option)
        if is_given and isinstance(values, dict) and values.get(name, said) != said:
            raise ValueError(
                f"--{option.replace('_', '-')} {said} and {setting}={values[name]} differ; leave one of them "
                "out"
            )


def _check_apart(config: TrainerConfig, names: Sequence[str]) -> None:
    """Raise ValueError if --apart names a model that the run does not have."""
    for name in names:
        setting, remedy = GIVEN_BY[name]
        section, _, attribute = setting.partition(".")
        if not (value := getattr(getattr(config, section), attribute)):
            raise ValueError(f"--apart {name}: {setting}={value!r} gives the run no {name}; {remedy}")


def base_config(given: argparse.Namespace) -> TrainerConfig:
    """Return the settings that all candidates share.

    Raises:
        ValueError: an unknown setting or an invalid value.
    """
    total, algorithm = given.samples_per_iteration, ALGORITHMS.get(given.algorithm, ALGORITHMS["ppo"])
    samples = given.samples_per_prompt or (8 if algorithm.min_samples > 1 else 1)
    if total % samples:
        raise ValueError(
            f"--samples-per-iteration {total} must be a multiple of --samples-per-prompt {samples}; "
            "change one of them"
        )
    settings: dict[str, Any] = {
        "actor": {"path": given.model},
        "critic": {"path": given.critic or given.model},
        "data": {
            "train": "",
            "max_prompt_tokens": given.prompt,
            "prompts_per_iteration": total // samples,
            "samples_per_prompt": samples,
        },
        "rollout": {"max_tokens": most_tokens(given)},
        "algorithm": {
            "name": given.algorithm,
            "num_mini_batches": given.mini_batches,
            "kl_coef": 0.0 if "teacher" in algorithm.needs else 0.01,
        },
    }
    own = settings_of(given.settings)[1]
    _check_own(given, own)
    for part in (_placed(given), own):
        for section, values in part.items():
            settings[section] = settings.get(section, {}) | values if isinstance(values, dict) else values
    names = [setting.split("=")[0] for setting in given.settings]
    searched = CHOSEN + (SCORING if given.separate else ())
    if not given.compare and (chosen := [name for name in names if name in searched]):
        raise ValueError(
            f"{', '.join(chosen)}: this is what the search chooses; leave it out, or give --compare or a "
            "recipe's --dry-run to plan one run"
        )
    config = structured(settings, TrainerConfig)
    refuse(check_values(config))  # before the models are opened
    _check_apart(config, given.apart)
    for option, model in (
        ("--model", config.actor.path),
        ("--critic", config.critic.path),
        ("reward.path", config.reward.path),
        ("teacher.path", config.teacher.path),
    ):
        _check_model(option, model)
    refuse(check_planned(config, architecture(config.actor.path), _training_ranks(config, given.gpus)))
    return config


def most_tokens(given: argparse.Namespace) -> int:
    """Return the most tokens of a response.

    Raises:
        ValueError: --lengths have longer ones than --response.
    """
    if given.lengths is None:
        return given.response or 1024
    longest = given.lengths.longest
    if given.response and given.response < longest:
        raise ValueError(
            f"--lengths have responses of {longest} tokens, and --response allows {given.response}; "
            "leave it out, or make it as large"
        )
    return given.response or longest


def lengths(text: str) -> Lengths:
    """Argument type: a distribution of lengths."""
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def frozen_models(text: str) -> tuple[str, ...]:
    """Argument type: names of frozen models."""
    names = text.split(",")
    if not set(names) <= set(SCORERS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not accepted; write one of {', '.join(SCORERS)}, or several with commas"
        )
    return tuple(names)


def _training_ranks(config: TrainerConfig, gpus: int) -> int:
    """Return how many of `gpus` train.

    Raises:
        ValueError: the devices of other worlds are not the last of them.
    """
    if not has_worlds(config):
        return gpus
    if num_ranks(config) != gpus:
        raise ValueError(
            f"{named_devices(config)} must end with the last of --gpus {gpus}, {gpus - 1}; change one of them"
        )
    return num_training_ranks(config)


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


def parser() -> argparse.ArgumentParser:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help=f"the actor: a folder with a config.json, a hub name, or a built-in shape: {', '.join(SHAPES)}",
    )
    options.add_argument(
        "--critic", default="", metavar="MODEL", help="the critic, where it is not like the actor"
    )
    options.add_argument("--gpus", type=COUNT, required=True, help="of all hosts together")
    options.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"{', '.join(MACHINES)}, or a file of benchmark calibrate (this host's, without any {USUAL})",
    )
    options.add_argument("--hosts", type=COUNT, help=f"number of hosts; default: {HOST_RANKS} GPUs a host")
    _add_iteration(options)
    options.add_argument("--best", type=COUNT, default=10, help="candidates that are shown")
    options.add_argument(
        "--separate",
        action="store_true",
        help="the rollout on GPUs of its own (rollout.devices), as many as are best; samples are at most "
        "async.max_staleness updates old, 1 unless it is given",
    )
    options.add_argument(
        "--apart",
        type=frozen_models,
        default=(),
        metavar="MODEL,...",
        help=f"with --separate: frozen models on GPUs of their own: {', '.join(SCORERS)}",
    )
    options.add_argument("--json", type=Path, help="write all candidates that fit to this file")
    options.add_argument(
        "--compare",
        type=Path,
        metavar="OUTPUT_DIR",
        help="no search: the plan of exactly these settings beside the metrics.jsonl of a run of them",
    )
    options.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="SECTION.SETTING=VALUE",
        help="other settings, such as algorithm.kl_coef=0 (no reference model) or reward.path=DIR",
    )
    return options


def _add_iteration(options: argparse.ArgumentParser) -> None:
    options.add_argument("--samples-per-iteration", type=COUNT, default=1024, help="of all prompts together")
    options.add_argument(
        "--samples-per-prompt", type=COUNT, help="default: 8 where they are compared, else 1"
    )
    options.add_argument("--prompt", type=COUNT, default=512, help="tokens of a prompt")
    options.add_argument(
        "--response", type=COUNT, help="most tokens of a response; default: 1024, or the longest of --lengths"
    )
    options.add_argument(
        "--lengths",
        type=lengths,
        metavar="A-B:WEIGHT,...",
        help="lengths of responses that differ: ranges of tokens with weights, such as 64-2048 or "
        "512:70,1024-8192:30; memory counts the longest",
    )
    options.add_argument("--mini-batches", type=COUNT, default=4, help="optimizer steps an iteration")
    options.add_argument("--algorithm", default="ppo", metavar="NAME", help=", ".join(ALGORITHMS))


def ranks_per_host(gpus: int, hosts: int | None) -> int:
    if hosts and gpus % hosts:
        raise ValueError(f"--hosts {hosts} must divide the {gpus} GPUs; choose a divisor or another --gpus")
    if not hosts and gpus > HOST_RANKS and gpus % HOST_RANKS:
        raise ValueError(
            f"--gpus {gpus} are no whole hosts of {HOST_RANKS}; give --hosts, or a multiple of {HOST_RANKS}"
        )
    return gpus // hosts if hosts else min(HOST_RANKS, gpus)


def run(arguments: list[str]) -> int:
    options = parser()
    given = options.parse_intermixed_args(arguments)
    given.gpu = given.gpu or machine_here()
    try:
        if given.gpus > MAX_GPUS:
            raise ValueError(
                f"--gpus {given.gpus} is more than the {MAX_GPUS} that are planned for; choose fewer"
            )
        if given.json and given.compare:
            raise ValueError(f"--json {given.json} takes candidates, and --compare has none; leave one out")
        if given.json:
            check_output("--json", given.json, inputs=[Path(given.model, "config.json"), given.gpu])
        machine = find_machine(given.gpu)
        config = base_config(given)
        searches_splits = given.separate and not given.compare
        world = {
            "world_size": given.gpus if searches_splits else _training_ranks(config, given.gpus),
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
    except (ValueError, OSError) as error:
        options.error(words_of(error))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

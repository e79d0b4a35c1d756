"""The settings of `verl-megatron plan`: those of its options and of its command line, checked."""

import argparse
from collections.abc import Sequence
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
from verl_megatron.commands.plan.options import HOST_RANKS, parser
from verl_megatron.config import SCORERS, TrainerConfig
from verl_megatron.launch.command_line import settings_of
from verl_megatron.model_specs import has_worlds, named_devices, num_ranks, num_training_ranks
from verl_megatron.planner.search.choices import CHOSEN

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
    refuse(check_planned(config, architecture(config.actor.path), training_ranks(config, given.gpus)))
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


def training_ranks(config: TrainerConfig, gpus: int) -> int:
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


def ranks_per_host(gpus: int, hosts: int | None) -> int:
    if hosts and gpus % hosts:
        raise ValueError(f"--hosts {hosts} must divide the {gpus} GPUs; choose a divisor or another --gpus")
    if not hosts and gpus > HOST_RANKS and gpus % HOST_RANKS:
        raise ValueError(
            f"--gpus {gpus} are no whole hosts of {HOST_RANKS}; give --hosts, or a multiple of {HOST_RANKS}"
        )
    return gpus // hosts if hosts else min(HOST_RANKS, gpus)

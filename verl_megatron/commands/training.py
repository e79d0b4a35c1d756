"""`train`, `sft`, `dpo` and `reward-model`: a run from its settings, on the ranks that it needs."""

import gc
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

from parallel.runtime.refusal import NO_ROOM, short_repr
from verl_megatron.commands import refusing
from verl_megatron.launch.options import LAUNCHER_OPTIONS, OF_A_RANK, is_rank, launcher_options

if TYPE_CHECKING:
    from verl_megatron.config import SupervisedConfig, TrainerConfig

USAGE = (
    "usage: verl-megatron {command} [--config-name RECIPE | --config FILE] [OPTION ...] [SETTING=VALUE ...]"
)
OPTIONS = """\
options:
  --config-name RECIPE   a shipped recipe, without .yaml
  --config FILE          a recipe of yours; `defaults: [RECIPE]` in it extends another one
  --ranks N              processes on this host, each with a GPU if there are GPUs; without it as many
                         GPUs as the layouts divide, on a CPU the fewest that they need
  --max-restarts N       how often failed ranks start again from the newest checkpoint (0)
  --dry-run              check and plan the run, and start nothing
  --gpu NAME             the GPU that a dry run plans for (this host's, without any h200)
  --verify               repeat an iteration of the newest checkpoint and compare
  --track_metrics        metrics go to the console and to every kind of file
  --cfg job [--resolve]  print the settings; with the values of ${names}
  --help [NAME ...]      this text, or the settings of sections (rollout) and single ones (run.seed)"""
# Of runs whose rollout or frozen models have ranks of their own.
ROLE = "  --role WORLD           start one world of the run here: train, rollout, rollout:1 or reward"


@dataclass(frozen=True, slots=True)
class Training:
    """A command that trains."""

    command: str
    module: str  # that a rank runs
    schema: str  # key of SCHEMAS
    purpose: str
    examples: tuple[str, ...]

    @property
    def plan(self) -> Callable[..., tuple[str, bool]]:
        """Return the function that plans a run for a dry run."""
        if self.schema == "train":
            from verl_megatron.train import plan

            return plan
        from verl_megatron.config import SCHEMAS, SupervisedConfig
        from verl_megatron.launch.supervised import plan

        return partial(plan, schema=cast(type[SupervisedConfig], SCHEMAS[self.schema]))


TRAIN = Training(
    "train",
    "verl_megatron.train",
    "train",
    "Trains a policy by PPO, GRPO or another algorithm. vLLM generates, on the same ranks or on its own.",
    (
        "--config-name grpo_8b actor.path=llama3-8b data.train=prompts.jsonl --dry-run",
        "--config-name ppo_toy_cpu run.iterations=2 run.output_dir=outputs/toy/short",
        "--config mine.yaml --ranks 4 run.iterations=100",
    ),
)
SFT = Training(
    "sft",
    "verl_megatron.sft",
    "sft",
    "Fine-tunes a model on demonstrations.",
    (
        "--config-name sft actor.path=llama3-8b data.train=demonstrations.jsonl --dry-run",
        "--config-name sft_toy_cpu run.seed=2",
    ),
)
DPO = Training(
    "dpo",
    "verl_megatron.dpo",
    "dpo",
    "Direct preference optimization: trains a policy on pairs of a chosen and a rejected response.",
    (
        "--config-name dpo_toy_cpu",
        "--config-name dpo_toy_cpu actor.path=llama3-8b data.train=pairs.jsonl --dry-run",
    ),
)
REWARD_MODEL = Training(
    "reward-model",
    "verl_megatron.reward_model",
    "reward_model",
    "Trains a reward model on pairs of a chosen and a rejected response.",
    (
        "--config-name reward_model_toy_cpu",
        "--config-name reward_model_toy_cpu reward.path=llama3-8b data.train=pairs.jsonl --dry-run",
    ),
)


def train(arguments: list[str]) -> int:
    """Train a policy."""
    return _run(TRAIN, arguments)


def sft(arguments: list[str]) -> int:
    """Fine-tune on demonstrations."""
    return _run(SFT, arguments)


def dpo(arguments: list[str]) -> int:
    """Train on pairs without a reward model."""
    return _run(DPO, arguments)


def reward_model(arguments: list[str]) -> int:
    """Train a reward model."""
    return _run(REWARD_MODEL, arguments)


def _run(training: Training, arguments: list[str]) -> int:
    if (asked := _help_asked(arguments)) is not None:
        print(help_text(training, *asked))
        return 0
    gc.disable()  # imports and recipes make many permanent objects
    if is_rank():
        _as_a_rank(training.module, arguments)
        return 0
    given, rest = launcher_options(arguments)
    from parallel.runtime.environment import check_environment
    from verl_megatron.launch.command_line import settings_of

    check_environment()
    known, settings = settings_of(rest, LAUNCHER_OPTIONS)
    if known.cfg or known.info:
        return 0  # Hydra has printed it
    from parallel.sealed_store import given_address
    from verl_megatron.checks.overrides import structured
    from verl_megatron.config import SCHEMAS, TrainerConfig
    from verl_megatron.launch import ranks as launching
    from verl_megatron.launch.hosts import ranks_of_role
    from verl_megatron.launch.merging import devices_in
    from verl_megatron.model_specs import has_worlds, named_devices, num_ranks

    _check_command(training, settings, known.config or known.config_name)
    devices = devices_in(settings) if training is TRAIN else TrainerConfig()
    separate = has_worlds(devices)
    if separate and given.ranks:
        raise ValueError(
            f"--ranks {given.ranks} beside {named_devices(devices)}, which says how many ranks there are; "
            "leave it out"
        )
    if known.role and training is not TRAIN:
        raise ValueError(f"--role {known.role}: {training.command} has one world; leave it out")
    of_role = ranks_of_role(devices, known.role) if known.role else 0
    config_of = partial(structured, settings, cast(Any, SCHEMAS[training.schema]))
    ranks = partial(num_ranks, devices) if separate else partial(_ranks, given.ranks, config_of)
    plan = partial(_plan, training, settings, ranks=ranks, gpu=known.gpu)
    if known.dry_run:
        text, fits = plan()
        print(text)
        return 0 if fits else NO_ROOM
    plan = partial(_plan_here, config_of, plan)
    restarts = given.max_restarts
    if known.role:
        plan()
        given_address()
        launching.start(training.module, rest, ranks=of_role or ranks(), restarts=restarts)
    if separate:
        from verl_megatron.launch.supervisor import supervise_here

        plan()
        sys.exit(supervise_here(training.module, rest, devices, restarts=restarts))
    check, config = refusing()(plan), config_of()
    launching.check_and_start(training.module, rest, config, ranks=ranks, restarts=restarts, check=check)


def _ranks(given: int, config_of: "Callable[[], TrainerConfig | SupervisedConfig]") -> int:
    from verl_megatron.launch.ranks import ranks_of

    return given or ranks_of(config_of())  # a plan for given ranks needs no data


def _plan(
    training: Training, settings: dict[str, Any], *, ranks: Callable[[], int], gpu: str | None
) -> tuple[str, bool]:
    """Return the plan of a run and whether it fits; refuse what cannot work, before any rank begins."""
    from verl_megatron.config.gpus import machine_here

    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks()))
    os.environ |= sizes
    try:
        return training.plan(settings, gpu=gpu or machine_here())
    finally:
        for name in sizes:
            del os.environ[name]


def _plan_here(
    config_of: "Callable[[], TrainerConfig | SupervisedConfig]", plan: Callable[[], tuple[str, bool]]
) -> tuple[str, bool]:
    """Plan a run that is started on this machine; refuse what this machine cannot compute."""
    from verl_megatron.checks.problems import refuse
    from verl_megatron.launch.ranks import machine_problems

    planned = plan()
    refuse(machine_problems(config_of()))
    return planned


def _check_command(training: Training, settings: dict[str, Any], recipe: str | None) -> None:
    """Refuse a recipe that is for another command."""
    from verl_megatron.checks.overrides import command_of
    from verl_megatron.config import SCHEMAS

    command = command_of(settings, SCHEMAS[training.schema])
    if recipe and command:
        raise ValueError(
            f"recipe {short_repr(recipe)} is for another command; start it with verl-megatron {command}"
        )


def _as_a_rank(module: str, arguments: list[str]) -> None:
    given = [argument.partition("=")[0] for argument in arguments]
    if named := [name for name in LAUNCHER_OPTIONS if name in given]:
        variable = next(f"{name}={os.environ[name]}" for name in OF_A_RANK if os.environ.get(name))
        raise ValueError(
            f"{named[0]} is for the command that starts ranks, and {variable} says that this is one; "
            f"leave it out, or unset {' and '.join(OF_A_RANK)}"
        )
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _help_asked(arguments: list[str]) -> list[str] | None:
    """Return the names after --help, none for all settings, or None if no help is asked for."""
    for place, argument in enumerate(arguments):
        option, _, name = argument.partition("=")
        if option in ("-h", "--help"):
            others = takewhile(lambda each: not each.startswith("-"), arguments[place + 1 :])
            return list(filter(None, (name, *others)))
    return None


def help_text(training: Training, *asked: str) -> str:
    """Return a command's help: purpose, options, recipes, settings and examples.

    Args:
        asked: sections and settings, whose help alone is returned.

    Raises:
        ValueError: the command has no such section or setting.
    """
    from verl_megatron.launch.help import recipe_summaries, settings_help

    if asked:
        return "\n\n".join(settings_help(training.schema, name) for name in asked)
    settings = settings_help(training.schema)
    shown = {name: text for name, text in recipe_summaries().items() if _trains(name) == training.schema}
    width = max(map(len, shown), default=0) + 2
    recipes = [f"  {name:<{width}}{text}" for name, text in shown.items()]
    examples = [f"  verl-megatron {training.command} {example}" for example in training.examples]
    return "\n".join(
        [
            USAGE.format(command=training.command),
            "",
            training.purpose,
            "",
            OPTIONS,
            *[ROLE] * (training is TRAIN),
            "",
            "recipes:",
            *recipes,
            "",
            "settings, with default and values:",
            "",
            settings,
            "",
            "examples:",
            *examples,
        ]
    )


def _trains(recipe: str) -> str:
    """Return the schema of a shipped recipe: its name begins with it, and all others are for RL."""
    from verl_megatron.config import SCHEMAS

    return next((name for name in SCHEMAS if recipe.startswith(name)), "train")

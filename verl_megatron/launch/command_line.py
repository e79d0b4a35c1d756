"""Shared command line: Hydra composes the recipe, and user errors are printed once, without a traceback."""

import argparse
import gc
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel.runtime import process
from parallel.runtime.environment import check_environment
from parallel.runtime.refusal import (
    NO_ROOM,
    RefusalError,
    complain,
    complain_of_output,
    fail,
    let_others_speak,
    nearest,
    short_repr,
)
from verl_megatron.config import SCHEMAS, SCORERS
from verl_megatron.config.gpus import USUAL, check_machine, machine_here
from verl_megatron.config.names import name_here
from verl_megatron.config.section import names_of
from verl_megatron.launch.bases import OF_HYDRA, files_of, find_recipe, shipped_names
from verl_megatron.launch.merging import make_room, merged, override_of
from verl_megatron.launch.options import Options
from verl_megatron.launch.recipe import SHIPPED, folder_of, own_recipe

FORM = "settings are SECTION.SETTING=VALUE, lists are [A,B], and a text with other signs stands in quotes"
MAPPING_FORM = """mappings are {A:B,C:D}; one whose names have other signs stands in quotes: '{"A B":C}'"""
RECIPE = "recipe"  # its name in Hydra's store
FLAGS = {
    "--track_metrics": "run.track_metrics=[console,jsonl,csv,tensorboard,report]",
    "--verify": "run.resume=verify",
}
COUNTS_OF_RANKS = ("gpus", "num_gpus", "n_gpus_per_node", "nproc_per_node", "num_processes")  # elsewhere
QUIET = [
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
]


def _no_plan(settings: dict, *, gpu: str) -> tuple[str, bool]:
    raise ValueError("--dry-run: this command has no plan; leave it out")


def run_command(
    main: Callable[[DictConfig], None],
    *,
    plan: Callable[..., tuple[str, bool]] = _no_plan,
    serve: Callable[..., None] | None = None,
) -> None:
    """Compose the recipe named on the command line and run `main` on it.

    With a `--role` other than train, such as rollout:1 or reward, `serve` runs instead and gets the role.
    With `--dry-run`, `plan` gets the settings by section and the GPU of `--gpu` instead. It returns a text to
    print and whether the run fits; if it does not, the exit status is `NO_ROOM`.
    `--track_metrics` means run.track_metrics with every file sink, `--verify` means run.resume=verify.
    Relative paths are relative to the working directory. Recipes come from --config-path, or else from those
    that are shipped; --config names a file anywhere.
    A ValueError is a user error: one rank prints it and all exit with status 2. Of other errors the root
    cause is printed, not the errors of ranks that lost a peer.
    """
    # Imports and engines create millions of permanent objects; collecting them doubles the start-up time.
    gc.disable()  # the trainers enable it again
    process.watch_stdout(complain_of_output)
    try:
        check_environment()
        known = _read_arguments(sys.argv[1:])
        if known.role not in (None, "train"):
            if serve is None:
                raise ValueError(f"--role {known.role}: this command has one world; leave it out")
            main = partial(serve, role=known.role)
        _compose(known, lambda config: _guarded(config, known, main, plan))
    except ValueError as error:
        complain(str(error), agreed=isinstance(error, RefusalError))


def _guarded(
    config: DictConfig,
    known: argparse.Namespace,
    main: Callable[[DictConfig], None],
    plan: Callable[..., tuple[str, bool]],
) -> NoReturn:
    try:
        if known.dry_run:
            text, fits = plan(OmegaConf.to_container(config, resolve=True), gpu=known.gpu or machine_here())
            print(text)
            process.end(0 if fits else NO_ROOM)
        main(config)
    except OmegaConfBaseException as error:
        complain(_about_values(error))
    except ValueError as error:
        complain(str(error), agreed=isinstance(error, RefusalError))
    except Exception as error:
        if "peer" in str(error) or "NCCL" in str(error):
            let_others_speak(1, seconds=15)
        fail(error)
    process.end(0)


# ---- arguments ---------------------------------------------------------------------------------------------


class _Parser(Options):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the options)")


def _parser() -> _Parser:
    parser = _Parser(
        usage="%(prog)s --config-name RECIPE [OPTION ...] [SECTION.SETTING=VALUE ...]",
        description=FORM[0].upper() + FORM[1:] + ".",
        examples=("--config-name ppo_toy_cpu --dry-run", "--config mine.yaml run.seed=2"),
    )
    parser.add_argument(
        "--config-name", "-cn", metavar="RECIPE", help="a file of the recipes' folder, without .yaml"
    )
    parser.add_argument(
        "--config-path",
        "-cp",
        metavar="FOLDER",
        help="of recipes, instead of those that are shipped",
    )
    parser.add_argument("--config", metavar="FILE", help="a recipe of yours, which may extend a shipped one")
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="of more recipes")
    parser.add_argument("--dry-run", action="store_true", help="check and plan the run, and start nothing")
    parser.add_argument(
        "--role",
        type=_role,
        metavar="ROLE",
        help="the world that these ranks are: train, rollout, rollout:1 of several, or a frozen model",
    )
    parser.add_argument("--gpu", help=f"for which a dry run plans (default: this host's, or {USUAL})")
    parser.add_argument(
        "--track_metrics", action="store_true", help="metrics go to the console and to every kind of file"
    )
    parser.add_argument(
        "--verify", action="store_true", help="repeat an iteration of the newest checkpoint and compare"
    )
    parser.add_argument(
        "--cfg", "-c", choices=["job", "hydra", "all"], help="show the settings instead of running"
    )
    parser.add_argument(
        "--info",
        "-i",
        nargs="?",
        const="all",
        choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"],
        help="show what Hydra found",
    )
    parser.add_argument("--resolve", action="store_true", help="with --cfg: values in place of ${names}")
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    return parser


def _role(text: str) -> str:
    """Argument type: the name of a world."""
    if not re.fullmatch(f"train|rollout(:[0-9]{{1,4}})?|{'|'.join(SCORERS)}", text):
        raise argparse.ArgumentTypeError(
            f"{short_repr(text)} is no world; write train, rollout, or rollout:1 for the second of several, "
            f"or {', '.join(SCORERS)} for one that scores"
        )
    return text


def _read_arguments(arguments: list[str], taken: Iterable[str] = ()) -> argparse.Namespace:
    """Parse options; `overrides` are the settings in Hydra's syntax.

    Args:
        taken: further options, which the caller has taken out of `arguments`.

    Raises:
        ValueError: an unknown option, an option without a value, or an argument that is not UTF-8.
    """
    for argument in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ValueError(
                f"argument {short_repr(argument)} is no UTF-8 text; type it again in a UTF-8 terminal"
            )
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    if known.multirun:
        raise ValueError(
            "--multirun: a command is one run; start one for each value, with a run.output_dir of its own"
        )
    for argument in rest:
        if argument.startswith("="):
            raise ValueError(f"{short_repr(argument)} cannot be read (it names no setting); {FORM}")
        if argument.startswith("-"):
            raise ValueError(_about_option(argument, [*parser.option_names(), *taken]))
        if re.match(r"[+~]*hydra\b", argument):
            raise ValueError(f"{short_repr(argument)}: {OF_HYDRA}")
        if "=" not in argument and not argument.startswith(("+", "~")):
            raise ValueError(_about_word(argument))
    if known.config_name is not None and (not known.config_name or "=" in known.config_name):
        raise ValueError(
            f"--config-name has no recipe after it but {short_repr(known.config_name)}; name one, "
            "such as --config-name ppo_toy_cpu"
        )
    if known.config and known.config_name:
        raise ValueError(
            f"--config {short_repr(known.config)} and --config-name {short_repr(known.config_name)} name two "
            "recipes; leave one of them out"
        )
    if known.gpu and not known.dry_run:
        raise ValueError(f"--gpu {short_repr(known.gpu)} is for a plan; give --dry-run too, or leave it out")
    if known.gpu:
        check_machine(known.gpu)
    if known.resolve and not known.cfg:
        raise ValueError("--resolve is for what --cfg shows; give --cfg job too, or leave it out")
    known.overrides = [override_of(argument) for argument in rest] + [
        override_of(setting) for flag, setting in FLAGS.items() if getattr(known, flag[2:])
    ]
    return known


def _about_option(argument: str, options: list[str]) -> str:
    """Describe an unknown option: maybe a setting, written as on another project's command line."""
    name, _, value = argument.partition("=")
    setting = name.lstrip("-").replace("-", "_")
    said = f"unrecognized arguments: {short_repr(name)[1:-1]}"
    if name.startswith("--") and "." in setting:
        return f"{said}; settings have no dashes: write {setting}={value or 'VALUE'}"
    if theirs := name_here(setting):
        is_setting = any(ours in theirs for ours in every_setting())
        return f"{said}: {theirs}" + ", as SECTION.SETTING=VALUE" * is_setting
    if setting in COUNTS_OF_RANKS and "--ranks" in options:
        return f"{said}; --ranks N says how many processes start, each with a GPU"
    ours = [f"{each}={value or 'VALUE'}" for each in every_setting() if each.partition(".")[2] == setting]
    if ours:
        return f"{said}; it is a setting: write {' or '.join(ours)}"
    return f"{said}{nearest(name, options)}; options are {', '.join(options)}"


def every_setting() -> list[str]:
    """Return the names of all settings of all commands, such as run.seed."""
    return sorted({name for schema in SCHEMAS.values() for name in names_of(schema)})


def _about_word(word: str) -> str:
    """Describe an argument that is neither option nor setting; recipes have an option before them."""
    if word.endswith(".yaml"):
        return f"{short_repr(word)} is no setting; write --config {shlex.quote(word)} for that recipe"
    if find_recipe(word, [SHIPPED]):
        return f"{short_repr(word)} is no setting; write --config-name {word} for that recipe"
    if "." in word:
        return f"{short_repr(word)} has no value; {FORM}"
    return f"{short_repr(word)} is no setting{nearest(word, shipped_names())}; {FORM}"


def settings_of(arguments: list[str], taken: Iterable[str] = ()) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options of a command line, and the settings by section that its recipe and overrides give.

    Args:
        taken: further options, which the caller has taken out of `arguments`.

    Raises:
        ValueError: an unknown option, no such recipe, or settings that cannot be read.
    """
    known, found, given = _read_arguments(arguments, taken), [], list(sys.argv)
    try:
        _compose(known, found.append)
        return known, cast(dict[str, Any], OmegaConf.to_container(found[0], resolve=True)) if found else {}
    except OmegaConfBaseException as error:
        raise ValueError(_about_values(error)) from None
    finally:
        sys.argv[:] = given


# ---- Hydra -------------------------------------------------------------------------------------------------


def _compose(known: argparse.Namespace, run: Callable[[DictConfig], None]) -> None:
    """Compose the recipe and let Hydra apply the overrides; raise ValueError for invalid input."""
    files = _recipe_files(known)
    given = [("--cfg", known.cfg), ("--info", known.info)]
    options = [part for name, value in given if value is not None for part in (name, value)] + [
        "--resolve"
    ] * known.resolve
    arguments = sys.argv[1:]
    sys.argv[1:] = options + known.overrides + QUIET

    def run_as_called(config: DictConfig) -> None:
        sys.argv[1:] = arguments
        run(config)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors, which it would otherwise print on every rank
    try:
        recipe = merged(files)
        for override in OverridesParser.create().parse_overrides(known.overrides):
            make_room(recipe, override.key_or_group, override.value())
        ConfigStore.instance().store(name=RECIPE, node=recipe)
        hydra.main(version_base=None, config_path=None, config_name=RECIPE)(run_as_called)()
    except OverrideParseException as error:
        reason = (
            (error.message or "")
            .removeprefix(f"Error parsing override '{error.override}'")
            .strip()
            .splitlines()[0]
            .split(" expecting ")[0]
        )
        if reason.startswith("Lexer"):
            reason = "it has signs that only texts in quotes have"
        form = MAPPING_FORM if "={" in error.override else FORM
        raise ValueError(
            f"{short_repr(error.override.removeprefix('++'))} cannot be read ({reason}); {form}"
        ) from None
    except HydraException as error:
        raise ValueError(_about_overrides(error)) from None
    except OmegaConfBaseException as error:
        raise ValueError(_about_values(error)) from None
    except ValueError as error:
        raise ValueError(f"the settings cannot be read: {str(error).split(';')[0]}; {FORM}") from None
    except RecursionError:
        raise ValueError(f"the settings are nested too deeply to be read; {FORM}") from None


def _recipe_files(known: argparse.Namespace) -> list[Path]:
    """Return the files of the recipe that is named, and of those that it extends; later ones win.

    Raises:
        ValueError: there is no such recipe, or one cannot be read.
    """
    if known.config:
        return files_of(own_recipe(known.config))
    given = {"--config-path": known.config_path, "--config-dir": known.config_dir}
    found = {option: folder_of(path) for option, path in given.items()}
    for option, folder in found.items():
        path = str(folder) if given[option] is None else given[option]
        if not path or not os.path.isdir(folder):
            raise ValueError(f"{option} {short_repr(path)} is no folder of recipes; name one that exists")
    if not known.config_name:
        return []
    folders = list(dict.fromkeys((*found.values(), SHIPPED)))
    if file := find_recipe(known.config_name, folders):
        return files_of(file, folders)
    names = sorted(path.stem for path in folders[0].glob("*.yaml"))
    raise ValueError(
        f"--config-name: {folders[0]} has no recipe {short_repr(known.config_name)}"
        f"{nearest(known.config_name, names)}; it has {', '.join(names) or 'none'}; "
        "--config FILE names a recipe elsewhere"
    )


def _about_overrides(error: HydraException) -> str:
    reason = str(error).split("\n")[0].replace("'++", "'").replace(" ++", " ")
    if reason.startswith("Ambiguous value"):
        return (
            f"{reason}: a run has one value of each setting; "
            "write [A,B] for a list, or quote a text with a comma in it"
        )
    if reason.startswith("Error merging override"):
        return (
            f"{reason}: there is a mapping or a list already, into which this does not fit; give the whole "
            "value, once"
        )
    return f"{reason.rstrip('.')}; {FORM}"


def _about_values(error: OmegaConfBaseException) -> str:
    where = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
    return (
        f"{where}{str(error).splitlines()[0]}; give the value itself, or a ${{section.setting}} that exists"
    )

"""Shared command line: Hydra composes the recipe, and user errors are printed once, without a traceback."""

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel.runtime import process
from parallel.runtime.environment import check_environment
from parallel.runtime.refusal import (
    RefusalError,
    complain,
    fail,
    let_others_speak,
    nearest,
    short_repr,
)
from verl_megatron.launch.recipe import SHIPPED, check_recipes, folder_of, own_recipe

NO_ROOM = 3  # exit status of a dry run: the settings are valid, but the run does not fit its GPUs
FORM = "settings are SECTION.SETTING=VALUE, lists are [A,B], and a text with other signs stands in quotes"
FLAGS = {
    "--track_metrics": "run.track_metrics=[console,jsonl,csv,tensorboard,report]",
    "--verify": "run.resume=verify",
}
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
    serve_rollout: Callable[[DictConfig], None] | None = None,
) -> None:
    """Compose the recipe named on the command line and run `main` on it.

    With `--role rollout`, `serve_rollout` runs instead.
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
    try:
        check_environment()
        known = _read_arguments(sys.argv[1:])
        if known.role == "rollout":
            if serve_rollout is None:
                raise ValueError("--role rollout: this command has no rollout; leave it out")
            main = serve_rollout
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
            text, fits = plan(OmegaConf.to_container(config, resolve=True), gpu=known.gpu)
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; options are {', '.join(self.names())}")

    def names(self) -> list[str]:
        return [action.option_strings[0] for action in self._actions if action.help != argparse.SUPPRESS]


def _parser() -> _Parser:
    parser = _Parser(
        usage="%(prog)s --config-name RECIPE [OPTION ...] [SECTION.SETTING=VALUE ...]",
        description=FORM,
        allow_abbrev=False,
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
        choices=["train", "rollout"],
        default="train",
        help="with rollout.devices: the world that these ranks are",
    )
    parser.add_argument("--gpu", default="h200", help="for which a dry run plans")
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


def _read_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse options; `overrides` are the settings in Hydra's syntax.

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
            name = argument.partition("=")[0]
            raise ValueError(
                f"unrecognized arguments: {short_repr(name)[1:-1]}{nearest(name, parser.names())}; "
                f"options are {', '.join(parser.names())}"
            )
    if known.config_name is not None and (not known.config_name or "=" in known.config_name):
        raise ValueError(
            f"--config-name has no recipe after it but {short_repr(known.config_name)}; name one, "
            "such as --config-name ppo_toy_cpu"
        )
    known.overrides = [_override(argument) for argument in rest] + [
        _override(setting) for flag, setting in FLAGS.items() if getattr(known, flag[2:])
    ]
    return known


def _override(argument: str) -> str:
    """Prefix settings with `++`, as recipes omit defaults; checks/settings.py refuses unknown settings."""
    is_setting = "=" in argument and argument[0] not in "+~" and not argument.startswith("hydra")
    return "++" + argument if is_setting else argument


def settings_of(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options of a command line, and the settings by section that its recipe and overrides give.

    Raises:
        ValueError: an unknown option, no such recipe, or settings that cannot be read.
    """
    known, found, given = _read_arguments(arguments), [], list(sys.argv)
    try:
        _compose(known, found.append)
        return known, cast(dict[str, Any], OmegaConf.to_container(found[0], resolve=True)) if found else {}
    except OmegaConfBaseException as error:
        raise ValueError(_about_values(error)) from None
    finally:
        sys.argv[:] = given


# ---- Hydra -------------------------------------------------------------------------------------------------


def _compose(known: argparse.Namespace, run: Callable[[DictConfig], None]) -> None:
    """Let Hydra compose the recipe and call `run`; raise ValueError for invalid input."""
    folder, shipped = str(folder_of(known.config_path)), str(SHIPPED)
    if known.config:
        folder, known.config_name = own_recipe(known.config)
    folders = list(dict.fromkeys(filter(None, (folder, known.config_dir, shipped))))
    if known.config_name:
        check_recipes(known.config_name, folders)
    searched = [f"hydra.searchpath=['file://{shipped}']"] if shipped != folder else []
    given = [
        ("--config-name", known.config_name),
        ("--config-dir", known.config_dir),
        ("--cfg", known.cfg),
        ("--info", known.info),
    ]
    options = [part for name, value in given if value is not None for part in (name, value)] + [
        "--resolve"
    ] * known.resolve
    sys.argv[1:] = options + known.overrides + searched + QUIET
    warnings.filterwarnings("ignore", "In '.*': Defaults list is missing `_self_`")  # own settings win
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors, which it would otherwise print on every rank
    try:
        hydra.main(version_base=None, config_path=folder, config_name=None)(run)()
    except OverrideParseException as error:
        reason = (
            (error.message or "")
            .removeprefix(f"Error parsing override '{error.override}'")
            .strip()
            .splitlines()[0]
            .split(" expecting ")[0]
        )
        raise ValueError(
            f"{short_repr(error.override.removeprefix('++'))} cannot be read ({reason}); {FORM}"
        ) from None
    except MissingConfigException as error:
        recipes = ", ".join(sorted(path.stem for path in Path(folder).glob("*.yaml"))) or "none"
        recipes += "; --config FILE names a recipe elsewhere" if not known.config else ""
        missing = error.missing_cfg_file
        asked = f"--config {known.config}" if known.config else "--config-name"
        if missing not in (None, known.config_name):
            asked = f"{asked if known.config else f'{asked} {known.config_name}'}, defaults"
        raise ValueError(f"{asked}: {folder} has no recipe {short_repr(missing)}; it has {recipes}") from None
    except HydraException as error:
        raise ValueError(_about_overrides(error)) from None
    except OmegaConfBaseException as error:
        raise ValueError(_about_values(error)) from None
    except ValueError as error:
        raise ValueError(f"the settings cannot be read: {str(error).split(';')[0]}; {FORM}") from None
    except RecursionError:
        raise ValueError(f"the settings are nested too deeply to be read; {FORM}") from None


def _about_overrides(error: HydraException) -> str:
    reason = str(error).split("\n")[0].replace("'++", "'").replace(" ++", " ")
    if reason.startswith("Ambiguous value"):
        return (
            f"{reason}: a run has one value of each setting; "
            "write [A,B] for a list, or quote a text with a comma in it"
        )
    return f"{reason.rstrip('.')}; {FORM}"


def _about_values(error: OmegaConfBaseException) -> str:
    where = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
    return (
        f"{where}{str(error).splitlines()[0]}; give the value itself, or a ${{section.setting}} that exists"
    )

"""What the entry points share: Hydra reads the recipe, and what a user did wrong is said once, without a traceback."""

import argparse
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from parallel import process

NO_ROOM = 3  # exit status of a dry run: the run is right, and does not fit its GPUs


def _no_plan(settings: dict, *, gpu: str) -> tuple[str, bool]:
    raise ValueError("--dry-run: this command has no plan; leave it out")


def run_command(main: Callable[[DictConfig], None], *, plan: Callable[..., tuple[str, bool]] = _no_plan) -> None:
    """Compose the recipe named on the command line and hand it to `main`.

    With `--dry-run` its settings, by section, go to `plan` instead, together with the GPU of `--gpu`. It answers with a text, which is printed, and whether
    the run fits, without which the exit status is `NO_ROOM`.
    `--track_metrics` stands for run.track_metrics with every file sink, `--verify` for run.resume=verify. Relative paths count from where the command was typed.
    A ValueError is the user's: one rank prints it and all exit with 2. Of other errors those are shown that began it, not those
    of ranks which lost a peer by it.
    """
    gc.disable()  # the imports and engines to come make millions of objects that stay: collecting them again and again doubles the start; trainers start it again
    quiet = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp", default="../recipes")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--gpu", default="h200")
    known, rest = parser.parse_known_args()
    arguments = [_override(argument) for argument in rest]
    settings = [argument for argument in arguments if "=" in argument and argument[0] != "-"]
    sys.argv[1:] = [argument for argument in arguments if argument not in settings] + settings + quiet  # Hydra wants its options first

    def guarded(config: DictConfig) -> None:
        try:
            if known.dry_run:
                text, fits = plan(OmegaConf.to_container(config, resolve=True), gpu=known.gpu)
                print(text)
                _leave(0 if fits else NO_ROOM)
            else:
                main(config)
        except ValueError as error:
            _complain(str(error))
        except Exception as error:
            if "peer" in str(error) or "NCCL" in str(error):
                _let_others_speak(1, seconds=15)
            traceback.print_exc()
            _leave(1)
        _leave(0)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raises what it would print from every rank
    folder = _recipes(known.config_path)
    try:
        hydra.main(version_base=None, config_path=folder, config_name=None)(guarded)()
    except OverrideParseException as error:
        reason = (error.message or "").removeprefix(f"Error parsing override '{error.override}'").strip().splitlines()[0].split(" expecting ")[0]
        given = error.override.removeprefix("++")
        _complain(f"{given!r} cannot be read ({reason}); settings are SECTION.SETTING=VALUE, lists are [A,B], and a text with other signs stands in quotes")
    except MissingConfigException as error:
        _complain(f"--config-name: {folder} has no recipe {error.missing_cfg_file!r}; it has {', '.join(sorted(path.stem for path in Path(folder).glob('*.yaml')))}")


def _complain(text: str) -> None:
    """Say what the user did wrong, from one rank, and end."""
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        _let_others_speak(2, seconds=5)
    print(f"error: {text}" + (f" (rank {rank})" if rank else ""), file=sys.stderr, flush=True)
    _leave(2)


def _recipes(path: str) -> str:
    """An absolute folder of recipes: `path` counts from where the command was typed or, as Hydra has it, from this package."""
    return str(next((found for base in (Path.cwd(), Path(__file__).parent) if (found := (base / path).resolve()).is_dir()), path))


def _override(argument: str) -> str:
    """Recipes hold only differences, so every setting given here may be new to them: checks.py tells which exist."""
    flags = {"--track_metrics": "run.track_metrics=[console,jsonl,csv,tensorboard]", "--verify": "run.resume=verify"}
    argument = flags.get(argument, argument)
    is_setting = "=" in argument and argument[0] not in "+~-" and not argument.startswith("hydra")
    return "++" + argument if is_setting else argument


def _let_others_speak(code: int, *, seconds: float) -> None:
    """Wait for the rank that has the message: when it is gone torchrun ends this one. If nobody speaks, the caller does."""
    signal.signal(signal.SIGTERM, lambda *_: _leave(code))
    time.sleep(seconds)


def _leave(code: int) -> None:
    """End at once: engines that share this process have nothing left to say, and must not wait for each other's teardown."""
    process.end(code)

"""The ranks of a run on this host: how many it needs, and their start."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from parallel import device
from parallel.bridge import new_address
from parallel.runtime.launch import PARENT
from parallel.runtime.refusal import short_repr
from verl_megatron.checks.ranks import ranks_needed
from verl_megatron.config import SupervisedConfig, TrainerConfig
from verl_megatron.model_specs import layout_of, models_of, num_training_ranks, rollout_devices

MOST_LOCAL = 1024  # ranks of one host
LAUNCHER_OPTIONS = {"--ranks": 1, "--max-restarts": 0}  # least value
FROM_TERMINAL_S = 0.5  # in which a Ctrl-C reaches both worlds without this process
ENDING_S = 60.0  # for the rollout world, once the training world has ended
OF_A_RANK = ("RANK", "LOCAL_RANK")  # environment variables that a launcher sets for each rank


def is_rank() -> bool:
    """Whether a launcher has started this process as a rank."""
    return any(name in os.environ for name in OF_A_RANK)


def suits(config: TrainerConfig | SupervisedConfig, ranks: int) -> bool:
    """Whether the layouts of all models, and vLLM's replicas, divide this number of ranks."""
    try:
        for spec in models_of(config):
            layout_of(spec.model, ranks)
    except ValueError:
        return False
    return not isinstance(config, TrainerConfig) or not ranks % config.rollout.tp


def ranks_of(config: TrainerConfig | SupervisedConfig) -> int:
    """Return how many ranks to start: all GPUs of this host as far as the layouts divide them.

    Without GPUs, the fewest that the layouts need. 1 if the layouts cannot be read; checks then say why.
    """
    try:
        fewest = ranks_needed(config)
    except ValueError:
        return 1
    gpus = device.visible_gpus()
    return max((count for count in range(fewest, gpus + 1) if suits(config, count)), default=fewest)


def launcher_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split off --ranks and --max-restarts (0 if absent); return them and the other arguments.

    Raises:
        ValueError: a value that is no such number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in LAUNCHER_OPTIONS:
        parser.add_argument(option)
    try:
        given, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name}: {error.message}; give a number after it") from None
    for option, least in LAUNCHER_OPTIONS.items():
        name = option[2:].replace("-", "_")
        text = getattr(given, name)
        if text is None:
            text = "0"
        elif not (isinstance(text, str) and text.isdecimal() and least <= int(text[:7]) <= MOST_LOCAL):
            raise ValueError(
                f"{option} {short_repr(text)} must be a whole number from {least} to {MOST_LOCAL}; change it"
            )
        setattr(given, name, int(text))
    return given, rest


def _prepare() -> None:
    if not device.is_gpu():
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # compiling takes longer than it saves
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def start_worlds(module: str, arguments: Sequence[str], config: TrainerConfig, *, restarts: int) -> NoReturn:
    """Run the training and the rollout world of this host, and exit when the training world has ended.

    Each has the launcher of `start`. If the rollout world ends first, the training world is ended, too.
    """
    _prepare()
    sizes = {"train": num_training_ranks(config), "rollout": len(rollout_devices(config))}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.is_gpu() else []
    gpus = [gpu for gpu in gpus if gpu] or [str(gpu) for gpu in range(device.visible_gpus())]
    common, first, worlds = dict(os.environ) | new_address() | {PARENT: str(os.getpid())}, 0, {}
    for role, ranks in sizes.items():
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + ranks])} if gpus else {}
        command = _command(module, [*arguments, "--role", role], ranks=ranks, restarts=restarts)
        quiet = (
            {"TORCH_CPP_LOG_LEVEL": "ERROR"} if role == "rollout" else {}
        )  # if the store ends with training
        group = 0 if role == "rollout" else None  # Ctrl-C reaches training alone, and this process
        worlds[role] = subprocess.Popen(command, env=common | own | quiet, process_group=group)
        first += ranks
    signal.signal(signal.SIGTERM, lambda *_: worlds["train"].terminate())  # it saves, and ends the other
    interrupted: list[float] = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(time.monotonic()))
    while worlds["train"].poll() is None and (interrupted or worlds["rollout"].poll() is None):
        time.sleep(0.05)
        if interrupted:
            worlds["rollout"].kill()  # its ranks end with it
        if interrupted and time.monotonic() > interrupted[0] + FROM_TERMINAL_S:
            worlds["train"].send_signal(signal.SIGINT)
            break
    ended = worlds["train"].poll() is not None or bool(interrupted)
    later = worlds["rollout" if ended else "train"]
    try:
        later.wait(ENDING_S if later is worlds["rollout"] else 1.0)
    except subprocess.TimeoutExpired:
        later.send_signal(signal.SIGTERM if later is worlds["rollout"] else signal.SIGKILL)
    codes = [world.wait() for world in (worlds["train"], worlds["rollout"])]
    status = codes[0] if later is worlds["rollout"] else codes[1] or 1
    sys.exit(status if status >= 0 else 128 - status)


def start(module: str, arguments: Sequence[str], *, ranks: int, restarts: int = 0) -> NoReturn:
    """Replace this process by the launcher of `python -m module arguments` on `ranks` ranks of this host."""
    _prepare()
    command = _command(module, arguments, ranks=ranks, restarts=restarts)
    os.execv(sys.executable, command)


def _command(module: str, arguments: Sequence[str], *, ranks: int, restarts: int) -> list[str]:
    """Return the launcher's command for `python -m module arguments` on this host."""
    launcher = ["--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    launcher += ["--rdzv-id", "verl_megatron", "--local-addr", "127.0.0.1"]
    return [sys.executable, "-m", "parallel.runtime.launch", *launcher, "-m", module, *arguments]

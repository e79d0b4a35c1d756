"""The ranks of a run on this host: how many it needs, what the host cannot compute, and their start."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from parallel import device
from parallel.gate import Gate, may_go_ahead
from parallel.runtime import launch, process
from parallel.runtime.forking.client import may_fork
from verl_megatron.algorithms import ALGORITHMS
from verl_megatron.checks.limits import check_types, check_values
from verl_megatron.checks.models import FROZEN
from verl_megatron.checks.ranks import named_layouts, ranks_needed
from verl_megatron.config import AlgorithmConfig, SupervisedConfig, TrainerConfig
from verl_megatron.launch.options import MOST_LOCAL
from verl_megatron.model_specs import layout_of, models_of


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

    Without GPUs, the fewest that the layouts need.

    Raises:
        ValueError: they need more than a host starts.
    """
    if isinstance(config, TrainerConfig) and config.algorithm.name not in ALGORITHMS:
        config = replace(config, algorithm=AlgorithmConfig())  # checks refuse the name, and only that
    fewest = ranks_needed(config)
    if fewest > MOST_LOCAL:
        raise ValueError(
            f"{named_layouts(config)} need {fewest:,} ranks, and this command starts at "
            f"most {MOST_LOCAL:,} on one host; choose smaller ones, or start the run on several hosts"
        )
    gpus = device.visible_gpus()
    if isinstance(config, TrainerConfig) and config.rollout.devices:
        return fewest  # they name all ranks
    return max((count for count in range(fewest, gpus + 1) if suits(config, count)), default=fewest)


def prepare() -> None:
    """Set what ranks inherit, and write out what this process has printed."""
    if not device.is_gpu():
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # compiling takes longer than it saves
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def start(
    module: str, arguments: Sequence[str], *, ranks: int, restarts: int = 0, gate: Gate | None = None
) -> NoReturn:
    """Run `python -m module arguments` on `ranks` ranks of this host, and exit with their status.

    Args:
        gate: checks that the ranks wait for, once they have imported their modules.
    """
    prepare()
    gc.enable()
    sys.exit(launch.main(launcher_arguments(module, arguments, ranks=ranks, restarts=restarts), gate))


def check_and_start(
    module: str,
    arguments: Sequence[str],
    config: TrainerConfig | SupervisedConfig,
    *,
    ranks: Callable[[], int],
    restarts: int,
    check: Callable[[], object],
) -> NoReturn:
    """Run `check` in a process of its own, and `start` ranks.

    They start at once if each setting by itself is right and the host has a core to spare.

    Args:
        ranks: returns how many; it may raise what `check` says.
        check: exits with a message if the run cannot work.
    """
    _flush()
    # Before this process asks for GPUs: CUDA does not work in a fork of a process that has used it.
    gate = Gate(check)
    try:
        count = ranks()
    except ValueError:
        count = 0
    is_right = not (check_types(config) or check_values(config))
    early = is_right and may_go_ahead(count, forked=may_fork(module))
    if not early and (status := gate.wait()):
        process.end(status)
    start(module, arguments, ranks=count, restarts=restarts, gate=gate)


def launcher_arguments(module: str, arguments: Sequence[str], *, ranks: int, restarts: int) -> list[str]:
    """Return the launcher's arguments for `python -m module arguments` on this host."""
    launcher = ["--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    launcher += ["--rdzv-id", "verl_megatron", "--local-addr", "127.0.0.1"]
    return [*launcher, "-m", module, *arguments]


def machine_problems(config: TrainerConfig | SupervisedConfig) -> list[str]:
    """Return the settings that cannot work here; only those that ask for fp8 look for GPUs."""
    remedies = {"engine.dtype": "use auto"} if config.engine.dtype == "fp8" else {}
    quantizes = False
    if isinstance(config, TrainerConfig):
        in_fp8 = [name for name in FROZEN if getattr(config, name).dtype == "fp8"]
        remedies |= {f"{name}.dtype": "leave it at auto" for name in in_fp8}
        is_auto = config.rollout.dtype == config.engine.dtype == "auto"
        quantizes = is_auto and config.rollout.weight_dtype == "fp8"
    if not (remedies or quantizes) or device.is_gpu():
        return []
    problems = [
        f"{setting}=fp8 needs GPUs that compute in fp8, and this machine has none; {remedy}"
        for setting, remedy in remedies.items()
    ]
    if quantizes:
        problems.append(
            "rollout.weight_dtype=fp8 quantizes weights of two bytes, and vLLM's are float32 on this machine "
            "without GPUs; set rollout.dtype=bfloat16"
        )
    return problems

"""Preflight check: rejects a run that cannot fit its GPUs before a model is built, and suggests settings."""

from dataclasses import replace

import torch

from parallel import device
from verl_megatron.config import TrainerConfig
from verl_megatron.config.gpus import machine_of
from verl_megatron.planner.machine import GIB, MACHINES, Machine
from verl_megatron.planner.memory import Problem, plan_memory, problems_of
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.text import alternatives

TOLERANCE = 0.02  # share of a GPU by which a plan may exceed it without being rejected
# Lower bounds of a process's needs. Plans assume more (Machine.process_bytes and the like), part of which
# depends on versions and on chance.
LEAST = dict(
    process_bytes=1.5 * GIB, communicator_bytes=0.1 * GIB, process_host_bytes=2 * GIB, prefill_tokens=1.0
)


def machine_here() -> Machine | None:
    """Return the machine of this process with its actual memory; None on a CPU.

    An unknown GPU is treated as an h100 with its own memory.
    """
    if not device.is_gpu():
        return None
    properties = torch.cuda.get_device_properties(device.device())
    base = MACHINES[machine_of(properties.name) or "h100"]
    prefill_tokens = base.prefill_tokens if properties.total_memory >= 70 * GIB else 8192
    return replace(
        base,
        gpu_bytes=float(properties.total_memory),
        host_bytes=float(device.host_memory_bytes()),
        prefill_tokens=prefill_tokens,
    )


def check_fits(
    config: TrainerConfig, *, world_size: int, machine: Machine | None, ranks_per_host: int = 8
) -> list[str]:
    """Return an error if the run cannot fit these GPUs; empty if it may fit.

    The error suggests the three best settings that fit. A run is rejected only if it exceeds a GPU even with
    the least memory that a process can need.

    Args:
        config: settings that `check_config` accepted.
        machine: None (a CPU) is not checked.
    """
    if machine is None:
        return []
    run = PlannedRun.of(config, world_size=world_size, ranks_per_host=ranks_per_host)
    least = replace(machine, **LEAST)
    problems = problems_of(run, least, plan_memory(run, least), margin=-TOLERANCE)
    return [_refusal(config, problems, world_size, machine, ranks_per_host)] if problems else []


def _refusal(
    config: TrainerConfig, problems: list[Problem], world_size: int, machine: Machine, ranks_per_host: int
) -> str:
    lines = alternatives(config, world_size=world_size, machine=machine, ranks_per_host=ranks_per_host)
    reasons = "; ".join(map(str, problems))
    remedy = (
        "use the settings of one of these lines:\n" + "\n".join(f"    {line}" for line in lines)
        if lines
        else "use more GPUs, shorter samples or smaller models"
    )
    return f"this run cannot fit {world_size} GPUs of {machine.gpu_bytes / GIB:.0f} GiB: {reasons}; {remedy}"

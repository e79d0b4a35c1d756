"""A supervised run as a plan sees it: the optimizer steps of an actor, of which every row is as long as the settings allow."""

from collections.abc import Callable
from dataclasses import replace

from parallel.weights.architecture import Architecture, read_architecture
from verl_megatron.config import AlgorithmConfig, DataConfig, RolloutConfig, SFTConfig, TrainerConfig
from verl_megatron.planner.case import Case
from verl_megatron.planner.machine import GIB, Machine, find_machine
from verl_megatron.planner.memory import MemoryPlan, Problem, plan_memory
from verl_megatron.planner.preflight import LEAST, TOLERANCE
from verl_megatron.planner.text import DOES_NOT_FIT
from verl_megatron.planner.training import step_seconds

STEP = "actor_update"  # the only phase
REMEDY = "give actor.layout more tp or pp, lower engine.tokens_per_micro_batch or set engine.recompute=full"


def supervised_case(
    config: SFTConfig,
    *,
    world_size: int,
    ranks_per_host: int = 8,
    read: Callable[[str], Architecture] = read_architecture,
) -> Case:
    """The actor alone, with a step's rows as one mini-batch; all but a row's first token is response.

    Raises:
        ValueError: as `Case.of`.
    """
    alone = TrainerConfig(
        actor=config.actor,
        engine=config.engine,
        data=DataConfig(max_prompt_tokens=1, prompts_per_iteration=config.data.rows_per_step),
        rollout=RolloutConfig(max_tokens=max(1, config.data.max_tokens - 1)),
        algorithm=AlgorithmConfig(name="grpo", mini_batches=1, kl_coef=0.0),
    )
    return Case.of(alone, world_size=world_size, ranks_per_host=ranks_per_host, read=read)


def supervised_report(
    config: SFTConfig, *, world_size: int, gpu: str = "h200", ranks_per_host: int = 8
) -> str:
    """Memory of the fullest rank in a step, its predicted seconds, and whether it fits.

    Raises:
        ValueError: an unknown machine, or a model folder or layout that cannot be understood.
    """
    machine = find_machine(gpu)
    case = supervised_case(config, world_size=world_size, ranks_per_host=ranks_per_host)
    memory = plan_memory(case, machine)
    fullest = max(memory.kinds, key=lambda kind: kind.total(STEP))
    parts = " ".join(f"{part} {size / GIB:.1f}" for part, size in fullest.phases[STEP].items() if size)
    problem = _problem(memory, machine.gpu_bytes)
    free = (machine.gpu_bytes - fullest.total(STEP)) / GIB
    return "\n".join(
        [
            f"{world_size} x {machine.name}: {fullest.total(STEP) / GIB:.1f} GiB of {machine.gpu_bytes / GIB:.1f} on the fullest GPU ({parts})",
            f"seconds predicted: {step_seconds(case, machine, case.actor):.1f} a step of rows of {config.data.max_tokens} tokens",
            f"{DOES_NOT_FIT}\n  {problem}; {REMEDY}"
            if problem
            else f"It fits: {free:.1f} GiB stay free on the fullest GPU.",
        ]
    )


def check_supervised_fits(
    config: SFTConfig,
    *,
    world_size: int,
    machine: Machine | None,
    ranks_per_host: int = 8,
    read: Callable[[str], Architecture] = read_architecture,
) -> list[str]:
    """What of a supervised run has no room on these GPUs even with the least that a process can need; empty if it may fit, or on a CPU (None)."""
    if machine is None:
        return []
    least = replace(machine, **LEAST)
    memory = plan_memory(
        supervised_case(config, world_size=world_size, ranks_per_host=ranks_per_host, read=read), least
    )
    problem = _problem(memory, least.gpu_bytes * (1 + TOLERANCE))
    return (
        [f"this run cannot fit {world_size} GPUs of {machine.gpu_bytes / GIB:.0f} GiB: {problem}; {REMEDY}"]
        if problem
        else []
    )


def _problem(memory: MemoryPlan, room: float) -> Problem | None:
    needed = memory.phase_bytes(STEP)
    return Problem("a step", needed, room) if needed > room else None

"""Plans of supervised runs: an actor's optimizer steps on samples as long as the settings allow."""

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
    """Build the plan of the actor alone, with a step's samples as one mini-batch.

    All tokens of a sample but the first are response.

    Raises:
        ValueError: as `Case.of`.
    """
    alone = TrainerConfig(
        actor=config.actor,
        engine=config.engine,
        data=DataConfig(max_prompt_tokens=1, prompts_per_iteration=config.data.samples_per_step),
        rollout=RolloutConfig(max_tokens=max(1, config.data.max_tokens - 1)),
        algorithm=AlgorithmConfig(name="grpo", num_mini_batches=1, kl_coef=0.0),
    )
    return Case.of(alone, world_size=world_size, ranks_per_host=ranks_per_host, read=read)


def supervised_report(
    config: SFTConfig, *, world_size: int, gpu: str = "h200", ranks_per_host: int = 8
) -> str:
    """Report the memory of the fullest rank in a step, its predicted seconds, and whether it fits.

    Raises:
        ValueError: an unknown machine, or an invalid model folder or layout.
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
            f"{world_size} x {machine.name}: {fullest.total(STEP) / GIB:.1f} GiB"
            f" of {machine.gpu_bytes / GIB:.1f} on the fullest GPU ({parts})",
            f"seconds predicted: {step_seconds(case, machine, case.actor):.1f}"
            f" a step of samples of {config.data.max_tokens} tokens",
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
    """Return an error if a supervised run cannot fit these GPUs even with the least memory a process needs.

    Empty if it may fit, or on a CPU (`machine` None).
    """
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

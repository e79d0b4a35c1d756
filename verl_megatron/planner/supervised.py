"""Plans of supervised runs: a model's optimizer steps on samples as long as the settings allow."""

from collections.abc import Callable
from dataclasses import replace

from parallel.weights.architecture import Architecture, read_architecture
from verl_megatron.config import (
    AlgorithmConfig,
    DataConfig,
    RolloutConfig,
    SupervisedConfig,
    TrainerConfig,
)
from verl_megatron.data.pairs import is_paired, items_per_step
from verl_megatron.model_specs import models_of
from verl_megatron.planner.machine import GIB, Machine, find_machine
from verl_megatron.planner.memory import HOST_MEMORY, MemoryPlan, Problem, host_problem, plan_memory
from verl_megatron.planner.planned_run import PlannedRole, PlannedRun
from verl_megatron.planner.preflight import LEAST, TOLERANCE
from verl_megatron.planner.text import DOES_NOT_FIT, budget_lines
from verl_megatron.planner.training import infer_seconds, step_seconds

STEP = "actor_update"  # the only phase


def supervised_run(
    config: SupervisedConfig,
    *,
    world_size: int,
    ranks_per_host: int = 8,
    read: Callable[[str], Architecture] = read_architecture,
) -> PlannedRun:
    """Build the plan of the trained model, called actor here, and of the reference if there is one.

    The samples of a step are one mini-batch. All tokens of a sample but the first are response.

    Raises:
        ValueError: as `PlannedRun.of`.
    """
    trained, *frozen = models_of(config)
    alone = TrainerConfig(
        run=config.run,
        actor=trained.model,
        engine=config.engine,
        data=DataConfig(
            max_prompt_tokens=1,
            prompts_per_iteration=items_per_step(config.data),
            samples_per_prompt=1 + is_paired(config.data),
        ),
        rollout=RolloutConfig(max_tokens=max(1, config.data.max_tokens - 1)),
        algorithm=AlgorithmConfig(name="grpo", num_mini_batches=1, kl_coef=0.0),
    )
    run = PlannedRun.of(alone, world_size=world_size, ranks_per_host=ranks_per_host, read=read)
    arch, layout = run.actor.arch, run.actor.layout
    actor = PlannedRole.of(name="actor", arch=arch, layout=layout, head=trained.head, trainable=True)
    others = (replace(actor, name=spec.name, trainable=False) for spec in frozen)
    return replace(run, roles=(actor, *others), unit=1 + is_paired(config.data))


def supervised_report(
    config: SupervisedConfig, *, world_size: int, gpu: str = "h200", ranks_per_host: int = 8
) -> str:
    """Report the memory of the fullest rank in a step, its predicted seconds, and whether it fits.

    Raises:
        ValueError: an unknown machine, or an invalid model folder or layout.
    """
    machine = find_machine(gpu)
    run = supervised_run(config, world_size=world_size, ranks_per_host=ranks_per_host)
    memory = plan_memory(run, machine)
    run = replace(run, budgets=memory.budgets)
    fullest = max(memory.kinds, key=lambda kind: kind.total(STEP))
    parts = " ".join(f"{part} {size / GIB:.1f}" for part, size in fullest.phases[STEP].items() if size)
    problem = _problem(memory, machine)
    seconds = step_seconds(run, machine, run.actor)
    if frozen := run.roles[1:]:
        seconds += infer_seconds(run, machine, frozen)
    free = (machine.gpu_bytes - fullest.total(STEP)) / GIB
    return "\n".join(
        [
            f"{world_size} x {machine.name}: {fullest.total(STEP) / GIB:.1f} GiB"
            f" of {machine.gpu_bytes / GIB:.1f} on the fullest GPU ({parts})",
            *budget_lines(memory),
            f"seconds predicted: {seconds:.1f} a step of samples of {config.data.max_tokens} tokens",
            f"{DOES_NOT_FIT}\n  {problem}; {_remedy(config, run, problem)}"
            if problem
            else f"It fits: {free:.1f} GiB stay free on the fullest GPU.",
        ]
    )


def check_supervised_fits(
    config: SupervisedConfig,
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
    run = supervised_run(config, world_size=world_size, ranks_per_host=ranks_per_host, read=read)
    memory = plan_memory(run, least)
    problem = _problem(memory, least, margin=-TOLERANCE)
    return (
        [
            f"this run cannot fit {world_size} GPUs of {machine.gpu_bytes / GIB:.0f} GiB: {problem}; "
            + _remedy(config, run, problem)
        ]
        if problem
        else []
    )


def _problem(memory: MemoryPlan, machine: Machine, *, margin: float = 0.0) -> Problem | None:
    room = machine.gpu_bytes * (1 - margin)
    for cause, phase in (("a step", STEP), ("building the models", "build")):
        if (needed := memory.phase_bytes(phase)) > room:
            return Problem(cause, needed, room)
    return host_problem(memory, machine, margin=margin)


def _remedy(config: SupervisedConfig, run: PlannedRun, problem: Problem) -> str:
    if problem.cause == HOST_MEMORY:
        return "use more hosts, or set run.save_interval=0: checkpoints are written from copies there"
    engine, layout = config.engine, run.actor.layout
    more = f"more tp or pp in {models_of(config)[0].section}.layout"
    if engine.sharding == "full":
        ways = ["use more GPUs", f"set engine.sharding=replicated with {more}" * (run.world_size > 1)]
    else:
        ways = [f"choose {more}" if run.world_size > 1 else "use more GPUs"]
        is_split = layout.tp * layout.pp * layout.cp > 1
        if not (is_split or engine.dynamic_batching or engine.dtype == "fp8"):
            ways.append("set engine.sharding=full")
    if engine.recompute != "full":
        ways.append("set engine.recompute=full")
    return " or ".join([*filter(None, ways), "lower engine.tokens_per_micro_batch"])

"""Planned runs and rows of the scaling benchmark, and a model of three sizes."""

from verl_megatron.benchmarks.scaling.model import Scaling, terms_of
from verl_megatron.benchmarks.scaling.rows import (
    MEASURED,
    Row,
    described,
)
from verl_megatron.benchmarks.scaling.runs import architecture
from verl_megatron.config import CriticConfig, ModelConfig, TrainerConfig
from verl_megatron.planner.machine import MACHINES
from verl_megatron.planner.planned_run import PlannedRun

PHASES = (
    "reshard",
    "rollout",
    "return",
    "reward",
    "log_probs",
    "values",
    "advantages",
    "critic_update",
    "actor_update",
)


def run_on(
    ranks: int, layout: str, *, rollout: int = 1, prompts: int = 64, algorithm: str = "ppo"
) -> PlannedRun:
    config = TrainerConfig(
        actor=ModelConfig(path="llama3-8b", layout=layout), critic=CriticConfig(layout=layout)
    )
    config.algorithm.name, config.algorithm.num_mini_batches, config.rollout.tp = algorithm, 4, rollout
    config.algorithm.reuse_logprobs = False
    config.data.prompts_per_iteration, config.data.max_prompt_tokens, config.rollout.max_tokens = (
        prompts,
        512,
        512,
    )
    return PlannedRun.of(config, world_size=ranks, ranks_per_host=ranks, read=architecture)


def row_on(run: PlannedRun, seconds: dict[str, float], source: str = MEASURED) -> Row:
    return Row(source=source, seconds=seconds, **described(run))


def scaling_of(
    layouts=("tp1", "tp2", "tp2pp2"),
    *,
    links=MACHINES["h200"],
    strong: bool = False,
    host: int = 8,
    prompts: int = 256,
) -> Scaling:
    """Three sizes whose seconds have work, tensor-parallel exchange and a term of log2 n."""
    runs = [
        run_on(n, layout, rollout=min(n, 2), prompts=prompts if strong else prompts * n // 4)
        for n, layout in zip((1, 2, 4), layouts)
    ]
    rows = []
    for run in runs:
        seconds = {}
        for phase in PHASES:
            terms = terms_of(run, phase)
            seconds[phase] = (
                0.02 * terms["work"] + 1e-4 * min(terms.get("tensor", 0.0), 100) + 0.01 * terms["sync"]
            )
        rows.append(row_on(run, seconds))
    return Scaling(runs=runs, rows=rows, links=links, ranks_per_host=host, strong=strong)

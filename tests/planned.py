"""Runs to plan: the 8B recipe on built-in shapes."""

from dataclasses import replace
from functools import cache

from parallel.weights.architecture import Architecture
from parallel.weights.shapes import shape
from verl_megatron.config import TrainerConfig
from verl_megatron.planner.machine import MACHINES
from verl_megatron.planner.planned_run import PlannedRun

H200 = MACHINES["h200"]


@cache
def arch(name: str) -> Architecture:
    """A built-in shape by its name."""
    return Architecture.from_hf(shape(name))


def run_config(
    layout: str = "tp2pp2sp",
    *,
    model: str = "llama3-8b",
    samples: int = 256,
    tokens: int = 512,
    rollout: int = 2,
    share: float = 0.4,
    **engine,
) -> TrainerConfig:
    """The 8B recipe with its critic and reference model, on other layouts."""
    config = TrainerConfig()
    config.actor.path = config.critic.path = model
    config.actor.layout = config.critic.layout = layout
    config.rollout.tp, config.rollout.max_tokens, config.rollout.gpu_memory_utilization = (
        rollout,
        tokens,
        share,
    )
    config.data.max_prompt_tokens, config.data.prompts_per_iteration = tokens, samples
    config.algorithm.num_mini_batches, config.algorithm.kl_coef = 4, 0.01
    config.algorithm.reuse_logprobs = False  # as in the measured runs
    config.engine = replace(config.engine, **engine)
    return config


def run_of(config: TrainerConfig, gpus: int, **kwargs) -> PlannedRun:
    """On `gpus` GPUs; paths are names of shapes."""
    return PlannedRun.of(config, world_size=gpus, read=arch, **kwargs)


def actor_alone(config: TrainerConfig, gpus: int) -> PlannedRun:
    """Without critic and reference model."""
    config.algorithm.name, config.algorithm.kl_coef = "grpo", 0.0
    return run_of(config, gpus)

"""Checks of a run's settings: all problems are reported together, before any model is built.

A problem names the setting, its value and a remedy.
"""

from dataclasses import replace
from typing import Any

from parallel.runtime.refusal import short_repr
from parallel.weights.architecture import Architecture
from verl_megatron.algorithms import ALGORITHMS
from verl_megatron.checks.batches import check_batch
from verl_megatron.checks.limits import check_types, check_values
from verl_megatron.checks.models import CheckedModel, check_model
from verl_megatron.checks.output_folder import output_problems
from verl_megatron.checks.problems import problem_of
from verl_megatron.checks.rollout import check_importance, check_rollout
from verl_megatron.checks.versions import require
from verl_megatron.config import MISSING, EngineConfig, RunConfig, SFTConfig, TrainerConfig
from verl_megatron.data.json_lines import file_problem
from verl_megatron.observe.tracking import check_sinks
from verl_megatron.rewards.pool import check_reward


def check_config(config: TrainerConfig, *, world_size: int) -> list[str]:
    """Return all problems of the settings of an RL run on `world_size` ranks; empty if there are none."""
    if problems := check_types(config):
        return problems
    problems = check_values(config) + _check_run(config.run, config.data) + _check_engine(config.engine)
    algorithm = ALGORITHMS.get(config.algorithm.name)
    needs_critic = algorithm is not None and algorithm.needs_critic
    actor = _check_actor(config, world_size)
    problems += actor.problems
    layouts = {"actor": actor.layout}
    if needs_critic:
        path = config.critic.path or (config.actor.path if actor.arch is not None else "")
        critic = check_model(
            "critic", replace(config.critic, path=path), config.engine, world_size=world_size
        )
        problems += critic.problems
        layouts["critic"] = critic.layout
    problems += output_problems(config.run, {role: getattr(config, role).path for role in layouts})
    problems += _check_reward(config, world_size)
    problems += check_rollout(config, actor.arch, world_size)
    problems += check_batch(config, layouts)
    problems += _check_algorithm(config, needs_critic)
    return problems


def check_sft_config(config: SFTConfig, *, world_size: int) -> list[str]:
    """Return all problems of a supervised run's settings on `world_size` ranks; empty if there are none."""
    if problems := check_types(config):
        return problems
    problems = check_values(config) + _check_run(config.run, config.data) + _check_engine(config.engine)
    actor = _check_actor(config, world_size)
    problems += actor.problems
    problems += output_problems(config.run, {"actor": config.actor.path})
    data = config.data
    if actor.layout is not None and data.samples_per_step < actor.layout.dp:
        problems.append(
            f"data.samples_per_step={data.samples_per_step} leaves some of the {actor.layout.dp} "
            f"data-parallel ranks of actor.layout={actor.layout} without a sample; raise it"
        )
    if actor.arch is not None and data.max_tokens > actor.arch.max_positions:
        problems.append(
            f"data.max_tokens={data.max_tokens} exceeds the model's {actor.arch.max_positions} positions; "
            "lower it"
        )
    if config.run.save_interval:
        problems.append(
            f"run.save_interval={config.run.save_interval}: a supervised run writes no checkpoints, "
            "only its model at the end; leave it at 0"
        )
    return problems


def check_planned(config: TrainerConfig, arch: Architecture, world_size: int) -> list[str]:
    """Check a run whose layouts are not chosen yet; values are in their intervals, `arch` is the actor's."""
    return (
        check_batch(config, {})
        + check_rollout(config, arch, world_size)
        + _check_algorithm(config, ALGORITHMS[config.algorithm.name].needs_critic)
    )


def _check_actor(config: TrainerConfig | SFTConfig, world_size: int) -> CheckedModel:
    actor = check_model("actor", config.actor, config.engine, world_size=world_size)
    if not config.actor.path:
        actor.problems.append("actor.path has to be given; name a Hugging Face folder")
    return actor


def _check_run(run: RunConfig, data: Any) -> list[str]:
    """Check data files, metric sinks, and the validation and checkpoint intervals."""
    problems = problem_of(check_sinks, run.track_metrics)
    if twice := sorted({name for name in run.track_metrics if run.track_metrics.count(name) > 1}):
        problems.append(
            f"run.track_metrics names {', '.join(twice)} twice, which would write every line twice; "
            "take one out"
        )
    if data.train in ("", MISSING):
        problems.append("data.train has to be given; name a .jsonl file")
    for name in ("train", "validation"):
        path = getattr(data, name)
        if path not in ("", MISSING) and (problem := file_problem(path)):
            problems.append(f"data.{name}={short_repr(path)} {problem}")
    if run.validate_interval > 0 and not data.validation:
        problems.append(
            f"run.validate_interval={run.validate_interval} has nothing to validate on; "
            "set data.validation or leave the interval at 0"
        )
    if run.keep_best_k > 0 and (not run.validate_interval or run.save_interval % run.validate_interval):
        problems.append(
            f"run.keep_best_k={run.keep_best_k} compares the validation accuracy at each checkpoint, "
            f"and run.save_interval={run.save_interval}"
            f" is no multiple of run.validate_interval={run.validate_interval}; make it one, "
            "or leave keep_best_k at 0"
        )
    return problems


def _check_engine(engine: EngineConfig) -> list[str]:
    problems = (
        problem_of(require, "transformer_engine", feature="engine.transformer_impl=te")
        if engine.transformer_impl == "te"
        else []
    )
    if engine.dtype == "fp8" and engine.transformer_impl == "local":
        problems.append(
            "engine.dtype=fp8 with engine.transformer_impl=local: only transformer-engine's layers compute "
            "in fp8; leave engine.transformer_impl at auto"
        )
    if len(engine.adam_betas) != 2:
        problems.append(
            f"engine.adam_betas={short_repr(list(engine.adam_betas))} must be two numbers, such as [0.9, "
            "0.95]"
        )
    return problems


def _check_reward(config: TrainerConfig, world_size: int) -> list[str]:
    reward = config.reward
    if not reward.function and not reward.path:
        return ["reward.function and reward.path are both empty, so nothing gives a score; set one of them"]
    problems = check_reward(reward.function) if reward.function else []
    if reward.path:
        problems += check_model("reward", reward, config.engine, world_size=world_size).problems
    return problems


def _check_algorithm(config: TrainerConfig, needs_critic: bool) -> list[str]:
    algorithm, samples, problems = config.algorithm, config.data.samples_per_prompt, []
    least = ALGORITHMS[algorithm.name].min_samples if algorithm.name in ALGORITHMS else 1
    if samples < least:
        problems.append(
            f"data.samples_per_prompt={samples} with algorithm.name={algorithm.name} compares a sample with "
            f"no other; use at least {least}"
        )
    if algorithm.critic_warmup and not needs_critic:
        problems.append(
            f"algorithm.critic_warmup={algorithm.critic_warmup} with algorithm.name={algorithm.name}, "
            "which has no critic; leave it at 0"
        )
    if algorithm.kl_ctrl_target and not algorithm.kl_coef:
        problems.append(
            f"algorithm.kl_ctrl_target={algorithm.kl_ctrl_target} needs a coefficient to start from; "
            "set algorithm.kl_coef above 0"
        )
    if algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        problems.append(
            "algorithm.kl_in=loss with algorithm.kl_estimator=k1 penalizes nothing, "
            "as the expected gradient of k1 is 0;"
            " set kl_estimator=k2 or k3, or kl_in=reward"
        )
    return problems + check_importance(config)

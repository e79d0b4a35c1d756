"""Checks of a run's settings: all problems are reported together, before any model is built.

A problem names the setting, its value and a remedy.
"""

from dataclasses import replace
from itertools import chain
from typing import Any

from parallel.runtime.refusal import short_repr
from parallel.weights.architecture import Architecture
from verl_megatron.algorithms import ALGORITHMS
from verl_megatron.checks.algorithm import algorithm_problems
from verl_megatron.checks.batches import check_batch
from verl_megatron.checks.limits import check_types, check_values
from verl_megatron.checks.models import (
    FROZEN,
    CheckedModel,
    check_model,
    dtype_problems,
    scorer_problems,
)
from verl_megatron.checks.output_folder import output_problems
from verl_megatron.checks.problems import problem_of
from verl_megatron.checks.rollout import check_rollout
from verl_megatron.checks.versions import require
from verl_megatron.config import (
    MISSING,
    DPOConfig,
    EngineConfig,
    RewardConfig,
    RunConfig,
    SupervisedConfig,
    TrainerConfig,
)
from verl_megatron.data.formats.sources import NAME_ONE, has_weights, source_problem
from verl_megatron.data.pairs import is_paired, items_per_step
from verl_megatron.model_specs import ModelSpec, models_of
from verl_megatron.observe.tracking import check_sinks
from verl_megatron.rewards.answers import pattern_problem
from verl_megatron.rewards.checks import check_reward
from verl_megatron.rewards.functions import CODE_SHARE, options_of
from verl_megatron.rewards.plan import functions_of


def check_config(config: TrainerConfig, *, world_size: int) -> list[str]:
    """Return all problems of the settings of an RL run on `world_size` ranks; empty if there are none."""
    if problems := check_types(config):
        return problems
    problems = check_values(config) + _check_run(config.run, config.data) + _check_engine(config.engine)
    algorithm = ALGORITHMS.get(config.algorithm.name)
    needs = algorithm.needs if algorithm is not None else frozenset()
    actor = _check_first(ModelSpec.actor(config.actor), config.engine, world_size)
    problems += actor.problems
    layouts = {"actor": actor.layout}
    if "critic" in needs and not config.critic.share_trunk:
        path = config.critic.path or (config.actor.path if actor.arch is not None else "")
        critic = check_model(
            "critic", replace(config.critic, path=path), config.engine, world_size=world_size
        )
        problems += critic.problems
        layouts["critic"] = critic.layout
    written = ("actor", "critic") if "critic" in needs else ("actor",)
    read = {f"{name}.path": getattr(config, name).path for name in ("actor", "critic", "reward", "teacher")}
    problems += output_problems(config.run, written, read)
    problems += _check_reward(config)
    problems += scorer_problems(config, actor, world_size)
    problems += check_rollout(config, actor.arch, world_size)
    problems += check_batch(config, layouts)
    problems += algorithm_problems(config, needs)
    return problems


def check_supervised_config(config: SupervisedConfig, *, world_size: int) -> list[str]:
    """Return all problems of a supervised run's settings on `world_size` ranks; empty if there are none."""
    if problems := check_types(config):
        return problems
    problems = check_values(config) + _check_run(config.run, config.data) + _check_engine(config.engine)
    trained = models_of(config)[0]
    model = _check_first(trained, config.engine, world_size)
    problems += model.problems
    problems += output_problems(config.run, [trained.name], {f"{trained.section}.path": trained.model.path})
    if config.engine.shared_prompts:
        problems.append(
            "engine.shared_prompts=true belongs to runs that generate several samples of a prompt; leave it "
            "at false"
        )
    if (
        config.engine.lr_decay_style == "constant"
        and config.engine.min_lr_ratio != EngineConfig().min_lr_ratio
    ):
        problems.append(
            f"engine.min_lr_ratio={config.engine.min_lr_ratio} has no effect with "
            "engine.lr_decay_style=constant; leave it out or set lr_decay_style=linear or cosine"
        )
    data, count = config.data, items_per_step(config.data)
    name, item = ("pairs_per_step", "pair") if is_paired(data) else ("samples_per_step", "sample")
    if model.layout is not None and count < model.layout.dp:
        problems.append(
            f"data.{name}={count} leaves some of the {model.layout.dp} data-parallel ranks of "
            f"{trained.section}.layout={model.layout} without a {item}; raise it"
        )
    if model.arch is not None and data.max_tokens > model.arch.max_positions:
        problems.append(
            f"data.max_tokens={data.max_tokens} exceeds the model's {model.arch.max_positions} positions; "
            "lower it"
        )
    if config.run.keep_best_k and not is_paired(data):
        problems.append(
            f"run.keep_best_k={config.run.keep_best_k} compares validation accuracies, and supervised "
            "fine-tuning has a validation loss only; leave it at 0"
        )
    if isinstance(config, DPOConfig) and config.dpo.label_smoothing and config.dpo.loss != "sigmoid":
        problems.append(
            f"dpo.label_smoothing={config.dpo.label_smoothing} belongs to dpo.loss=sigmoid, "
            f"not to {config.dpo.loss}; leave it at 0 or use sigmoid"
        )
    return problems


def check_planned(config: TrainerConfig, arch: Architecture, world_size: int) -> list[str]:
    """Check a run whose layouts are not chosen yet; values are in their intervals, `arch` is the actor's."""
    dtypes = (dtype_problems(config, name, CheckedModel(f"{name}.layout")) for name in FROZEN)
    return (
        _engine_problems(config.engine)
        + list(chain.from_iterable(dtypes))
        + check_batch(config, {})
        + check_rollout(config, arch, world_size)
        + algorithm_problems(config, ALGORITHMS[config.algorithm.name].needs)
    )


def _check_first(spec: ModelSpec, engine: EngineConfig, world_size: int) -> CheckedModel:
    """Check the section of the model that a run is about, which must have a path."""
    found = check_model(spec.section, spec.model, engine, world_size=world_size)
    if not spec.model.path:
        found.problems.append(f"{spec.section}.path has to be given; name a Hugging Face folder")
    return found


def _check_run(run: RunConfig, data: Any) -> list[str]:
    """Check data files, metric sinks, and the validation and checkpoint intervals."""
    problems = problem_of(check_sinks, run.track_metrics)
    if twice := sorted({name for name in run.track_metrics if run.track_metrics.count(name) > 1}):
        problems.append(
            f"run.track_metrics names {', '.join(twice)} twice, which would write every line twice; "
            "take one out"
        )
    if data.train in ("", MISSING):
        problems.append(f"data.train has to be given; {NAME_ONE}")
    for name in ("train", "validation"):
        path = getattr(data, name)
        if path not in ("", MISSING) and (problem := source_problem(path)):
            problems.append(f"data.{name}={short_repr(path)} {problem}")
    if data.validation and has_weights(data.validation):
        problems.append(
            f"data.validation={short_repr(data.validation)} has weights, and validation takes every prompt "
            "once; leave them out"
        )
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
    return problems + _engine_problems(engine)


def _engine_problems(engine: EngineConfig) -> list[str]:
    """Return contradictions of compute settings, on any machine."""
    problems = []
    if engine.dtype == "fp8" and engine.transformer_impl == "local":
        problems.append(
            "engine.dtype=fp8 with engine.transformer_impl=local: only transformer-engine's layers compute "
            "in fp8; leave engine.transformer_impl at auto"
        )
    if engine.sharding == "full":
        problems += [
            f"engine.{name}={value} with engine.sharding=full: {reason}; {remedy}, or set "
            "engine.sharding=replicated"
            for name, value, reason, remedy in (
                ("dtype", "fp8", "weights are gathered in bfloat16", "use bfloat16"),
                ("dynamic_batching", True, "its probes are those of replicated weights", "leave it at false"),
                ("distributed_optimizer", False, "its state is divided with the weights", "leave it at true"),
            )
            if getattr(engine, name) == value
        ]
    if len(engine.adam_betas) != 2:
        problems.append(
            f"engine.adam_betas={short_repr(list(engine.adam_betas))} must be two numbers, such as [0.9, "
            "0.95]"
        )
    return problems


def _check_reward(config: TrainerConfig) -> list[str]:
    reward, algorithm = config.reward, ALGORITHMS.get(config.algorithm.name)
    if not reward.is_given:
        needed = [f"algorithm.name={config.algorithm.name}"] * (algorithm is None or algorithm.needs_rewards)
        needed += [f"data.validation={short_repr(config.data.validation)}"] * bool(config.data.validation)
        if not needed:
            return []
        who = f"{' and '.join(needed)} {'needs' if len(needed) == 1 else 'need'} scores"
        return [f"reward.function and reward.path are both empty, and {who}; set one of them"]
    problems = check_functions(reward) if reward.function else []
    if reward.overlong_tokens > config.rollout.max_tokens:
        problems.append(
            f"reward.overlong_tokens={reward.overlong_tokens} exceeds "
            f"rollout.max_tokens={config.rollout.max_tokens}; lower it"
        )
    return problems


def check_functions(reward: RewardConfig) -> list[str]:
    """Return the problems of the reward functions that are named, and of the settings that they read."""
    problems = check_reward(reward.function, options_of(reward))
    if not reward.format:
        problems.append("reward.format is empty, which only empty responses match; give a regular expression")
    if problem := pattern_problem(reward.format):
        problems.append(
            f"reward.format={short_repr(reward.format)} is no regular expression ({problem}); mend it"
        )
    most_s = CODE_SHARE * reward.timeout_s
    if "code" in functions_of(reward.function) and reward.code_timeout_s > most_s:
        problems.append(
            f"reward.code_timeout_s={reward.code_timeout_s:g} of one program is more than {CODE_SHARE:.0%} "
            f"of reward.timeout_s={reward.timeout_s:g}, which all programs of a sample share; lower it, or "
            "raise reward.timeout_s"
        )
    return problems

"""Checks of settings: all problems are reported together, before any model is built.

A problem names the setting, its value and a remedy.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel import device
from parallel.layout import Layout, parse_devices
from parallel.runtime.refusal import nearest, readable, shown
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import VOCAB_MULTIPLE, padded_vocab
from verl_megatron.algorithms import ALGORITHMS
from verl_megatron.checks.limits import check_types, check_values
from verl_megatron.checks.output_folder import output_problems
from verl_megatron.checks.versions import require
from verl_megatron.config import (
    LEAST_TEMPERATURE,
    MISSING,
    DPOConfig,
    EngineConfig,
    RolloutConfig,
    RunConfig,
    SupervisedConfig,
    TrainerConfig,
    present_name,
)
from verl_megatron.data.json_lines import file_problem
from verl_megatron.data.pairs import is_paired
from verl_megatron.model_specs import models_of
from verl_megatron.observe.tracking import check_sinks
from verl_megatron.rewards.pool import check_reward

Schema = TypeVar("Schema")
MOST_SAMPLES = 1_000_000  # samples per iteration: every rank has a table of all
MOST_STOPS, MOST_STOP_IDS = 1000, 1 << 31


def refuse(problems: list[str]) -> None:
    """Raise a ValueError that lists `problems`, if there are any."""
    if len(problems) == 1:
        raise ValueError(readable(problems[0]))
    if problems:
        raise ValueError(
            readable(
                f"{len(problems)} settings cannot work:\n"
                + "\n".join(f"  - {problem}" for problem in problems)
            )
        )


# ---- names and types ---------------------------------------------------------------------------------------


def structured(overrides: Mapping[str, Any] | DictConfig, schema: type[Schema]) -> Schema:
    """Return the settings of `schema` (such as TrainerConfig) with `overrides` applied.

    Raises:
        ValueError: lists all unknown sections and settings, values of a wrong type and missing settings.
    """
    given = _resolved(overrides)
    merged = OmegaConf.structured(schema)
    problems = []
    for section, values in given.items():
        if section not in merged:
            problems.append(
                f"{shown(section)[1:-1]} is no section{nearest(section, merged)}; "
                f"the sections are {', '.join(merged)}"
            )
        elif not isinstance(values, dict):
            problems.append(
                f"{section}={shown(values)} is no section with settings; give its settings one by one, "
                f"such as {section}.{next(iter(merged[section]))}"
            )
        else:
            problems += [
                problem
                for name, value in values.items()
                if (problem := _put(merged[section], section, name, value))
            ]
    problems += [f"{name} has to be given; add {name}=..." for name in sorted(OmegaConf.missing_keys(merged))]
    refuse(problems)
    return OmegaConf.to_object(merged)


def _resolved(overrides: Mapping[str, Any] | DictConfig) -> dict[str, Any]:
    try:
        return OmegaConf.to_container(
            overrides if isinstance(overrides, DictConfig) else OmegaConf.create(dict(overrides)),
            resolve=True,
        )
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{error.full_key or 'a setting'} cannot be read ({str(error).splitlines()[0]}); "
            f"give the value itself, or a ${{section.setting}} that exists"
        ) from None


def _put(section: DictConfig, section_name: str, name: str, value: Any) -> str:
    """Set one setting; return its problem, or an empty string."""
    known = list(section.keys())
    if new := present_name(name, known):
        return f"{section_name}.{name} is now called {section_name}.{new}; rename it"
    if name not in known:
        return (
            f"{section_name}.{shown(name)[1:-1]} is no setting{nearest(name, known)}; "
            f"{section_name} has {', '.join(known)}"
        )
    try:
        section[name] = value
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return (
            f"{section_name}.{name}={shown(value)} has a wrong type ({reason}); "
            f"give a value like {_example(section, name)}"
        )
    return ""


def _example(section: DictConfig, name: str) -> str:
    default = getattr(OmegaConf.get_type(section)(), name)
    return f"{default!r}" if default != [] else "[a, b]"


# ---- contradictions ----------------------------------------------------------------------------------------


def check_config(config: TrainerConfig, *, world_size: int) -> list[str]:
    """Return all problems of the settings of an RL run on `world_size` ranks; empty if there are none."""
    if problems := check_types(config):
        return problems
    problems = check_values(config) + _check_run(config.run, config.data) + _check_engine(config.engine)
    algorithm = ALGORITHMS.get(config.algorithm.name)
    needs_critic = algorithm is not None and algorithm.needs_critic
    actor, arch = _check_model(config.actor, "actor", world_size, problems, config.engine, required=True)
    layouts = {"actor": actor}
    if needs_critic:
        path = config.critic.path or (config.actor.path if arch is not None else "")
        critic = replace(config.critic, path=path)
        layouts["critic"], _ = _check_model(critic, "critic", world_size, problems, config.engine)
    problems += output_problems(config.run, {role: getattr(config, role).path for role in layouts})
    problems += _check_reward(config, world_size)
    problems += _check_rollout(config, arch, world_size)
    problems += _check_samples(config, layouts)
    problems += _check_algorithm(config, needs_critic)
    return problems


def check_supervised_config(config: SupervisedConfig, *, world_size: int) -> list[str]:
    """Return all problems of a supervised run's settings on `world_size` ranks; empty if there are none."""
    if problems := check_types(config):
        return problems
    problems = check_values(config) + _check_run(config.run, config.data) + _check_engine(config.engine)
    trained = models_of(config)[0]
    layout, arch = _check_model(
        trained.model, trained.section, world_size, problems, config.engine, required=True
    )
    problems += output_problems(config.run, {trained.name: trained.model.path})
    data = config.data
    name, items = ("pairs_per_step", "pair") if is_paired(data) else ("samples_per_step", "sample")
    if layout is not None and getattr(data, name) < layout.dp:
        problems.append(
            f"data.{name}={getattr(data, name)} leaves some of the {layout.dp} data-parallel ranks of "
            f"{trained.section}.layout={layout} without a {items}; raise it"
        )
    if arch is not None and data.max_tokens > arch.max_positions:
        problems.append(
            f"data.max_tokens={data.max_tokens} exceeds the model's {arch.max_positions} positions; lower it"
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


def _said_by(check, *args, **kwargs) -> list[str]:
    """Run `check` and return the message of its ValueError as a list; empty if it passes."""
    try:
        check(*args, **kwargs)
    except ValueError as error:
        return [str(error)]
    return []


def _check_run(run: RunConfig, data: Any) -> list[str]:
    """Check data files, metric sinks, the output folder, and the validation and checkpoint intervals."""
    problems = _said_by(check_sinks, run.track_metrics)
    if twice := sorted({name for name in run.track_metrics if run.track_metrics.count(name) > 1}):
        problems.append(
            f"run.track_metrics names {', '.join(twice)} twice, which would write every row twice; "
            "take one out"
        )
    if reason := _why_no_folder(run.output_dir):
        problems.append(
            f"run.output_dir={shown(run.output_dir)} {reason}; name a folder that can be written (it is made "
            "if need be)"
        )
    if data.train in ("", MISSING):
        problems.append("data.train has to be given; name a .jsonl file")
    for name in ("train", "validation"):
        path = getattr(data, name)
        if path not in ("", MISSING) and (problem := file_problem(path)):
            problems.append(f"data.{name}={shown(path)} {problem}")
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


def _why_no_folder(path: str) -> str:
    """Return why `path` is no writable folder, or an empty string."""
    if not path or not path.isprintable():
        return "is no name of a folder"
    existing = Path(path).absolute()
    try:
        while not existing.exists():
            if existing.is_symlink():
                return f"leads to {existing}, a link to what does not exist"
            if len(os.fsencode(existing.name)) > 255:
                return "has a name of more than 255 bytes"
            existing = existing.parent
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    if not existing.is_dir():
        return "is a file" if existing == Path(path).absolute() else f"is below the file {existing}"
    if not os.access(existing, os.W_OK | os.X_OK) or existing.parts[1:2] in (("proc",), ("sys",)):
        return f"cannot be written: {existing} is read-only"
    return ""


def _check_engine(engine: EngineConfig) -> list[str]:
    problems = (
        _said_by(require, "transformer_engine", feature="engine.transformer_impl=te")
        if engine.transformer_impl == "te"
        else []
    )
    if engine.dtype == "fp8" and engine.transformer_impl == "local":
        problems.append(
            "engine.dtype=fp8 with engine.transformer_impl=local: only transformer-engine's layers compute in fp8; "
            "leave the spec at auto"
        )
    if len(engine.adam_betas) != 2:
        problems.append(
            f"engine.adam_betas={shown(list(engine.adam_betas))} must be two numbers, such as [0.9, 0.95]"
        )
    return problems


def _check_model(
    model: Any,
    name: str,
    world_size: int,
    problems: list[str],
    engine: EngineConfig,
    *,
    required: bool = False,
) -> tuple[Layout | None, Architecture | None]:
    """Return layout and architecture of a model section, as far as they are valid; append to `problems`."""
    layout = arch = None
    try:
        layout = Layout.parse(
            model.layout, parse_devices(model.devices, world_size), tuple(getattr(model, "stage_layers", ()))
        )
    except ValueError as error:
        problems.append(
            f"{name}.layout={shown(model.layout)}, {name}.devices={shown(model.devices)}, "
            f"{world_size} ranks started: {error}"
        )
    if model.path:
        found = _said_by(read_architecture, model.path)
        problems += [f"{name}.path={shown(model.path)}: {problem}" for problem in found]
        arch = None if found else read_architecture(model.path)
    elif required:
        problems.append(f"{name}.path has to be given; name a Hugging Face folder")
    if layout is not None and arch is not None:
        problems += [
            f"{name}.layout={model.layout!r}: {problem}"
            for problem in _check_split(arch, layout, engine.dtype)
        ]
    return layout, arch


def _check_split(arch: Architecture, layout: Layout, dtype: str) -> list[str]:
    """Return what prevents the model from being split by this layout."""
    problems = _check_tp(arch, layout.tp) + _said_by(layout.layers_of, arch.num_layers)
    if len(set(layout.stage_layers[1:-1])) > 1:
        problems.append(
            f"stage_layers={list(layout.stage_layers)}: only the first and the last pipeline stage may "
            "differ from the others; make those between alike"
        )
    if dtype == "fp8":
        widths = {
            "hidden size": arch.hidden_size,
            "heads' channels": arch.num_heads * arch.head_dim // layout.tp,
            "feed-forward channels": arch.intermediate_size // layout.tp,
        }
        wrong = " and ".join(f"{width} {name}" for name, width in widths.items() if width % 16)
        problems += [
            f"engine.dtype=fp8 multiplies matrices whose sides are multiples of 16, and a rank has {wrong}; "
            "use another tp, or bfloat16"
        ] * bool(wrong)
    return problems


def _check_tp(arch: Architecture, tp: int) -> list[str]:
    sizes = ((arch.num_heads, "attention heads"), (arch.intermediate_size, "feed-forward channels"))
    problems = [
        f"tp={tp} must divide the model's {size} {what}; choose a divisor"
        for size, what in sizes
        if size % tp
    ]
    if arch.num_kv_heads % tp and tp % arch.num_kv_heads:
        problems.append(
            f"tp={tp} must divide the model's {arch.num_kv_heads} key-value heads or be a multiple of them"
        )
    return problems


def _check_reward(config: TrainerConfig, world_size: int) -> list[str]:
    reward = config.reward
    if not reward.function and not reward.path:
        return ["reward.function and reward.path are both empty, so nothing gives a score; set one of them"]
    problems = check_reward(reward.function) if reward.function else []
    if reward.path:
        _check_model(reward, "reward", world_size, problems, config.engine)
    return problems


def _check_rollout(config: TrainerConfig, arch: Architecture | None, world_size: int) -> list[str]:
    rollout, problems = config.rollout, []
    if rollout.tp < 1:
        return problems  # reported by its interval
    if world_size % rollout.tp:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        problems.append(
            f"rollout.tp={rollout.tp} must divide the {world_size} ranks that were started; "
            f"choose one of {divisors} or start another number"
        )
    if rollout.min_tokens > rollout.max_tokens:
        problems.append(
            f"rollout.min_tokens={rollout.min_tokens} exceeds rollout.max_tokens={rollout.max_tokens}; "
            "lower it"
        )
    if rollout.top_k == 0:
        problems.append("rollout.top_k=0 keeps no token; use -1 for all or at least 1")
    problems += _check_stops(rollout, arch) + _check_host_memory(config, arch)
    if 0 < config.data.validation_temperature < LEAST_TEMPERATURE:
        problems.append(
            f"data.validation_temperature={config.data.validation_temperature} is below {LEAST_TEMPERATURE}, "
            "which vLLM takes for it; use 0 (greedy) or more"
        )
    if config.reshard.offload != "none" and not rollout.sleep:
        problems.append(
            f"reshard.offload={config.reshard.offload} makes room for vLLM to wake in, "
            "and with rollout.sleep=false it never sleeps; set one of them otherwise"
        )
    if config.reshard.mode != "keep" and not shares_dtype(config):
        problems.append(
            f"reshard.mode={config.reshard.mode} lets vLLM use the actor's memory, "
            f"and rollout.dtype={rollout.dtype} is not"
            f" engine.dtype={config.engine.dtype}; make them alike or use keep"
        )
    if arch is None:
        return problems
    problems += [f"rollout.tp={rollout.tp}: {problem}" for problem in _check_tp(arch, rollout.tp)]
    vocab = padded_vocab(arch.vocab_size, 1)
    if vocab % rollout.tp:
        problems.append(
            f"rollout.tp={rollout.tp} must divide vLLM's vocabulary of {vocab} (padded to a multiple of "
            f"{VOCAB_MULTIPLE}); choose a divisor"
        )
    tokens = config.data.max_prompt_tokens + rollout.max_tokens
    if tokens > arch.served_positions:
        problems.append(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and "
            f"rollout.max_tokens={rollout.max_tokens} make samples of {tokens} tokens, "
            f"more than the model's {arch.served_positions} positions; lower one of them"
        )
    return problems


def _check_stops(rollout: RolloutConfig, arch: Architecture | None) -> list[str]:
    """Check stop strings and stop tokens, which vLLM would refuse only after the run is built."""
    problems = []
    if "" in rollout.stop:
        problems.append("rollout.stop has an empty string, at which every response would end; take it out")
    vocab_size = arch.vocab_size if arch else MOST_STOP_IDS
    if wrong := [token for token in rollout.stop_token_ids if not 0 <= token < vocab_size]:
        problems.append(
            f"rollout.stop_token_ids has {shown(wrong)}, outside the model's vocabulary of {vocab_size} "
            "tokens; take them out"
        )
    for name, entries in (("stop", rollout.stop), ("stop_token_ids", rollout.stop_token_ids)):
        if len(entries) > MOST_STOPS:
            problems.append(
                f"rollout.{name} has {len(entries):,} entries, each of which is looked for at every token; "
                f"give at most {MOST_STOPS}"
            )
    return problems


def _check_host_memory(config: TrainerConfig, arch: Architecture | None) -> list[str]:
    """Check rollout settings that exceed the total memory of this host."""
    memory, rollout, problems = device.host_memory_bytes(), config.rollout, []
    if not device.is_gpu() and (rollout.kv_cache_mib << 20) * device.ranks_per_host() > memory:
        problems.append(
            f"rollout.kv_cache_mib={rollout.kv_cache_mib} of each rank is more than this host has: "
            f"{memory >> 20} MiB; lower it"
        )
    tokens = min(config.data.max_prompt_tokens + rollout.max_tokens, arch.max_positions if arch else 0)
    if rollout.max_num_seqs * tokens * 4 > memory:  # vLLM stores token ids as int32
        problems.append(
            f"rollout.max_num_seqs={shown(rollout.max_num_seqs)} samples of {tokens} tokens do not fit this "
            f"host's memory of {memory >> 20} MiB; lower it"
        )
    return problems


def shares_dtype(config: TrainerConfig) -> bool:
    """Whether vLLM's weights have the actor's dtype."""
    return config.rollout.dtype in ("auto", config.engine.dtype.replace("fp8", "bfloat16"))


def check_planned(config: TrainerConfig, arch: Architecture, world_size: int) -> list[str]:
    """Check a run whose layouts are not chosen yet; values are in their intervals, `arch` is the actor's."""
    return (
        _check_samples(config, {})
        + _check_rollout(config, arch, world_size)
        + _check_algorithm(config, ALGORITHMS[config.algorithm.name].needs_critic)
    )


def _check_samples(config: TrainerConfig, layouts: dict[str, Layout | None]) -> list[str]:
    """Check that the samples of an iteration divide into mini-batches and data-parallel ranks."""
    data, algorithm = config.data, config.algorithm
    samples, parts = data.prompts_per_iteration * data.samples_per_prompt, algorithm.num_mini_batches
    product = (
        f"data.prompts_per_iteration={data.prompts_per_iteration} x "
        f"data.samples_per_prompt={data.samples_per_prompt} = {samples} samples"
    )
    if parts < 1 or samples < 1:
        return []  # reported by their intervals
    if samples > MOST_SAMPLES:
        return [
            f"{shown(product)[1:-1]} are more than {MOST_SAMPLES:,}; "
            "lower one of them and raise run.iterations"
        ]
    if samples % parts:
        return [
            f"{product} do not split into algorithm.num_mini_batches={parts}; choose a divisor of {samples}"
        ]
    return [
        f"{product} in {parts} mini-batches of {samples // parts} leave some of the {layout.dp} "
        f"data-parallel ranks of {name}.layout={layout} without a sample; "
        f"use fewer mini-batches, more samples or a layout with less dp"
        for name, layout in layouts.items()
        if layout is not None and samples // parts < layout.dp
    ]


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
    return problems + _check_importance(config)


def _check_importance(config: TrainerConfig) -> list[str]:
    """Refuse importance weights over a truncated distribution.

    The sampler's log-probs are normalised over the kept tokens, the trainer's over all tokens. So every
    weight would contain the probability mass of the kept tokens.
    """
    rollout, cap = config.rollout, config.algorithm.tis_cap
    truncated = [
        f"rollout.{name}={getattr(rollout, name)}"
        for name, is_set in (
            ("top_p", rollout.top_p < 1),
            ("top_k", rollout.top_k > 0),
            ("min_tokens", rollout.min_tokens > 0),
        )
        if is_set
    ]
    if not cap or not truncated:
        return []
    return [
        f"algorithm.tis_cap={cap} with {' and '.join(truncated)} would scale the loss by the "
        "probability mass that the sampler keeps;"
        " sample from all tokens (top_p=1, top_k=-1, min_tokens=0) or set tis_cap=0"
    ]


def batch_arithmetic(config: TrainerConfig, world_size: int) -> str:
    """Describe the batch division of an iteration in one line; `config` must have passed `check_config`."""
    data, algorithm, engine = config.data, config.algorithm, config.engine
    samples = data.prompts_per_iteration * data.samples_per_prompt
    roles = {"actor": config.actor} | (
        {"critic": config.critic} if ALGORITHMS[algorithm.name].needs_critic else {}
    )
    shares = []
    for name, model in roles.items():
        layout = Layout.parse(
            model.layout, parse_devices(model.devices, world_size), tuple(model.stage_layers)
        )
        shares.append(
            f"{name} {layout}: {_about(samples // algorithm.num_mini_batches, layout.dp)} of a mini-batch a "
            "data-parallel rank"
        )
    steps = algorithm.epochs * algorithm.num_mini_batches
    return (
        f"{_count(data.prompts_per_iteration, 'prompt')} x {_count(data.samples_per_prompt, 'sample')} = "
        f"{_count(samples, 'sample')}"
        f" = {_count(algorithm.num_mini_batches, 'mini-batch', 'mini-batches')} of "
        f"{samples // algorithm.num_mini_batches}; {'; '.join(shares)};"
        f" micro-batches of at most {engine.tokens_per_micro_batch} tokens; "
        f"{_count(algorithm.epochs, 'epoch')}: {_count(steps, 'optimizer step')}"
        f" an iteration; rollout {_count(world_size // config.rollout.tp, 'replica')} of "
        f"tp{config.rollout.tp}"
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _about(samples: int, parts: int) -> str:
    return (
        _count(samples // parts, "sample") if samples % parts == 0 else f"about {samples / parts:.1f} samples"
    )

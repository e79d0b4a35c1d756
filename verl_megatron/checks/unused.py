"""Settings that a run would not read. One that differs from its default is refused, with the remedy."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from parallel.runtime.refusal import short_repr
from verl_megatron.algorithms import ALGORITHMS, needs_logprobs
from verl_megatron.algorithms.correction import correction_of
from verl_megatron.algorithms.objectives import OBJECTIVES, UNREAD
from verl_megatron.algorithms.proximal import is_recomputed
from verl_megatron.checks.limits import value_problems
from verl_megatron.checks.problems import problem_of
from verl_megatron.config import AlgorithmConfig, TrainerConfig
from verl_megatron.config.section import sections_of
from verl_megatron.model_specs import (
    is_separate,
    models_apart,
    models_of,
    names_apart,
    serving_worlds,
    shares_trunk,
)
from verl_megatron.rewards.plan import functions_of

# Settings that one of the built-in rewards reads.
USED_BY = {
    "format": ("reward.format",),
    "length": ("reward.target_length",),
    "code": ("reward.code_timeout_s", "reward.code_memory_mib"),
}
OWN = sorted({setting for algorithm in ALGORITHMS.values() for setting in algorithm.settings})


@dataclass(frozen=True, kw_only=True)
class Unused:
    """Settings without effect, why, and what would give them one."""

    names: tuple[str, ...]  # section.setting
    because: str
    remedy: str


def unused_problems(config: TrainerConfig, needs: Collection[str]) -> list[str]:
    """Return a problem for each setting that has been changed and has no effect.

    Args:
        needs: what the algorithm needs besides the actor.
    """
    if config.algorithm.name not in ALGORITHMS:
        return []  # reported by its choices
    switches = replace(config.algorithm, correction=correction_of(config))
    found = [_of_algorithm(config, needs), _of_switches(switches), _of_log_probs(config)]
    return _problems(config, chain(*found, _of_other_sections(config), _of_placement(config)))


def unused_without_training(config: TrainerConfig) -> list[str]:
    """Return a problem for each setting of sampling and scores that has been changed and has no effect."""
    return _problems(config, _of_other_sections(config))


def _problems(config: TrainerConfig, found: Iterable[Unused]) -> list[str]:
    problems = []
    for unused in found:
        for name in unused.names:
            value, default, limits = _setting(config, name)
            if value != default and not value_problems(name, value, limits):
                leave = "leave it out" if default == "" else f"leave it at {_shown(default)}"
                problems.append(
                    f"{name}={_shown(value)} has no effect {unused.because}; {leave}, or {unused.remedy}"
                )
    return problems


def unused_notes(config: TrainerConfig) -> list[str]:
    """Return what to say of settings of the KL penalty without a reference.

    They are not refused: algorithm.kl_coef=0 turns off the penalty of a recipe.
    """
    changed = []
    for name in ("algorithm.kl_in", "algorithm.kl_estimator", "algorithm.kl_unbiased"):
        value, default, _ = _setting(config, name)
        if value not in (default, "none"):
            changed.append(f"{name}={_shown(value)}")
    if not changed or config.algorithm.kl_coef:
        return []
    return [f"algorithm.kl_coef=0: there is no reference, and {', '.join(changed)} has no effect"]


def _of_algorithm(config: TrainerConfig, needs: Collection[str]) -> Iterator[Unused]:
    """Yield settings that the algorithm, its objective or its models leave out."""
    algorithm = config.algorithm
    entry = ALGORITHMS[algorithm.name]
    for setting in OWN:
        if setting not in entry.settings:
            readers = [name for name, other in ALGORITHMS.items() if setting in other.settings]
            yield Unused(
                names=(f"algorithm.{setting}",),
                because=f"with algorithm.name={algorithm.name}",
                remedy=f"use {_either(readers)}",
            )
    objective = entry.objective if algorithm.objective == "auto" else algorithm.objective
    for setting in UNREAD.get(objective, ()):
        readers = [name for name in OBJECTIVES if setting not in UNREAD.get(name, ())]
        yield Unused(
            names=(f"algorithm.{setting}",),
            because=f"with the objective {objective}",
            remedy=f"set algorithm.objective to {_either(readers)}",
        )
    if "critic" not in needs:
        critics = [name for name, other in ALGORITHMS.items() if "critic" in other.needs]
        yield Unused(
            names=("algorithm.cliprange_value", "algorithm.critic_warmup", "critic.share_trunk"),
            because=f"with algorithm.name={algorithm.name}, which has no critic",
            remedy=f"use {_either(critics)}",
        )


def _of_switches(algorithm: AlgorithmConfig) -> Iterator[Unused]:
    """Yield settings of the algorithm's parts that another setting turns off."""
    if algorithm.correction == "none":
        yield Unused(
            names=("algorithm.correction_level", "algorithm.correction_low", "algorithm.correction_high"),
            because="with algorithm.correction=none",
            remedy="set correction=truncate or mask",
        )
    if not algorithm.kl_ctrl_target:
        yield Unused(
            names=("algorithm.kl_ctrl_horizon",),
            because="with algorithm.kl_ctrl_target=0",
            remedy="set kl_ctrl_target above 0",
        )
    if algorithm.kl_coef and algorithm.kl_in == "none":
        yield Unused(
            names=("algorithm.kl_ctrl_target",),
            because="with algorithm.kl_in=none",
            remedy="set kl_in=reward or loss",
        )
    if not algorithm.dynamic_sampling:
        yield Unused(
            names=("algorithm.max_sampling_rounds",),
            because="with algorithm.dynamic_sampling=false",
            remedy="set dynamic_sampling=true",
        )
    if algorithm.epochs * algorithm.num_mini_batches == 1:
        yield Unused(
            names=("algorithm.target_kl",),
            because="with one optimizer step an iteration, after which none is left to skip",
            remedy="raise num_mini_batches or epochs",
        )


def _of_log_probs(config: TrainerConfig) -> Iterator[Unused]:
    """Yield settings of reused log-probs in runs that always compute them in a pass of their own."""
    algorithm = config.algorithm
    reuse, check = "algorithm.reuse_logprobs", "algorithm.check_logprobs_interval"
    if not is_recomputed(algorithm):
        yield Unused(
            names=(reuse,),
            because=f"with algorithm.old_logprobs={algorithm.old_logprobs}",
            remedy="set old_logprobs=recompute",
        )
    elif shares_trunk(config):
        yield Unused(
            names=(reuse, check),
            because="with critic.share_trunk=true, whose values come from the pass of the log-probs",
            remedy="set share_trunk=false",
        )
    elif needs_logprobs(algorithm, _models(config)):
        yield Unused(
            names=(reuse, check),
            because=f"where advantages need the log-probs: with algorithm.name={algorithm.name}, "
            f"algorithm.kl_in={algorithm.kl_in} and teacher.path={short_repr(config.teacher.path)}",
            remedy="use kl_in=loss, an algorithm without log-probs in its advantages, and no teacher",
        )
    elif not algorithm.reuse_logprobs:
        yield Unused(
            names=(check,),
            because="with algorithm.reuse_logprobs=false",
            remedy="set reuse_logprobs=true",
        )


def _models(config: TrainerConfig) -> list[str]:
    """Return the names of all models; none where devices are not understood, which other checks say."""
    try:
        return [spec.name for spec in (*models_of(config), *models_apart(config))]
    except ValueError:
        return []


def _of_other_sections(config: TrainerConfig) -> Iterator[Unused]:
    """Yield settings of models, schedules and rewards that another setting turns off."""
    reward = config.reward
    if not config.critic.share_trunk:
        yield Unused(
            names=("critic.trunk_gradient", "critic.value_coef"),
            because="with critic.share_trunk=false",
            remedy="set share_trunk=true",
        )
    if not config.teacher.path:
        yield Unused(
            names=("algorithm.teacher_coef",), because="without a teacher", remedy="set teacher.path"
        )
    if config.data.samples_per_prompt == 1:
        yield Unused(
            names=("engine.shared_prompts",),
            because="with data.samples_per_prompt=1",
            remedy="raise samples_per_prompt",
        )
    if config.engine.lr_decay_style == "constant":
        yield Unused(
            names=("engine.min_lr_ratio",),
            because="with engine.lr_decay_style=constant",
            remedy="set lr_decay_style=linear or cosine",
        )
    if not reward.is_given:
        yield Unused(
            names=(
                *("reward.overlong_tokens", "reward.missing_eos_penalty", "reward.failure_score"),
                *("reward.timeout_s", "reward.workers"),
            ),
            because="without a reward",
            remedy="set reward.function",
        )
    named = functions_of(reward.function)
    for function, settings in USED_BY.items():
        if function not in named:
            yield Unused(
                names=settings,
                because=f"without {function} in reward.function",
                remedy=f"set reward.function=[{function},...]",
            )
    if config.rollout.max_num_seqs == 1:
        yield Unused(
            names=("rollout.dynamic_batching",),
            because="with rollout.max_num_seqs=1",
            remedy="raise max_num_seqs",
        )
    if config.rollout.speculative == "off":
        yield Unused(
            names=("rollout.speculative_tokens", "rollout.speculative_max_seqs"),
            because="with rollout.speculative=off",
            remedy="set speculative=ngram",
        )
    if not reward.overlong_tokens:
        yield Unused(
            names=("reward.overlong_penalty",),
            because="with reward.overlong_tokens=0",
            remedy="set overlong_tokens above 0",
        )


def _of_placement(config: TrainerConfig) -> Iterator[Unused]:
    """Yield settings that depend on which models there are, and which have ranks of their own."""
    for name in ("teacher", "reward"):
        if not getattr(config, name).path:
            yield Unused(names=(f"{name}.dtype",), because=f"without {name}.path", remedy=f"set {name}.path")
    if problem_of(serving_worlds, config):
        return  # other checks say it
    if is_separate(config):
        yield Unused(
            names=("reshard.offload", "rollout.sleep"),
            because="with a rollout on ranks of its own, for which no room has to be made",
            remedy="leave rollout.devices empty",
        )
    if config.engine.sharding == "full" and config.reshard.offload == "grads":
        yield Unused(
            names=("reshard.offload",),
            because="with engine.sharding=full, which keeps no gradients between steps",
            remedy="use optimizer, all or steps",
        )
    if "reference" not in names_apart(config):
        yield Unused(
            names=("reference.layout",),
            because="without ranks of its own in reference.devices: the reference has the actor's layout",
            remedy="name some",
        )
    if not config.algorithm.kl_coef:
        yield Unused(
            names=("reference.devices", "reference.dtype"),
            because="with algorithm.kl_coef=0, which has no reference",
            remedy="set kl_coef above 0",
        )


def _setting(config: TrainerConfig, name: str) -> tuple[Any, Any, Mapping[str, Any]]:
    """Return the value of section.setting, its default, and its interval or choices."""
    section, _, setting = name.partition(".")
    usual = sections_of(TrainerConfig())[section]
    limits = usual.__dataclass_fields__[setting].metadata
    return getattr(sections_of(config)[section], setting), getattr(usual, setting), limits


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else short_repr(value).strip("'")


def _either(names: list[str]) -> str:
    """Join alternatives: a, b or c."""
    return " or ".join([", ".join(names[:-1])] * bool(names[:-1]) + names[-1:])

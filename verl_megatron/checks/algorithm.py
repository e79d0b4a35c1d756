"""Checks of the algorithm's settings."""

from collections.abc import Collection

from parallel.runtime.refusal import short_repr
from verl_megatron.algorithms import ALGORITHMS, needs_logprobs
from verl_megatron.algorithms.correction import correction_of
from verl_megatron.algorithms.proximal import is_recomputed
from verl_megatron.checks.critic import check_trunk
from verl_megatron.checks.rollout import check_table, most_samples, truncated_entries
from verl_megatron.checks.unused import unused_problems
from verl_megatron.config import TrainerConfig
from verl_megatron.data.formats.sources import has_weights
from verl_megatron.data.order.curriculum import FILES


def algorithm_problems(config: TrainerConfig, needs: Collection[str]) -> list[str]:
    """Return contradictions of the algorithm's settings with each other, the data and the sampling.

    Args:
        needs: what the algorithm needs besides the actor.
    """
    algorithm, samples, problems = config.algorithm, config.data.samples_per_prompt, []
    least = ALGORITHMS[algorithm.name].min_samples if algorithm.name in ALGORITHMS else 1
    if samples < least:
        problems.append(
            f"data.samples_per_prompt={samples} with algorithm.name={algorithm.name} compares a sample with "
            f"no other; use at least {least}"
        )
    if algorithm.kl_ctrl_target and not algorithm.kl_coef:
        problems.append(
            f"algorithm.kl_ctrl_target={algorithm.kl_ctrl_target} needs a coefficient to start from; "
            "set algorithm.kl_coef above 0"
        )
    if algorithm.dual_clip and algorithm.dual_clip <= 1:
        problems.append(
            f"algorithm.dual_clip={algorithm.dual_clip} would clip ratios near 1; "
            "use a value above 1, such as 3, or 0 (off)"
        )
    if config.reward.overlong_tokens and not config.reward.overlong_penalty:
        problems.append(
            f"reward.overlong_tokens={config.reward.overlong_tokens} with reward.overlong_penalty=0 deducts "
            "nothing; raise overlong_penalty or set overlong_tokens=0"
        )
    if config.rollout.ignore_eos:
        problems += _cut_problems(config)
    checks = (_check_kl, _check_correction, _check_dynamic_sampling, _check_curriculum, check_table)
    problems += [problem for check in checks for problem in check(config)]
    problems += check_trunk(config, needs) + _check_teacher(config, needs)
    problems += _check_old_logprobs(config, needs)
    return problems + unused_problems(config, needs)


def _cut_problems(config: TrainerConfig) -> list[str]:
    """Refuse what depends on the end of responses where none ends by itself."""
    problems = []
    remedy = "with rollout.ignore_eos=true, which cuts off every response; turn one of them off"
    if config.algorithm.mask_cut:
        problems.append(f"algorithm.mask_cut=true leaves no loss {remedy}")
    if penalty := config.reward.missing_eos_penalty:
        problems.append(f"reward.missing_eos_penalty={penalty:g} says nothing about a response {remedy}")
    return problems


def _check_kl(config: TrainerConfig) -> list[str]:
    algorithm = config.algorithm
    in_loss, estimator, unbiased = algorithm.kl_in == "loss", algorithm.kl_estimator, algorithm.kl_unbiased
    if unbiased and not in_loss:
        return [
            f"algorithm.kl_unbiased=true with algorithm.kl_in={algorithm.kl_in}: it changes the KL of the "
            "loss only; set kl_in=loss or kl_unbiased=false"
        ]
    if unbiased and estimator == "k2":
        return [
            "algorithm.kl_unbiased=true with algorithm.kl_estimator=k2: k2 times the ratio has another "
            "gradient than the KL; set kl_estimator=k1 or k3"
        ]
    if algorithm.kl_coef and in_loss and estimator == "k1" and not unbiased:
        return [
            "algorithm.kl_in=loss with algorithm.kl_estimator=k1 penalizes nothing, "
            "as the expected gradient of k1 is 0;"
            " set kl_estimator=k2 or k3, kl_unbiased=true, or kl_in=reward"
        ]
    return []


def _check_teacher(config: TrainerConfig, needs: Collection[str]) -> list[str]:
    if "teacher" not in needs:
        return []
    algorithm, problems = config.algorithm, []
    if not config.teacher.path:
        problems.append(
            f"algorithm.name={algorithm.name} learns from a teacher, and teacher.path is empty; "
            "name its Hugging Face folder"
        )
    if not algorithm.teacher_coef:
        problems.append(
            f"algorithm.teacher_coef=0 with algorithm.name={algorithm.name} makes every advantage 0; "
            "raise teacher_coef"
        )
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        problems.append(
            f"algorithm.kl_coef={algorithm.kl_coef} with algorithm.kl_in=reward is lost with "
            f"algorithm.name={algorithm.name}, whose advantages have no rewards; "
            "set kl_in=loss with kl_estimator=k2 or k3, or kl_coef=0"
        )
    return problems


def _check_correction(config: TrainerConfig) -> list[str]:
    """Refuse importance weights over a truncated distribution.

    The sampler's log-probs are normalised over the kept tokens, the trainer's over all tokens. So every
    weight would contain the probability mass of the kept tokens.
    """
    correction, named = correction_of(config), config.algorithm.correction
    if named == "auto":
        given, because = config.async_, "rollout.weight_dtype=fp8"
        if given.is_stale:
            because = (
                f"async.max_staleness={given.max_staleness} and async.sync_interval={given.sync_interval}"
            )
        named = f"auto ({correction}, because {because})"
    truncated = _truncated(config)
    if correction == "none" or not truncated:
        return []
    return [
        f"algorithm.correction={named} with {' and '.join(truncated)} would scale the loss by the "
        "probability mass that the sampler keeps;"
        " sample from all tokens (top_p=1, top_k=-1, min_tokens=0) or set correction=none"
    ]


def _truncated(config: TrainerConfig) -> list[str]:
    """Return the settings that let the sampler keep some tokens only, for messages."""
    rollout = config.rollout
    return [
        f"rollout.{name}={getattr(rollout, name)}"
        for name, is_set in (
            ("top_p", rollout.top_p < 1),
            ("top_k", rollout.top_k > 0),
            ("min_tokens", rollout.min_tokens > 0),
        )
        if is_set
    ] + truncated_entries(config)


def _check_old_logprobs(config: TrainerConfig, needs: Collection[str]) -> list[str]:
    """Refuse old log-probs without a pass where they are needed before the update, or would mislead."""
    algorithm, problems = config.algorithm, []
    if algorithm.name not in ALGORITHMS or is_recomputed(algorithm):
        return []
    named = f"algorithm.old_logprobs={algorithm.old_logprobs}"
    models = {
        *needs,
        *["reference"] * bool(algorithm.kl_coef),
        *["teacher"] * bool(config.teacher.path),
    }
    if algorithm.old_logprobs == "loglinear" and needs_logprobs(algorithm, models):
        problems.append(
            f"{named} is known in the update, and the advantages (algorithm.name={algorithm.name}, "
            f"kl_in={algorithm.kl_in}, teacher.path) need log-probs before it; use recompute or sampler"
        )
    if algorithm.target_kl:
        problems.append(
            f"algorithm.target_kl={algorithm.target_kl} with {named}: the step from the actor before the "
            "updates is not known, only that from the sampler; use old_logprobs=recompute or target_kl=0"
        )
    if config.critic.share_trunk:
        problems.append(
            f"{named} with critic.share_trunk=true saves nothing: the pass for the values gives log-probs, "
            "too; use old_logprobs=recompute"
        )
    if algorithm.old_logprobs == "sampler" and algorithm.correction in ("truncate", "mask"):
        problems.append(
            f"{named} with algorithm.correction={algorithm.correction} makes each importance weight 1; "
            "use correction=auto or another old_logprobs"
        )
    if truncated := _truncated(config):
        problems.append(
            f"{named} with {' and '.join(truncated)}: the sampler's log-probs are of the tokens that it "
            "keeps; sample from all tokens (top_p=1, top_k=-1, min_tokens=0), or use recompute"
        )
    return problems


def _check_dynamic_sampling(config: TrainerConfig) -> list[str]:
    """Refuse dynamic sampling where equal scores teach, or are not known during the rollout."""
    if not config.algorithm.dynamic_sampling:
        return []
    problems, name, rounds = [], config.algorithm.name, config.algorithm.max_sampling_rounds
    if name in ALGORITHMS and ALGORITHMS[name].min_samples < 2:
        problems.append(
            f"algorithm.dynamic_sampling=true with algorithm.name={name}, whose advantages do not compare "
            "the samples of a prompt: equal scores teach, too; set dynamic_sampling=false"
        )
    if config.reward.path:
        problems.append(
            "algorithm.dynamic_sampling=true needs scores during the rollout, and the reward model "
            f"reward.path={short_repr(config.reward.path)} gives them after it; use reward.function alone"
        )
    if rounds == 1:
        problems.append(
            "algorithm.dynamic_sampling=true with algorithm.max_sampling_rounds=1 replaces nothing: "
            "the first round draws the prompts; use at least 2"
        )
    return problems


def _check_curriculum(config: TrainerConfig) -> list[str]:
    """Refuse a curriculum without scores to compare, or whose sources have two kinds of weights."""
    data, named = config.data, f"data.curriculum={short_repr(config.data.curriculum)}"
    if not data.curriculum:
        return []
    problems = []
    if most_samples(config) < 2:
        setting = "rollout.adaptive_sampling leaves"
        if data.samples_per_prompt == 1:
            setting = "data.samples_per_prompt=1 is"
        problems.append(
            f"{named} compares the samples of a prompt, and {setting} one of each; use at least 2"
        )
    if not config.reward.is_given:
        problems.append(f"{named} follows scores, and there are none; set reward.function or leave it empty")
    if data.curriculum != FILES and has_weights(data.train):
        problems.append(
            f"{named} has sources of its own, and data.train={short_repr(data.train)} gives its files "
            "weights; leave the weights out, or set curriculum=files"
        )
    if config.rollout.devices and config.async_.buffer == "window":
        problems.append(
            f"{named} follows the scores of prompts in their order, and async.buffer=window trains on them "
            "as they come; use async.buffer=in_order"
        )
    return problems

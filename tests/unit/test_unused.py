"""Settings without effect are refused by name with a remedy, or said to have none."""

import pytest

from verl_megatron.algorithms import ALGORITHMS
from verl_megatron.checks.algorithm import algorithm_problems
from verl_megatron.checks.unused import unused_notes
from verl_megatron.config import TrainerConfig


def config_of(**settings) -> TrainerConfig:
    """Settings of a group of two samples and several steps; `settings` as section__setting."""
    config = TrainerConfig()
    config.data.samples_per_prompt, config.algorithm.num_mini_batches = 2, 2
    for name, value in settings.items():
        section, _, setting = name.partition("__")
        setattr(getattr(config, section), setting, value)
    return config


def problems_of(**settings) -> list[str]:
    config = config_of(**settings)
    return algorithm_problems(config, ALGORITHMS[config.algorithm.name].needs)


GRPO = {"algorithm__name": "grpo"}
TEACHER = {"algorithm__name": "distillation", "teacher__path": "/teacher"}
# Settings, and what their only problem says.
MEANINGLESS = [
    (GRPO | {"algorithm__gamma": 0.9}, "algorithm.gamma=0.9 has no effect with algorithm.name=grpo; leave "),
    (
        GRPO | {"engine__sharding": "full", "reshard__offload": "grads"},
        "reshard.offload=grads has no effect with engine.sharding=full, which keeps no gradients between",
    ),
    (GRPO | {"algorithm__gae_lambda": 1.0}, "leave it at 0.95, or use ppo"),
    (GRPO | {"algorithm__whiten": False}, "algorithm.whiten=false has no effect"),
    (
        {"algorithm__name": "reinforce_plus_plus", "algorithm__whiten": False},
        "algorithm.whiten=false has no effect with algorithm.name=reinforce_plus_plus; leave it at true",
    ),
    ({"algorithm__scale_by_std": False}, "or use grpo, gspo or cispo"),
    ({"algorithm__name": "rloo", "algorithm__scale_by_std": False}, "algorithm.name=rloo"),
    (GRPO | {"algorithm__cliprange_value": 0.5}, "which has no critic; leave it at 0.2, or use ppo"),
    (GRPO | {"algorithm__critic_warmup": 3}, "algorithm.critic_warmup=3 has no effect"),
    ({"algorithm__objective": "reinforce", "algorithm__clip_ratio_low": 0.1}, "the objective reinforce"),
    (
        {"algorithm__name": "remax", "algorithm__clip_ratio_high": 0.3},
        "algorithm.clip_ratio_high=0.3 has no effect with the objective reinforce; leave it at 0.2, "
        "or set algorithm.objective to clip, gspo, gspo_token or cispo",
    ),
    ({"algorithm__objective": "cispo", "algorithm__dual_clip": 3.0}, "algorithm.dual_clip=3.0 has no effect"),
    ({"algorithm__correction_low": 0.5}, "set correction=truncate or mask"),
    ({"algorithm__kl_coef": 0.1, "algorithm__kl_ctrl_horizon": 9}, "algorithm.kl_ctrl_target=0"),
    (
        {"algorithm__kl_coef": 0.1, "algorithm__kl_ctrl_target": 3.0, "algorithm__kl_in": "none"},
        "algorithm.kl_ctrl_target=3.0 has no effect with algorithm.kl_in=none",
    ),
    (GRPO | {"algorithm__max_sampling_rounds": 3}, "set dynamic_sampling=true"),
    (
        GRPO | {"algorithm__dynamic_sampling": True, "algorithm__max_sampling_rounds": 1},
        "algorithm.max_sampling_rounds=1 replaces nothing",
    ),
    ({"algorithm__dynamic_sampling": True}, "algorithm.name=ppo, whose advantages do not compare"),
    (TEACHER | {"algorithm__dynamic_sampling": True}, "algorithm.name=distillation, whose advantages do not"),
    (
        {"algorithm__reuse_logprobs": False, "algorithm__check_logprobs_interval": 5},
        "algorithm.check_logprobs_interval=5 has no effect with algorithm.reuse_logprobs=false",
    ),
    (
        {"algorithm__old_logprobs": "sampler", "algorithm__reuse_logprobs": False},
        "algorithm.reuse_logprobs=false has no effect with algorithm.old_logprobs=sampler",
    ),
    (
        {"algorithm__old_logprobs": "sampler", "algorithm__correction": "mask"},
        "algorithm.old_logprobs=sampler with algorithm.correction=mask makes each importance weight 1",
    ),
    (
        {"algorithm__old_logprobs": "loglinear", "algorithm__kl_coef": 0.1},
        "algorithm.old_logprobs=loglinear is known in the update, and the advantages",
    ),
    (TEACHER | {"algorithm__old_logprobs": "loglinear"}, "use recompute or sampler"),
    (
        GRPO
        | {"algorithm__kl_coef": 0.0, "algorithm__old_logprobs": "loglinear", "teacher__path": "llama3-8b"},
        "algorithm.old_logprobs=loglinear is known in the update, and the advantages",
    ),
    (
        {"algorithm__old_logprobs": "sampler", "algorithm__target_kl": 0.1},
        "algorithm.target_kl=0.1 with algorithm.old_logprobs=sampler: the step from the actor",
    ),
    (
        {"algorithm__old_logprobs": "loglinear", "critic__share_trunk": True},
        "algorithm.old_logprobs=loglinear with critic.share_trunk=true saves nothing",
    ),
    (
        {"algorithm__old_logprobs": "sampler", "rollout__top_p": 0.9},
        "algorithm.old_logprobs=sampler with rollout.top_p=0.9: the sampler's log-probs are of the tokens",
    ),
    (
        {"algorithm__num_mini_batches": 1, "algorithm__target_kl": 0.1},
        "algorithm.target_kl=0.1 has no effect",
    ),
    (GRPO | {"algorithm__teacher_coef": 0.5}, "without a teacher; leave it at 1.0, or set teacher.path"),
    (TEACHER | {"algorithm__teacher_coef": 0.0}, "algorithm.teacher_coef=0 with algorithm.name=distillation"),
    (
        TEACHER | {"algorithm__kl_coef": 0.1},
        "algorithm.kl_coef=0.1 with algorithm.kl_in=reward is lost with algorithm.name=distillation",
    ),
    ({"reward__overlong_penalty": 2.0}, "reward.overlong_tokens=0"),
    ({"engine__min_lr_ratio": 0.1}, "engine.lr_decay_style=constant"),
    (
        {"data__samples_per_prompt": 1, "engine__shared_prompts": True},
        "engine.shared_prompts=true has no effect with data.samples_per_pro",
    ),
    (TEACHER | {"reward__function": "", "reward__overlong_tokens": 4}, "without a reward"),
    (TEACHER | {"reward__function": "", "reward__missing_eos_penalty": 1.0}, "without a reward"),
    ({"reward__overlong_tokens": 4, "reward__overlong_penalty": 0.0}, "deducts nothing"),
]
# Settings that have an effect together.
FINE = [
    {"algorithm__gamma": 0.9, "algorithm__gae_lambda": 1.0, "algorithm__whiten": False},
    {"algorithm__cliprange_value": 0.0, "algorithm__critic_warmup": 2},
    {"algorithm__name": "remax", "algorithm__gamma": 0.9},
    {"algorithm__name": "remax", "algorithm__objective": "clip", "algorithm__clip_ratio_high": 0.3},
    GRPO | {"algorithm__scale_by_std": False, "algorithm__clip_ratio_low": 0.1, "algorithm__dual_clip": 3.0},
    GRPO | {"algorithm__dynamic_sampling": True, "algorithm__max_sampling_rounds": 2},
    {"algorithm__correction": "mask", "algorithm__correction_low": 0.5},
    {"algorithm__kl_coef": 0.1, "algorithm__kl_ctrl_target": 3.0, "algorithm__kl_ctrl_horizon": 9},
    {"algorithm__num_mini_batches": 1, "algorithm__epochs": 2, "algorithm__target_kl": 0.1},
    TEACHER | {"algorithm__teacher_coef": 0.5},
    GRPO | {"teacher__path": "/teacher", "algorithm__teacher_coef": 0.0},  # kl/teacher is a metric
    TEACHER | {"algorithm__kl_coef": 0.1, "algorithm__kl_in": "loss", "algorithm__kl_estimator": "k3"},
    TEACHER | {"algorithm__kl_coef": 0.1, "algorithm__kl_in": "none"},
    {"reward__overlong_tokens": 4, "reward__overlong_penalty": 2.0},
    {"engine__lr_decay_style": "cosine", "engine__min_lr_ratio": 0.1},
    GRPO | {"engine__shared_prompts": True},
]


@pytest.mark.parametrize(("settings", "words"), MEANINGLESS, ids=str)
def test_a_setting_without_effect_is_refused_with_the_remedy(settings, words):
    (problem,) = problems_of(**settings)
    assert words in problem and "; " in problem


@pytest.mark.parametrize("settings", FINE, ids=str)
def test_settings_that_are_read_are_not(settings):
    assert problems_of(**settings) == [] and unused_notes(config_of(**settings)) == []


def test_a_value_outside_its_interval_is_reported_as_such_only():
    assert problems_of(algorithm__name="grpo", algorithm__gamma=7.0) == []


def test_the_penalty_of_a_recipe_can_be_turned_off_and_it_is_said():
    config = config_of(algorithm__kl_in="loss", algorithm__kl_estimator="k3")
    assert algorithm_problems(config, {"critic"}) == []
    assert unused_notes(config) == [
        "algorithm.kl_coef=0: there is no reference, and algorithm.kl_in=loss, algorithm.kl_estimator=k3 "
        "has no effect"
    ]
    config.algorithm.kl_coef = 0.1
    assert unused_notes(config) == unused_notes(config_of(algorithm__kl_in="none")) == []

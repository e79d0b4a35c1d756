"""What a curriculum cannot follow is refused before a run."""

import pytest

from verl_megatron.checks.algorithm import algorithm_problems
from verl_megatron.config import TrainerConfig
from verl_megatron.trainer import RLTrainer


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("async.buffer", "window", "as they come; use async.buffer=in_order"),
        ("data.samples_per_prompt", 1, "data.samples_per_prompt=1 is one of each"),
        ("rollout.adaptive_sampling", "0-:samples:1", "rollout.adaptive_sampling leaves one of each"),
        ("reward.function", "", "follows scores, and there are none"),
        ("data.train", "a.jsonl:0.5,b.jsonl:0.5", "gives its files weights; leave the weights out"),
    ],
)
def test_what_a_curriculum_cannot_follow_is_refused(setting, value, words):
    config = TrainerConfig()
    config.data.samples_per_prompt, config.rollout.devices = 2, "2-3" * (setting == "async.buffer")
    config.set(setting, value)
    assert not [problem for problem in algorithm_problems(config, ()) if "curriculum" in problem]
    config.data.curriculum = "level"
    (problem,) = [problem for problem in algorithm_problems(config, ()) if "curriculum" in problem]
    assert problem.startswith("data.curriculum='level'") and words in problem


@pytest.mark.parametrize(
    ("curriculum", "by", "words"),
    [(3, "files", "curriculum=3 is a int"), (max, "", "data.curriculum, which is empty; set it to files")],
)
def test_a_hook_needs_sources_and_is_a_function(curriculum, by, words):
    config = TrainerConfig()
    config.data.curriculum = by
    with pytest.raises(ValueError, match="curriculum=") as refused:
        RLTrainer(config, curriculum=curriculum)
    assert words in str(refused.value)

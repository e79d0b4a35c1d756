"""What benchmarks refuse before they build a model."""

import pytest

from parallel import device
from parallel.layout import Layout
from tests.planned import arch
from tests.tiny import tiny_architecture
from verl_megatron.benchmarks.case import check_room
from verl_megatron.benchmarks.engine import prompt_logits_flops
from verl_megatron.config import TrainerConfig
from verl_megatron.planner.planned_run import PlannedRun


def test_a_model_that_no_rank_has_room_for_is_refused(monkeypatch):
    arch, layout = tiny_architecture(), Layout.parse("tp2", (0, 1))
    check_room(arch, layout, bytes_per_parameter=16)
    monkeypatch.setattr(device, "free_memory_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"takes at least .* GiB, .* name a smaller model with --hf"):
        check_room(arch, layout, bytes_per_parameter=16)


@pytest.mark.parametrize(("group", "packed"), [(1, 8 * (512 + 63)), (8, 512 + 8 * 63)])
def test_the_baseline_computes_the_logits_of_every_packed_token(group, packed):
    config = TrainerConfig()
    config.actor.path, config.algorithm.name, config.engine.shared_prompts = "llama3-8b", "grpo", group > 1
    config.data.prompts_per_iteration, config.data.samples_per_prompt = 8 // group, group
    config.data.max_prompt_tokens, config.rollout.max_tokens = 512, 64
    run = PlannedRun.of(config, world_size=1, read=arch)
    of_a_token = 2 * run.actor.arch.hidden_size * run.actor.arch.vocab_size
    assert prompt_logits_flops(run) == (packed - 8 * 64) * of_a_token

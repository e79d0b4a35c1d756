"""Plans of `reshard.offload=steps`: memory of passes and of steps, and the seconds of the copies."""

from dataclasses import replace

import pytest

from tests.planned import H200, actor_alone, run_config
from verl_megatron.planner.memory import MemoryPlan, plan_memory
from verl_megatron.planner.static import most_optimizer_bytes
from verl_megatron.planner.training import step_seconds


def planned(offload: str, **engine):
    config = run_config("tp1", **engine)
    config.reshard.offload = offload
    run = actor_alone(config, 4)
    return run, plan_memory(run, H200)


def parts_of(memory: MemoryPlan, phase: str) -> dict[str, float]:
    return memory.kinds[0].phases[phase]


@pytest.mark.parametrize("engine", [{"sharding": "full"}, {}, {"distributed_optimizer": False}])
def test_optimizer_state_is_on_the_gpu_in_steps_only(engine):
    run, away = planned("steps", **engine)
    _, there = planned("none", **engine)
    state = most_optimizer_bytes(run, run.actor)
    for phase in ("rollout", "log_probs"):
        assert parts_of(away, phase)["optimizer"] == 0
        assert parts_of(there, phase)["optimizer"] == state
    update = parts_of(away, "actor_update")
    activations = parts_of(there, "actor_update")["activations"]
    assert {update["optimizer"], update["activations"]} == {0.0, max(state, activations)}
    assert away.host_bytes == there.host_bytes + 4 * state  # of the four ranks of the host


def test_each_step_waits_for_the_state_both_ways():
    run, _ = planned("steps")
    still, _ = planned("none")
    slow = replace(H200, pinned_rate=1e9)
    waited = step_seconds(run, slow, run.actor) - step_seconds(still, slow, still.actor)
    assert waited == pytest.approx(2 * most_optimizer_bytes(run, run.actor) / 1e9)

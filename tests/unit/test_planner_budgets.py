"""Plans of runs whose micro-batches follow the memory."""

from dataclasses import replace

import pytest

from tests.planned import H200, actor_alone, arch, run_config, run_of
from verl_megatron.planner.machine import GIB
from verl_megatron.planner.memory import plan_memory, problems_of
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.search.candidates import search
from verl_megatron.planner.seconds import plan_seconds
from verl_megatron.planner.text import memory_lines


def dynamic(layout: str = "tp2sp", **settings):
    return of_memory(run_config(layout, dynamic_batching=True, **settings))


def of_memory(config):
    """A run that offloads and leaves little to vLLM, so that most memory is for activations."""
    config.reshard.offload, config.rollout.gpu_memory_utilization = "all", 0.2
    return config


def updates(run: PlannedRun, machine=H200) -> float:
    return plan_memory(run, machine).phase_bytes("actor_update") / machine.gpu_bytes


@pytest.mark.parametrize("gib", [100, 120, 139.8, 178])
@pytest.mark.parametrize("layout", ["tp2sp", "dp4", "tp4sp"])
def test_micro_batches_fill_the_gpu_they_get(layout, gib):
    machine = replace(H200, gpu_bytes=gib * GIB)
    run = run_of(dynamic(layout, samples=4096), 4)
    memory = plan_memory(run, machine)
    if problems_of(run, machine, memory):
        pytest.skip(f"{layout} does not fit {gib} GiB")
    assert set(memory.budgets) == {"actor", "critic"}
    assert 0.8 < updates(run, machine) <= 1
    larger = plan_memory(run, replace(machine, gpu_bytes=(gib + 10) * GIB)).budgets
    assert all(larger[name] > tokens for name, tokens in memory.budgets.items())


def test_a_budget_is_what_a_fixed_one_would_take():
    run = run_of(dynamic(samples=4096), 4)
    memory = plan_memory(run, H200)
    fixed = run_of(
        of_memory(run_config("tp2sp", samples=4096, tokens_per_micro_batch=memory.budgets["actor"])), 4
    )
    same = plan_memory(fixed, H200)
    assert same.phase_bytes("actor_update") == pytest.approx(memory.phase_bytes("actor_update"), rel=0.01)
    seconds = plan_seconds(run, H200, memory).seconds
    assert seconds["actor_update"] == pytest.approx(
        plan_seconds(fixed, H200, same).seconds["actor_update"], rel=0.01
    )


def test_passes_have_the_room_of_optimizer_state_that_comes_for_steps_only():
    config, budgets = dynamic("dp4", samples=4096), {}
    for config.reshard.offload in ("all", "steps"):
        run = actor_alone(config, 4)
        memory = plan_memory(run, H200)
        budgets[config.reshard.offload] = memory.budgets["actor"]
        assert 0.8 < memory.phase_bytes("actor_update") / H200.gpu_bytes <= 1
    assert budgets["steps"] > 1.2 * budgets["all"]


def test_few_samples_leave_memory_free():
    memory = plan_memory(run_of(dynamic(samples=16), 4), H200)
    assert memory.budgets == {"actor": 2 * 1024, "critic": 2 * 1024}  # all rows of a mini-batch of 4 on 2


def test_pipeline_stages_get_enough_micro_batches():
    run = run_of(dynamic("tp2pp2sp", samples=256), 4)
    budget = plan_memory(run, H200).budgets["actor"]
    assert budget == 8192 and replace(run, budgets={"actor": budget}).micro_batches(run.actor)[0] == 8


def test_short_memory_makes_small_micro_batches_instead_of_a_refusal():
    machine = replace(H200, gpu_bytes=120 * GIB)
    fixed = run_of(of_memory(run_config("tp2sp", samples=4096, tokens_per_micro_batch=65536)), 4)
    assert problems_of(fixed, machine, plan_memory(fixed, machine))
    run = run_of(dynamic(samples=4096, tokens_per_micro_batch=65536), 4)
    memory = plan_memory(run, machine)
    assert not problems_of(run, machine, memory) and memory.budgets["actor"] < 65536


def test_the_report_and_the_search_say_it():
    run = run_of(dynamic(samples=4096), 4)
    memory = plan_memory(run, H200)
    (said,) = [line for line in memory_lines(memory, H200) if line.startswith("engine.dynamic_batching")]
    assert f"{memory.budgets['actor']:,} tokens (actor)" in said
    found = search(dynamic(samples=512), world_size=4, machine=H200, ranks_per_host=4, read=arch)
    assert found.fitting and all(candidate.memory.budgets for candidate in found.fitting)

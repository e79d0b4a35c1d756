"""Plans of a rollout on GPUs of its own, and the search for the best split."""

import json
from dataclasses import replace
from statistics import fmean

import pytest

from tests.planned import H200, arch, run_config
from verl_megatron.commands.plan import command as plan
from verl_megatron.model_specs import rollout_devices
from verl_megatron.planner.memory import SERVING, plan_memory, problems_of
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.rollout.serving import kv_bytes_per_token, vllm_working_bytes
from verl_megatron.planner.search.choices import configured
from verl_megatron.planner.search.splits import search_splits
from verl_megatron.planner.seconds import plan_seconds
from verl_megatron.planner.text import waiting
from verl_megatron.planner.training import infer_seconds


def separate(training: int, gpus: int, **settings) -> PlannedRun:
    placed = {"rollout.devices": f"{training}-{gpus - 1}"} | settings
    return PlannedRun.of(configured(run_config(samples=512), placed), world_size=training, read=arch)


def test_ranks_train_or_generate():
    run = separate(4, 6, **{"rollout.tp": 2})
    assert (run.gpus, run.world_size, run.replicas) == (6, 4, 1)
    *training, rollout = plan_memory(run, H200).kinds
    assert rollout.ranks == (4, 5) and set(rollout.phases) == {"start", "rollout"}
    parts = rollout.phases["rollout"]
    assert parts["versions"] == parts["vllm weights"] > run.actor.arch.num_layers * 2e8, "tp2 of 8B, bfloat16"
    config, tokens = run.config.rollout, run.prompt_tokens + run.response_tokens
    assert tokens % 16 == 0
    blocks = config.max_num_seqs * (tokens // 16 + 1) + 1  # smaller than what the share leaves
    cache = blocks * 16 * kv_bytes_per_token(run)
    assert parts["kv cache"] == pytest.approx(cache + vllm_working_bytes(run, H200))
    assert parts["vllm weights"] + parts["kv cache"] < config.gpu_memory_utilization * H200.gpu_bytes
    assert [kind.ranks for kind in training] == [(0, 1), (2, 3)], "two pipeline stages"
    for kind, elements in zip(training, run.actor.elements):
        for parts in kind.phases.values():
            assert not set(SERVING) & set(parts) and parts["versions"] == 2 * elements


def test_both_sides_take_turns_at_staleness_0_and_overlap_above():
    seconds = {}
    for staleness in (0, 1):
        run = separate(4, 6, **{"async.max_staleness": staleness})
        seconds[staleness] = plan_seconds(run, H200, plan_memory(run, H200))
    turns, beside = seconds[0], seconds[1]
    assert turns.iteration == pytest.approx(sum(turns.seconds.values()))
    assert beside.iteration == max(beside.seconds["rollout"], beside.training) < turns.iteration
    assert beside.seconds["rollout"] < turns.seconds["rollout"], "weights arrive while training goes on"
    assert turns.gpus == 6


def test_frozen_models_apart_score_beside_the_others():
    apart = {"reference.devices": "4-5", "reference.layout": "tp2", "rollout.devices": "6-7"}
    plans = []
    for staleness, buffer in ((0, "in_order"), (1, "in_order"), (1, "window")):
        run = separate(4, 8, **apart, **{"async.max_staleness": staleness, "async.buffer": buffer})
        plans.append(plan_seconds(run, H200, plan_memory(run, H200)))
    assert [role.name for role in run.roles] == ["actor", "critic"] and (run.gpus, run.world_size) == (8, 4)
    (reference,) = run.scoring[0].roles
    alone = H200.phase_s + infer_seconds(run, H200, [reference])
    turns, beside, window = plans
    assert turns.scoring == beside.scoring == {"reference": pytest.approx(alone)}
    # in turns: what is left of it when the training ranks have passed over the samples
    passes = turns.seconds["log_probs"] + turns.seconds["values"]
    assert turns.seconds["scores"] == pytest.approx(max(0.0, alone - passes))
    assert turns.iteration == pytest.approx(sum(turns.seconds.values()))
    assert "scores" not in beside.seconds
    assert window.seconds["scores"] == turns.seconds["scores"], "its samples are not known ahead"
    slow = replace(beside, scoring={"reference": 1000.0})
    assert slow.iteration == 1000.0 and "training waits" in waiting(slow) and "reference" not in waiting(slow)
    assert beside.iteration == max(beside.seconds["rollout"], beside.training, alone)


def test_the_search_places_frozen_models_apart():
    settings = {"reference.devices": "0", "reward.devices": "0", "reward.path": "llama3-1b"}
    base = configured(run_config(samples=512), {"async.max_staleness": 1} | settings)
    result = search_splits(base, world_size=8, machine=H200, read=arch)
    assert result.fitting
    for candidate in result.fitting[:5]:
        run = candidate.run
        (world,) = run.scoring  # both share it
        scoring = world.world.ranks
        assert {role.name for role in world.roles} == {"reference", "reward"} and len(scoring) in (1, 2)
        assert scoring[0] == run.world_size and scoring[-1] + 1 == rollout_devices(run.config)[0]
        assert rollout_devices(run.config)[-1] == run.gpus - 1 == 7
        again = PlannedRun.of(configured(base, candidate.settings), world_size=run.world_size, read=arch)
        memory = plan_memory(again, H200)
        assert not problems_of(again, H200, memory, margin=0.05)
        assert plan_seconds(again, H200, memory).iteration == pytest.approx(candidate.seconds.iteration)


def test_the_best_split_fits_when_it_is_planned_again():
    base = configured(run_config(samples=512), {"async.max_staleness": 1})
    result = search_splits(base, world_size=8, machine=H200, read=arch)
    assert {candidate.run.world_size for candidate in (*result.fitting, *result.refused)} == set(range(1, 8))
    for candidate in result.fitting[:5]:
        run = PlannedRun.of(
            configured(base, candidate.settings), world_size=candidate.run.world_size, read=arch
        )
        assert run.gpus == 8
        memory = plan_memory(run, H200)
        assert not problems_of(run, H200, memory, margin=0.05)
        assert plan_seconds(run, H200, memory).iteration == pytest.approx(candidate.seconds.iteration)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ("--gpus 1 --separate", "--separate needs a GPU to train and one to generate"),
        ("--gpus 4 --separate rollout.devices=3", "this is what the search chooses"),
        ("--gpus 4 --separate reference.devices=2", "this is what the search chooses"),
        ("--gpus 2 --separate --apart reference", "--apart one to score; raise --gpus to 3"),
        ("--gpus 4 --apart reference", "--apart is for a search with --separate"),
        (
            "--gpus 4 --separate --apart actor",
            "'actor' is not accepted; write one of reward, reference, teacher",
        ),
        ("--gpus 4 --separate --apart reward", "--apart reward: reward.path='' gives the run no reward"),
        (
            "--gpus 4 --separate --apart reference algorithm.kl_coef=0",
            "algorithm.kl_coef=0.0 gives the run no reference; set it above 0",
        ),
        ("--gpus 4 async.max_staleness=1", "needs a rollout on ranks of its own"),
        ("--gpus 4 --compare /nowhere rollout.devices=1-2", "must end with the last of --gpus 4, 3"),
    ],
)
def test_what_the_command_refuses(arguments, refusal, capsys):
    with pytest.raises(SystemExit) as ended:
        plan.run(["--model", "llama3-8b", *arguments.split()])
    assert ended.value.code == 2 and refusal in capsys.readouterr().err


def test_the_command_shows_the_split(capsys):
    assert plan.run(["--model", "llama3-8b", "--gpus", "4", "--separate", "--best", "2"]) == 0
    text = capsys.readouterr().out
    assert "rollout.devices=" in text and "async.max_staleness=1" in text and " waits " in text
    command = "--model llama3-8b --gpus 4 --algorithm grpo --separate --apart reference --best 1"
    assert plan.run(command.split()) == 0
    text = capsys.readouterr().out
    assert "those that score" in text and " reference.devices=" in text
    (shared,) = [line for line in text.splitlines() if line.startswith("together with ")]
    assert ".devices=" not in shared, "the lines have them"


def test_an_overlapping_run_is_compared_by_its_means(capsys, tmp_path):
    """An iteration that waits is followed by one that does not; training has one GPU, as in the run."""
    seconds = [40.0, 10.0, 20.0, 10.0, 20.0]
    rows = [
        {"step": step, "time/rollout_s": 1.0, "train/step_time_ms": 1e3 * each}
        for step, each in enumerate(seconds, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = "--model llama3-1b --gpus 2 --algorithm grpo --samples-per-iteration 64 algorithm.kl_coef=0"
    placed = ["rollout.devices=1", "async.max_staleness=1", "--compare", str(tmp_path)]
    assert plan.run([*command.split(), *placed]) == 0
    found = capsys.readouterr().out
    (iteration,) = [line.split() for line in found.splitlines() if line.startswith("iteration")]
    assert float(iteration[2]) == fmean(seconds[1:])
    assert plan.run([*command.split(), "--separate", *placed]) == 0
    assert capsys.readouterr().out == found

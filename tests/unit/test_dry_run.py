"""The plan of a dry run against the plan of a reshard and against the checks of a run."""

import json
import re
import subprocess
from dataclasses import replace

import pytest

from parallel.placement import busiest_elements
from parallel.runtime.refusal import NO_ROOM
from tests.launchers import LAUNCH, environment, hostfile
from tests.planned import arch
from tests.worlds import ROOT
from verl_megatron.config import DPOConfig, RewardModelConfig, SFTConfig
from verl_megatron.data.packing import Units
from verl_megatron.launch.dry_run import supervised_plan, training_plan, world
from verl_megatron.planner.machine import MACHINES
from verl_megatron.planner.reshard.case import read_case
from verl_megatron.planner.supervised import check_supervised_fits, supervised_run


@pytest.fixture
def ranks(monkeypatch):
    def set_ranks(world_size: int, of_a_host: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_a_host))

    return set_ranks


def settings(**sections: dict) -> dict:
    return {"actor": {"path": "llama3-8b", "layout": "tp4"}, "rollout": {"tp": 2}} | sections


def test_what_moves_is_what_is_missing(ranks):
    """Elements that the busiest rank of two hosts of four needs and does not hold, counted without a plan."""
    ranks(8, 4)
    text = training_plan(settings(actor={"path": "llama3-8b", "layout": "tp2pp4"}, rollout={"tp": 4}))
    case = read_case(hf="llama3-8b", train="tp2pp4", rollout="tp4", ranks=8, hosts=2).placed()
    missing = busiest_elements(case.arch, case.train, case.rollout, spec="te", ranks_per_host=4)[1]
    assert f"busiest rank receives {missing * 2 / 2**20:.1f} MiB" in text


def test_a_shape_stands_in_for_folders_and_prompts(ranks):
    ranks(8, 8)
    given = settings(critic={"path": "llama3-1b"}, reward={"path": "qwen2.5-1.5b", "function": ""})
    before = json.dumps(given)
    text = training_plan(given)
    assert json.dumps(given) == before
    assert re.search(r"critic +dp8 +on 8 ranks, from llama3-1b", text)
    assert re.search(r"reward +dp8 +on 8 ranks, from qwen2.5-1.5b", text)
    assert "4 x tp2" in text and "256 prompts x 1 sample" in text and "seconds predicted" in text


def test_each_world_is_shown(ranks, monkeypatch):
    """Ranks, hosts, GPUs, models and memory; vLLM's ranks hold 8B's 15 GiB of weights twice."""
    ranks(16, 4)
    given = settings(
        actor={"path": "llama3-8b", "layout": "tp4"},
        rollout={"tp": 2, "devices": "8-9+10-11+12-15", "gpu_memory_utilization": 0.25},
        reshard={"mode": "keep"},
        critic={"layout": "tp2pp2"},
    )
    text = training_plan(given)
    worlds = re.findall(
        r"^  (\S+) +ranks (\S+), hosts? (\S+), GPUs (\S+): (.*); [\d.]+ of 139.8 GiB", text, re.M
    )
    models = "actor tp4dp2, critic tp2pp2dp2"
    assert worlds == [
        ("train", "0-7", "0-1", "0-3", models),
        ("rollout:0", "8-9", "2", "0-1", "vLLM 1 x tp2"),
        ("rollout:1", "10-11", "2", "2-3", "vLLM 1 x tp2"),
        ("rollout:2", "12-15", "3", "0-3", "vLLM 2 x tp2"),
    ]
    shares = [float(found) for found in re.findall(r"vLLM .*; ([\d.]+) of 139.8 GiB", text)]
    least = 0.25 * 139.8 + 7.5  # its share, and the back buffer; a process needs more
    assert len(shares) == 3 and all(least < share < least + 12 for share in shares)
    received = re.findall(r"into a rollout world of (\d) ranks: .* receives ([\d.]+) MiB", text)
    assert [size for size, _ in received] == ["2", "4"] and {size for _, size in received} == {"7658.5"}
    monkeypatch.delenv("WORLD_SIZE")
    assert training_plan(given) == text, "the devices say how many ranks there are"
    ranks(24, 4)
    with pytest.raises(ValueError, match="makes a run of 16 ranks, and 24 were asked for"):
        training_plan(given)


def test_several_reward_functions_are_shown(ranks):
    ranks(8, 8)
    text = training_plan(
        settings(reward={"function": {"gsm8k": ["exact:0.8", "format:0.2"], "default": "json"}})
    )
    assert "\nscore: 0.8 x exact + 0.2 x format for 'gsm8k'; 1 x json for all others\n" in text
    assert "\nscore: " not in training_plan(settings())


def test_a_shape_stands_in_for_a_teacher(ranks):
    ranks(8, 8)
    text = training_plan(settings(teacher={"path": "llama3-1b"}, algorithm={"name": "distillation"}))
    assert re.search(r"teacher +dp8 +on 8 ranks, from llama3-1b", text)


def test_a_critic_that_the_algorithm_does_not_have_is_not_looked_for(ranks):
    ranks(8, 8)
    compared = {"data": {"train": "", "samples_per_prompt": 2}, "algorithm": {"name": "grpo"}}
    text = training_plan(settings(critic={"path": "/models/none"}, **compared))
    assert "critic" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (settings(actor={"path": "llama9"}), "actor.path='llama9' is neither a folder nor a built-in shape"),
        (
            settings(critic={"path": "/models/none"}, data={"train": __file__}),
            "critic.path='/models/none' is neither a folder nor",
        ),
        (settings(data={"train": "/data/none.jsonl"}), "data.train='/data/none.jsonl' does not exist"),
        (settings(actor={"path": "llama3-8b", "layout": "tp3"}), "actor.layout='tp3'"),
        (settings(rollout={"tp": 16}), "rollout.tp=16 must divide the number of ranks that generate, 8"),
        (settings(actr={"lr": 1}), "actr is no section"),
        (settings(data=3), "data=3 is no section"),
    ],
)
def test_settings_are_checked_as_a_run_checks_them(ranks, given, message):
    ranks(8, 8)
    with pytest.raises(ValueError, match=re.escape(message)):
        training_plan(given)


def test_an_unknown_gpu_is_named(ranks):
    ranks(8, 8)
    with pytest.raises(ValueError, match="abacus"):
        training_plan(settings(), gpu="abacus")


def test_supervised_runs_are_checked_too(ranks):
    ranks(4, 4)
    assert (
        "256 samples a step; actor tp2dp2: 128 samples a data-parallel rank; micro-batches"
        in supervised_plan({"actor": {"path": "llama3-8b", "layout": "tp2"}}, SFTConfig)
    )
    with pytest.raises(ValueError, match="data.max_tokens=9000 exceeds"):
        supervised_plan({"actor": {"path": "llama3-8b"}, "data": {"max_tokens": 9000}}, SFTConfig)
    with pytest.raises(ValueError, match="abacus"):
        supervised_plan({"actor": {"path": "llama3-8b"}}, SFTConfig, gpu="abacus")


@pytest.mark.parametrize(("schema", "other"), [(DPOConfig, "reward"), (RewardModelConfig, "actor")])
def test_a_model_that_a_command_does_not_have_is_no_section(ranks, schema, other):
    """Whether or not its path leads anywhere."""
    ranks(4, 4)
    with pytest.raises(ValueError, match=f"^{other} is no section"):
        supervised_plan({other: {"path": "nowhere"}, "data": {"train": ""}}, schema)


def test_runs_on_pairs_are_planned(ranks):
    """DPO holds a frozen copy of the actor: 2 bytes of 8 billion parameters more, and a forward pass."""
    ranks(4, 4)
    model = {"path": "llama3-8b", "layout": "tp2"}
    plans = [supervised_plan({"actor": model}, schema) for schema in (SFTConfig, DPOConfig)]
    weights = [float(re.search(r"weights ([\d.]+)", plan)[1]) for plan in plans]
    assert weights[1] == pytest.approx(2 * weights[0], abs=0.2)
    assert "64 pairs a step; actor tp2dp2: 32 pairs a data-parallel rank; micro-batches" in plans[1]
    assert "reference: the initial weights of the actor, frozen" in plans[1]
    plan = supervised_plan({"reward": model}, RewardModelConfig)
    assert "64 pairs a step; reward tp2dp2" in plan and "It fits: " in plan
    with pytest.raises(ValueError, match="reward.path='none' is neither a folder nor"):
        supervised_plan({"reward": {"path": "none"}}, RewardModelConfig)


def test_supervised_runs_are_planned_and_refused_too(ranks):
    ranks(4, 4)
    fits, narrow = (
        supervised_plan({"actor": {"path": "llama3-8b", "layout": layout}}, SFTConfig, gpu=gpu)
        for layout, gpu in (("tp2", "h200"), ("tp1", "h100"))
    )
    assert (
        "It fits: " in fits and "seconds predicted" in fits and "optimizer 22.4" in fits
    )  # 12 bytes of 8 billion parameters on two of the four GPUs, halved by dp
    assert "It does not fit:\n  a step: " in narrow and "engine.recompute=full" in narrow
    large = SFTConfig()
    large.actor.path, large.actor.layout = "llama3-70b", "tp4"

    def problems(machine):
        run = supervised_run(large, world_size=4, read=arch)
        assert run.actor.trainable and run.packed_tokens == large.data.max_tokens - 1
        return check_supervised_fits(large, world_size=4, machine=machine, read=arch)

    assert (
        problems(None) == []
        and "this run cannot fit 4 GPUs of 140 GiB: a step: " in problems(MACHINES["h200"])[0]
    )


@pytest.mark.parametrize(("length", "budget"), [(8192, 8192), (5000, 16384), (8192, 24576), (100, 8192)])
def test_plans_keep_pairs_together_as_runs_do(length, budget):
    config = DPOConfig()
    config.actor.path, config.actor.layout = "llama3-8b", "tp8"
    config.data.pairs_per_step, config.data.max_tokens = 32, length
    config.engine.tokens_per_micro_batch = budget
    run = supervised_run(config, world_size=8, read=arch)
    pairs = Units([[place, place + 1] for place in range(0, 64, 2)], [length] * 64)
    batches = pairs.micro_batches(tokens_per_micro_batch=budget, multiple_of=1)
    assert run.micro_batches(run.actor) == (len(batches), max(map(len, batches)))


def test_the_remedies_of_a_supervised_run_are_those_that_can_be_followed(ranks):
    ranks(1, 1)
    given = {"actor": {"path": "llama3-8b"}, "engine": {"dtype": "bfloat16"}}
    plan = supervised_plan(given, SFTConfig)
    assert "engine.sharding=full" in plan and "more tp or pp" not in plan
    sharded = {"sharding": "full", "recompute": "full", "tokens_per_micro_batch": 4096}
    given["engine"] |= sharded
    assert "It fits: " in supervised_plan(given, SFTConfig)


def test_fitted_micro_batches_of_supervised_runs_are_told_and_timed(ranks):
    ranks(4, 4)
    given = {"actor": {"path": "llama3-8b", "layout": "tp2"}, "engine": {"dynamic_batching": True}}
    plan = supervised_plan(given, SFTConfig)
    (tokens,) = re.findall(r"micro-batches of up to ([\d,]+) tokens \(actor\)", plan)
    fixed = {"dynamic_batching": False, "tokens_per_micro_batch": int(tokens.replace(",", "")) // 4}
    smaller = supervised_plan(given | {"engine": fixed}, SFTConfig)
    seconds, more = (float(re.search(r"predicted: ([\d.]+)", text)[1]) for text in (plan, smaller))
    assert "micro-batches of up to" not in smaller and seconds < more


def test_host_memory_of_supervised_runs_is_checked(ranks, monkeypatch):
    ranks(4, 4)
    given = {"actor": {"path": "llama3-8b", "layout": "tp2"}, "run": {"save_interval": 10}}
    small = replace(MACHINES["h200"], host_bytes=80 * 2**30)
    monkeypatch.setitem(MACHINES, "h200", small)
    plan = supervised_plan(given, SFTConfig, gpu="h200")
    assert "It does not fit:\n  host memory: " in plan and "set run.save_interval=0" in plan
    config = SFTConfig()
    config.actor.path, config.actor.layout, config.run.save_interval = "llama3-8b", "tp2", 10
    (problem,) = check_supervised_fits(config, world_size=4, machine=small, read=arch)
    assert "host memory: " in problem
    config.run.save_interval = 0
    assert check_supervised_fits(config, world_size=4, machine=small, read=arch) == []


def test_a_supervised_run_that_is_too_large_to_be_built_is_refused(ranks):
    """Fully sharded, all of a step fits; the remedy is none that full sharding refuses."""
    ranks(32, 8)
    plan = supervised_plan(
        {"actor": {"path": "llama3-70b"}, "engine": {"sharding": "full", "recompute": "full"}}, SFTConfig
    )
    assert "It does not fit:\n  building the models: " in plan
    assert "set engine.sharding=replicated with more tp or pp in actor.layout" in plan


def test_the_world_comes_from_the_environment(ranks, monkeypatch):
    ranks(16, 8)
    assert world() == (16, 8)
    ranks(4, 8)
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE=8 must divide WORLD_SIZE=4"):
        world()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert world() == (4, 4)
    monkeypatch.delenv("WORLD_SIZE")
    assert world() == (1, 1)
    ranks(12, 8)
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE=8 must divide WORLD_SIZE=12"):
        world()
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ValueError, match="WORLD_SIZE='many' is no number"):
        world()


def test_the_whole_way_from_a_launcher(tmp_path):
    """As a user types it, without stand-ins."""
    hosts = hostfile(tmp_path / "hosts", nodes=4, slots=8)
    command = [
        "bash",
        LAUNCH / "hostfile.sh",
        hosts,
        "recipes/llama3_70b_ppo.sh",
        "reward.path=llama3-8b",
        "reward.function=",
        "--dry-run",
        "--gpu",
        "h100",
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=120)
    assert run.returncode == NO_ROOM and "It does not fit" in run.stdout, run.stderr
    assert run.stdout.count("NODE_RANK=") == 4 and "worker-3: ssh" in run.stdout
    assert (
        "dry run: 32 ranks, 8 a host" in run.stdout and "reward" in run.stdout and "32 x h100" in run.stdout
    )

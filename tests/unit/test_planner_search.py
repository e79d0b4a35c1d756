"""Search for a plan: what it offers, refuses and reports; files that describe a machine."""

import json
from dataclasses import replace
from itertools import product

import pytest

from parallel.weights.shapes import shape
from tests.planned import H200, arch, run_config, run_of
from verl_megatron.checks.overrides import structured
from verl_megatron.config import TrainerConfig
from verl_megatron.planner.machine import MACHINES, Machine, find_machine
from verl_megatron.planner.memory import plan_memory, problems_of
from verl_megatron.planner.preflight import check_fits
from verl_megatron.planner.search.candidates import search
from verl_megatron.planner.search.choices import configured
from verl_megatron.planner.seconds import plan_seconds
from verl_megatron.planner.text import report

# ---- search, refusal, text -------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "gpus"), [("h200", 8), ("h100", 8), ("h200", 2)])
def test_the_search_offers_what_fits_when_it_is_planned_again(gpu, gpus):
    base, machine = run_config(samples=512), MACHINES[gpu]
    result = search(base, world_size=gpus, machine=machine, read=arch)
    iterations = [candidate.time.iteration for candidate in result.fitting]
    assert iterations == pytest.approx(sorted(iterations), abs=0.01)
    for candidate in result.fitting[:5]:
        run = run_of(configured(base, candidate.settings), gpus)
        memory = plan_memory(run, machine)
        assert not problems_of(run, machine, memory, margin=0.05)
        assert plan_seconds(run, machine, memory).iteration == pytest.approx(candidate.time.iteration)
    for candidate in result.refused:
        assert problems_of(candidate.run, machine, candidate.memory, margin=0.05) and candidate.time is None


def test_every_layout_of_one_host_was_tried():
    result = search(run_config(samples=512), world_size=4, machine=H200, read=arch)
    tried = {candidate.run.actor.layout for candidate in (*result.fitting, *result.refused)}
    assert {(layout.tp, layout.pp, layout.dp) for layout in tried} == {
        (tp, pp, dp) for tp, pp, dp in product((1, 2, 4), repeat=3) if tp * pp * dp == 4
    }


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 8192), ("fp8", 16_384)])
def test_larger_micro_batches_are_tried_in_fp8_and_win_where_launching_is_the_limit(dtype, most):
    config = run_config("tp2sp", samples=256, rollout=1, dtype=dtype, tokens_per_micro_batch=8192)
    config.algorithm.name, slow = "grpo", replace(H200, forward_launch_s=4e-3, backward_launch_s=6e-3)
    found = search(config, world_size=2, machine=slow, read=arch).fitting
    tokens = "engine.tokens_per_micro_batch"
    assert max(each.settings[tokens] for each in found) == most
    assert found[0].settings[tokens] == most


def test_a_critic_on_the_actors_trunk_has_no_layout_and_takes_no_memory():
    config = run_config(samples=512)
    config.critic.share_trunk = True
    best = search(config, world_size=4, machine=H200, read=arch).fitting[0]
    assert not any(name.startswith("critic.") for name in best.settings)
    assert [role.name for role in best.run.roles if role.trainable] == ["actor"]
    assert not {"values", "critic_update"} & best.time.seconds.keys()


def test_optimizer_state_for_steps_only_is_offered_where_nothing_else_fits_and_timed():
    config = run_config("tp1", samples=64, rollout=1)
    config.algorithm.name, config.algorithm.num_mini_batches, config.algorithm.kl_coef = "grpo", 1, 0
    config.engine.sharding, config.engine.tokens_per_micro_batch = "full", 4096
    found = search(config, world_size=1, machine=H200, read=arch).fitting
    assert found and {each.settings["reshard.offload"] for each in found} == {"steps"}
    best = found[0]
    again = plan_seconds(best.run, H200, best.memory).seconds
    at_rest = replace(best.run, config=configured(best.run.config, {"reshard.offload": "all"}))
    without = plan_seconds(at_rest, H200, best.memory).seconds
    assert best.seconds.seconds["actor_update"] == again["actor_update"] > without["actor_update"] + 1


def test_full_sharding_is_offered_and_only_where_a_run_accepts_it():
    def grpo(**engine):
        config = run_config("tp1", samples=64, rollout=1, **engine)
        config.algorithm.name, config.algorithm.kl_coef = "grpo", 0.01
        return config

    def shardings(config, gpus: int = 2) -> set[str]:
        found = search(config, world_size=gpus, machine=H200, read=arch)
        assert all(
            each.run.actor.layout.dp == gpus and each.settings["reshard.mode"] == "keep"
            for each in found.fitting
            if each.settings.get("engine.sharding") == "full"
        )
        return {each.run.config.engine.sharding for each in (*found.fitting, *found.refused)}

    assert shardings(grpo()) == {"replicated", "full"}
    assert shardings(grpo(sharding="full")) == {"full"}
    assert shardings(grpo(dynamic_batching=True)) == shardings(grpo(dtype="fp8")) == {"replicated"}
    rounded, trunk = grpo(), run_config(samples=512)
    rounded.reference.dtype, trunk.critic.share_trunk = "fp8", True
    assert shardings(rounded) == shardings(trunk, 4) == {"replicated"}
    alone = grpo(tokens_per_micro_batch=4096)
    alone.algorithm.kl_coef = 0
    found = search(alone, world_size=1, machine=H200, read=arch).fitting
    assert {each.settings.get("engine.sharding") for each in found} == {"full"}


def settings_offered(change, gpus: int = 8, **machine) -> list[dict]:
    """Of every candidate that fits, after a change of the base."""
    base = run_config(samples=512)
    change(base)
    return [
        candidate.settings
        for candidate in search(base, world_size=gpus, machine=H200, read=arch, **machine).fitting
    ]


def test_the_search_offers_what_a_run_accepts():
    def awake(config):
        config.rollout.sleep = False

    def half(config):
        config.rollout.dtype = "float16"

    def long(config):
        config.algorithm.name, config.algorithm.kl_coef, config.data.samples_per_prompt = "grpo", 0.0, 8
        config.data.max_prompt_tokens = config.rollout.max_tokens = 4096

    def quantized(config):
        long(config)
        config.rollout.weight_dtype = "fp8"

    def shared(config):
        long(config)
        config.engine.shared_prompts = True

    assert {settings["reshard.mode"] for settings in settings_offered(quantized, 4)} == {"keep"}
    assert not any("cp" in settings["actor.layout"] for settings in settings_offered(shared, 4))
    assert {settings["reshard.offload"] for settings in settings_offered(awake)} == {"none"}
    assert {settings["reshard.mode"] for settings in settings_offered(half)} == {"keep"}
    assert {
        settings["rollout.tp"] for settings in settings_offered(lambda config: None, 12, ranks_per_host=6)
    } == {1, 2}  # not across a host's border


def test_a_large_reward_model_is_split():
    def scored(layout):
        def change(config):
            config.reward.path, config.reward.layout = "llama3-70b", layout

        return change

    assert {settings["reward.layout"] for settings in settings_offered(scored("tp1"))} == {"tp8sp"}
    assert all(
        "reward.layout" not in settings for settings in settings_offered(scored("tp4pp2"))
    )  # chosen by the user


def test_a_reward_model_is_split_as_the_ranks_and_the_sharding_allow():
    def scored(config):
        config.actor.path, config.reward.path = "llama3-1b", "qwen2.5-32b"
        config.algorithm.name = "grpo"

    def sharded(config):
        scored(config)
        config.engine.sharding = "full"

    replicated = [
        settings
        for settings in settings_offered(scored, 2, ranks_per_host=8)
        if "engine.sharding" not in settings
    ]
    assert {settings["reward.layout"] for settings in replicated} == {"tp2sp"}
    offered = settings_offered(sharded)
    assert offered and not any("reward.layout" in settings for settings in offered)


def test_no_layout_is_offered_whose_matrices_fp8_cannot_multiply():
    narrow = replace(arch("llama3-1b"), intermediate_size=8192 + 16)  # 4 ranks have 2052 channels each

    def layouts(dtype):
        base = run_config(samples=512, model="llama3-1b", dtype=dtype)
        found = search(base, world_size=4, machine=H200, read=lambda _: narrow)
        return {candidate.run.actor.layout.tp for candidate in found.fitting}

    assert layouts("bfloat16") == {1, 2, 4} and layouts("fp8") == {1}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shape("llama3-8b")))
    return tmp_path


def test_a_run_without_room_is_refused_with_runs_that_have_it(folder):
    config = run_config("tp2sp", model=str(folder), share=0.9)
    assert check_fits(config, world_size=8, machine=None) == []
    (problem,) = check_fits(config, world_size=8, machine=MACHINES["h100"])
    assert "rollout: " in problem and "8 GPUs of 79 GiB" in problem
    lines = [line.split() for line in problem.splitlines()[1:]]
    assert len(lines) == 3
    for line in lines:
        settings = dict(setting.split("=") for setting in line)
        assert not check_fits(
            structured(nested(config, settings), TrainerConfig), world_size=8, machine=MACHINES["h100"]
        )


def nested(config: TrainerConfig, settings: dict[str, str]) -> dict[str, dict]:
    """What a recipe of `config` with these settings says."""
    sections = {
        "data": {
            "train": "",
            "max_prompt_tokens": config.data.max_prompt_tokens,
            "prompts_per_iteration": config.data.prompts_per_iteration,
        },
        "actor": {"path": config.actor.path},
        "critic": {"path": config.critic.path},
        "rollout": {"max_tokens": config.rollout.max_tokens},
        "algorithm": {
            "num_mini_batches": config.algorithm.num_mini_batches,
            "kl_coef": config.algorithm.kl_coef,
        },
    }
    for name, value in settings.items():
        section, setting = name.split(".")
        sections.setdefault(section, {})[setting] = value
    return sections


def test_nothing_that_fits_is_said_so(folder):
    (problem,) = check_fits(run_config("tp2sp", model=str(folder)), world_size=2, machine=MACHINES["h100"])
    assert "use more GPUs" in problem


def test_the_report_tells_memory_seconds_and_the_verdict(folder):
    config = run_config(model=str(folder))
    text = report(config, world_size=4)
    assert "It fits" in text and "seconds predicted" in text and "ranks 0-1" in text
    assert all(
        phase in text
        for phase in ("weights_awake", "rollout", "log_probs", "values", "critic_update", "actor_update")
    )
    assert "It does not fit:\n" in report(config, world_size=4, gpu="h100")
    with pytest.raises(ValueError, match="gpu 'tpu' is not known; choose one of h200"):
        report(config, world_size=4, gpu="tpu")


# ---- machines --------------------------------------------------------------------------------------------


def test_a_machine_file_changes_what_it_names(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps({"base": "h100", "name": "mine", "copy_rate": 3e12, "measured": {"products": {}}})
    )
    assert find_machine(str(file)) == replace(MACHINES["h100"], name="mine", copy_rate=3e12)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "JSON object with base"),
        ('{"base": "tpu"}', "base set to one of"),
        ('{"base": "h100", "speed": 1}', "speed=1 is not known"),
        ('{"base": "h100", "copy_rate": 0}', "copy_rate=0 must be a positive number"),
        ('{"base": "h100", "name": 3}', "name=3 must be a text"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_machine_file_is_refused_by_name(tmp_path, content, message):
    file = tmp_path / "mine.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        Machine.from_file(file)


@pytest.mark.parametrize(
    ("gpus", "change", "message"),
    [
        (240, {"actor.layout": "tp3"}, "actor.layout='tp3'"),
        (240, {"critic.layout": "pp5"}, "critic.layout='pp5'"),
        (240, {"rollout.tp": 48}, "rollout.tp=48: "),
        (64, {"rollout.tp": 3}, "rollout.tp=3 must divide"),
    ],
)
def test_a_case_that_cannot_be_is_refused_by_name(gpus, change, message):
    with pytest.raises(ValueError, match=message):
        run_of(configured(run_config("tp2sp", samples=4096), change), gpus)


def test_an_engine_that_never_sleeps_has_its_room_in_every_phase():
    base = run_config(samples=512)
    base.rollout.sleep = False
    result = search(base, world_size=8, machine=H200, read=arch)
    assert result.fitting
    for candidate in result.fitting:
        share = candidate.settings["rollout.gpu_memory_utilization"] * H200.gpu_bytes
        assert candidate.memory.phase_bytes("actor_update") >= share + candidate.memory.idle_bytes

"""tools/plan.py as it is called, and tools/calibrate.py on two CPU ranks."""

import json

import pytest

from parallel.weights.shapes import shape
from tests.worlds import run_world
from verl_megatron.algorithms import ALGORITHMS
from verl_megatron.commands.plan import command as plan
from verl_megatron.commands.plan.settings import base_config
from verl_megatron.planner.machine import LAYER_SHARE, MACHINES, find_machine
from verl_megatron.planner.search.choices import ALWAYS_SAID


def planned(capsys, *arguments: str) -> str:
    plan.run(list(arguments))
    return capsys.readouterr().out


def test_the_table_the_reasons_and_three_recipe_lines(capsys):
    text = planned(capsys, "--model", "llama3-8b", "--gpus", "4", "--gpu", "h100", "--best", "4")
    table, rest = text.split("\n\n", 1)
    assert len(table.splitlines()) == 1 + 4
    assert all(
        phase in table.splitlines()[0]
        for phase in ("rollout", "log_probs", "values", "critic_update", "actor_update", "MFU", "GiB")
    )
    assert "do not fit 79.1 GiB (h100)" in rest and "critic_update" in rest
    first = rest.split("the first:\n")[1]
    assert all(
        part in first.splitlines()[0]
        for part in ("weights", "gradients", "optimizer", "activations", "vllm weights", "kv cache")
    )
    assert "host memory" in first and "seconds predicted" in first
    lines = rest.split("recipe lines:\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) == 3 and all(f"{name}=" in line for line in lines for name in ALWAYS_SAID)


def test_settings_and_json(capsys, tmp_path):
    file = tmp_path / "plan.json"
    arguments = (
        "--model",
        "qwen2.5-7b",
        "--gpus",
        "4",
        "--algorithm",
        "grpo",
        "--samples-per-iteration",
        "512",
        "--json",
        str(file),
    )
    with_reference = planned(capsys, *arguments)
    plain = json.loads(file.read_text())
    planned(capsys, *arguments, "algorithm.kl_coef=0")
    without = json.loads(file.read_text())
    assert "critic" not in with_reference and "data.samples_per_prompt=8" in with_reference
    best = plain["fitting"][0]
    assert best["iteration_seconds"] == pytest.approx(sum(best["seconds"].values()))
    assert best["peak_bytes"] == max(
        sum(parts.values()) for kind in best["memory"] for parts in kind["phases"].values()
    )
    assert without["fitting"][0]["seconds"]["log_probs"] < 0.6 * best["seconds"]["log_probs"]


def test_a_plan_beside_what_a_run_measured(capsys, tmp_path):
    rows = [{"step": 0, "validation/accuracy": 0.5}]
    rows += [
        {
            "step": step,
            "time/rollout_s": 6.0 + step,
            "memory/actor_update_mb": 1024.0 * 98,
            "train/step_time_ms": 26_300.0,
        }
        for step in (1, 2, 3, 4)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = (
        "--model",
        "llama3-8b",
        "--gpus",
        "4",
        "--samples-per-iteration",
        "256",
        "--prompt",
        "512",
        "--response",
        "512",
        "--compare",
        str(tmp_path),
    )
    layout = (
        "actor.layout=tp2pp2sp",
        "critic.layout=tp2pp2sp",
        "rollout.tp=2",
        "rollout.gpu_memory_utilization=0.4",
    )
    lines = {line.split()[0]: line.split()[1:] for line in planned(capsys, *run, *layout).splitlines()}
    assert (
        lines["actor_update"][1:3] == ["98.00", "GiB"]
        and abs(float(lines["actor_update"][3].rstrip("%"))) < 10
    )
    assert lines["rollout"][1:3] == ["9.00", "s"]  # the median of the last three
    assert lines["iteration"][1:3] == ["26.30", "s"]


def test_a_folder_is_read(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shape("llama3-1b")))
    by_name, by_folder = (
        planned(capsys, "--model", model, "--gpus", "1", "--samples-per-iteration", "64")
        for model in ("llama3-1b", str(tmp_path))
    )
    assert by_name == by_folder and "rollout.tp=1" in by_name


def test_seventy_billion_on_sixty_four_gpus_can_be_planned(capsys):
    text = planned(capsys, "--model", "llama3-70b", "--gpus", "64")
    assert "recipe lines:" in text


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_planned_with_the_samples_that_it_compares(name):
    teacher = ["teacher.path=llama3-8b"] * (name == "distillation")
    given = ["--model", "llama3-8b", "--gpus", "8", "--algorithm", name, *teacher]
    config = base_config(plan.parser().parse_args(given))
    assert config.algorithm.name == name
    assert (config.data.samples_per_prompt > 1) == (ALGORITHMS[name].min_samples > 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "llama3-8b", "--gpus", "8", "--algorithm", "distillation"],
            "algorithm.name=distillation learns from a teacher",
        ),
        (
            ["--model", "nothing-here", "--gpus", "8"],
            "--model: 'nothing-here' is neither a folder nor a built-in shape",
        ),
        (["--model", "llama3-8b", "--gpus", "8", "--critic", "nope"], "--critic: 'nope' is neither"),
        (["--model", "llama3-8b", "--gpus", "12"], "--gpus 12 are no whole hosts of 8"),
        (
            ["--model", "llama3-8b", "--gpus", "8", "engine.recompute"],
            "'engine.recompute' has no value; settings are SECTION.SETTING=VALUE",
        ),
        (
            ["--model", "llama3-8b", "--gpus", "8", "data.prompts_per_iteration=77"],
            "77 samples do not split into algorithm.num_mini_batches=4",
        ),
        (["--model", "llama3-8b", "--gpus", "8", "rollout.stop=["], "'rollout.stop=[' cannot be read"),
        (["--model", "llama3-8b", "--gpus", "8", "=3"], "'=3' cannot be read (it names no setting)"),
        (
            ["--model", "llama3-8b", "--gpus", "8", "--response", "100", "rollout.max_tokens=9"],
            "--response 100 and rollout.max_tokens=9 differ; leave one of them out",
        ),
        (
            ["--model", "llama3-8b", "--gpus", "8", "actor.path=llama3-1b"],
            "--model llama3-8b and actor.path=llama3-1b differ",
        ),
        (
            ["--model", "llama3-8b", "--gpus", "8", "--compare", ".", "--json", "x.json"],
            "--json x.json takes candidates, and --compare has none; leave one out",
        ),
        (["--model", "llama3-8b", "--gpus", "8", "--gpu", "tpu"], "gpu 'tpu' is not known"),
        (["--model", "llama3-8b", "--gpus", "8", "--hosts", "3"], "--hosts 3 must divide the 8 GPUs"),
        (["--model", "llama3-8b", "--gpus", "0"], "'0' is not accepted"),
        (
            ["--model", "llama3-8b", "--gpus", "8", "actor.layout=tp2", "reshard.mode=swap"],
            "actor.layout, reshard.mode: this is what the search chooses",
        ),
        (["--model", "llama3-8b", "--gpus", "8", "actor.devices=0-99"], "actor"),
        (
            ["--model", "llama3-8b", "--gpus", "8", "reward.path=/nope"],
            "reward.path: '/nope' is neither a folder nor a built-in shape",
        ),
        (
            ["--model", "llama3-8b", "--gpus", "8", "--prompt", "1024", "--response", "15360"],
            "samples of 16384 tokens, more than the model's 8192 positions",
        ),
        (
            ["--model", "llama3-8b", "--gpus", "8", "--algorithm", "grpo", "--samples-per-prompt", "1"],
            "compares a sample with no other",
        ),
        (
            ["--model", "llama3-8b", "--gpus", "4", "engine.sharding=full", "engine.dynamic_batching=true"],
            "engine.dynamic_batching=True with engine.sharding=full",
        ),
        (
            ["--model", "llama3-8b", "--gpus", "4", "engine.dtype=float32", "reference.dtype=fp8"],
            "reference.dtype=fp8 with engine.dtype=float32",
        ),
        (["--model", "llama3-8b", "--gpus", "5000"], "more than the 4096"),
        (
            ["--model", "llama3-8b", "--gpus", "8", "--samples-per-iteration", "10"],
            "10 samples do not split into algorithm.num_mini_batches=4",
        ),
        (
            [
                "--model",
                "llama3-8b",
                "--gpus",
                "8",
                "--samples-per-iteration",
                "12",
                "--samples-per-prompt",
                "8",
            ],
            "--samples-per-iteration 12 must be a multiple of --samples-per-prompt 8",
        ),
        (["--model", "llama3-8b", "--gpus", "8", "--algorithm", "ppp"], "algorithm.name='ppp' is not known"),
        (["--model", "llama3-8b", "--gpus", "8", "engine.speed=3"], "engine.speed is no setting"),
        (["--model", "llama3-8b", "--gpus", "8", "rollout.top_p=7"], "rollout.top_p=7.0 lies outside"),
        (
            ["--model", "llama3-8b", "--gpus", "8", "--compare", "/nowhere"],
            "--compare /nowhere holds no metrics.jsonl",
        ),
        (
            ["--model", "llama3-8b", "--gpus", "8", "--json", "/nowhere/x.json"],
            "--json /nowhere/x.json cannot be written",
        ),
    ],
)
def test_bad_input_ends_with_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        plan.run(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and len(error.splitlines()) == 1


def test_calibration_on_two_ranks_is_a_machine_that_plans_read(tmp_path):
    file = tmp_path / "machine.json"
    run_world("tools/calibrate.py", 2, file, "--seconds", "0.02", fresh=True)
    written, machine = json.loads(file.read_text()), find_machine(str(file))
    measured = written["measured"]
    assert machine.layer_flops == pytest.approx(LAYER_SHARE * max(measured["products"].values()))
    assert machine.same_host_rate == max(measured["links"]["all_gather"].values())
    assert machine.copy_rate == measured["copies"]["device"]
    for way, seconds in measured["launch"].items():
        usual = getattr(MACHINES["h200"], f"{way}_launch_s")
        assert getattr(machine, f"{way}_launch_s") == (seconds if seconds > 0 else usual)
    assert set(measured["links"]) == {"all_gather", "all_reduce", "next_rank"}
    assert machine.decode_step_s == MACHINES["h200"].decode_step_s  # not measured: as the base
    # In bytes, operations and seconds, however loaded the machine is.
    assert 1e4 < machine.same_host_rate < 1e12
    assert 1e6 < machine.layer_flops < 1e14
    assert 1e-7 < machine.collective_s < 30

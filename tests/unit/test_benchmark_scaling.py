"""Outputs and refusals of the scaling benchmark, and the runs that it starts."""

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from parallel.weights.rules import hf_shapes
from parallel.weights.shapes import shape
from tests.scaled import run_on, scaling_of
from verl_megatron.benchmarks.options.scaling import by_size, numbers, parser
from verl_megatron.benchmarks.scaling import command
from verl_megatron.benchmarks.scaling.command import main, sizes_to_run
from verl_megatron.benchmarks.scaling.report import Report, markdown, write_csv, write_png
from verl_megatron.benchmarks.scaling.rows import (
    MEASURED,
    MODELLED,
    Row,
    at_best,
    described,
    disturbance,
    measured_row,
)
from verl_megatron.benchmarks.scaling.runs import Recipe, architecture, environment
from verl_megatron.examples import random_weights, toy


def test_planned_seconds_and_what_is_modelled_stand_in_every_output(tmp_path):
    scaling = scaling_of()
    rows, _ = scaling.model(16, lambda run: {"rollout": 7.125})
    report = Report(
        title="title", device="device", rows=[*scaling.rows, *rows], peak_flops=989e12, notes=["a note"]
    )
    text = markdown(report)
    assert (
        text.count("| measured |") == 6
        and text.count("| modelled |") == 4
        and "MFU, updates" in text
        and "7.12 / " in text
    )
    write_csv(tmp_path / "rows.csv", report)
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines] == ["source", *[MEASURED] * 3, *[MODELLED] * 2]
    write_png(tmp_path / "rows.png", report)
    assert (tmp_path / "rows.png").stat().st_size > 10_000
    on_cpu = markdown(replace(report, peak_flops=None))
    assert "MFU" not in on_cpu and "TFLOP/s a rank" in on_cpu


def test_responses_of_other_lengths_are_no_measurement(tmp_path):
    row = {"step": 1, "time/rollout_s": 1.0, "rollout/response_tokens_mean": 511.5}
    (tmp_path / "metrics.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    with pytest.raises(ValueError, match=r"\[511.5\] tokens on average and not 512"):
        measured_row(run_on(1, "tp1"), tmp_path, {})
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="run at least two"):
        measured_row(run_on(1, "tp1"), tmp_path, {})


def test_iterations_that_differ_are_told():
    row = Row(source=MEASURED, seconds={"rollout": 3.0, "log_probs": 1.0}, **described(run_on(2, "tp1")))
    assert disturbance(row) == ""  # modelled: no iterations
    assert disturbance(replace(row, ranges={"rollout": (2.95, 3.05), "log_probs": (0.95, 1.05)})) == ""
    text = disturbance(replace(row, ranges={"rollout": (2.8, 3.9), "log_probs": (0.95, 1.2)}))
    assert text.startswith("on 2 ranks rollout took from 2.80 to 3.90 s")


def test_efficiency_at_best_takes_the_shortest_time_of_each_phase():
    """Two ranks do twice the rows of one: in 3 s where that takes 2.7, each at best."""
    one = Row(
        source=MEASURED,
        seconds={"rollout": 5.0},
        ranges={"rollout": (2.0, 9.0), "log_probs": (0.7, 0.8)},
        **described(run_on(1, "tp1")),
    )
    two = replace(
        one, gpus=2, tokens=2 * one.tokens, ranges={"rollout": (2.25, 2.3), "log_probs": (0.75, 0.8)}
    )
    assert at_best([one, two]).endswith("efficiency is 100.0% on 1, 90.0% on 2.")


def test_an_interrupted_measurement_does_not_wait_to_save(monkeypatch):
    monkeypatch.delenv("GRACE_S", raising=False)
    assert float(environment(2)["GRACE_S"]) <= 1  # seconds from SIGTERM to the end of a rank
    monkeypatch.setenv("GRACE_S", "60")
    assert environment(2)["GRACE_S"] == "60"


def test_arguments_are_read_and_refused():
    assert by_size("1:tp1,4:tp2pp2") == {1: "tp1", 4: "tp2pp2"} and numbers("4,1,2") == [1, 2, 4]
    for wrong in (
        ["--gpus", "1,1"],
        ["--gpus", "0"],
        ["--layouts", "tp1"],
        ["--rollout", "1:x"],
        ["--steps", "0"],
        ["--host-gbps", "-1"],
    ):
        with pytest.raises(SystemExit):
            parser().parse_args(["--recipe", "ppo_toy_cpu", "--gpus", "1", *wrong])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "no_such"], "--recipe no_such is no .yaml or .sh file; name one, or one of "),
        (["--recipe", "sft_toy_cpu", "actor.path=x"], "sft_toy_cpu.yaml is supervised fine-tuning"),
        (["--recipe", "grpo_8b"], "grpo_8b.yaml names no model; add actor.path=DIR"),
        (["--recipe", "ppo_toy_cpu", "--steps", "1"], "--steps 1 leaves nothing to measure"),
        (
            ["--recipe", "ppo_toy_cpu", "--rollout", "8:2"],
            "--rollout speaks of 8 ranks, which --gpus does not name",
        ),
        (["--recipe", "ppo_toy_cpu", "actor.lay=tp1"], "actor.lay is no setting"),
        (["--recipe", "ppo_toy_cpu", "lr"], "'lr' is no setting; write SECTION.SETTING=VALUE"),
        (
            ["--recipe", "ppo_toy_cpu", "data.max_prompt_tokens=-3"],
            "error: data.max_prompt_tokens=-3 lies outside [1, 1000000000]; choose a value inside",
        ),
        (
            ["--recipe", "ppo_toy_cpu", "rollout.tp=0"],
            "error: rollout.tp=0 lies outside [1, 131072]; choose a value inside",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["--gpus", "1,2", "--out", str(tmp_path), *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/x/y"])
def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path, capsys, out):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["--recipe", "ppo_toy_cpu", "--gpus", "1", "--out", str(tmp_path / out)])
    expected = rf"error: --out {tmp_path / out} cannot be written \([\w ]+\); name another folder\n"
    assert ended.value.code == 2 and re.fullmatch(expected, capsys.readouterr().err)


def tiny_model(folder: Path, **more) -> Path:
    """A model folder without weights and tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape("llama3-1b", layers=4) | more))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompt-tokens", "100000"],
            "on 1 ranks: data.max_prompt_tokens=100000 and rollout.max_tokens=8 make samples of "
            "100008 tokens",
        ),
        (["actor.layout=tp0"], 'layout "tp0" has a size of 0'),
    ],
)
def test_sizes_are_checked_before_prompts_are_made(tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "--recipe",
                "ppo_toy_cpu",
                "--gpus",
                "1",
                "--out",
                str(out),
                f"actor.path={tiny_model(tmp_path / 'model')}",
                *arguments,
            ]
        )
    assert ended.value.code == 2 and message in capsys.readouterr().err and not out.exists()


def test_runs_train_on_the_prompts_that_are_made_last(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        "verl_megatron.benchmarks.scaling.command.make_prompts", lambda path, *_, **__: made.append(path)
    )
    given = [
        "--recipe",
        "ppo_toy_cpu",
        "--gpus",
        "1,2",
        "--out",
        str(tmp_path / "out"),
        f"actor.path={tiny_model(tmp_path / 'model')}",
        "reward.function=match",
    ]
    sizes = sizes_to_run(parser().parse_args(given))
    assert made == [tmp_path / "out/prompts.jsonl"] and {size.settings["data.train"] for size in sizes} == {
        str(made[0])
    }


def test_random_weights_without_room_are_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    out, needed = tmp_path / "out", 2 * sum(map(prod, hf_shapes(architecture("llama3-8b")).values()))
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: SimpleNamespace(free=needed - 1) if path.is_dir() else None
    )
    with pytest.raises(SystemExit) as ended:
        random_weights.main([str(out)])
    expected = (
        f"error: {out}/model has {needed - 1:,} bytes free and the random weights need "
        f"{needed:,}; name another OUT (in recipes SCRATCH) or fewer --layers\n"
    )
    assert ended.value.code == 2 and capsys.readouterr().err == expected and not out.exists()
    for wrong in ("0", "x", "9-8", "1-2-3"):
        with pytest.raises(SystemExit):
            random_weights.main([str(out), "--layers", "1", "--prompt-tokens", wrong])
        assert f"error: --prompt-tokens '{wrong}' is no number" in capsys.readouterr().err
    assert not out.exists()
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"1")
    random_weights.check_room(out, shape("llama3-8b"))  # an earlier call's file is written over


def test_random_prompts_have_lengths_of_the_range(tmp_path):
    toy.make_toy(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    random_weights.write_prompts(tmp_path / "prompts.jsonl", tokenizer, rows=40, lengths=range(5, 9), seed=1)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").open()]
    assert {len(tokenizer(prompt)["input_ids"]) for prompt in prompts} == {5, 6, 7, 8}


def test_a_script_is_read_from_its_dry_run(tmp_path, monkeypatch):
    """The model is a published shape, and every size has the recipe's layout made smaller."""
    monkeypatch.delenv("MODEL", raising=False)
    given = parser().parse_args(
        [
            "--recipe",
            "llama3_8b_grpo.sh",
            "--gpus",
            "1,4",
            "--prompts",
            "32",
            "--out",
            str(tmp_path),
            "actor.layout=tp2sp",
            "rollout.tp=2",
        ]
    )
    sizes = sizes_to_run(given)
    assert [
        (str(size.run.actor.layout), size.run.replicas, size.run.samples, size.run.packed_tokens)
        for size in sizes
    ] == [("tp1", 1, 64, 575), ("tp2dp2sp", 2, 256, 575)], "8 samples share their prompt"
    assert (
        sizes[0].run.actor.arch == architecture("llama3-8b")
        and Recipe.find("llama3_8b_grpo").path.suffix == ".sh"
    )
    assert "data.train" not in sizes[0].settings and sizes[0].settings["run.resume"] == "never"


def test_what_was_measured_outlives_a_model_that_fails(tmp_path, monkeypatch):
    scaling = scaling_of()
    monkeypatch.setattr(command, "measured", lambda sizes, planned: scaling.rows)
    monkeypatch.setattr(command.Scaling, "model", lambda *_: {}["none"])
    given = parser().parse_args(["--recipe", "grpo_8b.yaml", "--gpus", "1,2,4", "--out", str(tmp_path)])
    with pytest.raises(KeyError):
        command.report_of(given, [SimpleNamespace(run=run) for run in scaling.runs])
    assert (tmp_path / "scaling.csv").read_text().count(MEASURED) == 3

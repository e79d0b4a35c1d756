"""What lies in the output folder when a run starts: what it would stumble over later is told by name."""

import os
from pathlib import Path

import pytest

from verl_megatron.checks.output_folder import output_problems
from verl_megatron.config import RunConfig
from verl_megatron.manifest import changed_settings


def problems(folder: Path, *, source: str = "/models/base", **settings) -> list[str]:
    return output_problems(RunConfig(output_dir=str(folder), **settings), ["actor"], {"actor.path": source})


def test_a_new_folder_and_that_of_an_earlier_run_are_free(tmp_path):
    assert problems(tmp_path / "absent") == [] and problems(tmp_path) == []
    for name in ("checkpoint", "actor", "validation", "stacks", "tensorboard"):
        (tmp_path / name).mkdir()
    for name in ("metrics.jsonl", "metrics.csv", "report.png", "validation/step_0.jsonl", "notes.txt"):
        (tmp_path / name).write_bytes(b"\xff garbage")
    (tmp_path / "actor/model-00001-of-00002.safetensors").write_text("of an export that was killed")
    assert problems(tmp_path) == []


@pytest.mark.parametrize("name", ["checkpoint", "actor", "validation", "stacks", "tensorboard", "profile"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, name):
    (tmp_path / name).write_text("")
    assert problems(tmp_path) == [
        f"run.output_dir: {tmp_path / name} is no folder, and the run writes one there; move it away "
        f"or name another folder"
    ]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "metrics.csv", "report.png", "timeline.json", "validation/step_3.jsonl"]
)
@pytest.mark.parametrize("make", [os.makedirs, os.mkfifo, lambda path: os.symlink(path, path)])
def test_something_else_in_the_place_of_a_file_is_named(tmp_path, name, make):
    (tmp_path / "validation").mkdir()
    make(tmp_path / name)
    assert [problem.split(",")[0] for problem in problems(tmp_path)] == [
        f"run.output_dir: {tmp_path / name} is no regular file"
    ]


def test_the_export_spares_the_base_model_and_what_is_no_model(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/thesis.tex").write_text("mine")
    assert (
        "holds something else than a model (thesis.tex), and the trained actor is written there; move it away"
        in problems(tmp_path)[0]
    )
    assert problems(tmp_path, export=False) == []
    (tmp_path / "actor/config.json").write_text("{}")
    assert problems(tmp_path) == []
    assert (
        "actor is actor.path, and the trained actor is written there"
        in problems(tmp_path, source=f"{tmp_path}/x/../actor")[0]
    )


def test_changed_settings_are_told_but_a_path_written_in_another_way_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = {"actor": {"lr": 1e-6, "path": "model", "betas": [1, 2]}, "run": {"seed": 1, "gone": None}}
    present = {
        "actor": {"lr": 2e-6, "path": f"{tmp_path}/model", "betas": (1, 2)},
        "run": {"seed": 1, "new": "x" * 1000},
    }
    changed = changed_settings(saved, present)
    assert changed[:2] == ["actor.lr: 1e-06 -> 2e-06", "run.gone: null -> not there"]
    assert changed[2].startswith('run.new: not there -> "xxx') and len(changed[2]) < 100 and len(changed) == 3
    assert changed_settings(saved, saved) == []
    before = {"algorithm": {"lam": 0.9, "stop_kl": 0.1}}
    assert changed_settings(before, {"algorithm": {"gae_lambda": 0.9, "target_kl": 0.2}}) == [
        "algorithm.target_kl: 0.1 -> 0.2"
    ]
    assert (
        changed_settings({"a": {str(i): 0 for i in range(50)}}, {"a": {str(i): 1 for i in range(50)}})[-1]
        == "and 30 more"
    )

"""Faults of a run's files are found before anything is built; in dry runs, too, where the files exist."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from parallel.weights.files import INDEX
from tests.tiny import SERVED, write_hf, write_tokenizer
from verl_megatron.config import SFTConfig, TrainerConfig
from verl_megatron.launch.dry_run import supervised_plan, training_plan
from verl_megatron.preflight import SAMPLE_ROWS, Inputs, inspect_run, inspect_supervised


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_hf(folder / "model", "llama", **SERVED["llama"])
    write_tokenizer(folder / "model")
    return folder


@pytest.fixture
def folder(made, tmp_path) -> Path:
    shutil.copytree(made / "model", tmp_path / "model")
    for name in ("train", "validation"):
        rows = [{"prompt": f"w{i} w7", "answer": "w9", "response": "w8"} for i in range(3, 13)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config_of(schema: type, folder: Path):
    config = schema()
    config.run.output_dir, config.run.track_metrics = folder / "out", ["console"]
    config.actor.path, config.data.train, config.data.validation = (
        folder / "model",
        folder / "train.jsonl",
        folder / "validation.jsonl",
    )
    if schema is TrainerConfig:
        config.data.max_prompt_tokens, config.rollout.max_tokens = 32, 8
    else:
        config.data.max_tokens = 64
    return config


INSPECTED = [(TrainerConfig, inspect_run), (SFTConfig, inspect_supervised)]


@pytest.mark.parametrize(("schema", "inspect"), INSPECTED)
def test_what_was_read_is_kept(schema, inspect, folder):
    inputs = Inputs()
    assert inspect(config_of(schema, folder), world_size=2, inputs=inputs) == []
    assert len(inputs.tokenizer) == 150 and len(inputs.train) == len(inputs.validation) == 10
    assert inspect(config_of(schema, folder), world_size=2, rows=4, inputs=inputs) == []
    assert len(inputs.train) == 4


def spoil(folder: Path, how: str) -> None:
    if how == "weights":
        (folder / "model/model.safetensors").write_bytes(b"\xff" * 100)
    elif how == "no weights":
        (folder / "model/model.safetensors").unlink()
    elif how == "tokenizer":
        for path in (folder / "model").glob("tokenizer*"):
            path.unlink()
    elif how == "data":
        (folder / "train.jsonl").write_text('{"prompt": "w5", "answer": 1, "response": "w6"}\n[1, 2]\n')
    elif how == "both files":
        (folder / "train.jsonl").write_text("1\n")
        (folder / "validation.jsonl").write_text("")
    elif how == "vocabulary":
        config = json.loads((folder / "model/config.json").read_text())
        (folder / "model/config.json").write_text(json.dumps(config | {"vocab_size": 12}))


@pytest.mark.parametrize(("schema", "inspect"), INSPECTED)
@pytest.mark.parametrize(
    ("how", "words", "dry"),
    [
        ("weights", ["model.safetensors"], True),
        ("no weights", ["model.safetensors"], False),
        ("tokenizer", ["has no tokenizer"], False),
        ("data", ["train.jsonl, line 2"], True),
        ("both files", ["train.jsonl, line 1", "validation.jsonl gives nothing"], True),
        ("vocabulary", ["do not belong"], True),
    ],
)
def test_each_file_is_named(schema, inspect, how, words, dry, folder):
    spoil(folder, how)
    for rows in (None, SAMPLE_ROWS):
        problems = inspect(config_of(schema, folder), world_size=2, rows=rows)
        expected = words if dry or rows is None else []
        assert len(problems) == len(expected) and all(
            word in problem for word, problem in zip(expected, problems)
        ), problems


def test_settings_come_before_files(folder):
    spoil(folder, "data")
    config = config_of(TrainerConfig, folder)
    config.actor.lr = -1.0
    (problem,) = inspect_run(config, world_size=2)
    assert "actor.lr=-1.0" in problem


def test_reward_models_are_looked_into(folder, made):
    write_hf(folder / "reward", "llama", "ForSequenceClassification")
    config = config_of(TrainerConfig, folder)
    config.reward.path = folder / "reward"
    assert inspect_run(config, world_size=2) == []
    (folder / "reward/model.safetensors").unlink()
    (folder / "reward" / INDEX).write_text('{"weight_map": {}}')
    (problem,) = inspect_run(config, world_size=2)
    assert "reward" in problem


def test_a_dry_run_looks_at_what_is_there(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    settings = {
        "actor": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32},
        "rollout": {"max_tokens": 8},
    }
    settings["run"] = {"output_dir": str(folder / "out")}
    supervised = {
        "actor": settings["actor"],
        "run": settings["run"],
        "data": {"train": str(folder / "train.jsonl"), "max_tokens": 64},
    }
    assert "It fits" in training_plan(settings) and "It fits" in supervised_plan(supervised, SFTConfig)
    spoil(folder, "data")
    for plan, given in ((training_plan, settings), (partial(supervised_plan, schema=SFTConfig), supervised)):
        with pytest.raises(ValueError, match=r"train.jsonl, line 2"):
            plan(given)
        assert "It fits" in plan(given | {"data": given["data"] | {"train": ""}}), "a plan needs no data"


def test_only_the_first_rows_are_read_in_a_dry_run(folder):
    with (folder / "train.jsonl").open("a") as file:
        file.write((json.dumps({"prompt": "w3", "answer": 1}) + "\n") * SAMPLE_ROWS + "no JSON\n")
    assert inspect_run(config_of(TrainerConfig, folder), world_size=2, rows=SAMPLE_ROWS) == []
    assert "line 1011" in inspect_run(config_of(TrainerConfig, folder), world_size=2)[0]


def test_a_reward_of_lists_needs_its_columns(folder):
    reward = folder / "mine.py"
    reward.write_text("def score(completions, topic): return [1.0]\n")
    config = config_of(TrainerConfig, folder)
    config.reward.function = f"{reward}:score"
    first, second = inspect_run(config, world_size=2)
    assert "takes the argument 'topic', and the data have no such column; they have 'response'" in first
    assert "train.jsonl" in first and "validation.jsonl" in second


def test_a_penalty_of_missing_ends_needs_an_end(folder):
    config = config_of(TrainerConfig, folder)
    config.reward.missing_eos_penalty = 0.5
    assert inspect_run(config, world_size=2) == []
    for path in (folder / "model").glob("*.json"):
        named = json.loads(path.read_text())
        path.write_text(
            json.dumps({key: named[key] for key in named if key not in ("eos_token", "eos_token_id")})
        )
    (problem,) = inspect_run(config, world_size=2)
    assert "reward.missing_eos_penalty=0.5 needs an end-of-sequence token" in problem
    config.reward.missing_eos_penalty = 0.0
    assert inspect_run(config, world_size=2) == []


def test_sources_of_a_curriculum_are_looked_at(folder):
    config = config_of(TrainerConfig, folder)
    config.data.samples_per_prompt, config.data.curriculum = 2, "level"
    (problem,) = inspect_run(config, world_size=2)
    assert "data.curriculum='level' is neither files nor a column" in problem
    assert inspect_run(config, world_size=2, rows=5) == [], "later rows may have it"
    config.data.curriculum = "files"
    (problem,) = inspect_run(config, world_size=2)
    assert "data.curriculum=files" in problem and "only one has prompts" in problem
    second = folder / "second.jsonl"
    shutil.copy(folder / "train.jsonl", second)
    config.data.train, inputs = f"{folder}/train.jsonl:3,{second}:1", Inputs()
    assert inspect_run(config, world_size=2, inputs=inputs) == []
    assert inputs.notes[-1] == "data.curriculum=files: sources of prompts: 2, 'train.jsonl', 'second.jsonl'"
    cursor = inputs.train.cursor(seed=1)
    assert [source.weight for source in cursor.sources] == [0.75, 0.25]
    config.data.curriculum = "level"
    (problem,) = inspect_run(config, world_size=2)
    assert "gives its files weights" in problem

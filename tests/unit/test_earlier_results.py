"""Results of an earlier run are put aside, not overwritten."""

import json
from pathlib import Path

import pytest

from verl_megatron.config import TrainerConfig
from verl_megatron.lifecycle.earlier_results import put_aside


def starts(*reasons: str, aside: int = 0) -> list[dict]:
    """Entries of run.json, the new run's last; the results were put aside by start `aside`."""
    entries = [
        {
            "number": number,
            "exit": {"reason": reason} if reason else None,
            "put_aside": None,
            "layouts": {"critic": "tp1"},
        }
        for number, reason in enumerate((*reasons, ""), 1)
    ]
    if aside:
        entries[aside - 1]["put_aside"] = "earlier"
    return entries


@pytest.fixture
def config(tmp_path) -> TrainerConfig:
    """A run whose folder has results."""
    config = TrainerConfig()
    config.algorithm.name = "grpo"
    config.run.output_dir, config.actor.path = tmp_path / "run", tmp_path / "model"
    (tmp_path / "run/samples").mkdir(parents=True)
    (tmp_path / "run/samples/step_1.jsonl").write_text("{}\n")
    (tmp_path / "run/critic").mkdir()
    for name in ("metrics.jsonl", "config.yaml", "run.json"):
        (tmp_path / "run" / name).write_text(name)
    return config


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_results_of_a_finished_run_are_put_aside_once(config, tmp_path):
    run = tmp_path / "run"
    assert put_aside(config, starts("error")) is None and "metrics.jsonl" in names(run)
    assert put_aside(config, starts("done", "error")) == run / "earlier"
    assert names(run / "earlier") == {"samples", "metrics.jsonl", "critic"}  # the new run has no critic
    assert names(run) == {"earlier", "config.yaml", "run.json"}
    (run / "metrics.jsonl").write_text("of the start that failed")
    assert put_aside(config, starts("done", "error", aside=2)) is None
    assert put_aside(config, starts("done", "done", aside=2)) == run / "earlier_2"


def test_a_model_is_put_aside_whoever_has_made_it_unless_it_is_read(config, tmp_path):
    run = tmp_path / "run"
    (run / "actor").mkdir()
    assert put_aside(config, starts()) is None  # it is empty
    (run / "actor/config.json").write_text("{}")
    config.run.export = False
    assert put_aside(config, starts()) is None
    config.run.export, config.reward.path = True, run / "actor"
    assert put_aside(config, starts()) is None
    config.reward.path, config.data.train = "", f"{tmp_path}/a.jsonl, {run}/samples/step_1.jsonl:0.5"
    assert put_aside(config, starts()) == run / "earlier"
    assert names(run / "earlier") == {"actor", "metrics.jsonl"} and "samples" in names(run)


def test_an_interrupted_put_aside_is_continued_elsewhere(config, tmp_path):
    (tmp_path / "run/earlier").mkdir()
    (tmp_path / "run/earlier/metrics.jsonl").write_text(json.dumps({"step": 1}))
    assert put_aside(config, starts("done")) == tmp_path / "run/earlier_2"
    assert json.loads((tmp_path / "run/earlier/metrics.jsonl").read_text()) == {"step": 1}

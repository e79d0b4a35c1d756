"""Results of an earlier run are put aside, not overwritten."""

import errno
import os
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
    for name in ("samples/step_1.jsonl", "metrics.jsonl", "config.yaml", "run.json", "critic/config.json"):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    return config


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_results_of_a_finished_run_are_put_aside_once(config, tmp_path):
    run = tmp_path / "run"
    (run / "reference").mkdir()  # a world that scores is at work there
    assert put_aside(config, starts("error")) == (None, []) and "metrics.jsonl" in names(run)
    assert put_aside(config, starts("done", "error")) == (run / "earlier", [])
    assert names(run / "earlier") == {"samples", "metrics.jsonl", "critic"}  # the new run has no critic
    assert names(run) == {"earlier", "config.yaml", "run.json", "reference"}
    (run / "metrics.jsonl").write_text("of the start that failed")
    assert put_aside(config, starts("done", "error", aside=2)) == (None, [])
    assert put_aside(config, starts("done", "done", aside=2)) == (run / "earlier_2", [])
    assert put_aside(config, [{"number": 1, "exit": "edited"}, {"number": 2}]) == (None, [])


def test_a_model_is_put_aside_whoever_has_made_it(config, tmp_path):
    run = tmp_path / "run"
    (run / "actor").mkdir()
    assert put_aside(config, starts()) == (None, [])  # it is empty
    (run / "actor/config.json").write_text("{}")
    config.run.export = False
    assert put_aside(config, starts()) == (None, [])
    config.run.export = True
    assert put_aside(config, starts()) == (run / "earlier", [])
    assert names(run / "earlier") == {"actor"} and {"samples", "critic"} <= names(run)  # maybe a user's own


@pytest.mark.parametrize("folder", ["run", "lr=1,kl=2", "run:1"])
def test_what_a_run_reads_stays(config, tmp_path, folder):
    run = (tmp_path / "run").rename(tmp_path / folder)
    for name in ("actor", "reward"):
        (run / name).mkdir()
        (run / name / "config.json").write_text("{}")
    config.run.output_dir, config.reward.path = run, run / "actor"
    config.reward.function = [f"{run}/reward/score.py:f", "length"]
    config.data.train = f"{tmp_path}/a.jsonl,{run}/samples/step_1.jsonl:0.5"
    assert put_aside(config, starts("done")) == (run / "earlier", [])
    assert names(run / "earlier") == {"metrics.jsonl", "critic"}


def test_what_cannot_be_moved_is_named_unless_it_would_be_lost(config, tmp_path, monkeypatch):
    run, rename, stuck = tmp_path / "run", Path.rename, {"samples", "actor"}

    def busy(path: Path, target: Path) -> Path:
        if path.name in stuck:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    assert put_aside(config, starts("done")) == (run / "earlier", ["samples"])
    assert put_aside(config, starts("done")) == (None, ["samples"]) and "earlier_2" not in names(run)
    (run / "actor").mkdir()
    (run / "actor/config.json").write_text("{}")
    with pytest.raises(OSError, match="busy"):
        put_aside(config, starts())

"""Weights & Biases and MLflow with the real libraries, offline; a resumed run continues its run there."""

import importlib.util
import json
import posixpath
import re

import pytest

from tests.processes import eventually
from verl_megatron.observe.services import accepted
from verl_megatron.observe.tracking import MetricsTracker, coloured, console_line


def needs(package: str):
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None,
        reason=f"{package} is not installed: pip install verl-megatron[{package}]",
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("actor:\n  lr: 3.0e-06\nreward:\n  token: '***'\n")
    return tmp_path / "run"


def track(folder, sink: str, rows: list[tuple[int, dict[str, float]]]) -> None:
    with MetricsTracker(folder, [sink], total_steps=4, first_step=rows[0][0]) as tracker:
        for step, metrics in rows:
            tracker.log(step, metrics)


FIRST = [(0, {"validation/accuracy": 0.25}), (1, {"reward/mean": 0.5}), (1, {"bad": float("nan")})]
RESUMED = [(2, {"reward/mean": 0.75})]


def identity(folder, sink: str) -> str:
    return json.loads((folder / "tracking.json").read_text())[sink]


@needs("wandb")
def test_wandb_offline(folder, monkeypatch):
    """The library keeps what it would send in a file; names and values stand in it as JSON."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_CODE", "true")

    def holds(*words: str) -> bool:
        """Whether these stand in the file, which another process completes."""
        return eventually(lambda: all(word.encode() in stored() for word in words))

    def stored() -> bytes:
        return b"".join(path.read_bytes() for path in folder.glob("wandb/*/*.wandb"))

    track(folder, "wandb", FIRST)
    known = identity(folder, "wandb")
    assert holds(known, "validation/accuracy", "0.25", "reward/mean", "0.5", '{"lr":3e-', '"token":"***"')
    track(folder, "wandb", RESUMED)
    assert identity(folder, "wandb") == known and holds(known, "reward/mean", "0.75")
    track(folder, "wandb", FIRST)
    assert identity(folder, "wandb") != known  # a new run


@needs("mlflow")
def test_mlflow_with_a_store_of_files(folder, monkeypatch, tmp_path):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/store")
    track(folder, "mlflow", FIRST)
    known = identity(folder, "mlflow")
    track(folder, "mlflow", RESUMED)
    assert identity(folder, "mlflow") == known
    client = mlflow.MlflowClient()
    history = [(each.step, each.value) for each in client.get_metric_history(known, "reward/mean")]
    assert history == [(1, 0.5), (2, 0.75)]
    run = client.get_run(known)
    assert run.info.run_name == "run" and run.data.params == {"actor.lr": "3e-06", "reward.token": "***"}
    assert client.get_experiment(run.info.experiment_id).name == "verl_megatron"


@needs("mlflow")
def test_a_service_that_cannot_be_reached_is_a_sentence_at_the_start_and_a_warning_later(
    folder, monkeypatch, capsys, tmp_path
):
    import mlflow

    mlflow.set_tracking_uri("nonsense://nowhere")
    with pytest.raises(
        ValueError, match=r"track_metrics: 'mlflow' does not start .*; set MLFLOW_TRACKING_URI"
    ):
        track(folder, "mlflow", FIRST)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path}/store")

    def away(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(mlflow, "log_metrics", away)
    track(folder, "mlflow", FIRST)
    said = capsys.readouterr().out
    assert said == "warning: mlflow takes no metrics (ConnectionError: no route to host)\n"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward/source/openai/gsm8k", "reward/source/openai/gsm8k"),
        ("reward/source/数学 (train)", "reward/source/数学 _train_"),
        ("validation/source/https://hub//a/../b/", "validation/source/https_/_/hub/_/a/_/b/_"),
    ],
)
def test_names_of_metrics_that_mlflow_takes(key, name):
    assert accepted(key) == name
    # mlflow.utils.validation refuses all others
    assert re.fullmatch(r"[/\w.\- ]*", name) and posixpath.normpath(name) == name


def test_a_damaged_file_of_ids_starts_a_new_run(folder):
    from verl_megatron.observe.destination import Destination

    to = Destination(folder, 3, 4)
    for text in ("", "[1]", '{"wandb": 3}', "[" * 100_000):
        (folder / "tracking.json").write_text(text)
        assert to.known_id("wandb") == ""
    to.remember_id("wandb", "abc")
    assert to.known_id("wandb") == "abc" and Destination(folder, 0, 4).known_id("wandb") == ""


def test_colours_mark_steps_scores_and_failures():
    line = console_line(3, 8, {"reward/mean": 0.5, "reward/failed": 0.25, "kl/ref": float("nan")})
    assert coloured(line) == (
        "\x1b[1mstep 3/8\x1b[0m: \x1b[32mreward 0.500\x1b[0m, \x1b[31mfailed rewards 25.0%\x1b[0m, "
        "\x1b[31mkl nan\x1b[0m"
    )

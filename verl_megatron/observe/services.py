"""Sinks that are services: Weights & Biases and MLflow. A resumed run continues its run there."""

import contextlib
import os
import re
from collections.abc import Iterator

from verl_megatron.observe.destination import Destination

PROJECT = "verl_megatron"
MOST_TEXT = 250  # characters of a setting's value at MLflow


@contextlib.contextmanager
def _starting(sink: str, remedy: str) -> Iterator[None]:
    """Turn an error of a service's start into one message with the remedy."""
    try:
        yield
    except Exception as error:  # every service has its own types
        reason = " ".join(str(error).split())[:400]
        raise ValueError(
            f"run.track_metrics: {sink!r} does not start ({type(error).__name__}: {reason}); {remedy}"
        ) from None


class _Patient:
    """Calls that may fail while a run goes on: a service that is away costs rows, not the run."""

    def __init__(self, sink: str):
        self._sink, self._has_failed = sink, False

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                reason = " ".join(str(error).split())[:200]
                print(
                    f"warning: {self._sink} takes no metrics ({type(error).__name__}: {reason})", flush=True
                )
            self._has_failed = True


class Wandb:
    """A run of Weights & Biases, named after the output folder.

    The environment variables WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the like have their usual meaning.
    """

    def __init__(self, to: Destination):
        import wandb

        known = to.known_id("wandb")
        with _starting("wandb", "run wandb login, or set WANDB_MODE=offline"):
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=os.environ.get("WANDB_NAME") or to.output_dir.name,
                dir=str(to.output_dir),
                config=to.settings,
                id=known or None,
                resume="allow" if known else None,
            )
        to.remember_id("wandb", self._run.id)
        self._patient = _Patient("wandb")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        with self._patient.trying():
            self._run.log(metrics, step=step)

    def close(self) -> None:
        with self._patient.trying():
            self._run.finish()


class MLflow:
    """An MLflow run, named after the output folder, on the tracking server of MLFLOW_TRACKING_URI."""

    def __init__(self, to: Destination):
        import mlflow

        self._mlflow, known = mlflow, to.known_id("mlflow")
        remedy = "set MLFLOW_TRACKING_URI to a server that answers, such as http://127.0.0.1:5000"
        with _starting("mlflow", remedy):
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
            run = mlflow.start_run(run_id=known or None, run_name=to.output_dir.name)
            if not known:
                mlflow.log_params(_flat(to.settings))
        to.remember_id("mlflow", run.info.run_id)
        self._patient = _Patient("mlflow")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        with self._patient.trying():
            self._mlflow.log_metrics({accepted(key): value for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        with self._patient.trying():
            self._mlflow.end_run()


def accepted(key: str) -> str:
    """Return the name of a metric with `_` for what MLflow refuses, and with it the whole row.

    Names have letters, digits, spaces and `_-./`. Parts between slashes are not empty, and no dots alone.
    """
    parts = re.sub(r"[^\w. /-]", "_", key).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)


def _flat(settings: dict) -> dict[str, str]:
    """Return settings as section.name: text."""
    sections = {section: values for section, values in settings.items() if isinstance(values, dict)}
    return {
        f"{section}.{name}": str(value)[:MOST_TEXT]
        for section, values in sections.items()
        for name, value in values.items()
    }

"""Results of an earlier run in the output folder: a new run puts them aside before it writes its own."""

import os
from collections.abc import Iterable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from verl_megatron.config import PATHS
from verl_megatron.config.section import sections_of
from verl_megatron.lifecycle.record import Start
from verl_megatron.model_specs import models_of

FOLDER = "earlier"  # in run.output_dir; a number follows if it is taken
RESULTS = (
    *("metrics.jsonl", "metrics.csv", "tracking.json", "samples", "validation", "tensorboard", "profile"),
    *("report.png", "report.html", "timeline.json", "timeline.png", "export"),
)


def put_aside(config: Any, starts: Sequence[Start]) -> Path | None:
    """Move the results of a finished run, and models that the new one would overwrite; return where they are.

    What the new run reads stays. Results of a run that did not finish are not kept.

    Args:
        config: settings of the new run, which begins at its first iteration.
        starts: entries of `run.json`, the new run's last.

    Raises:
        OSError: something cannot be moved.
    """
    folder, trained = Path(config.run.output_dir), [spec for spec in models_of(config) if spec.trainable]
    models = set(chain.from_iterable(spec.exports for spec in trained)) if config.run.export else set()
    done = [start for start in starts[:-1] if (start.get("exit") or {}).get("reason") == "done"]
    read, free = list(_paths_of(config)), []
    for path in map(folder.joinpath, sorted({*models, *RESULTS, *_models_of(done)})):
        if os.path.lexists(path) and not any(_leads_into(each, path) for each in read):
            free.append(path)
    overwritten = [path for path in free if path.name in models and any(path.iterdir())]
    put = [start["number"] for start in starts if start.get("put_aside")]
    is_finished = max((start["number"] for start in done), default=0) >= max(put, default=1)
    if not free or not (overwritten or is_finished):
        return None
    names = chain([FOLDER], (f"{FOLDER}_{number}" for number in count(2)))
    aside = next(path for path in map(folder.joinpath, names) if not os.path.lexists(path))
    aside.mkdir()
    for path in free:
        path.rename(aside / path.name)
    return aside


def _models_of(starts: Sequence[Start]) -> set[str]:
    """Return the models of earlier runs, which have folders of these names if they were exported."""
    return {str(name) for start in starts for name in start.get("layouts") or () if "/" not in str(name)}


def _paths_of(config: Any) -> Iterable[str]:
    """Yield the files and folders that a run reads; one text may name several."""
    sections = sections_of(config)
    for name in PATHS - {"run.output_dir"}:
        section, _, setting = name.partition(".")
        if value := getattr(sections.get(section), setting, ""):
            yield value


def _leads_into(text: str, path: Path) -> bool:
    """Whether one of the paths in `text`, separated by commas, is `path` or below it."""
    parts = (Path(part.strip().partition(":")[0]).resolve() for part in text.split(","))
    return any(path.resolve() in (part, *part.parents) for part in parts)

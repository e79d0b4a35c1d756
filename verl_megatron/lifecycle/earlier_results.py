"""Results of an earlier run in the output folder: a new run puts them aside before it writes its own."""

import os
import re
from collections.abc import Iterator, Sequence
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
MODELS = ("actor", "critic", "reward")  # folders that runs export to


def put_aside(config: Any, starts: Sequence[Start]) -> tuple[Path | None, list[str]]:
    """Move the results of a finished run, and models that the new one would overwrite.

    What the new run reads stays. Results of a run that did not finish are not kept.

    Args:
        config: settings of the new run, which begins at its first iteration.
        starts: entries of `run.json`, the new run's last.

    Returns:
        Where they are, if there are any, and names of results that cannot be moved, such as mount points.

    Raises:
        OSError: a model that would be overwritten cannot be moved, or nothing can.
    """
    folder, trained = Path(config.run.output_dir), [spec for spec in models_of(config) if spec.trainable]
    own = set(chain.from_iterable(spec.exports for spec in trained)) if config.run.export else set()
    names = sorted(own.union(MODELS)) + list(RESULTS) if _has_finished(starts) else sorted(own)
    texts = list(_texts_of(config))
    found = [
        path
        for path in map(folder.joinpath, names)
        if _is_result(path) and not any(_leads_into(text, path) for text in texts)
    ]
    if not found:
        return None, []
    free = chain([FOLDER], (f"{FOLDER}_{number}" for number in count(2)))
    aside = next(path for path in map(folder.joinpath, free) if not os.path.lexists(path))
    aside.mkdir()
    left = []
    for path in found:
        try:
            path.rename(aside / path.name)
        except OSError:
            if path.name in own:
                raise
            left.append(path.name)
    return aside, left


def _has_finished(starts: Sequence[Start]) -> bool:
    """Whether results of a finished run are in the folder, and have not been put aside."""
    exits = {start["number"]: start.get("exit") for start in starts[:-1]}
    done = [number for number, end in exits.items() if isinstance(end, dict) and end.get("reason") == "done"]
    put = [start["number"] for start in starts if start.get("put_aside")]
    return max(done, default=0) >= max(put, default=1)


def _is_result(path: Path) -> bool:
    """Whether there is something of a run; a model has a config.json."""
    return (path / "config.json").exists() if path.name in MODELS else os.path.lexists(path)


def _texts_of(config: Any) -> Iterator[str]:
    """Yield the settings that name what a run reads; one may name several files."""
    sections = sections_of(config)
    for name in {*PATHS, "reward.function"} - {"run.output_dir"}:
        section, _, setting = name.partition(".")
        if value := getattr(sections.get(section), setting, ""):
            yield str(value)


def _leads_into(text: str, path: Path) -> bool:
    """Whether a setting is or names `path`, or what is below it."""
    whole = Path(text).resolve()
    spellings = {str(path), str(path.absolute()), str(path.resolve())}
    return path.resolve() in (whole, *whole.parents) or any(
        re.search(rf"{re.escape(each)}(?![\w.-])", text) for each in spellings
    )

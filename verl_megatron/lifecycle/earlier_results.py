"""Results of an earlier run in the output folder: a new run puts them aside before it writes its own."""

import os
import re
from collections.abc import Sequence
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
    read = _Read(config)
    found = [path for path in map(folder.joinpath, names) if _is_result(path) and not read.has(path)]
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
    if len(left) == len(found):
        aside.rmdir()
    return aside if aside.exists() else None, left


def _has_finished(starts: Sequence[Start]) -> bool:
    """Whether results of a finished run are in the folder, and have not been put aside."""
    exits = {start["number"]: start.get("exit") for start in starts[:-1]}
    done = [number for number, end in exits.items() if isinstance(end, dict) and end.get("reason") == "done"]
    put = [start["number"] for start in starts if start.get("put_aside")]
    return max(done, default=0) >= max(put, default=1)


def _is_result(path: Path) -> bool:
    """Whether there is something of a run; a model has a config.json."""
    return (path / "config.json").exists() if path.name in MODELS else os.path.lexists(path)


class _Read:
    """The settings that name what a run reads; one may name several files."""

    def __init__(self, config: Any):
        sections = sections_of(config)
        names = (name.split(".") for name in {*PATHS, "reward.function"} - {"run.output_dir"})
        values = (getattr(sections.get(section), setting, "") for section, setting in names)
        self._texts = [str(value) for value in values if value]

    def has(self, path: Path) -> bool:
        """Whether a setting is or names `path`, or what is below it."""
        spellings = {str(path), str(path.absolute()), str(path.resolve())}
        named = re.compile(rf"({'|'.join(map(re.escape, spellings))})(?![\w.-])")
        wholes = [Path(text).resolve() for text in self._texts]
        return any(path.resolve() in (whole, *whole.parents) for whole in wholes) or any(
            map(named.search, self._texts)
        )

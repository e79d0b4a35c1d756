"""Writes docs/configuration.md: every setting with its default, valid values and meaning.

python tools/make_docs.py [--check]

Everything comes from the dataclasses of verl_megatron/config/. With --check nothing is written; exit status
1: the page is out of date.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs where nothing is installed

from verl_megatron import config as schemas

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

<!-- Written by tools/make_docs.py from verl_megatron/config/: change its files and run it again. -->

A setting has two levels, `section.setting`. A recipe is a YAML file of the settings that differ from the
defaults. The command line overrides the recipe:

```
torchrun --nproc_per_node 4 -m verl_megatron.train --config-name ppo_toy_cpu actor.lr=1e-4 rollout.stop=[END]
```

Lists are written `[a,b]`. All wrong settings are refused together, before a model is built. From Python, the
sections are attributes of `TrainerConfig`, such as `config.rollout.temperature`.
"""
TABLE_HEAD = ("| setting | default | values | meaning |", "|---|---|---|---|")
SUPERVISED = {
    "sft": "Supervised fine-tuning",
    "dpo": "Direct preference optimization",
    "reward_model": "Reward-model training",
}  # title by command
SUPERVISED_HEAD = """
# {title}

`verl_megatron.{command}` has the sections {sections}. Those listed below differ from those of RL.
"""


def spelled(value: Any) -> str:
    """Return a default as a recipe would write it."""
    if value == schemas.MISSING:
        return "required"
    text = json.dumps(value) if not isinstance(value, float) else f"{value:g}"
    return f"`{text}`"


def allowed(metadata: Mapping[str, Any], value: Any) -> str:
    """Return the choices, interval or type of a setting."""
    if choices := metadata["choices"]:
        return ", ".join(f"`{choice}`" for choice in choices)
    if interval := metadata["within"]:
        return ("list of numbers " if isinstance(value, list) else "") + in_words(interval)
    kinds = {bool: "true, false", int: "whole number", float: "number", list: "list"}
    return next((text for kind, text in kinds.items() if isinstance(value, kind)), "text")


def in_words(interval: str) -> str:
    """Return an interval such as "(0, 1]" in words."""
    low, high = interval[1:-1].split(", ")
    above = "" if low == "-inf" else f"≥ {low}" if interval[0] == "[" else f"> {low}"
    below = "" if high == "inf" else f"≤ {high}" if interval[-1] == "]" else f"< {high}"
    return ", ".join(filter(None, (above, below))) or "any number"


def section_lines(name: str, section: Any, *, title: str) -> list[str]:
    """Return the heading, the docstring and the table of one section."""
    lines = [f"\n## {title}\n", inspect.getdoc(type(section)), "", *TABLE_HEAD]
    for setting in fields(section):
        value = getattr(section, setting.name)
        values, meaning = allowed(setting.metadata, value), setting.metadata["meaning"].replace("|", "\\|")
        lines.append(f"| `{name}.{setting.name}` | {spelled(value)} | {values} | {meaning} |")
    return lines


def page() -> str:
    """Return the text of docs/configuration.md."""
    trainer = schemas.TrainerConfig()
    lines = [HEAD.rstrip()]
    for section in fields(trainer):
        lines += section_lines(section.name, getattr(trainer, section.name), title=section.name)
    for command, title in SUPERVISED.items():
        supervised = schemas.SCHEMAS[command]()
        names = [section.name for section in fields(supervised)]
        sections = ", ".join(f"`{name}`" for name in names)
        lines.append(SUPERVISED_HEAD.rstrip().format(title=title, command=command, sections=sections))
        for name in names:
            section = getattr(supervised, name)
            if section != getattr(trainer, name, None):
                lines += section_lines(name, section, title=f"{name} ({command})")
    return "\n".join(lines) + "\n"


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    options.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    if not options.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date; run python tools/make_docs.py")


if __name__ == "__main__":
    main()

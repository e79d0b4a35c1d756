"""Writes docs/configuration.md, and tables of other projects' names in coming-from-*.md and python.md.

python tools/make_docs.py [--check]

Everything comes from verl_megatron/config/: every setting with its default, valid values and meaning, and
what names of verl, of TRL and of the older Python interface are called here. With --check nothing is written;
exit status 1: a page is out of date.
"""

import argparse
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs where nothing is installed

from verl_megatron import config as schemas
from verl_megatron.config.names import ARR, Row, Table
from verl_megatron.config.older_names import OLDER_NAMES, PLACES
from verl_megatron.config.section import sections_of
from verl_megatron.config.trl_names import TRL
from verl_megatron.config.verl_names import VERL
from verl_megatron.launch.help import allowed, spelled

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

<!-- Written by tools/make_docs.py from verl_megatron/config/: change its files and run it again. -->

A setting has two levels, `section.setting`. A recipe is a YAML file of the settings that differ from the
defaults. The command line overrides the recipe:

```
verl-megatron train --config-name ppo_toy_cpu actor.lr=1e-4 rollout.stop=[END]
```

Lists are written `[a,b]`. A text with commas, or with a bracket at its start, stands in quotes. All
wrong settings are refused together, before a model is built. From Python, the sections are
attributes of `TrainerConfig`, such as `config.rollout.temperature`.
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


def section_lines(name: str, section: Any, *, title: str) -> list[str]:
    """Return the heading, the docstring and the table of one section."""
    lines = [f"\n## {title}\n", inspect.getdoc(type(section)), "", *TABLE_HEAD]
    for setting in fields(section):
        value = getattr(section, setting.name)
        values, meaning = allowed(setting.metadata, value), setting.metadata["meaning"].replace("|", "\\|")
        shown = ", ".join(f"`{choice}`" for choice in values) if setting.metadata["choices"] else values[0]
        default = spelled(value) if value == schemas.MISSING else f"`{spelled(value)}`"
        lines.append(f"| `{name}.{setting.name}` | {default} | {shown} | {meaning} |")
    return lines


def page() -> str:
    """Return the text of docs/configuration.md."""
    trainer = schemas.TrainerConfig()
    lines = [HEAD.rstrip()]
    for name, section in sections_of(trainer).items():
        lines += section_lines(name, section, title=name)
    for command, title in SUPERVISED.items():
        supervised = sections_of(schemas.SCHEMAS[command]())
        names = list(supervised)
        sections = ", ".join(f"`{name}`" for name in names)
        lines.append(SUPERVISED_HEAD.rstrip().format(title=title, command=command, sections=sections))
        for name in names:
            section = supervised[name]
            if section != getattr(trainer, name, None):
                lines += section_lines(name, section, title=f"{name} ({command})")
    return "\n".join(lines) + "\n"


def names_table(project: str, rows: tuple[Row, ...]) -> list[str]:
    """Return a table of another project's names."""
    lines = [f"| {project} | here | note |", "|---|---|---|"]
    for row in rows:
        theirs = ", ".join(f"`{name.replace(ARR, 'arr')}`" for name in row.theirs)
        lines.append(f"| {theirs} | {row.ours or '–'} | {row.note} |")
    return lines


def older_tables() -> dict[str, list[str]]:
    """Return the tables of the older Python interface by title."""
    places = [f"| `{older}` | `{here}` |" for older, here in PLACES.items()]
    arguments = [
        f"| `{name}={older.example!r}` | {older.gives.replace('|', '')} |"
        for name, older in OLDER_NAMES.items()
    ]
    return {
        "imports": ["| import | here |", "|---|---|", *places],
        "arguments": ["| argument | here |", "|---|---|", *arguments],
    }


def filled(text: str, tables: Mapping[str, list[str]]) -> str:
    """Return a page with its marked tables replaced: `<!-- table: TITLE -->` to `<!-- end -->`.

    Raises:
        ValueError: a table has no place on the page, or a place no table.
    """
    places = re.findall(r"<!-- table: (.+?) -->", text)
    if sorted(places) != sorted(tables):
        raise ValueError(f"the page has tables {places} and should have {list(tables)}")
    for title, lines in tables.items():
        start, end = f"<!-- table: {title} -->\n", "<!-- end -->"
        before, _, rest = text.partition(start)
        text = before + start + "\n" + "\n".join(lines) + "\n\n" + end + rest.partition(end)[2]
    return text


def titled(project: str, table: Table) -> dict[str, list[str]]:
    """Return the tables of a project by the page's headings."""
    return {heading: names_table(project, rows) for heading, rows in table.items()}


def pages() -> dict[Path, str]:
    """Return the text of every page that has something from the code."""
    tables = {
        "coming-from-verl.md": titled("verl", VERL),
        "coming-from-trl.md": titled("TRL", TRL),
        "python.md": older_tables(),
    }
    docs = ROOT / "docs"
    written = {
        docs / name: filled((docs / name).read_text(encoding="utf-8"), parts)
        for name, parts in tables.items()
    }
    return {PAGE: page()} | written


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    options.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    check = options.parse_args().check
    for path, text in pages().items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is out of date; run python tools/make_docs.py")


if __name__ == "__main__":
    main()

"""The documents' pages: their text, their prose, and the commands in their blocks of code."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.worlds import ROOT

README = ROOT / "README.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", ROOT / "tools/README.md", *ROOT.glob("docs/*.md")])
FOLDERS = ("parallel", "verl_megatron", "recipes", "tools", "tests", "docs")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def each_page(test):
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))(test)


@cache
def text_of(page: Path) -> str:
    return re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@cache
def prose_of(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", text_of(page))


@dataclass(frozen=True, order=True)
class Command:
    """A command line of a block of code; `note` is the comment behind it."""

    line: str
    note: str = ""


def commands_of(page: Path) -> list[Command]:
    """Commands of the blocks of code without a language, but those of other projects."""
    blocks = [block for language, block in FENCE.findall(text_of(page)) if not language]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    starts = re.compile(r"^([A-Z_]+=\S+ )*(verl-megatron|python|bash|torchrun|sbatch|kubectl|pip|mkdocs) ")
    parts = [line.partition("  #") for line in lines if starts.match(line)]
    return [Command(line.strip(), note.strip()) for line, _, note in parts]


def named_in(page: Path) -> list[Command]:
    """Return the commands of ours that sentences and tables name, some without all of their options."""
    code = re.findall(r"`((?:[A-Z_0-9]+=\S+ )*(?:verl-megatron|python|bash) [^`]+)`", prose_of(page))
    return [
        Command(line.strip()) for line in code if not re.search(r"verl-megatron [A-Z]|\.\.\.|-m pytest", line)
    ]


INLINE = sorted({command for page in PAGES for command in named_in(page)})
COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})

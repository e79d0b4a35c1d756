"""README and docs/: links, commands, settings and messages are those of the code, and sentences are short."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from tests.documents import FENCE, FOLDERS, PAGES, README, commands_of, each_page, prose_of, text_of
from tests.worlds import ROOT
from tools import make_docs
from verl_megatron.config import SCHEMAS

MOST_WORDS = 25  # of a sentence
FILE_ENDINGS = {"py", "sh", "md", "json", "jsonl", "yaml", "png", "csv", "lock", "log"}


def ours(page: Path) -> str:
    """A page without the other project's names: first cells of the tables and its own command lines."""
    if not page.name.startswith("coming-from"):
        return text_of(page)
    text = FENCE.sub(lambda block: "" if "verl.trainer" in block[2] else block[0], text_of(page))
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)


# ---- what stands where -----------------------------------------------------------------------------------


def test_the_readme_fits_a_few_screens():
    assert len(README.read_text().splitlines()) <= 140


def test_the_readme_begins_with_the_two_commands():
    lines = [command.line for command in commands_of(README)]
    assert lines[:2] == ["bash recipes/quickstart.sh", "bash tests/run.sh"]


def test_pages_made_from_the_code_are_up_to_date():
    for page, text in make_docs.pages().items():
        assert page.read_text(encoding="utf-8") == text, "run python tools/make_docs.py"


def test_every_setting_has_a_meaning():
    cells = [line.split(" | ") for line in make_docs.page().splitlines() if line.startswith("| `")]
    assert len(cells) > 80 and not [cell[0] for cell in cells if not cell[3].strip(" |")]


# ---- links and paths -------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What a heading is linked by, on GitHub and in MkDocs."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{target} of {page.name} does not exist"
        assert not anchor or anchor in anchors(file), f"{target} of {page.name} names no heading"


@each_page
def test_paths_exist(page):
    named = set(re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", text_of(page)))
    named = {path for path in named if "NAME" not in path}
    assert not {path for path in named if not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()}


# ---- settings --------------------------------------------------------------------------------------------


def settings() -> dict[tuple[str, str], tuple[str, ...]]:
    """The choices of each (section, setting)."""
    schemas = [schema() for schema in SCHEMAS.values()]
    sections = [(part.name, getattr(schema, part.name)) for schema in schemas for part in fields(schema)]
    return {
        (name, setting.name): setting.metadata["choices"]
        for name, part in sections
        for setting in fields(part)
    }


KNOWN = settings()
SECTIONS = "|".join(sorted({section for section, _ in KNOWN}))
NAMED = re.compile(rf"(?<![\w./])({SECTIONS})\.([a-z_0-9]+)(?![\w/(])(?:=([\w.]+))?")


@each_page
def test_settings_exist_and_have_such_values(page):
    found = {match for match in NAMED.findall(ours(page)) if match[1] not in FILE_ENDINGS}
    unknown = {f"{section}.{name}" for section, name, _ in found if (section, name) not in KNOWN}
    assert not unknown, f"no such settings: {unknown}"
    for section, name, value in found:
        choices = KNOWN[section, name]
        if choices and value.strip("."):
            assert value in choices, f"{section}.{name}={value} is none of {choices}"


# ---- messages --------------------------------------------------------------------------------------------


@cache
def messages() -> str:
    """Texts of the code, `…` for each value put in; shell scripts as they are."""
    texts = []
    for path in [*(ROOT / "parallel").rglob("*.py"), *(ROOT / "verl_megatron").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts + [path.read_text() for path in (ROOT / "recipes" / "launch").glob("*.sh")])


def quoted_messages() -> list[str]:
    """First cells of the tables of troubleshooting, as far as they quote our messages."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Low throughput")[0]
    cells = "".join(re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE))
    quoted = re.findall(r"`([^`]+)`", cells.replace("``", "` `"))
    return [message for message in quoted if " " in message.strip() and not message.startswith("torch.")]


@pytest.mark.parametrize("message", quoted_messages())
def test_messages_are_those_of_the_code(message):
    parts = [part for part in message.split("…") if len(part.strip(" :;,(")) > 3]
    missing = [part for part in parts if part not in messages()]
    assert parts and not missing, f"the code says nothing like {missing}"


# ---- words -----------------------------------------------------------------------------------------------


def sentences(page: Path) -> list[str]:
    """Sentences of paragraphs, list items and table cells; code counts as one word."""
    text = re.sub(r"`[^`]*`", "code", prose_of(page))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks, paragraph = [], ""
    for line in [*text.splitlines(), ""]:
        if starts_block := re.match(r"^(\s*[-*] |\s*\d+\. |#|\||\s*$)", line):
            blocks.append(paragraph)
            paragraph = ""
        if starts_block and line.startswith("|"):
            blocks += line.split("|")
        else:
            paragraph += " " + line
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.!?:])\s", block)]


@each_page
def test_sentences_are_short(page):
    long = [sentence.strip() for sentence in sentences(page) if len(sentence.split()) > MOST_WORDS]
    assert not long


@each_page
def test_documents_have_no_diary(page):
    stale = re.search(r"\b(no longer|used to be|will soon|TODO|previously|until recently)\b", prose_of(page))
    assert stale is None, stale


# ---- the site --------------------------------------------------------------------------------------------


HAS_MKDOCS = importlib.util.find_spec("mkdocs") and importlib.util.find_spec("material")
FROM_THE_NETWORK = re.compile(
    r'<(?:script|img)[^>]+src="https?://|<link[^>]+(?:stylesheet|preconnect)[^>]+https?://'
)


@pytest.mark.skipif(not HAS_MKDOCS, reason="needs mkdocs-material")
def test_the_site_builds_and_loads_nothing_from_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 3
    for page in pages:
        assert not FROM_THE_NETWORK.findall(page.read_text()), page

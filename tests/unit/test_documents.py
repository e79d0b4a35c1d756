"""README and docs/: links, commands, settings and messages are those of the code, and sentences are short."""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from tests.worlds import ROOT
from tools import make_docs
from verl_megatron.config import SCHEMAS

README = ROOT / "README.md"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", ROOT / "tools/README.md", *ROOT.glob("docs/*.md")])
FOLDERS = ("parallel", "verl_megatron", "recipes", "tools", "tests", "docs")
MOST_WORDS = 35  # of a sentence; 25 are aimed at
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE_ENDINGS = {"py", "sh", "md", "json", "jsonl", "yaml", "png", "csv", "lock"}


def each_page(test):
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))(test)


@cache
def text_of(page: Path) -> str:
    return re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@cache
def prose_of(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", text_of(page))


def ours(page: Path) -> str:
    """A page without the other project's names: first cells of the tables and its own command lines."""
    if not page.name.startswith("coming-from"):
        return text_of(page)
    text = FENCE.sub(lambda block: "" if "verl.trainer" in block[2] else block[0], text_of(page))
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)


def run(command: list[str], *, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


# ---- what stands where -----------------------------------------------------------------------------------


def test_the_readme_fits_a_few_screens():
    assert len(README.read_text().splitlines()) <= 140


def test_the_readme_begins_with_the_two_commands():
    assert commands_of(README)[:2] == ["bash recipes/quickstart.sh", "bash tests/run.sh"]


def test_the_configuration_page_is_up_to_date():
    assert make_docs.PAGE.read_text(encoding="utf-8") == make_docs.page(), "run python tools/make_docs.py"


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


# ---- commands --------------------------------------------------------------------------------------------


def commands_of(page: Path) -> list[str]:
    """Lines of code blocks without a language that start one of our programs."""
    blocks = [block for language, block in FENCE.findall(text_of(page)) if not language]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    starts = re.compile(r"^([A-Z_]+=\S+ )*(python|bash|torchrun|sbatch|kubectl) ")
    return [line.split("  #")[0].strip() for line in lines if starts.match(line)]


COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_what_exists(command):
    words = shlex.split(re.sub(r"[\[\]]", " ", command))
    for before, word in zip(["", *words], words):
        if word.startswith(("tools/", "recipes/", "tests/")) and "." in word:
            assert (ROOT / word).is_file(), f"{word} does not exist"
        if before == "-m" and word.startswith(("verl_megatron", "tests")):
            assert importlib.util.find_spec(word), f"module {word} does not exist"
        if before == "--config-name":
            assert (ROOT / "recipes" / f"{word}.yaml").is_file(), f"there is no recipe {word}"
    program = next((i for i, word in enumerate(words) if re.fullmatch(r"tools/\w+\.py", word)), None)
    if program is not None:
        source = (ROOT / words[program]).read_text()
        options = {word for word in words[program:] if word.startswith("--")}
        known = {
            option
            for option in options
            if f'"{option}"' in source or f'"{option.replace("no-", "")}"' in source
        }
        assert options == known, f"{words[program]} has no option {options - known}"


def runs_anywhere(command: str) -> bool:
    """Plans need no GPU, no weights and no data; words in capitals stand for a user's files."""
    planners = ("python tools/plan.py", "python tools/reshard_plan.py")
    is_plan = "--dry-run" in command or command.startswith(planners)
    return is_plan and not re.search(r"\.\.\.|machine\.json|\b[A-Z]{3,}\b(?!=)|/models/", command)


OF_A_RUN = ("NNODES", "NODE_RANK", "GPUS", "MODEL", "DATA", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
RUNNABLE = [command for command in COMMANDS if runs_anywhere(command)]


def test_there_are_plans_to_run():
    assert 5 <= len(RUNNABLE) <= 12


@pytest.mark.parametrize("command", RUNNABLE)
def test_plans_run(command, tmp_path):
    for folder in FOLDERS:
        (tmp_path / folder).symlink_to(ROOT / folder)  # what a command writes stays out of the repository
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "VERL_MEGATRON_VENV": str(tmp_path / "none")}
    ran = run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, **dict.fromkeys(OF_A_RUN, ""), **environment},
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


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
    ran = run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 3
    for page in pages:
        assert not FROM_THE_NETWORK.findall(page.read_text()), page

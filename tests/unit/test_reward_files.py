"""Reward files: what they do as they are imported, and what reward.function may name."""

import os

import pytest

from verl_megatron.rewards.checks import check_reward

SCORE = "def score(prompt, response, ground_truth, extra):\n    return 1.0\n"
FUNCTIONS = """
def fail(error):
    raise error

def score(prompt, response, ground_truth, extra):
    return 1.0

async def later(prompt, response, ground_truth, extra):
    return 1.0

def steps(prompt, response, ground_truth, extra):
    yield 1.0

def pair(a, b):
    return 1.0

class Scorer:
    def __call__(self, prompt, response, ground_truth, extra):
        return 1.0

scorer = Scorer()
number = 3
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


FILES = {
    "import sys; sys.exit(0)": "SystemExit: 0; take that out of its top level",
    "import os; os._exit(0)": "ends its process (exit code 0)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL",
    "import time; time.sleep(100)": "takes longer than 1 s",
    "while True: pass": "takes longer than 1 s",
    "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('needed')\n"
    "parser.parse_args()": "SystemExit: 2",
    "import os; os.closerange(3, 100)": "ends its process",
    "def f(:": "SyntaxError",
    "1 / 0": "ZeroDivisionError: division by zero; mend the file",
    "raise ValueError('x' * 10**7)": "ValueError: xxx",
    "import a_module_that_is_not_there": "ModuleNotFoundError",
    "del score\ndef __getattr__(name): raise RuntimeError(name)": "cannot be looked at",
    "import os; os.fork()": "",
    "print('x' * 10**6)": "",
    "import sys; sys.stdout.close()": "",
    "import sys; sys.stdout = None": "",
    "import argparse; argparse.ArgumentParser().parse_args()": "",
    "from __future__ import annotations\nimport dataclasses\n"
    "@dataclasses.dataclass\nclass A:\n    x: int": "",
}


@pytest.mark.parametrize("text", FILES)
def test_files_are_imported_apart_and_refused_by_name(tmp_path, capfd, text):
    path = tmp_path / "json.py"  # a name of the standard library
    path.write_text(text + "\n" + SCORE if "__future__" in text else SCORE + text + "\n")
    problems = check_reward(f"{path}:score", timeout_s=1.0 if "takes longer" in FILES[text] else 100.0)
    assert (len(problems) == 1 and FILES[text] in problems[0]) if FILES[text] else problems == []
    assert all(str(path) in problem and len(problem) < 1500 and "\n" not in problem for problem in problems)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        *((spec, "choose match, exact, last_number") for spec in (":", ":f", "x.py:")),
        ("a.py", "names a file and no function; write 'a.py:NAME'"),
        ("{folder}:score", "is a folder"),
        ("{folder}/fifo.py:score", "is no file"),
        ("{folder}/gone.py:score", "does not exist"),
        ("x" * 100_000 + ":score", "name too long"),
        ("a\0b.py:score", "does not exist"),
        ("{folder}/text.txt:score", "must end in .py"),
        ("{folder}/nul.py:score", "null bytes"),
        ("{functions}:Scorer.__call__", "at its top level; it has"),
        ("{functions}:scorre", "it has fail, score, later, steps, pair"),
        ("{functions}:Scorer", "is a class"),
        ("{functions}:number", "is of type 'int'"),
        ("{functions}:later", "async or a generator"),
        ("{functions}:steps", "async or a generator"),
        ("{functions}:pair", "takes (a, b) and is called with (prompt, response, ground_truth, extra)"),
        ("{functions}:scorer", ""),
        ("{folder}/a name with ü.py:score", ""),
        ("last_number", ""),
    ],
)
def test_wrong_names_are_refused(functions, tmp_path, spec, words):
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "text.txt").write_text(SCORE)
    (tmp_path / "nul.py").write_bytes(b"\0")
    (tmp_path / "a name with ü.py").write_text(SCORE)
    problems = check_reward(spec.replace("{folder}", str(tmp_path)).replace("{functions}", functions))
    assert (
        (len(problems) == 1 and words in problems[0] and len(problems[0]) < 2000) if words else problems == []
    )

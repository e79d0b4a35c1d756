"""Reward files and functions that do what they should not: to the trainer, to its log, to the processes around them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.worlds import ROOT
from verl_megatron.rewards.pool import RewardPool, check_reward
from verl_megatron.rewards.worker import MAX_METRICS

SCORE = "def score(prompt, response, ground_truth, extra):\n    return 1.0\n"
FUNCTIONS = '''
import os, signal, subprocess, sys, threading, time

class Hostile:
    def __str__(self):
        raise SystemExit("no text")
    __repr__ = __str__

class HostileError(Exception):
    def __str__(self):
        raise SystemExit("no text")

class Ends:
    def __float__(self):
        os._exit(0)

def fail(error):
    raise error

def daemon():
    """A process that has nothing to do with this one any more."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "4242"])
        os._exit(0)
    os.wait()

def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value

def score(prompt, response, ground_truth, extra):
    return eval(ground_truth) or 1.0

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
'''
# What a reward function does, and what is said of it; nothing: its score counts.
CALLS = {
    "os._exit(0)": "reward worker died on row 0: its process ended: exit code 0",
    "os._exit(3)": "exit code 3",
    "Ends()": "exit code 0",
    "os.abort()": "killed by SIGABRT",
    "os.kill(os.getpid(), signal.SIGTERM)": "killed by SIGTERM",
    "os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL",
    "os.kill(0, signal.SIGKILL)": "killed by SIGKILL",
    "os.kill(os.getpid(), signal.SIGSTOP)": "no answer within 1 s",
    "os.closerange(3, 100)": "worker died",
    "[os.write(int(fd), b'5\\n') for fd in os.listdir('/proc/self/fd') if os.path.realpath(f'/proc/self/fd/{fd}').find('socket:') >= 0]": "worker died",
    "fail(ValueError('x' * 10_000_000))": "ValueError: xxx",
    "fail(ValueError('\\ud800 \\x1b[31m\\n'))": r"ValueError: \ud800 \x1b[31m\n",
    "fail(HostileError())": "HostileError: (no text: SystemExit)",
    "Hostile()": "wrong type",
    "input()": "EOFError",
    "1e300": "score is 1e+300, beyond float32",
    "10**400": "not finite",
    "deep()": "wrong type",
    "'y' * 10_000_000": "wrong type",
    "{'score': 1.0, 1: 2.0}": "the name 1 of a metric",
    "{'score': 1.0, 'a\\nb': 2.0}": r"the name 'a\nb' of a metric",
    "{'score': 1.0, 'n' * 101: 2.0}": "at most 100 characters",
    "{'score': 1.0} | {str(i): 1.0 for i in range(5000)}": "5000 entries besides the score",
    "later('', '', '', {})": "coroutine",
    "True": "",
    "{'score': 1.0, 'pass@1': 1.0, 'mean': 5}": "",
    "os.fork() * 0 + 1": "",
    "os.close(1) or os.close(2)": "",
}


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def pool(functions):
    with RewardPool(f"{functions}:score", timeout_s=1) as pool:
        yield pool


def said(pool: RewardPool, call: str) -> str:
    """What the pool says of a call that does this; empty: it gave 1."""
    pool.submit(0, str(os.getpid()), "", call)
    reward = pool.results()[0]
    assert len(str(pool.first_failure)) < 2000 and str(pool.first_failure).isascii()
    assert reward.score == (0.0 if reward.failure else 1.0)
    return str(pool.first_failure) if reward.failure else ""


def below(pid: int) -> dict[int, str]:
    """All processes that `pid` and its children started, with their commands."""
    listed = subprocess.run(["ps", "-ww", "--no-headers", "-eo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True).stdout
    parents, commands = {}, {}
    for line in listed.splitlines():
        child, parent, state, command = line.split(maxsplit=3)
        if state[0] != "Z":
            parents[int(child)], commands[int(child)] = int(parent), command
    found, fresh = set(), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh}
        found |= fresh
    return {child: commands[child] for child in found if "verl_megatron.rewards.worker" in commands[child] or "4242" in commands[child]}


def gone(pids: set[int], *, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text()]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return not alive


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_does_costs_its_row_only(pool, call):
    started = time.monotonic()
    found = said(pool, call)
    assert (CALLS[call] in found) if CALLS[call] else found == ""
    assert time.monotonic() - started < 5
    assert said(pool, "2 - 1") == ""  # the worker, or the next one, answers


def test_a_call_that_ends_its_process_fails_at_once(functions):
    with RewardPool(f"{functions}:score", timeout_s=100) as pool:
        started = time.monotonic()
        assert "exit code 0" in said(pool, "os._exit(0)") and time.monotonic() - started < 5


@pytest.mark.parametrize("call", ["os.kill(os.getppid(), 9)", "os.killpg(os.getpgid(os.getppid()), 9)", "os.kill(int(prompt), 9)", "os.kill(-1, 9)"])
def test_the_trainer_cannot_be_signalled(functions, call):
    script = f"from verl_megatron.rewards.pool import RewardPool\nimport os\nwith RewardPool({functions + ':score'!r}) as pool:\n    assert not pool.refused or 'getppid' in {call!r}, pool.refused\n"
    script += f"    pool.submit(0, str(os.getpid()), '', {call!r})\n    pool.results()\n    pool.submit(0, '', '', '2 - 1')\n    print(pool.results()[0].score)\n"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, start_new_session=True)
    if "AssertionError" in done.stderr:
        pytest.skip("the system gives no namespaces")
    assert done.stdout == "1.0\n", done


@pytest.mark.parametrize("namespaces", [True, False])
def test_children_end_with_their_worker(functions, namespaces):
    """Also those that left its session, and also where the system has no namespaces for it; no zombie is left."""
    script = f"from verl_megatron.rewards.pool import RewardPool\nimport os, time\nwith RewardPool({functions + ':score'!r}, timeout_s=1) as pool:\n"
    script += "    print('with' if pool.refused == '' else 'without', flush=True)\n    for row, call in enumerate(['daemon()', 'daemon() or time.sleep(60)']):\n"
    script += "        pool.submit(row, '', '', call)\n        print(pool.results()[row].failure, flush=True)\n        input()\n    time.sleep(0.2)\nprint(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\ninput()\n"
    command = [sys.executable, "-c", script]
    if not namespaces:
        command = ["unshare", "--user", "--map-root-user", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh", *command]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        how = started.stdout.readline()
        if how != ("with\n" if namespaces else "without\n"):
            pytest.skip(f"the system gives no choice of namespaces: {how!r}")
        assert started.stdout.readline() == "None\n"
        first = {pid for pid, command in below(started.pid).items() if "4242" in command}
        assert len(first) == 1
        print(file=started.stdin, flush=True)
        assert started.stdout.readline() == "timeout\n"
        assert gone(first)
        print(file=started.stdin, flush=True)
        assert started.stdout.readline().strip() == ""
        print(file=started.stdin, flush=True)
    assert started.returncode == 0


def test_a_worker_that_somebody_kills_is_replaced(functions):
    """Any of its processes, idle or in a call: the rows get their scores."""
    with RewardPool(f"{functions}:score", timeout_s=30) as pool:
        for call in ("2 - 1", "time.sleep(0.3)"):
            for place in range(3):
                assert said(pool, "2 - 1") == ""
                processes = sorted(below(os.getpid()))
                assert len(processes) == 3
                if call != "2 - 1":
                    pool.submit(1, "", "", call)
                    time.sleep(0.1)
                os.kill(processes[place], signal.SIGKILL)
                if call != "2 - 1":
                    assert pool.results()[1].failure is None
                assert said(pool, "2 - 1") == ""
                assert gone(set(processes))


def test_everything_ends_with_a_killed_trainer(functions):
    script = f"from verl_megatron.rewards.pool import RewardPool\npool = RewardPool({functions + ':score'!r}, workers=2, timeout_s=300)\n"
    script += "for row in range(2):\n    pool.submit(row, '', '', 'daemon() or time.sleep(60)')\nprint('ready', flush=True)\npool.results()\n"
    trainer = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 10
        while sum("4242" in command for command in below(trainer.pid).values()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        processes = below(trainer.pid)
        assert len(processes) == 8, processes
    finally:
        trainer.kill()
        trainer.wait()
    assert gone(set(processes))


def test_output_is_passed_on_and_cut(functions, capfd):
    with RewardPool(f"{functions}:score", timeout_s=30) as pool:
        assert said(pool, "print('hello') or print('to stderr', file=sys.stderr) or os.system('echo from a child')") == ""
        assert said(pool, "print('x' * 10**8)") == ""
        assert said(pool, "print('late')") == ""
    printed = capfd.readouterr()
    assert printed.out == "" and len(printed.err) < 70_000
    assert all(text in printed.err for text in ("hello", "to stderr", "from a child", "prints more than is shown")) and "late" not in printed.err


FILES = {
    "import sys; sys.exit(0)": "SystemExit: 0; take that out of its top level",
    "import os; os._exit(0)": "ends its process (exit code 0)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL",
    "import time; time.sleep(100)": "takes longer than 1 s",
    "while True: pass": "takes longer than 1 s",
    "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('needed')\nparser.parse_args()": "SystemExit: 2",
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
    "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int": "",
}


@pytest.mark.parametrize("text", FILES)
def test_files_are_imported_apart_and_refused_by_name(tmp_path, capfd, text):
    path = tmp_path / "json.py"  # a name of the standard library
    path.write_text(text + "\n" + SCORE if "__future__" in text else SCORE + text + "\n")
    problems = check_reward(f"{path}:score", timeout_s=1.0 if "takes longer" in FILES[text] else 30.0)
    assert (len(problems) == 1 and FILES[text] in problems[0]) if FILES[text] else problems == []
    assert all(str(path) in problem and len(problem) < 1500 and "\n" not in problem for problem in problems)
    assert capfd.readouterr() == ("", "") and not below(os.getpid())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        *((spec, "choose match, last_number or path.py:function") for spec in ("", ":", "a.py", ":f", "x.py:")),
        ("{folder}:score", "is a folder"),
        ("{folder}/fifo.py:score", "is no file"),
        ("{folder}/gone.py:score", "does not exist"),
        ("x" * 100_000 + ":score", "name too long"),
        ("a\0b.py:score", "does not exist"),
        ("{folder}/text.txt:score", "must end in .py"),
        ("{folder}/nul.py:score", "null bytes"),
        ("{functions}:Scorer.__call__", "at its top level; it has"),
        ("{functions}:scorre", "it has fail, daemon, deep, score"),
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
    assert (len(problems) == 1 and words in problems[0] and len(problems[0]) < 2000) if words else problems == []


def test_a_file_that_goes_bad_later_fails_its_rows_by_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import os\ndef score(p, r, t, e):\n    os._exit(1)\n")
    with RewardPool(f"{path}:score") as pool:
        path.write_text("import gone\n")
        for row in range(2):
            pool.submit(row, "", "", "")
        pool.results()
        assert pool.failures == {"worker died": 2} and "exit code 1" in pool.first_failure.error
        pool.submit(0, "", "", "")
        pool.results()
        assert "No module named 'gone'" in pool.first_failure.error


def test_complaints_about_all_rows(functions):
    with RewardPool(f"{functions}:score") as pool:
        said(pool, "fail(KeyError('gone'))")
        assert pool.complaint(1, 2) == ""  # another rank had a row that went well
        assert all(words in pool.complaint(2, 2) for words in (functions, "all 2 rows", "mend the function", "reward exception on row 0", "KeyError: 'gone'"))
        for row in range(MAX_METRICS + 1):
            pool.submit(row, "", "", f"dict(score=1, n{row}=1)")
        pool.results()
        assert f"metrics of {MAX_METRICS + 1} names ('n0', 'n1', 'n10', ...)" in pool.complaint(0, MAX_METRICS + 1)

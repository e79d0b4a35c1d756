"""The reward `code`: programs of responses against tests, and programs that do harm or cheat."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_megatron.checks.settings import check_config
from verl_megatron.config import RewardConfig, TrainerConfig
from verl_megatron.rewards.checks import check_reward
from verl_megatron.rewards.code import file_system
from verl_megatron.rewards.code.cases import is_same_output, program_of, read_cases
from verl_megatron.rewards.code.kernel import call
from verl_megatron.rewards.code.program import MOST_PROCESSES, Limits, run_program
from verl_megatron.rewards.code.reward import code, code_problem
from verl_megatron.rewards.functions import options_of
from verl_megatron.rewards.pool import RewardPool

DOUBLE = "print(2 * int(input()))"
DOUBLED = {"inputs": ["1\n", "2\n", "-3\n"], "outputs": ["2\n", "4\n", "-6\n"]}
ADD = "def add(a, b):\n    return a + b\n"
ADDED = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) != 1"]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(1, 1) == 2\n"


@pytest.fixture(autouse=True)
def _confined(request):
    if request.function is not test_this_machine_confines_programs and (problem := confined()):
        pytest.skip(problem)


_known: list[str] = []


def confined() -> str:
    """Return why this machine has no sandbox for programs."""
    if not _known:
        _known.append(code_problem(memory_mib=512))
    return _known[0]


def score(response: str, tests: object, *, seconds: float = 20.0, **extra) -> float:
    may = {"seconds": seconds, "memory_mib": 512, "total_seconds": 60}
    return code("", response, tests, extra, may=may)


def test_this_machine_confines_programs():
    """The others here would be skipped."""
    if not Path("/proc/self/ns/user").exists():
        pytest.skip("the kernel has no user namespaces")
    assert confined() == ""


def test_python_may_be_installed_where_programs_have_memory(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    asks = "from verl_megatron.rewards.code.reward import code_problem; print(code_problem(memory_mib=512))"
    asked = [tmp_path / "venv/bin/python", "-c", asks]
    here = {"TMPDIR": "/tmp", "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(asked, env=os.environ | here, stdout=subprocess.PIPE, check=True).stdout == b"\n"


# ---- programs and tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("First\n```python\na\n```\nthen\n```python\nb\n```", "b"),
        ("```python\na\n```\n```\nplain\n```\n```cpp\nc\n```", "a"),
        ("```\nplain\n```", "plain"),
        ("```py\na\n```", "a"),
        ("```Python3\n  a\n\n  b\n```  ", "  a\n\n  b"),
        ("```cpp\nint a;\n```", ""),
        ("```python\na\n```\n```python\nunfinished", "a"),
        ("```python\nunfinished", ""),
        ("```cpp\n```\n```python\na\n```", "a"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block_of_python(response, program):
    assert program_of(response) == program


@pytest.mark.parametrize("tests", [DOUBLED, json.dumps(DOUBLED)])
def test_standard_input_and_output(tests):
    assert score(f"So:\n```python\n{DOUBLE}\n```", tests) == 1
    assert score("print(2 * abs(int(input())))", tests) == pytest.approx(2 / 3)
    assert score("print(", tests) == score("1 / 0", tests) == score("```python\n```", tests) == 0
    assert score(f"{DOUBLE}\nimport sys; sys.exit(1)", tests) == 0, "an error after the right output"


def test_forms_of_tests():
    pairs = [{"input": "1", "output": "2", "type": "stdin_stdout"}, {"input": "2", "output": "4"}]
    lines = {"inputs": [["1"], ["2"]], "outputs": [["2"], ["4"]]}
    for tests in (pairs, json.dumps(pairs), {"input": ["1"], "output": ["2"]}, lines):
        assert score(DOUBLE, tests) == 1
    calls = {"fn_name": "add", "inputs": [[1, 2], [2, 2], [[1], [2]]], "outputs": [3, [4], [1, 2]]}
    assert score(ADD, calls) == 1
    assert score("class Solution:\n    def add(self, a, b):\n        return (a, b)", calls) == 0
    assert score("class Solution:\n    def add(self, a, b):\n        return a + b", calls) == 1
    assert score(ADD, ADDED) == score(ADD, "\n".join(ADDED)) == 1
    assert score("def add(a, b):\n    return 4", ADDED) == pytest.approx(2 / 3)
    assert score(ADD, CHECK, entry_point="add") == score(ADD, CHECK) == 1
    assert score(ADD, CHECK + "\ncheck(add)") == 1 and score("def add(a, b): return 3", CHECK) == 0
    assert score(ADD, "import math\nx = math.floor(1.5)\nassert add(x, x) == 2\nassert x == 1") == 1


def test_objects_of_libraries_and_classes_keep_their_equality():
    program = "from fractions import Fraction\ndef half(): return Fraction(1, 2)"
    assert score(program, ["assert half() == 0.5"]) == 1
    point = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
    assert score(point, ["assert P(1) == P(1)", "assert P(1) != P(2)"]) == 1


@pytest.mark.parametrize(
    "tests",
    [None, "", 5, [], {}, [3], "def (", ["def ("], {"inputs": [], "outputs": []}]
    + [{"inputs": ["1"], "outputs": []}, {"inputs": "1", "outputs": "2"}, [{"input": "1"}]],
    ids=str,
)
def test_a_ground_truth_without_tests_is_a_failure(tests):
    with pytest.raises(ValueError, match="the ground truth .*give {.inputs.: "):
        read_cases(tests)


def test_white_space_at_ends_does_not_count():
    assert is_same_output("1 2 \n3\n\n", "1 2\n3") and not is_same_output("1 2\n3", "1 2 3")
    assert not is_same_output(" 1", "1") and not is_same_output("1.0", "1")


# ---- harm --------------------------------------------------------------------------------------------------

HOSTILE = {
    "a network": "import socket\ns = socket.create_connection(('127.0.0.1', PORT), timeout=2)\nprint(2)",
    "a socket of the host": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0SOCKET')\nprint(2)",
    "100 GB": "x = bytearray(100 << 30)\nprint(2)",
    "many small memories": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory of the kernel": "import os\nos.memfd_create('x')\nprint(2)",
    "a big file": "open('x', 'wb').write(bytes(100 << 20))\nprint(2)",
    "many big files": "for n in range(10): open(f'x{n}', 'wb').write(bytes(50 << 20))\nprint(2)",
    "files outside": "open('MARKER', 'w').write('x')\nprint(2)",
    "deleted files": "import os\nos.remove('MARKER')\nprint(2)",
    "Python's own files": "import os\nopen(os.__file__, 'a')\nprint(2)",
    "an endless loop": "while True: pass",
    "an endless sleep": "import time\ntime.sleep(1000)",
    "SIGTERM ignored": "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, 1)\n"
    "  except OSError: pass\nwhile True: time.sleep(1)",
    "signals to its parent": "import os\nos.kill(os.getppid(), 9)\nprint(2)",
    "signals to all": "import os\nos.kill(-1, 9)\nprint(2)\nraise SystemExit(1)",
    "processes of others": "import os\nopen('/proc/1/environ').read()\nprint(2)",
    "devices": "import os\nos.mknod('/tmp/x', 0o60666, os.makedev(8, 0))\nprint(2)",
    "an escape": "import os\nos.chroot('/tmp')\nprint(2)",
    "mounts": "import ctypes\nassert not ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None)\nprint(2)",
    "namespaces": "import ctypes\nassert not ctypes.CDLL(None).unshare(0x10000000)\nprint(2)",
    "rights": "import os\nos.setuid(0)\nprint(2)",
    "higher limits": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (99, 99))\nprint(2)",
    "a fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "threads": "from threading import Thread\nfrom time import sleep\n"
    "for n in range(100): Thread(target=sleep, args=(9,)).start()\nprint(2)",
    "much output": "while True: print('2' * 100000)",
    "closed files": "import os\nos.closerange(0, 300)\nprint(2)",
    "its end": "import os\nos._exit(0)",
    "an abort": "import os\nos.abort()",
    "a core": "import ctypes\nctypes.string_at(0)",
    "its environment": "import os\nprint(2 if os.environ.get('SECRET') else 3)",
}


def descendants() -> list[str]:
    children = [
        path.read_text().split()
        for path in Path(f"/proc/{os.getpid()}/task").glob("*/children")
        if path.exists()
    ]
    return [child for part in children for child in part]


@pytest.mark.parametrize("harm", HOSTILE)
def test_harm_changes_nothing_outside_and_scores_nothing(harm, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    marker.write_text("mine")
    monkeypatch.setenv("SECRET", "x")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        name = f"reward_{os.getpid()}"
        local.bind(f"\0{name}")
        local.listen()
        server.setblocking(False)
        program = HOSTILE[harm].replace("PORT", str(server.getsockname()[1]))
        program = program.replace("SOCKET", name).replace("MARKER", str(marker))
        before = descendants()
        assert score(program, {"inputs": ["1"], "outputs": ["2"]}, seconds=1.5) == 0
        with pytest.raises(BlockingIOError):  # nobody has connected
            server.accept()
    assert marker.read_text() == "mine" and descendants() == before
    assert score(DOUBLE, DOUBLED) == 1


def test_a_daemon_ends_with_its_program():
    daemon = (
        "import os, time\nprint(2, flush=True)\nif not os.fork():\n  os.setsid()\n  if not os.fork():\n"
        "    time.sleep(300)\n  os._exit(0)\n"
    )
    before, began = descendants(), time.monotonic()
    assert score(daemon, {"inputs": [""], "outputs": ["2"]}) == 1
    assert time.monotonic() - began < 100 and descendants() == before


def test_what_a_program_sees():
    found = run_program(
        "import json, os\nfds = []\nfor fd in range(64):\n  try: os.fstat(fd); fds.append(fd)\n"
        "  except OSError: pass\n"
        "ids = [os.getpid(), os.getuid()]\n"
        "print(json.dumps([fds, *ids, os.listdir('/tmp'), sorted(os.environ), os.getcwd()]))",
        b"",
        Limits(seconds=20, memory_bytes=1 << 29),
    )
    fds, pid, user, files, names, folder = json.loads(found.output)
    python = Path(sys.prefix).parts[1:3]  # which is shown, also in a folder of /tmp
    assert fds == [0, 1, 2] and pid < 5 and user > 0 and folder == "/tmp"
    assert sorted(files) == sorted({"main.py"} | ({python[1]} if python[0] == "tmp" else set()))
    assert "HOME" in names and not {"PYTHONPATH", "HF_TOKEN"} & set(names)


def test_processes_are_counted_before_a_bomb_is_tried():
    counted = (
        "import os, time\nn = 1\ntry:\n  while n < 100:\n    if not os.fork(): time.sleep(60)\n    n += 1\n"
    )
    ended = run_program(
        f"{counted}except OSError: pass\nprint(n)", b"", Limits(seconds=20, memory_bytes=1 << 29)
    )
    assert 1 < int(ended.output) <= MOST_PROCESSES


def test_the_processes_of_a_program_have_its_memory_together():
    """Each stays below the limit; a child starts while the program goes on to hold what it has."""
    held = (
        "import os, sys, time\nfor n in range(3):\n  if not os.fork(): break\n"
        "x = bytearray(MIB << 20)\nfor at in range(0, len(x), 4096): x[at] = 1\ntime.sleep(HOLD)\n"
        "try:\n  while True: os.wait()\nexcept ChildProcessError: print(2)"
    )
    limits = Limits(seconds=60, memory_bytes=256 << 20)
    within = run_program(held.replace("MIB", "20").replace("HOLD", "0.5"), b"", limits)
    assert (within.output, within.cut) == (b"2\n" * 4, "")
    beyond = run_program(held.replace("MIB", "120").replace("HOLD", "60"), b"", limits)
    assert (beyond.output, beyond.cut) == (b"", "memory")


# ---- cheats ------------------------------------------------------------------------------------------------

CHEATS = {
    "an early end": "import os\nos._exit(0)",
    "an exit": "raise SystemExit(0)",
    "an end at the call": "import os\ndef add(a, b): os._exit(0)",
    "a forged verdict": "import os\nfor fd in range(20):\n  try: os.write(fd, b'[\"\", 0, true]\\n')\n"
    "  except OSError: pass",
    "an object equal to all": "class A:\n  def __eq__(self, other): return True\n  def __ne__(self, other): "
    "return True\ndef add(a, b): return A()",
    "a number equal to all": "class A(int):\n  def __eq__(self, other): return True\n"
    "def add(a, b): return A(9)",
    "another AssertionError": "import builtins\nbuiltins.AssertionError = builtins.Exception = StopIteration",
    "another compile": "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: None).__code__",
    "another exec": "import builtins\nbuiltins.exec = lambda *a, **k: None",
    "another main": "import __main__\n__main__._is_equal = lambda a, b: True",
    "another check": "check = lambda f: None\ndef add(a, b): return 0",
    "a trace": "import sys\ndef t(frame, event, arg): return t\nsys.settrace(t)\ndef add(a, b): return 0",
    "the tests' input": "import sys\nprint(sys.stdin.read())\nopen(0).read()",
    "another json": "import json\njson.loads = lambda t: {'tests': ['pass'] * 9}\njson.dumps = str",
}


@pytest.mark.parametrize("tests", [ADDED, CHECK], ids=["asserts", "check"])
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_score_nothing(cheat, tests):
    tests = [tests[0], "assert add(2, 2) == 4"] if isinstance(tests, list) else tests
    assert score(CHEATS[cheat], tests) == 0


def test_values_of_calls_are_compared_outside():
    calls = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    assert score(CHEATS["an object equal to all"].replace("class A", "class A(int)"), calls) == 0
    assert score("def add(a, b): return True", {**calls, "outputs": [1]}) == 0


# ---- in a run ----------------------------------------------------------------------------------------------


def test_a_worker_scores_programs_and_stays():
    options = options_of(RewardConfig(code_timeout_s=8, timeout_s=60))
    with RewardPool("[code,exact:0]", options, timeout_s=60) as pool:
        for number, response in enumerate([DOUBLE, HOSTILE["an endless loop"], DOUBLE, "no"]):
            pool.submit(number, "", response, DOUBLED if number < 3 else None)
        rewards = pool.results()
        assert [rewards[number].score for number in range(4)] == [1, 0, 1, 0]
        assert pool.failures == {"exception": 2} and "the ground truth has no tests" in str(
            pool.first_failure
        )
        assert pool.total_ms < 20_000, "an endless program has its own time, not that of all its runs"


def test_code_is_refused_where_programs_cannot_be_confined(monkeypatch):
    def refused(*arguments) -> None:
        raise OSError(1, "unshare: Operation not permitted")

    monkeypatch.setattr("verl_megatron.rewards.code.program.call", refused)
    problem = code_problem(memory_mib=512)
    assert "cannot confine programs here (PermissionError: [Errno 1] unshare: " in problem
    assert "); allow user namespaces" in problem
    monkeypatch.undo()
    monkeypatch.setattr(file_system, "_make_read_only", lambda path: None)
    monkeypatch.setattr("verl_megatron.rewards.code.program.MOST_PROCESSES", 100)
    assert "they reach processes without limit)" in code_problem(memory_mib=512)
    with pytest.raises(OSError, match="umount2: "):
        call("umount2", b"/nowhere", 0)


def test_code_settings_are_checked():
    config = TrainerConfig()
    config.reward.function, config.reward.code_timeout_s = "code", 9.5
    (problem,) = [one for one in check_config(config, world_size=1) if "reward" in one]
    assert problem.startswith(
        "reward.code_timeout_s=9.5 of one program is more than 90% of reward.timeout_s=10"
    )
    config.reward.code_timeout_s, config.reward.code_memory_mib = 5.0, 64
    problems = [one for one in check_config(config, world_size=1) if "reward" in one]
    assert not problems or "raise reward.code_memory_mib=64" in problems[0]
    assert check_reward("[code:0.9,format:0.1]", options_of(RewardConfig())) == []

"""Reward functions that do what they should not: to the trainer, to its log, to the processes around them."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.processes import all_ended, eventually
from tests.worlds import ROOT
from verl_megatron.rewards.pool import RewardPool
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
'''
# What a reward function does, and what is said of it; nothing: its score counts.
CALLS = {
    "os._exit(0)": "reward worker died on sample 0: its process ended: exit code 0",
    "os._exit(3)": "exit code 3",
    "Ends()": "exit code 0",
    "os.abort()": "killed by SIGABRT",
    "os.kill(os.getpid(), signal.SIGTERM)": "killed by SIGTERM",
    "os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL",
    "os.kill(0, signal.SIGKILL)": "killed by SIGKILL",
    "os.closerange(3, 1 << 20)": "worker died",
    "[os.write(int(fd), b'5\\n') for fd in os.listdir('/proc/self/fd') if "
    "os.path.realpath(f'/proc/self/fd/{fd}').find('socket:') >= 0]": "worker died",
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


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def trainer(functions: str, script: str) -> list[str]:
    """The command of a process with a pool of its own."""
    script = textwrap.dedent(script).replace("SPEC", repr(f"{functions}:score"))
    return [sys.executable, "-c", f"from verl_megatron.rewards.pool import RewardPool\n{script}"]


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def pool(functions):
    with RewardPool(f"{functions}:score", timeout_s=60) as pool:
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
    listed = subprocess.run(
        ["ps", "-ww", "--no-headers", "-eo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True
    ).stdout
    parents, commands = {}, {}
    for line in listed.splitlines():
        child, parent, state, command = line.split(maxsplit=3)
        if state[0] != "Z":
            parents[int(child)], commands[int(child)] = int(parent), command
    found, fresh = set(), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh}
        found |= fresh
    return {
        child: commands[child]
        for child in found
        if "verl_megatron.rewards.worker" in commands[child] or "4242" in commands[child]
    }


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_does_costs_its_sample_only(pool, call):
    found = said(pool, call)
    assert (CALLS[call] in found) if CALLS[call] else found == ""
    assert said(pool, "2 - 1") == ""  # the worker, or the next one, answers


def test_a_call_that_stops_its_process_costs_its_sample_only(functions):
    with RewardPool(f"{functions}:score", timeout_s=5) as pool:
        assert "no answer within 5 s" in said(pool, "os.kill(os.getpid(), signal.SIGSTOP)")
        assert said(pool, "2 - 1") == ""


def test_a_call_that_ends_its_process_fails_at_once(functions):
    with RewardPool(f"{functions}:score", timeout_s=100) as pool:
        started = time.monotonic()
        assert "exit code 0" in said(pool, "os._exit(0)") and time.monotonic() - started < 60


@pytest.mark.parametrize(
    "call",
    [
        "os.kill(os.getppid(), 9)",
        "os.killpg(os.getpgid(os.getppid()), 9)",
        "os.kill(int(prompt), 9)",
        "os.kill(-1, 9)",
    ],
)
def test_the_trainer_cannot_be_signalled(functions, call):
    script = """
        import os
        with RewardPool(SPEC) as pool:
            if pool.refused and "getppid" not in CALL:
                raise SystemExit("without namespaces")
            for sample, call in enumerate([CALL, "2 - 1"]):
                pool.submit(sample, str(os.getpid()), "", call)
                reward = pool.results()[sample]
            print(reward.score)
    """
    done = subprocess.run(
        trainer(functions, script.replace("CALL", repr(call))),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "without namespaces" in done.stderr:
        pytest.skip("the system gives no namespaces")
    assert done.stdout == "1.0\n", done


@pytest.mark.parametrize("namespaces", [True, False])
def test_children_end_with_their_worker(functions, namespaces):
    """Descendants end, those in other sessions and without PID namespaces, too; no zombie is left."""
    script = """
        import os, time
        with RewardPool(SPEC, timeout_s=5) as pool:
            print("without" if pool.refused else "with", flush=True)
            for sample, call in enumerate(["daemon()", "daemon() or time.sleep(600)"]):
                pool.submit(sample, "", "", call)
                print(pool.results()[sample].failure, flush=True)
                input()
        print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    """
    command = trainer(functions, script)
    if not namespaces:
        none = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
        command = ["unshare", "--user", "--map-root-user", "sh", "-c", none, "sh", *command]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        how = started.stdout.readline()
        if how != ("with\n" if namespaces else "without\n"):
            pytest.skip(f"the system gives no choice of namespaces: {how!r}")
        assert started.stdout.readline() == "None\n"

        def daemons() -> set[int]:
            return {pid for pid, command in below(started.pid).items() if "4242" in command}

        assert eventually(lambda: len(daemons()) == 1)  # it has become `sleep` by then
        first = daemons()
        print(file=started.stdin, flush=True)
        assert started.stdout.readline() == "timeout\n"
        assert all_ended(first)
        print(file=started.stdin, flush=True)
        assert started.stdout.readline().strip() == ""
    assert started.returncode == 0


def test_the_kernel_ends_a_worker_before_its_trainer_when_memory_runs_out(functions):
    with RewardPool(f"{functions}:score") as pool:
        pool.submit(0, "", "", "int(open('/proc/self/oom_score_adj').read())", {})
        assert pool.results()[0].score == 1000


def test_a_worker_that_somebody_kills_is_replaced(functions):
    """Any of its processes, idle or in a call: the samples get their scores."""
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
                assert all_ended(processes)


def test_a_worker_that_is_killed_as_it_starts_is_started_again(tmp_path):
    path, marker = tmp_path / "mine.py", tmp_path / "marker"
    path.write_text(
        f"import os, pathlib, signal\nmarker = pathlib.Path({str(marker)!r})\nif not marker.exists():\n"
        "    marker.touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n" + SCORE
    )
    with RewardPool(f"{path}:score") as pool:
        pool.submit(0, "", "", "")
        assert pool.results()[0].failure is None


def test_everything_ends_with_a_killed_trainer(functions):
    script = """
        pool = RewardPool(SPEC, workers=2, timeout_s=300)
        for sample in range(2):
            pool.submit(sample, "", "", "daemon() or time.sleep(60)")
        print("ready", flush=True)
        pool.results()
    """
    started = subprocess.Popen(trainer(functions, script), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    processes: dict[int, str] = {}

    def are_all_there() -> bool:
        """Whether there is a daemon for each three, and none of those that only start one."""
        processes.clear()
        processes.update(below(started.pid))
        return len(processes) == 8 and list(processes.values()).count("sleep 4242") == 2

    try:
        assert started.stdout.readline() == "ready\n"
        assert eventually(are_all_there, within_s=100), processes
    finally:
        started.kill()
        started.wait()
    assert all_ended(processes)


def test_output_is_passed_on_and_cut(functions, capfd):
    with RewardPool(f"{functions}:score", timeout_s=30) as pool:
        assert (
            said(
                pool,
                "print('hello') or print('to stderr', file=sys.stderr) or os.system('echo from a child')",
            )
            == ""
        )
        assert said(pool, "print('x' * 10**8)") == ""
        assert said(pool, "print('late')") == ""
    printed = capfd.readouterr()
    assert printed.out == "" and len(printed.err) < 70_000
    assert (
        all(
            text in printed.err
            for text in ("hello", "to stderr", "from a child", "prints more than is shown")
        )
        and "late" not in printed.err
    )


def test_a_file_that_goes_bad_later_fails_its_samples_by_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import os\ndef score(p, r, t, e):\n    os._exit(1)\n")
    with RewardPool(f"{path}:score") as pool:
        path.write_text("import gone\n")
        for sample in range(2):
            pool.submit(sample, "", "", "")
        pool.results()
        assert pool.failures == {"worker died": 2} and "exit code 1" in pool.first_failure.error
        pool.submit(0, "", "", "")
        pool.results()
        assert "No module named 'gone'" in pool.first_failure.error


def test_complaints_about_all_samples(functions):
    with RewardPool(f"{functions}:score") as pool:
        said(pool, "fail(KeyError('gone'))")
        assert pool.complaint(1, 2) == ""  # another rank had a sample that went well
        assert all(
            words in pool.complaint(2, 2)
            for words in (
                functions,
                "all 2 samples",
                "mend the function",
                "reward exception on sample 0",
                "KeyError: 'gone'",
            )
        )
        for sample in range(MAX_METRICS + 1):
            pool.submit(sample, "", "", f"dict(score=1, n{sample}=1)")
        pool.results()
        assert f"metrics of {MAX_METRICS + 1} names ('n0', 'n1', 'n10', ...)" in pool.complaint(
            0, MAX_METRICS + 1
        )

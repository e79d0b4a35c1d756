"""The gate of a run: ranks import while the command checks, and begin nothing before that has passed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel import gate
from parallel.runtime import forking, leftovers, process
from tests.processes import all_ended
from tests.worlds import ROOT, environment_of_ranks
from verl_megatron.commands import COMMANDS
from verl_megatron.launch import ranks as launching
from verl_megatron.observe import startup
from verl_megatron.observe.startup import StartClock

HEAVY = ("megatron.core", "vllm", "transformer_engine", "verl_megatron.roles", "verl_megatron.models")
# A line is one write: those of two ranks do not mix.
SAY = "import os; say = lambda text: os.write(1, f'{text}{chr(10)}'.encode()); "
RANK = SAY + "from parallel import gate; say('imported'); gate.pass_through(); say('begun')"


def program(body: str, folder: Path) -> subprocess.Popen:
    """Start a script whose checks wait until `folder`/go exists."""
    head = f"""
        import os, signal, sys, time
        from pathlib import Path
        from parallel.runtime import launch, process
        from parallel.gate import Gate
        def wait():
            while not Path("go").exists():
                time.sleep(0.01)
        SAY, RANK = {SAY!r}, {RANK!r}
    """
    (folder / "script.py").write_text(textwrap.dedent(head) + textwrap.dedent(body))
    command = [sys.executable, "script.py"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment_of_ranks(), stdout=pipe, stderr=pipe, text=True
    )


ONE_RANK = """
    import subprocess
    gate = Gate({check})
    rank = subprocess.Popen([sys.executable, "-c", RANK], env=os.environ | gate.environment)
    print(gate.wait(), rank.wait(), flush=True)
"""


def test_a_rank_begins_once_the_checks_have_passed(tmp_path):
    running = program(ONE_RANK.format(check="wait"), tmp_path)
    assert running.stdout and running.stdout.readline() == "imported\n"
    time.sleep(0.3)
    (tmp_path / "go").touch()
    assert sorted(running.communicate(timeout=60)[0].split()) == ["0", "0", "begun"]


@pytest.mark.parametrize(
    ("check", "status"),
    [
        ("lambda: (wait(), process.end(2))", 2),
        ("lambda: (wait(), 1 / 0)", 1),
        ("lambda: (wait(), os.kill(os.getpid(), signal.SIGKILL))", 137),
    ],
)
def test_no_rank_begins_if_the_checks_fail_or_are_killed(check, status, tmp_path):
    running = program(ONE_RANK.format(check=check), tmp_path)
    assert running.stdout and running.stdout.readline() == "imported\n"
    (tmp_path / "go").touch()
    shown, errors = running.communicate(timeout=60)
    assert shown.split() == [str(status), "2"], "the rank ends by itself, and says nothing"
    assert ("ZeroDivisionError" in errors) == (status == 1)
    assert ("error: the checks were ended by SIGKILL; the host" in errors) == (status == 137)


@pytest.mark.parametrize(
    ("check", "codes", "said"),
    [("lambda: (wait(), sys.exit('no'))", ["1", "2"], "no\n"), ("wait", ["0", "2"], "error: bad x\n")],
)
def test_a_rank_complains_of_nothing_before_the_checks_have_passed(check, codes, said, tmp_path):
    rank = "from parallel.runtime.refusal import complain; print('imported', flush=True); complain('bad x')"
    running = program(ONE_RANK.format(check=check).replace("RANK", repr(rank)), tmp_path)
    assert running.stdout and running.stdout.readline() == "imported\n"
    time.sleep(0.3)
    (tmp_path / "go").touch()
    shown, errors = running.communicate(timeout=60)
    assert (shown.split(), errors) == (codes, said)


def test_without_a_gate_and_behind_one_that_is_gone_nobody_waits(monkeypatch):
    monkeypatch.delenv(gate.GATE, raising=False)
    gate.pass_through()
    monkeypatch.setenv(gate.GATE, "/proc/self/fd/123456")
    gate.pass_through()


# ---- the launcher ----------------------------------------------------------------------------------------

LAUNCHED = """
    Path("rank.py").write_text(SAY + "say(os.getpid()); " + RANK)
    options = ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=1", "--local-addr=127.0.0.1"]
    sys.exit(launch.main([*options, "rank.py"], Gate({check})))
"""


def test_the_launcher_ends_its_ranks_with_the_status_of_the_checks_and_without_a_word(tmp_path):
    running = program(LAUNCHED.format(check="lambda: (wait(), process.end(3))"), tmp_path)
    assert running.stdout
    lines = [running.stdout.readline().strip() for _ in range(4)]
    ranks = [int(line) for line in lines if line.isdecimal()]
    assert len(ranks) == 2 and lines.count("imported") == 2
    (tmp_path / "go").touch()
    rest, errors = running.communicate(timeout=60)
    assert (running.returncode, rest, errors) == (3, "", "")
    assert all_ended(ranks)


def test_sigterm_while_the_run_is_checked_ends_the_checks_and_the_ranks(tmp_path):
    running = program(LAUNCHED.format(check="wait"), tmp_path)
    assert running.stdout
    for _ in range(4):
        running.stdout.readline()
    others = process.children(running.pid)
    assert len(others) == 3
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert all_ended(others)


INTERRUPTED_TWICE = """
    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)
    launch.{begins} = launch.leftovers.sweep = interrupt
    sys.exit(launch.main([]))
"""


@pytest.mark.parametrize("begins", ["leftovers.begin", "_run_agent"])
def test_a_second_interrupt_is_no_traceback(begins, tmp_path):
    running = program(INTERRUPTED_TWICE.format(begins=begins), tmp_path)
    errors = running.communicate(timeout=60)[1]
    assert running.returncode == 130 and errors.startswith("interrupted") and errors.count("\n") == 1, errors


@pytest.mark.parametrize("kind", ["RuntimeError", "OSError"])
def test_what_clean_up_raises_after_a_signal_is_no_traceback(kind, tmp_path):
    body = f"""
        from torch.distributed.launcher import api
        def launch_half(*_):
            def start(*_):
                try:
                    os.kill(os.getpid(), signal.SIGTERM)  # as a thread is about to start
                    time.sleep(5)
                finally:
                    raise {kind}("cannot join thread before it is started")
            return start
        api.elastic_launch = launch_half
        sys.exit(launch.main(["--standalone", "--nproc-per-node", "1", "script"]))
    """
    running = program(body, tmp_path)
    assert running.communicate(timeout=60) == ("", "") and running.returncode == 143


@pytest.mark.parametrize(
    ("cores", "forked", "ahead"),
    [
        (4, False, [False, True, True, False, False]),
        (2, True, [False, True, True, True, True]),
        (1, True, [False, False, False, False, False]),
    ],
)
def test_ranks_go_ahead_where_a_core_is_left(cores, forked, ahead, monkeypatch):
    monkeypatch.setattr(gate.os, "sched_getaffinity", lambda _: range(cores))
    assert [gate.may_go_ahead(count, forked=forked) for count in (0, 1, 3, 4, 64)] == ahead


# ---- what is imported when -------------------------------------------------------------------------------


def test_a_command_that_checks_a_run_imports_no_models_and_no_engine():
    code = f"""
    import sys
    from verl_megatron.commands import main
    shape = ["actor.path=llama3-1b", "data.train=", "actor.layout=tp1"]
    status = main(["train", "--config-name", "grpo_8b", "--ranks", "1", *shape, "--dry-run"])
    assert not (found := [name for name in {HEAVY} if name in sys.modules]), found
    assert status in (0, 3), status
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, cwd=ROOT, env=environment_of_ranks(), check=True, stdout=subprocess.DEVNULL)


def test_the_checks_are_forked_before_this_process_asks_for_gpus(monkeypatch):
    """In a fork of a process that has initialized CUDA the checks would find no GPU."""
    asked = []
    for name in ("is_available", "device_count", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name) or 0)

    def fork(check: object) -> None:
        raise SystemExit(f"asked for {asked}")

    monkeypatch.setattr(launching, "Gate", fork)
    with pytest.raises(SystemExit, match=r"^asked for \[\]$"):
        COMMANDS["train"].load()(["--config-name", "ppo_toy_cpu", "data.train=x"])
    assert not launching.device.visible_gpus() and asked, "the functions that were replaced are those in use"


def test_the_stages_of_a_start_add_up(monkeypatch):
    monkeypatch.setenv(process.LAUNCHER, str(os.getppid()))
    launched_at = leftovers.started_at(os.getppid()) / os.sysconf("SC_CLK_TCK")
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    clock = StartClock()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert list(clock.seconds) == ["launch", "imports"]
    rounding_s = 0.01
    all_s = sum(clock.seconds.values())
    assert before - launched_at - rounding_s <= all_s <= after - launched_at + rounding_s
    moments = iter([5.0, 5.06, 7.0, 7.06])
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    for _ in range(2):
        with clock.stage("world"):
            pass
    assert clock.seconds["world"] == pytest.approx(0.12) and "world 0.1" in str(clock)


def test_a_start_counts_neither_what_a_shell_did_before_nor_earlier_attempts(monkeypatch):
    monkeypatch.setenv(process.LAUNCHER, str(os.getppid()))
    monkeypatch.setenv(startup.BEGAN, str(time.time() - 0.5))
    assert StartClock().seconds["launch"] <= 0.5
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert list(StartClock().seconds) == ["imports"]


def test_imports_of_a_forked_rank_begin_in_its_server(monkeypatch):
    monkeypatch.setenv(process.LAUNCHER, str(os.getppid()))
    began = time.clock_gettime(time.CLOCK_BOOTTIME) - 0.5
    monkeypatch.setattr(forking, "began", began)
    imports_s = StartClock().seconds["imports"]
    assert 0.5 <= imports_s <= time.clock_gettime(time.CLOCK_BOOTTIME) - began
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert StartClock().seconds["imports"] > 1, "this process has imported by itself"


def test_a_process_that_no_launcher_started_has_no_start_of_its_own(monkeypatch):
    monkeypatch.delenv(process.LAUNCHER, raising=False)
    assert StartClock().seconds == {}

"""The launcher of recipes on one host: a dry run of the module decides whether its ranks begin."""

import os
import subprocess
import sys

import pytest

from tests.worlds import environment_of_ranks

MODULE = """
import os, sys
from parallel import gate

if "--dry-run" in sys.argv:
    print("a plan for", os.environ.get("WORLD_SIZE"), "ranks")
    print("some library warns", file=sys.stderr)
    if refusal := os.environ["REFUSAL"]:
        print(refusal, "for", os.environ.get("WORLD_SIZE"), file=sys.stderr)
    if os.environ["STATUS"] == "killed":
        os.kill(os.getpid(), 9)
    sys.exit(int(os.environ["STATUS"]))
gate.pass_through()
# one write: lines of two ranks do not mix
os.write(1, " ".join(["rank", os.environ["RANK"], "has", *sys.argv[1:]]).encode() + b"\\n")
"""
LAUNCH = ["verl_megatron.launch.node", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", "--check"]


@pytest.fixture
def run(tmp_path):
    """A function that launches two ranks of `MODULE` with these arguments and variables."""
    (tmp_path / "asked.py").write_text(MODULE)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        environment = environment_of_ranks() | variables
        environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
        command = [sys.executable, "-m", *LAUNCH, "-m", "asked", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.parametrize(("said", "status"), [("2", 2), ("3", 0), ("killed", 137)])
def test_ranks_begin_if_a_dry_run_refuses_nothing_but_want_of_room(said, status, run):
    ended = run("x=1", STATUS=said, REFUSAL="error: no room")
    begun = [] if status else ["rank 0 has x=1", "rank 1 has x=1"]
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (status, begun), ended
    assert "no room" not in ended.stderr if not status else ended.stderr == "error: no room for 2\n"


def test_with_a_role_the_ranks_here_are_not_the_run(run):
    assert run("--role=train", STATUS="2", REFUSAL="error: no").stderr == "error: no for None\n"


def test_a_dry_run_that_is_killed_without_a_word_is_an_error(run):
    ended = run(STATUS="killed", REFUSAL="")
    assert ended.returncode == 137 and "error: the checks were ended by SIGKILL; " in ended.stderr, ended


def test_the_module_gets_arguments_that_are_named_like_the_launchers(run):
    ended = run("--check", STATUS="0", REFUSAL="")
    assert sorted(ended.stdout.splitlines()) == ["rank 0 has --check", "rank 1 has --check"], ended


def test_ranks_do_not_wait_for_the_launcher_to_import_torch():
    code = """
import sys
from parallel.runtime import launch
from verl_megatron.launch import node
launch.main = lambda arguments, gate: print("torch" in sys.modules) or 0
node.main(["--nproc-per-node", "1", "-m", "verl_megatron.train", "--config-name", "ppo_toy_cpu"])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment_of_ranks(), capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

"""Commands whose output ends early, is closed or full, and Ctrl-C: at most one line, no traceback."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from tests.worlds import ROOT, environment_of_ranks

PLAN = "plan --model llama3-1b --gpus 1"  # which turns the errors of files into its own
DRY_RUN = "train --config-name ppo_toy_cpu --dry-run actor.path=llama3-1b data.train= data.validation="


def said_by(command: str, redirection: str, *, module: str = "verl_megatron") -> tuple[str, str]:
    """Run a command in bash; return what it printed on both streams, and its status."""
    line = f"{sys.executable} -m {module} {command} {redirection}; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env=environment_of_ranks(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    *shown, status = done.stdout.splitlines()
    return "\n".join(shown), status


@pytest.mark.parametrize("command", ["--help", "train --help", "report --help", "recipes list", PLAN])
def test_a_reader_that_has_enough_ends_a_command_quietly(command):
    assert said_by(command, "| true") == ("", "141")


@pytest.mark.parametrize("command", ["--help", "report --help", PLAN, DRY_RUN])
def test_a_full_disk_is_one_error(command):
    shown, status = said_by(command, "> /dev/full")
    assert status == "2" and shown.startswith("error: the output cannot be written (No space left on device)")
    assert shown.count("\n") == 0


def test_a_full_disk_is_one_error_of_a_rank():
    rank = DRY_RUN.removeprefix("train ") + " actor.layout=tp1 critic.layout=tp1 rollout.tp=1"
    shown, status = said_by(rank, "> /dev/full", module="verl_megatron.train")
    assert status == "2" and shown.startswith("error: the output cannot be written (No space left on device)")
    assert shown.count("\n") == 0


def test_what_a_command_without_streams_starts_has_streams():
    starting = "; ".join(
        [
            "import subprocess, sys; from parallel.runtime import process",
            "process.open_streams()",
            "sys.exit(subprocess.call([sys.executable, '-c', 'import sys; sys.exit(sys.stdout is None)']))",
        ]
    )
    line = shlex.join([sys.executable, "-c", starting])
    assert not subprocess.run(
        ["bash", "-c", f"{line} >&- 2>&-"], env=environment_of_ranks(), timeout=100
    ).returncode


@pytest.mark.parametrize("command", ["--version", "report --help", "train --config-name sft --cfg job"])
def test_closed_streams_are_no_error(command):
    assert said_by(command, "<&- >&- 2>&-") == ("", "0")


def test_an_error_needs_no_stream():
    shown, status = said_by("nothing", ">&-")
    assert shown.startswith("error: 'nothing' is no command") and status == "2"
    assert said_by("nothing", "2>&-") == ("", "2")


def test_signs_that_an_encoding_lacks_are_escaped(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    shown, status = said_by("train --help run", "")
    assert r"(\u2265 0" in shown and status == "0"


@pytest.mark.parametrize("command", ["plan --model llama3-8b --gpus 64", "convert inspect none"])
def test_ctrl_c_is_one_line(command, tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('imported', flush=True)\ntime.sleep(600)\n")
    environment = environment_of_ranks()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    started = subprocess.Popen(
        [sys.executable, "-m", "verl_megatron", *shlex.split(command)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout.readline() == "imported\n"
    os.killpg(started.pid, signal.SIGINT)
    _, shown = started.communicate(timeout=60)
    assert (shown, started.returncode) == ("interrupted\n", 130)

"""What ranks print is in run.log with time and rank, and on the console as without it."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from parallel.runtime import collector
from parallel.runtime.run_log import RunLog
from tests.processes import eventually
from tests.worlds import ROOT
from verl_megatron.lifecycle.base_trainer import node_of

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} rank (\d+): (.*)")
HEAD = """
import ctypes, os, signal, subprocess, sys, time
from parallel.runtime import endings, run_log
from parallel.runtime.run_log import RunLog
run_log.PATIENCE_S = 60.0
"""


def run(script: str, folder: Path, **options) -> subprocess.CompletedProcess:
    file = folder / "script.py"
    file.write_text(HEAD + textwrap.dedent(script))
    options = {"capture_output": True, "text": True} | options
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, file], cwd=folder, env=environment, timeout=60, **options)


def logged(path: Path) -> list[tuple[int, str]]:
    """Rank and text of each line."""
    found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    assert all(found), path.read_text()
    return [(int(line[1]), line[2]) for line in found]


def test_all_that_is_printed_is_logged_and_the_console_is_as_before(tmp_path):
    body = """
        print("before", flush=True)
        {log}:
            print("by python", flush=True)
            os.system("echo by a child")
            ctypes.CDLL(None).puts(b"by C"); ctypes.CDLL(None).fflush(None)
            print("\\x1b[31mred\\x1b[0m", file=sys.stderr)
            print("no end", end="", file=sys.stderr)
        print("after")
    """
    plain, with_log = (run(body.format(log=log), tmp_path) for log in ("if True", "with RunLog('.', rank=3)"))
    assert (with_log.stdout, with_log.stderr) == (plain.stdout, plain.stderr)
    assert "by C" in plain.stdout and plain.returncode == with_log.returncode == 0
    assert eventually(lambda: len(logged(tmp_path / "run.log")) == 5)
    assert sorted(logged(tmp_path / "run.log")) == sorted(
        (3, text) for text in ("by python", "by a child", "by C", "red", "no end")
    )


def test_one_file_for_both_streams_keeps_the_order(tmp_path):
    script = """
        with RunLog(".", rank=0):
            for number in range(200):
                print(number, file=(sys.stdout, sys.stderr)[number % 2], flush=True)
    """
    said = run(script, tmp_path, capture_output=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert said.stdout.split() == [str(number) for number in range(200)]
    assert [text for _, text in logged(tmp_path / "run.log")] == said.stdout.split()


@pytest.mark.parametrize(
    "end", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", "ctypes.string_at(0)"]
)
def test_the_last_words_of_a_rank_that_crashes_are_kept(tmp_path, end):
    script = f"""
        RunLog(".", rank=1).__enter__()
        os.write(2, b"NCCL WARN the reason\\n")
        {end}
    """
    said = run(script, tmp_path)
    assert said.returncode not in (0, 1) and said.stderr == "NCCL WARN the reason\n"
    assert eventually(lambda: logged(tmp_path / "run.log") == [(1, "NCCL WARN the reason")])


def test_a_traceback_is_in_the_log_only_and_the_error_knows_where(tmp_path):
    script = """
        try:
            with RunLog(".", rank=2):
                print("at work")
                raise RuntimeError("broken")
        except RuntimeError as error:
            endings.locate(error, phase="rollout", iteration=4)
            print(endings.last_words(error))
    """
    said = run(script, tmp_path)
    assert said.stdout == (
        "at work\nrank 0 in rollout of iteration 4: RuntimeError: broken; "
        "tracebacks of all ranks are in run.log\n"
    )
    texts = [text for rank, text in logged(tmp_path / "run.log") if rank == 2]
    assert (
        texts[:2] == ["at work", "Traceback (most recent call last):"] and texts[-1] == "RuntimeError: broken"
    )


def test_signals_to_the_ranks_group_and_a_stopped_console_do_not_end_it(tmp_path):
    script = """
        signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
        with RunLog(".", rank=0):
            os.killpg(0, signal.SIGTERM)
            print("saved", flush=True)
            os.close(1)
    """
    said = run(script, tmp_path, start_new_session=True)
    assert said.returncode == 0, said.stderr
    assert [text for _, text in logged(tmp_path / "run.log")] == ["asked to end", "saved"]


def test_a_terminal_stays_one_and_a_bar_is_logged_without_its_states(tmp_path):
    """The console of a rank is a pseudo-terminal of the same width."""
    script = """
        from tqdm import tqdm
        with RunLog(".", rank=0):
            print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)
            bar = tqdm(total=2, dynamic_ncols=True, disable=None)
            bar.write("step 1/2")
            bar.update(1)
            bar.write("step 2/2")
            bar.update(1)
            bar.close()
    """
    master, slave = pty.openpty()
    import termios

    termios.tcsetwinsize(slave, (24, 77))
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(master, 4096):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    said = run(script, tmp_path, capture_output=False, stdout=slave, stderr=slave)
    os.close(slave)
    reader.join(10)
    os.close(master)
    assert said.returncode == 0 and b"2/2 [" in shown and b"True True 77\r\n" in shown, bytes(shown)
    texts = [text for _, text in logged(tmp_path / "run.log")]
    assert texts[:3] == ["True True 77", "step 1/2", "step 2/2"] and len(texts) == 4, texts


def test_many_ranks_share_a_file_of_bounded_size(tmp_path):
    """Whole lines, the newest of them, and at most two files."""
    path, limit = tmp_path / "run.log", 20_000
    logs = [collector.Log(collector.Task(str(path), rank, limit, control=0, streams={})) for rank in range(4)]
    for number in range(600):
        log = logs[number % 4]
        log.add(b"line %d" % number)
        assert log.write() == ""
    assert sorted(os.listdir(tmp_path)) == ["run.log", "run.log.1"]
    assert all(file.stat().st_size <= limit for file in tmp_path.iterdir())
    lines = logged(tmp_path / "run.log.1") + logged(path)
    assert [text for _, text in lines] == [f"line {number}" for number in range(600 - len(lines), 600)]
    assert all(rank == int(text.split()[1]) % 4 for rank, text in lines)


def test_a_log_that_cannot_be_written_is_said_once_and_the_console_goes_on(tmp_path):
    (tmp_path / "run.log").symlink_to("/dev/full")
    script = """
        with RunLog(".", rank=0):
            for number in range(3):
                print(number, flush=True)
                time.sleep(0.1)
    """
    said = run(script, tmp_path)
    assert said.returncode == 0 and re.sub(r"warning: .*\n", "", said.stdout) == "0\n1\n2\n"
    assert len(re.findall(r"warning: \S+run\.log cannot be written \(.*No space left", said.stdout)) == 1


def test_without_a_process_for_it_a_run_goes_on(tmp_path):
    script = """
        sys.executable = "/nowhere/python"
        with RunLog(".", rank=0):
            print("at work")
    """
    said = run(script, tmp_path)
    assert said.returncode == 0 and re.search(r"warning: no run.log, .*\nat work\n", said.stdout)
    assert not (tmp_path / "run.log").exists()


def test_it_begins_before_its_process_does(tmp_path):
    """The interpreter of that process waits until the block has begun, longer than `run` has time."""
    late = tmp_path / "late"
    begun = f'[ -e "{tmp_path}/begun" ]'
    late.write_text(
        f"#!/bin/sh\nn=0\nuntil {begun} || [ $((n += 1)) -gt 2000 ]; do sleep 0.05; done\n"
        f'exec "{sys.executable}" "$@"\n'
    )
    late.chmod(0o755)
    script = """
        from parallel.runtime import run_log
        run_log.PATIENCE_S, sys.executable = 600.0, os.path.abspath("late")
        with RunLog(".", rank=0):
            print("begun")
            open("begun", "x").close()
    """
    assert run(script, tmp_path).stdout == "begun\n"
    assert eventually(lambda: logged(tmp_path / "run.log") == [(0, "begun")])


def test_ranks_of_another_host_have_a_file_of_their_own(tmp_path):
    run("with RunLog('.', rank=9, node=2):\n    print('here')", tmp_path)
    assert logged(tmp_path / "run.node2.log") == [(9, "here")]


def test_long_lines_are_cut_into_several(tmp_path):
    run("with RunLog('.', rank=0):\n    print('x' * 200_000, end='')", tmp_path)
    assert eventually(lambda: sum(len(text) for _, text in logged(tmp_path / "run.log")) == 200_000)


def test_each_host_of_a_world_has_a_log_of_its_own(tmp_path, monkeypatch):
    names = []
    for node in range(2):
        monkeypatch.setenv("GROUP_RANK", str(node))  # torchrun's, of the host among those of the world
        names.append(RunLog(tmp_path, rank=3, node=node_of(3)).path.name)
    assert names == ["run.log", "run.node1.log"]

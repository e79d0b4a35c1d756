"""Signals to a run as recipes start it: who ends, with which status and which words, and what is left."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.end_to_end.launch import GONE
from tests.end_to_end.signals_worker import STALL_S, names_left, start
from tests.processes import eventually
from tests.worlds import ROOT
from verl_megatron.lifecycle.record import read_starts


def worker(folder: Path, *arguments: str) -> str:
    """What tests.end_to_end.signals_worker says of a few kills or stops."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "tests.end_to_end.signals_worker", folder, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=550,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.long
def test_kills_leave_nothing_and_change_nothing(tmp_path):
    assert re.search("^[45] kills", worker(tmp_path, "--kills", "4"), re.MULTILINE)


@pytest.mark.long
def test_a_stopped_rank_is_named_in_time(tmp_path):
    """Rank 0, where the launcher holds the store of the ranks."""
    (took_s,) = re.findall(
        r"rank 0 under recipe .* was named after (\S+) s", worker(tmp_path, "--stops", "1")
    )
    assert float(took_s) <= STALL_S + 5


@pytest.mark.long
def test_a_rank_that_holds_the_store_is_named_in_time(toy, tmp_path, monkeypatch):
    """Where the launcher leaves the store to rank 0."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    running = start(
        tmp_path, toy, f"run.stall_timeout_s={STALL_S}", "run.iterations=1000", launcher="torchrun"
    )
    running.wait_for("step 1/", within_s=300)
    victim = running.rank(0)
    os.kill(victim, signal.SIGSTOP)
    assert running.wait_for("rank 0 made no progress", within_s=STALL_S + 30) <= STALL_S + 5, running.text[
        -4000:
    ]
    with suppress(ProcessLookupError):  # torchrun kills it after its --shutdown-timeout
        os.kill(victim, signal.SIGKILL)
    assert running.process.wait(300) and not running.leftovers()


def listening(pids) -> set[str]:
    """Addresses, as /proc/net writes them, on which these processes listen."""
    inodes = set()
    for pid in pids:
        with suppress(*GONE):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(*GONE):  # the file has just been closed
                    inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(path)))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def test_sigterm_in_the_first_iteration_ends_with_0(toy, tmp_path):
    """Nothing has been validated and nothing logged; until then the run has listened on the loopback only."""
    running = start(
        tmp_path, toy, "run.iterations=1000", "data.prompts_per_iteration=64", "rollout.max_tokens=24"
    )
    running.wait_for("KV cache", within_s=300)
    assert listening(running.processes()) == {"0100007F"}
    running.process.terminate()
    assert running.process.wait(300) == 0, running.text[-6000:]
    assert (
        "as SIGTERM asks for" in running.text
        and "Traceback" not in running.text
        and "Error" not in running.text
    )
    assert not running.leftovers() and not names_left(tmp_path)


@pytest.mark.parametrize(
    ("moment", "number", "status"),
    [
        ("", signal.SIGINT, 130),
        pytest.param("", signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param("step 1/", signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_an_end_that_saves_nothing_is_one_line(toy, tmp_path, moment, number, status):
    """Ctrl-C at any time, and SIGTERM while the ranks are being started."""
    running = start(tmp_path, toy, "run.iterations=1000")
    running.wait_for(moment or "$", within_s=300)
    assert moment or eventually(lambda: running.rank(1) is not None, within_s=300)
    os.killpg(running.process.pid, number)  # as a terminal does
    assert running.process.wait(300) == status, running.text[-6000:]
    ends = [line for line in running.text.splitlines() if line.startswith(("interrupted", "on SIGTERM"))]
    assert len(ends) == 1 and "Traceback" not in running.text, running.text[-6000:]
    assert not running.leftovers() and not names_left(tmp_path)


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["launcher", "group"])
def test_ctrl_c_is_recorded_and_frees_the_folder(toy, tmp_path, send):
    running = start(tmp_path, toy, "run.iterations=1000")
    running.wait_for("step 1/", within_s=300)
    send(running.process.pid, signal.SIGINT)
    assert running.process.wait(30) == 130 and not running.leftovers(), running.text[-6000:]
    (ended,) = read_starts(tmp_path / "run")
    assert ended["exit"]["reason"] == "interrupted" and ended["exit"]["step"] >= 1 and ended["ended"]
    assert not {"run.lock", "stacks"} & {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.long
def test_a_run_that_was_asked_to_end_does_not_speak_of_its_result(toy, tmp_path):
    validated = [f"data.validation={toy}/val.jsonl", "data.validation_samples=8", "run.iterations=1000"]
    running = start(tmp_path, toy, *validated)
    running.wait_for("step 1/", within_s=300)
    running.process.terminate()
    assert running.process.wait(300) == 0 and "as SIGTERM asks for" in running.text, running.text[-6000:]
    assert " -> " not in running.text, running.text[-6000:]


def test_a_user_error_is_the_status_of_the_recipe(toy, tmp_path):
    running = start(tmp_path, toy, "actor.lr=fast")
    assert (
        running.process.wait(300) == 2 and running.text.count("error:") == 1 and running.text.count("\n") < 4
    ), running.text

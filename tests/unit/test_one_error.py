"""One error, once: whatever ranks print while they fail, the console ends with the error that has a name."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from parallel.runtime import launch, process
from parallel.runtime.watchdog import EXIT_STATUS
from tests.unit.test_run_log import logged
from tests.worlds import ROOT

LAUNCHER = [sys.executable, "-m", "parallel.runtime.launch", "--local-addr", "127.0.0.1"]
HEAD = """
import os, signal, sys, time
from parallel.runtime import endings, run_log
from parallel.runtime.refusal import RefusalError, complain, fail, speak_once
from parallel.runtime.run_log import RunLog
run_log.PATIENCE_S = 60.0
rank = int(os.environ["RANK"])
"""
FAILS = """
    try:
        with RunLog(".", rank=rank):
            print(f"rank {rank} is at work")
            error = RuntimeError("attempt " + os.environ["TORCHELASTIC_RESTART_COUNT"])
            endings.locate(error, phase="actor_update", iteration=3)
            raise error
    except RuntimeError as error:
        fail(error)
"""
LINE = (
    r"error: rank \d in actor_update of iteration 3: RuntimeError: attempt {}; "
    r"tracebacks of all ranks are in run\.log"
)


def script(body: str, folder: Path) -> Path:
    (folder / "rank.py").write_text(HEAD + textwrap.dedent(body))
    return folder / "rank.py"


def test_an_error_of_all_ranks_is_one_line_and_the_tracebacks_are_in_the_log(tmp_path):
    """Of the attempt before the last the ranks speak themselves."""
    said = subprocess.run(
        [*LAUNCHER, "--nproc-per-node=3", "--max-restarts=1", script(FAILS, tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 1 and "Traceback" not in said.stdout + said.stderr, said.stderr
    *before, last = said.stderr.splitlines()
    assert re.fullmatch(LINE.format(1), last), said.stderr
    assert before and all(re.fullmatch(LINE.format(0), line) for line in before), said.stderr
    lines = logged(tmp_path / "run.log")
    failed = {rank for rank, text in lines if text == "RuntimeError: attempt 1"}
    assert failed and failed <= {rank for rank, text in lines if text.startswith("Traceback")}


RAISES_LATER = """
    import time
    from pathlib import Path
    from parallel.runtime.preemption import Preemption
    try:
        with RunLog(".", rank=rank) as log, Preemption(log=log.write) as preemption:
            Path(f"began_{rank}").touch()  # before the first rank ends and the launcher ends the others
            while rank == 0 and len(list(Path().glob("began_*"))) < 3:
                time.sleep(0.01)
            assert rank == 0 or preemption._asked.wait(60)
            raise RefusalError("reward.function=mine.py:score failed")
    except RefusalError as error:
        complain(str(error), agreed=True)
"""


def test_what_other_ranks_raise_after_the_first_is_in_the_log_only(tmp_path):
    """They get SIGTERM because a rank has ended, which is no request to end a run."""
    said = subprocess.run(
        [*LAUNCHER, "--nproc-per-node=3", script(RAISES_LATER, tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert said.returncode == 2
    assert said.stderr.splitlines() == ["error: reward.function=mine.py:score failed"]
    lines = logged(tmp_path / "run.log")
    error = "parallel.runtime.refusal.RefusalError: reward.function=mine.py:score failed"
    assert {rank for rank, text in lines if text == error} == {0, 1, 2}


def failure(folder: Path, rank: int, *, code: int, body: str = "") -> ProcessFailure:
    """How a rank that a recipe's launcher has started ended, as the launcher sees it."""
    file = folder / f"error_{rank}.json"
    if body:
        environment = {
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "TORCHELASTIC_ERROR_FILE": str(file),
            "TORCHELASTIC_RUN_ID": "test",
            process.LAUNCHER: "1",
        }
        ended = subprocess.run(
            [sys.executable, script(body, folder)],
            cwd=folder,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == code and not ended.stderr, ended.stderr  # its launcher speaks
    return ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))


def said_of(failures: dict[int, ProcessFailure], capsys) -> tuple[int, list[str]]:
    status = launch._status(SimpleNamespace(failures=failures), ranks_per_host=8)
    return status, capsys.readouterr().err.splitlines()


def test_a_refusal_is_the_last_line(tmp_path, capsys):
    one = {0: failure(tmp_path, 0, code=2, body="complain('no file here')")}
    assert said_of(one, capsys) == (2, ["error: no file here"])


def test_what_all_ranks_refuse_is_said_on_the_first_host_only(tmp_path, capsys):
    agreed = failure(tmp_path, 0, code=2, body="complain('run.seed=-1 is wrong', agreed=True)")
    assert said_of({0: agreed}, capsys) == (2, ["error: run.seed=-1 is wrong"])
    assert said_of({8: agreed}, capsys) == (2, [])
    assert "agreed" in json.loads((tmp_path / "error_0.json").read_text())["message"]["extraInfo"]


@pytest.mark.parametrize(
    ("code", "words"), [(-9, "SIGKILL; the host may be out of memory"), (-11, "SIGSEGV")]
)
def test_a_rank_that_was_killed_has_an_error_line(tmp_path, capsys, code, words):
    status, (line,) = said_of({3: failure(tmp_path, 3, code=code)}, capsys)
    assert (
        status == 128 - code and line.startswith("error: rank 3 (process 1) was ended by") and words in line
    )


def test_of_a_rank_that_hangs_the_launcher_says_nothing(tmp_path, capsys):
    """The watchdog has named it at once; the launcher may wait long for the others."""
    assert said_of({0: failure(tmp_path, 0, code=EXIT_STATUS)}, capsys) == (EXIT_STATUS, [])


def test_a_rank_that_gave_no_reason_is_the_error(tmp_path, capsys):
    line = "error: rank 3 (process 1) ended with 5; its output says why"
    assert said_of({3: failure(tmp_path, 3, code=5)}, capsys) == (5, [line])


def test_what_ends_on_a_signal_is_no_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch._Asked, "by", signal.SIGTERM)
    line = "on SIGTERM: rank 3 (process 1) ended with 137"
    assert said_of({3: failure(tmp_path, 3, code=-9)}, capsys) == (137, [line])


def test_a_users_own_script_ends_with_the_error_as_well(tmp_path, capsys):
    """Through the hook of the Python interface: an exception that has a log is a run's."""
    body = "speak_once()\nwith RunLog('.', rank=rank):\n    raise KeyError('gone')"
    found = {0: failure(tmp_path, 0, code=1, body=body)}
    line = "error: rank 0: KeyError: 'gone'; tracebacks of all ranks are in run.log"
    assert said_of(found, capsys) == (1, [line])

"""Names that tell their owner, and what the next command may remove."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from parallel.runtime import leftovers
from tests.worlds import ROOT

OWNER = """
import multiprocessing, sys, time
from multiprocessing import shared_memory
from parallel.runtime import leftovers
leftovers.begin()
memory = shared_memory.SharedMemory(create=True, size=64)
lock = multiprocessing.get_context("spawn").Lock()
import tempfile
open(tempfile.mkdtemp() + "/file", "w").close()
print(leftovers.mark_of(__import__("os").getpid()), flush=True)
time.sleep(600)
"""


def owner(folder: Path, **more: str) -> tuple[subprocess.Popen, str]:
    told = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)} | more
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], env=told, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    return process, process.stdout.readline().strip()


def names(mark: str) -> list[str]:
    return [path.name for path in leftovers.SHARED_MEMORY.iterdir() if mark in path.name]


def test_what_a_killed_process_leaves_is_removed_and_what_a_living_one_has_stays(tmp_path):
    (killed, its_mark), (living, living_mark) = owner(tmp_path), owner(tmp_path)
    try:
        assert len(names(its_mark)) == 2 and any(name.startswith("sem.") for name in names(its_mark))
        os.killpg(killed.pid, signal.SIGKILL)  # with what would clean up after it
        killed.wait()
        assert (tmp_path / its_mark).is_dir()  # another command may have removed its shared memory already
        leftovers.sweep(tmp_path)
        assert (
            not names(its_mark)
            and [path.name for path in tmp_path.iterdir()] == [living_mark]
            and len(names(living_mark)) == 2
        )
    finally:
        for process in (killed, living):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        time.sleep(0.1)
        leftovers.sweep(tmp_path, leftovers.SHORT)
    assert not names(living_mark) and not list(tmp_path.iterdir())


def test_only_a_name_that_proves_its_owners_end_counts(tmp_path):
    mine = leftovers.mark_of(os.getpid())
    prefix, pid, started, numbering = mine.split("-")
    gone = f"{prefix}-{pid}-{int(started) - 1}-{numbering}"  # the id was given again
    other_machine = f"{prefix}-{pid}-{int(started) - 1}-{'0' * 8}"
    assert leftovers.has_ended(gone) and leftovers.has_ended(f"sem.{gone}-abc")
    for name in (
        mine,
        f"{mine}-abc",
        other_machine,
        f"x{gone}",
        "vmeg-1-2",
        f"{prefix}-{pid}--{numbering}",
        "psm_12345678",
    ):
        assert not leftovers.has_ended(name), name
    for folder, inside in (
        ("torchelastic_gone", gone),
        ("torchelastic_here", mine),
        ("torchelastic_other", "error.json"),
        ("other", gone),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / inside).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / gone).symlink_to(tmp_path / "elsewhere")
    leftovers.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "torchelastic_here",
        "torchelastic_other",
        "other",
        "elsewhere",
    }


def test_torchruns_folder_gets_torchruns_mark(tmp_path):
    folder = tmp_path / "torchelastic_abc"
    (folder / "attempt_0/0").mkdir(parents=True)
    process, _ = owner(tmp_path, TORCHELASTIC_ERROR_FILE=str(folder / "attempt_0/0/error.json"))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (folder / leftovers.mark_of(os.getpid())).exists()
    leftovers.sweep(tmp_path)
    assert folder.exists(), "its torchrun, here this process, is alive"


SOCKETS = """
import os, signal, sys
from pathlib import Path
from parallel.runtime import leftovers
folder = Path(leftovers.socket_folder())
assert str(folder) == leftovers.socket_folder()
(folder / "socket").touch()
print(folder, flush=True)
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def shared():
    """A folder of temporary files with a short path, as a socket's must be."""
    with tempfile.TemporaryDirectory(dir=leftovers.SHORT) as folder:
        yield Path(folder)


def socket_folder(shared: Path, *arguments: str, first: str = "", **more: str) -> Path:
    """The folder that a program had, which has ended."""
    told = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(shared)} | more
    command = [sys.executable, "-c", first + SOCKETS, *arguments]
    return Path(subprocess.run(command, env=told, stdout=subprocess.PIPE, text=True).stdout.strip())


def test_a_callers_program_leaves_no_sockets(shared):
    folder = socket_folder(shared)
    assert folder.parent == shared and leftovers.OWNED.fullmatch(folder.name) and not folder.exists()


def test_sockets_of_a_killed_program_are_removed_by_the_next_command(shared):
    folder = socket_folder(shared, "killed")
    assert (folder / "socket").exists()
    leftovers.sweep(shared)
    assert not folder.exists()


def test_sockets_lie_where_they_are_wanted(shared, tmp_path):
    assert socket_folder(shared, VLLM_RPC_BASE_PATH=str(tmp_path)) == tmp_path
    assert (tmp_path / "socket").exists(), "a folder of others stays"
    first = "from parallel.runtime import leftovers\nleftovers.begin()\n"
    assert (socket_folder(shared, first=first) / "socket").exists(), "that of all temporary files"
    long = shared / ("long" * 20)
    long.mkdir()
    folder = socket_folder(long)
    assert folder.parent == leftovers.SHORT and not folder.exists()

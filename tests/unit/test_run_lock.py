"""Who may use an output folder: the living keep it, the dead do not; a world of one rank in this process."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from parallel.runtime import run_lock
from parallel.runtime.run_lock import NAME, RunLock, identity, is_dead
from tests.one_rank import ONE_RANK
from tests.processes import eventually

HOLD = """
import sys, time
from parallel.runtime import run_lock
lock = run_lock.RunLock(sys.argv[1], None)
assert lock._acquire() is None
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def world(monkeypatch):
    """A lock that waits less for a dying run."""
    monkeypatch.setattr(run_lock, "DYING_S", 0.3)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_folder_is_free_again_at_the_end_and_after_an_error(tmp_path, world):
    folder = tmp_path / "made/for/it"
    with RunLock(folder, ONE_RANK):
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
    with pytest.raises(RuntimeError), RunLock(folder, ONE_RANK):
        raise RuntimeError("of the run")
    assert list(folder.iterdir()) == []


def test_a_living_run_keeps_it_and_is_named(tmp_path, world, holder):
    before = (tmp_path / NAME).read_text()
    with pytest.raises(
        ValueError,
        match=rf"is in use by another run: process {holder.pid} on {socket.gethostname()}, since .*; "
        rf"wait for it, end it",
    ) as error:
        RunLock(tmp_path, ONE_RANK).__enter__()
    assert str(tmp_path) in str(error.value) and (tmp_path / NAME).read_text() == before
    holder.send_signal(signal.SIGSTOP)  # stopped is not dead
    with pytest.raises(ValueError, match="is in use by another run"):
        RunLock(tmp_path, ONE_RANK).__enter__()


def test_a_dead_run_does_not_keep_it_though_nobody_has_asked_for_its_status(tmp_path, monkeypatch, holder):
    monkeypatch.setattr(run_lock, "DYING_S", 30.0)
    holder.kill()
    with RunLock(tmp_path, ONE_RANK):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert not (tmp_path / NAME).exists()


def test_a_dying_run_is_waited_for(tmp_path, world, holder, monkeypatch):
    monkeypatch.setattr(run_lock, "DYING_S", 20.0)
    began = time.monotonic()
    threading.Timer(0.5, holder.kill).start()
    with RunLock(tmp_path, ONE_RANK):
        assert 0.3 < time.monotonic() - began < 20


def test_a_process_id_that_was_given_out_again_does_not_count(tmp_path, world):
    (tmp_path / NAME).write_text(json.dumps(identity() | {"started": 1}))
    with RunLock(tmp_path, ONE_RANK):
        assert json.loads((tmp_path / NAME).read_text())["started"] != 1


def far(path) -> None:
    path.write_text(json.dumps(identity() | {"host": "far", "machine": "another boot", "pid": 1}))


def test_a_run_elsewhere_that_renews_its_file_keeps_the_folder(tmp_path, world, capsys):
    far(path := tmp_path / NAME)
    is_told = threading.Event()

    def renew() -> None:
        while not is_told.wait(0.2):
            os.utime(path)

    threading.Thread(target=renew, daemon=True).start()
    with pytest.raises(
        ValueError, match=rf"process 1 on far, since .*; wait for it, .* or remove {path} if it is gone"
    ):
        RunLock(tmp_path, ONE_RANK).__enter__()
    is_told.set()
    assert capsys.readouterr().out.count("waiting until it is renewed or 180 s old") == 1


def test_a_run_elsewhere_that_is_silent_is_dead(tmp_path, world, monkeypatch):
    far(path := tmp_path / NAME)
    os.utime(path, (time.time() - run_lock.SILENT_S - 5,) * 2)
    with RunLock(tmp_path, ONE_RANK):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    monkeypatch.setattr(run_lock, "SILENT_S", 4.0)
    far(path)
    with RunLock(tmp_path, ONE_RANK):  # after a while
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_the_next_attempt_of_the_same_torchrun_takes_over_from_another_host():
    me = identity() | {"launch": "job", "attempt": 1}
    far = me | {"machine": "another boot", "attempt": 0}
    assert is_dead(far, me, silent_s=0)
    assert not is_dead(far | {"launch": "other"}, me, silent_s=0)
    assert not is_dead(
        far | {"launch": "none"}, me | {"launch": "none"}, silent_s=0
    )  # what torchrun calls every launch
    assert not is_dead(far | {"attempt": 1}, me, silent_s=0)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00", b"[1]", b'{"pid": "1"}', b"[" * 100_000, "folder", "pipe"]
)
def test_a_file_that_no_run_has_written_is_named(tmp_path, world, content):
    path = tmp_path / NAME
    if content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(
        ValueError,
        match=rf"is locked by {path}, which no run has written; if no run is at work there, remove {path}",
    ):
        RunLock(tmp_path, ONE_RANK).__enter__()
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


def test_of_many_that_find_a_dead_run_one_gets_the_folder(tmp_path, world):
    (tmp_path / NAME).write_text(json.dumps(identity() | {"started": 1}))
    held, refused, barrier = [], [], threading.Barrier(8)

    def contend() -> None:
        lock = RunLock(tmp_path, ONE_RANK)
        barrier.wait()
        (refused if lock._acquire() else held).append(lock)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(refused) == 7
    held[0]._release()


def test_without_links_the_file_is_made_alone(tmp_path, world, monkeypatch):
    def no_links(*_):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with RunLock(tmp_path, ONE_RANK), pytest.raises(ValueError, match="is in use by another run"):
        RunLock(tmp_path, ONE_RANK).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_renewed(tmp_path, world, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    with RunLock(tmp_path, ONE_RANK):
        os.utime(tmp_path / NAME, (0, 0))
        assert eventually(lambda: (tmp_path / NAME).stat().st_mtime > 1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path, world):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError,
        match=r"run.output_dir='.*/file/run' cannot be locked for this run \(.*Not a directory.*make "
        r"it writable",
    ):
        RunLock(tmp_path / "file/run", ONE_RANK).__enter__()

"""A rank ends with its launcher, and Ctrl-C ends it in a line, whatever its main thread does."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel.runtime import leftovers, process, store
from tests.processes import all_ended, eventually, is_alive
from tests.worlds import ROOT

RANK = """
import sys
from parallel.runtime import process
process.begin()
print("begun", flush=True)
import ctypes
while True:
    ctypes.CDLL(None).sleep(600)  # gives up Python's lock, and lets no handler in Python run
"""
LAUNCHER = """
import os, subprocess, sys, time
os.environ[sys.argv[1]] = str(os.getpid()) if sys.argv[1] == "VERL_MEGATRON_LAUNCHER" else "1"
print(subprocess.Popen([sys.executable, "-c", sys.argv[2]], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def start(*command: str, **more: str) -> subprocess.Popen:
    known = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", process.LAUNCHER, "TORCHELASTIC_RUN_ID")
    }
    told = known | {"PYTHONPATH": str(ROOT)} | more
    return subprocess.Popen(
        [sys.executable, "-c", *command], env=told, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("variable", ["VERL_MEGATRON_LAUNCHER", "TORCHELASTIC_RUN_ID"])
def test_a_rank_ends_with_its_launcher(variable, tmp_path):
    launcher = start(LAUNCHER, variable, RANK, TMPDIR=str(tmp_path))
    pid = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "begun\n" and is_alive(pid)
    launcher.kill()
    launcher.wait()
    assert all_ended([pid])
    leftovers.sweep(tmp_path, leftovers.SHORT)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_has_lost_its_launcher_before_does_not_begin(tmp_path):
    rank = start(RANK, VERL_MEGATRON_LAUNCHER="1", TMPDIR=str(tmp_path))
    assert rank.wait(100) == 128 + signal.SIGKILL and rank.stdout.read() == ""


@pytest.mark.parametrize(("told", "lines"), [({}, 1), ({"RANK": "0"}, 1), ({"RANK": "1"}, 0)])
def test_an_interrupt_ends_a_call_into_c_in_one_line(told, lines, tmp_path):
    rank = start(RANK, TMPDIR=str(tmp_path), **told)
    assert rank.stdout.readline() == "begun\n" and len(list(tmp_path.iterdir())) == 1
    rank.send_signal(signal.SIGINT)
    said, errors = rank.communicate(timeout=100)
    assert rank.returncode == process.INTERRUPTED and not said and not list(tmp_path.iterdir())
    assert errors.count("\n") == lines and errors.count("interrupted; the same command goes on") == lines


RECORDING = """
import time
from parallel.runtime import endings, leftovers, process
process.begin()
endings.listen(lambda reason, text: print(reason, flush=True))
leftovers.add(lambda: print("removed", flush=True))
print("begun", flush=True)
time.sleep(600)
"""


def test_a_rank_records_that_the_launcher_interrupts_it(tmp_path):
    rank = start(RECORDING, TMPDIR=str(tmp_path), **{process.LAUNCHER: str(os.getpid())})
    assert rank.stdout.readline() == "begun\n"
    process.interrupt([rank.pid], within_s=100)
    assert rank.communicate(timeout=100)[0] == "interrupted\nremoved\n"
    assert rank.returncode == process.INTERRUPTED
    early = start("print('imports', flush=True); import time; time.sleep(600)")
    assert early.stdout.readline() == "imports\n"
    process.interrupt([early.pid], within_s=100)
    assert early.communicate(timeout=100) == ("", "")


def test_children_have_their_exit_status_where_sigchld_was_ignored():
    told = start(
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from parallel.runtime import process\n"
        "process.keep_exit_statuses()\n"
        "sys.exit(subprocess.call([sys.executable, '-c', 'exit(7)']))"
    )
    assert told.wait(100) == 7


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "out of memory"),
        (signal.SIGBUS, "may have been shortened"),
        (signal.SIGABRT, "do so"),
    ],
)
def test_a_signal_is_told_with_its_likely_cause(number, words):
    assert words in process.ended_by(number, otherwise="do so")


# ---- the store of a world --------------------------------------------------------------------------------


def listening(port: int, inode: int | None = None) -> list[str]:
    """Addresses at which sockets listen to the port: all sockets, or the one with this number."""
    addresses = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, place, _, state, *_, number = line.split()[:10]
            address, _, hexadecimal = place.partition(":")
            if state == "0A" and int(hexadecimal, 16) == port and inode in (None, int(number)):
                addresses.append(address)
    return addresses


@pytest.mark.parametrize(
    ("address", "one_host", "expected"),
    [
        ("example.invalid", True, "0100007F"),
        ("127.0.0.2", False, "0200007F"),
        ("localhost", False, "00000000"),
    ],
)
def test_a_store_listens_where_the_world_is(address, one_host, expected):
    """A name of several hosts that means the loopback here means another interface there."""
    listener = store.listen(address, 0, one_host=one_host)
    assert listening(listener.getsockname()[1], os.fstat(listener.fileno()).st_ino) == [expected]
    listener.close()
    if one_host:
        served = store.serve(address, one_host=True)
        assert expected in listening(served.port)


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            OSError, match=f"port {taken.getsockname()[1]} of .* is taken; choose another MASTER_PORT"
        ):
            store.listen("127.0.0.1", taken.getsockname()[1], one_host=True)


def test_a_port_that_may_not_be_used_is_not_called_taken(monkeypatch):
    def refuse(self, place):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    for one_host in (True, False):
        with pytest.raises(OSError, match=r"port 80 of .* cannot be used \(Permission denied\); choose"):
            store.listen("127.0.0.1", 80, one_host=one_host)


def test_a_store_that_is_served_later_is_found():
    with store.reserved_port() as holder:
        port = holder.getsockname()[1]
        with ThreadPoolExecutor(1) as pool:
            met = pool.submit(store.meet, "127.0.0.1", port, within_s=100)
            time.sleep(0.5)
            assert not met.done()
            served = store.serve("127.0.0.1", port, one_host=True)
            served.set("a", "b")
            assert met.result(100).get("a") == b"b"


def test_who_waits_for_a_store_can_be_interrupted():
    with store.reserved_port() as holder:
        waiting = start(
            "from parallel.runtime import store; print('waits', flush=True); "
            f"store.meet('127.0.0.1', {holder.getsockname()[1]}, within_s=600)"
        )
        assert waiting.stdout.readline() == "waits\n"
        waiting.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in waiting.communicate(timeout=100)[1]


def test_a_reserved_port_is_for_the_store_alone():
    with store.reserved_port() as holder:
        port = holder.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        for _ in range(2):  # also after a restart
            listener = store.listen("127.0.0.1", port, one_host=True)
            socket.create_connection(("127.0.0.1", port)).close()
            listener.accept()[0].close()
            listener.close()


def test_a_store_of_a_stopped_rank_answers_and_ends_with_it():
    with store.reserved_port() as holder:
        check_store_of_a_stopped_rank(holder.getsockname()[1])


def check_store_of_a_stopped_rank(port: int) -> None:
    keeper = start(
        f"from parallel.runtime import store; import time; store.serve_apart('127.0.0.1', {port}, "
        f"one_host=True); print('served', flush=True); time.sleep(600)"
    )
    try:
        assert keeper.stdout.readline() == "served\n"
        keeper.send_signal(signal.SIGSTOP)
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        client.set("a", "b")
        assert client.get("a") == b"b" and listening(port) == ["0100007F"]
    finally:
        keeper.kill()
        keeper.wait()
    assert eventually(lambda: not listening(port))

"""Ranks whose modules are imported beforehand, in a fork or the same process, are as those started anew."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from parallel.runtime import process
from parallel.runtime.forking import client
from parallel.runtime.forking.client import ForkedRank, ForkServer, SpareRank
from tests.processes import all_ended, eventually, is_alive
from tests.worlds import ROOT, environment_of_ranks

OPEN = os.O_CREAT | os.O_WRONLY | os.O_APPEND
# What a rank does, by its argument.
RANK = """
import atexit, json, os, random, signal, sys, tempfile, threading, time
import loaded

def work():
    stat = open("/proc/self/stat").read().rpartition(")")[2].split()
    print(json.dumps({
        "argv": sys.argv, "command": sys.orig_argv, "path": sys.path[0], "name": __spec__.name,
        "shown": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
        "main": sys.modules["__main__"].work is work, "parent": os.getppid(),
        "files": os.listdir("/proc/self/fd"),
        "rank": [entry for entry in open("/proc/self/environ").read().split(chr(0)) if entry[:5] == "RANK="],
        "session": os.getsid(0) == os.getpid(), "stdin": os.readlink("/proc/self/fd/0"),
        "signals": [str(signal.getsignal(number)) for number in (2, 15, 13, 17)],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "environment": dict(os.environ), "drawn": random.random(), "loaded": loaded.by,
        "name of a file": tempfile.mktemp(),
    }))

def end(mode):
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
    if mode == "raise":
        raise RuntimeError("planned")
    sys.exit({"0": None, "7": 7, "text": "a reason"}[mode])

if __name__ == "__main__":
    if sys.argv[1] == "work":
        work()
    elif sys.argv[1] == "wait":
        print("waits", flush=True)
        time.sleep(600)
    elif sys.argv[1] == "abort":
        os.abort()
    else:
        end(sys.argv[1])
"""
PRELOAD = """
import os
def preload(arguments):
    import loaded
    {more}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Working directory with the modules of a rank."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "loaded.py").write_text("import os\nby = os.getpid()\n")
    (tmp_path / "preloading.py").write_text(PRELOAD.format(more=""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(process.LAUNCHER, str(os.getpid()))
    return tmp_path


def command_of(*arguments: str) -> list[str]:
    return [sys.executable, "-u", "-m", "rank", *arguments]


def fork(
    server: ForkServer | SpareRank, *arguments: str, file: str = "output", **environment: str
) -> ForkedRank | subprocess.Popen | None:
    """Start a rank whose output and errors go to a file."""
    output = os.open(file, OPEN)
    try:
        told = os.environ | {"RANK": "0"} | environment
        return server.rank(command_of(*arguments), dict(told), stdout=output, stderr=output)
    finally:
        os.close(output)


@pytest.fixture
def serve(folder):
    """A function that starts a server for ranks with its arguments."""
    servers = []

    def start(*arguments: str, kind: type = ForkServer) -> ForkServer:
        servers.append(kind("rank", arguments, preloaded_by="preloading"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
        assert not is_alive(server._process.pid)


@pytest.fixture(params=[ForkServer, SpareRank])
def prepare(request, serve):
    """As `serve`, in both ways."""
    return partial(serve, kind=request.param)


def seen(file: str) -> dict:
    return json.loads(Path(file).read_text())


@pytest.mark.parametrize("kind", [ForkServer, SpareRank])
def test_a_rank_sees_what_a_new_interpreter_sees(kind, serve, folder):
    servers = [serve("work", "a b", kind=kind) for _ in range(1 + (kind is SpareRank))]
    ranks = [
        fork(servers[rank % len(servers)], "work", "a b", file=f"{rank}", RANK=f"{rank}") for rank in range(2)
    ]
    assert [rank and rank.wait(20) for rank in ranks] == [0, 0], Path("0").read_text()
    with open("new", "w") as file:
        told = os.environ | {"RANK": "0"}
        subprocess.run(command_of("work", "a b"), env=told, stdout=file, start_new_session=True, check=True)
    first, second, new = (seen(name) for name in ("0", "1", "new"))
    assert [first["loaded"], second["loaded"]] == [servers[0]._process.pid, servers[-1]._process.pid]
    assert second["environment"] == dict(os.environ) | {"RANK": "1"}
    for differs in ("drawn", "name of a file"):
        assert len({first.pop(differs), second.pop(differs), new.pop(differs)}) == 3
    assert new.pop("loaded") != first.pop("loaded") and first == new
    assert fork(servers[0], "7") is None


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("0", 0, "thread\nat exit\n"),
        ("7", 7, "thread\nat exit\n"),
        ("text", 1, "a reason\nthread\nat exit\n"),
        ("raise", 1, "RuntimeError: planned\nthread\nat exit\n"),
        ("abort", -signal.SIGABRT, ""),
    ],
)
def test_it_ends_as_an_interpreter_ends(prepare, mode, code, said):
    rank = fork(prepare(mode), mode)
    assert rank and rank.wait(20) == rank.returncode == rank.poll() == code
    assert Path("output").read_text().endswith(said)


def test_signals_reach_it_and_its_status_tells_them(prepare):
    for number in (signal.SIGTERM, signal.SIGKILL):
        rank = fork(prepare("wait"), "wait", file=number.name)
        assert rank and eventually(lambda number=number: Path(number.name).read_text() == "waits\n")
        assert process.ranks() == [rank.pid] and rank.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.05)
        rank.send_signal(number)
        assert rank.wait(20) == -number
        rank.send_signal(number)  # no-op


def test_ranks_go_on_without_the_server_and_no_other_is_forked(serve):
    server = serve("wait")
    rank = fork(server, "wait")
    server._process.kill()
    server._process.wait()
    assert rank and rank.poll() is None and fork(server, "wait") is None
    rank.send_signal(signal.SIGKILL)
    assert rank.wait(20) == -signal.SIGKILL


def test_a_process_becomes_one_rank(serve):
    spare = serve("wait", kind=SpareRank)
    assert process.ranks() == []
    rank = fork(spare, "wait")
    assert rank and process.ranks() == [rank.pid] and fork(spare, "wait") is None
    spare.close()
    assert rank.poll() is None
    rank.send_signal(signal.SIGKILL)
    assert rank.wait(20) == -signal.SIGKILL


def test_a_process_whose_imports_start_threads_becomes_a_rank(serve, folder):
    more = "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start()"
    (folder / "preloading.py").write_text(PRELOAD.format(more=more))
    rank = fork(serve("0", kind=SpareRank), "0")
    assert rank and rank.wait(20) == 0


@pytest.mark.parametrize("more", ["raise ImportError('not installed')", "os.kill(os.getpid(), 9)"])
def test_a_process_that_cannot_import_becomes_no_rank(serve, more, folder, capfd):
    (folder / "preloading.py").write_text(PRELOAD.format(more=more))
    assert fork(serve("0", kind=SpareRank), "0") is None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "more",
    [
        "raise ImportError('not installed')",
        "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start()",
        "os.kill(os.getpid(), 9)",
        "os.fork = lambda: open('/')",  # raises OSError
        "fork, own = os.fork, os.getpid(); os.fork = lambda: fork() if os.getpid() == own else open('/')",
    ],
)
def test_where_nothing_can_be_forked_nothing_is(serve, more, folder, capfd):
    (folder / "preloading.py").write_text(PRELOAD.format(more=more))
    assert fork(serve("0"), "0") is None
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_the_system_gives_to_another_process_is_ended(serve, folder, monkeypatch):
    (folder / "rank.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    monkeypatch.setattr(client, "adopting", contextlib.nullcontext)
    assert fork(serve("work"), "work") is None
    assert all_ended([int(line) for line in Path("output").read_text().splitlines()])


def test_ranks_that_differ_in_more_than_their_place_start_anew(prepare):
    server = prepare("0")
    assert fork(server, "7") is None and fork(prepare("0"), "0", OMP_NUM_THREADS="77") is None
    output = os.open("output", OPEN)
    without = {name: value for name, value in os.environ.items() if name != process.LAUNCHER}
    assert prepare("0").rank(command_of("0"), without, stdout=output, stderr=output) is None
    os.close(output)
    place = dict(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", TORCHELASTIC_RESTART_COUNT="1")
    assert (rank := fork(prepare("0"), "0", **place)) and rank.wait(20) == 0


def test_a_module_of_ours_has_what_preloads_it():
    assert all(callable(import_module(by).preload) for by in client.PRELOADED_BY.values())


def test_ranks_are_forked_without_gpus_and_only_those_of_our_modules(monkeypatch):
    monkeypatch.setattr(client, "GPUS", ("/dev/none",))
    assert client.may_fork("verl_megatron.train") and not client.may_fork("mine.train")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # NumPy's import starts threads
    assert not client.may_fork("verl_megatron.train")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert client.may_fork("verl_megatron.train")
    monkeypatch.setattr(client, "GPUS", ("/dev/none", "/dev/null"))
    assert not client.may_fork("verl_megatron.train")


def test_ranks_of_torchrun_are_counted():
    counted = client._num_ranks
    assert counted(["--nnodes", "1", "--nproc-per-node", "4"]) == counted(["--nproc-per-node=4"]) == 4
    assert [counted(given) for given in ([], ["--nproc-per-node"], ["--nproc-per-node", "gpu"])] == [0, 0, 0]


# ---- the launcher ----------------------------------------------------------------------------------------

LAUNCHED = """
import sys
from parallel.runtime import launch
from parallel.runtime.forking import client
client.GPUS = {gpus}
client.PRELOADED_BY["rank"] = "preloading"
options = ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=1", "--local-addr=127.0.0.1"]
sys.exit(launch.main([*options, "-m", "rank"]))
"""
# Says its process id, its server's, and the number of the attempt; then does what stands in its place.
SAYS = """
import os, signal, sys, time
import loaded
from parallel.runtime import process
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"{os.getpid()} {loaded.by} {attempt}\\n".encode())
process.end_with_launcher()
"""
# The launcher ends the other rank once one has ended: both have to say theirs first.
BOTH_HAVE_SAID = """
open(f"said_{attempt}_{os.environ['RANK']}", "x").close()
while not all(os.path.exists(f"said_{attempt}_{rank}") for rank in range(2)):
    time.sleep(0.01)
"""


def launch(folder: Path, body: str, *, forks: bool = True) -> subprocess.Popen:
    (folder / "rank.py").write_text(SAYS + textwrap.dedent(body))
    told = environment_of_ranks()
    told.pop(process.LAUNCHER, None)
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHED.format(gpus=() if forks else ("/dev/null",))],
        cwd=folder,
        env=told,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


def said_by(running: subprocess.Popen, ranks: int) -> list[list[int]]:
    assert running.stdout
    return [list(map(int, running.stdout.readline().split())) for _ in range(ranks)]


def test_both_attempts_come_from_one_server(folder):
    end = "time.sleep(2 if os.environ['RANK'] == '0' else 0)\nos.kill(os.getpid(), 9)"
    running = launch(folder, BOTH_HAVE_SAID + end)
    lines = said_by(running, 4)
    assert len({server for _, server, _ in lines}) == 1 and {pid for pid, *_ in lines}.isdisjoint(
        {lines[0][1]}
    )
    assert [attempt for *_, attempt in lines] == [0, 0, 1, 1]
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in errors and errors.count("\n") == 1
    assert all_ended([pid for line in lines for pid in line[:2]])


def test_the_first_attempt_has_the_prepared_processes(folder):
    running = launch(folder, BOTH_HAVE_SAID + "os.kill(os.getpid(), 9)", forks=False)
    lines = said_by(running, 4)
    assert all(pid == importer for pid, importer, _ in lines) and len({pid for pid, *_ in lines}) == 4
    assert [attempt for *_, attempt in lines] == [0, 0, 1, 1]
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_launcher_that_is_ended(number, forks, folder):
    saves = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + BOTH_HAVE_SAID
    running = launch(folder, saves + "open('ready', 'a').close()\ntime.sleep(600)", forks=forks)
    lines = said_by(running, 2)
    assert eventually((folder / "ready").exists)
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    assert all_ended([pid for line in lines for pid in line[:2]])
    expected = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 0, signal.SIGINT: process.INTERRUPTED}
    assert running.returncode == expected[number]
    assert errors.count("\n") == (number == signal.SIGINT)


@pytest.mark.parametrize("forks", [True, False])
def test_a_launcher_that_is_ended_while_modules_are_imported_leaves_nothing(forks, folder):
    (folder / "preloading.py").write_text(
        PRELOAD.format(more="import time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)")
    )
    for number in (signal.SIGKILL, signal.SIGTERM):
        running = launch(folder, "", forks=forks)
        assert running.stdout
        importing = [int(running.stdout.readline()) for _ in range(1 if forks else 2)]
        running.send_signal(number)
        _, errors = running.communicate(timeout=60)
        assert all_ended(importing) and errors == ""
        assert running.returncode == (-number if number == signal.SIGKILL else 128 + number)


BECOMING = """
import os, sys, time, types
def wait():
    print("becomes", flush=True)
    while not os.path.exists("sent"):
        time.sleep(0.05)
sys.modules["numpy"] = types.SimpleNamespace(random=types.SimpleNamespace(seed=wait))
"""


def test_a_signal_while_a_process_becomes_a_rank_ends_it(folder):
    (folder / "becoming.py").write_text(BECOMING)
    (folder / "preloading.py").write_text(PRELOAD.format(more="import becoming"))
    running = launch(folder, "print('runs', flush=True)\ntime.sleep(600)", forks=False)
    assert running.stdout and running.stdout.readline() == "becomes\n"
    running.send_signal(signal.SIGTERM)
    time.sleep(1)  # until the launcher has passed it on
    (folder / "sent").touch()
    output, _ = running.communicate(timeout=60)
    assert output.count("runs") <= 1, "the second one may, until the agent sees that the first has ended"
    assert running.returncode == 128 + signal.SIGTERM

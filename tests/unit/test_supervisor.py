"""Worlds over several hosts: where they are, and their ends. Hosts are threads, ranks are scripts."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel.runtime import leftovers
from tests.planned import run_config
from verl_megatron.launch import supervisor
from verl_megatron.launch.board import Board
from verl_megatron.launch.hosts import place_worlds
from verl_megatron.launch.lookout import Lookout
from verl_megatron.launch.node import Call
from verl_megatron.planner.search.choices import configured

TOKEN = "secret of the run"
UNTIL_TOLD = "trap 'echo told >>$0.log; exit 0' TERM; while [[ ! -f $0.done ]]; do sleep 0.02; done"
UNTIL_KILLED = "echo $1 $2 $$ >>$0.log; while true; do sleep 0.02; done"


# ---- places ------------------------------------------------------------------------------------------------


def placed(devices: str, ranks_per_host: int, world_size: int | None = None):
    config = configured(run_config(), {"rollout.devices": devices})
    last = int(devices.replace("+", "-").rpartition("-")[2])
    return place_worlds(config, world_size=world_size or last + 1, ranks_per_host=ranks_per_host)


@pytest.mark.parametrize(
    ("devices", "ranks_per_host", "expected"),
    [
        ("1", 2, [("train", 0, "0"), ("rollout", 0, "1")]),
        ("2-3", 2, [("train", 0, "01"), ("rollout", 1, "01")]),
        ("4-7", 2, [("train", 0, "01"), ("train", 1, "01"), ("rollout", 2, "01"), ("rollout", 3, "01")]),
        ("1+2-3", 2, [("train", 0, "0"), ("rollout:0", 0, "1"), ("rollout:1", 1, "01")]),
    ],
)  # fmt: skip
def test_each_rank_is_on_its_host(devices, ranks_per_host, expected):
    parts = placed(devices, ranks_per_host)
    assert [(part.name, part.host, "".join(map(str, part.local))) for part in parts] == expected
    for part in parts:
        assert list(part.hosts) == [host for name, host, _ in expected if name == part.name]


@pytest.mark.parametrize(
    ("devices", "world_size", "message"),
    [
        ("6-15", 16, "ranks 6-15 of the rollout world are on 2 hosts of 8 ranks and share one"),
        ("12-15", 16, "ranks 0-11 of the train world are on 2 hosts of 8 ranks and share one"),
        ("8-15", 24, "makes a run of 16 ranks, and 24 were asked for"),
        ("8-15", 8, "makes a run of 16 ranks, and 8 were asked for"),
    ],
)
def test_worlds_that_share_a_host_and_go_on_on_another_are_refused(devices, world_size, message):
    with pytest.raises(ValueError, match=message):
        placed(devices, 8, world_size)


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(supervisor.device, "is_gpu", lambda: True)
    monkeypatch.setattr(supervisor.device, "visible_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus_of(devices: str, *, ranks: int) -> list[str]:
    call = Call.here("module", [], ranks=ranks, restarts=0)
    return [supervisor._gpus(part, call)["CUDA_VISIBLE_DEVICES"] for part in placed(devices, ranks)]


def test_each_world_of_a_host_gets_its_own_gpus(four_gpus, monkeypatch):
    assert gpus_of("3", ranks=4) == ["0,1,2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5")
    assert gpus_of("1", ranks=2) == ["7", "5"]


def test_too_few_gpus_for_all_worlds_are_refused(four_gpus):
    with pytest.raises(ValueError, match="the rollout world needs 5 GPUs on this host, which has 4; name"):
        gpus_of("3-4", ranks=5)


def test_a_fault_is_started_again_and_an_error_is_not():
    statuses = (0, 1, 2, 75, 130, 134, 137, 139, 143)
    assert [status for status in statuses if supervisor._is_fault(status)] == [75, 134, 137, 139]


# ---- the board ---------------------------------------------------------------------------------------------


def test_notes_are_written_once_and_only_with_the_token():
    store = dist.HashStore()
    board, stranger = Board(store, TOKEN), Board(store, "another")
    assert board.read("a") is None and board.write("a", "1") and not board.write("a", "2")
    assert board.read("a") == "1"
    with pytest.raises(ValueError, match="a was not written with this run's token"):
        stranger.read("a")
    store.set("b", store.get("a"))  # sealed for another name
    with pytest.raises(ValueError, match="b was not written"):
        board.read("b")


# ---- what becomes of worlds --------------------------------------------------------------------------------


class Run:
    """The supervisors of a run's hosts, each in a thread."""

    def __init__(self, folder: Path, devices: str, gpus: int, *, restarts: int = 0):
        self.folder, self.store, self.statuses = folder, dist.HashStore(), {}
        self.asked = {}
        parts = placed(devices, gpus)
        hosts = sorted({part.host for part in parts})
        for host in hosts:
            call = Call(
                nnodes=len(hosts),
                node_rank=host,
                nproc_per_node=gpus,
                max_restarts=restarts,
                rdzv_id="job",
                endpoint=("here", 1),
                address=f"host{host}",
                module="nothing",
                arguments=[str(folder)],
            )
            own = [supervisor._World(part, call, {}) for part in parts if part.host == host]
            lookout = Lookout("127.0.0.1:1", TOKEN)  # no training world answers there
            self.asked[host] = type("Asked", (), {"received": set()})()
            self._start(
                supervisor._Supervisor(call, Board(self.store, TOKEN), own, self.asked[host], lookout),
                host,
            )

    def _start(self, one: supervisor._Supervisor, host: int) -> None:
        def run() -> None:
            self.statuses[host] = one.run()

        threading.Thread(target=run, daemon=True).start()

    def log(self, role: str) -> list[list[str]]:
        path = self.folder / f"{role}.sh.log"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def done(self, role: str) -> None:
        (self.folder / f"{role}.sh.done").touch()

    def wait(self) -> dict[int, int]:
        until(lambda: len(self.statuses) == len(self.asked))
        return self.statuses


def until(condition) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LAUNCHER", "tests.stand_in_launcher")
    monkeypatch.setattr(supervisor, "POLL_S", 0.01)
    monkeypatch.setattr(supervisor, "LAST_WORDS_S", 0.2)
    monkeypatch.setattr(supervisor, "OTHERS_S", 0.5)

    def begin(devices: str, gpus: int, *, restarts: int = 0, **scripts: str) -> Run:
        for role, text in scripts.items():
            (tmp_path / f"{role}.sh").write_text(text)
        return Run(tmp_path, devices, gpus, restarts=restarts)

    return begin


def kill(pid: str) -> None:
    with contextlib.suppress(ProcessLookupError):  # its supervisor was faster
        os.kill(int(pid), signal.SIGKILL)


def test_a_killed_world_starts_again_and_training_goes_on(start, capfd):
    run = start("2+3", 2, train=UNTIL_TOLD, rollout0=UNTIL_KILLED, rollout1=UNTIL_TOLD)
    for count in (1, 2, 3):
        until(lambda: len(run.log("rollout0")) == count)  # noqa: B023
        if count < 3:
            kill(run.log("rollout0")[-1][-1])
    assert [line[1] for line in run.log("rollout0")] == ["0", "1", "2"] and not run.log("train")
    run.done("rollout1"), run.done("train")
    (run.folder / "rollout0.sh").write_text("exit 0")
    kill(run.log("rollout0")[-1][-1])  # it has not heard of the end
    assert run.wait() == {0: 0, 1: 0}
    assert capfd.readouterr().out.count("the rollout:0 world ended with 137 and is started again\n") >= 2


def test_a_world_on_two_hosts_starts_again_on_both(start, monkeypatch):
    """The rank that lost its peer ends by an error, before the other host says that one was killed."""
    monkeypatch.setattr(supervisor, "OTHERS_S", 60)  # the other host has yet to start its rank
    other = "echo $1 $2 $$ >>$0.log; [[ $1$2 == host20 ]] && exit 1; while true; do sleep 0.02; done"
    run = start("1-2", 1, train=UNTIL_TOLD, rollout=other)
    until(lambda: len(run.log("rollout")) == 2)
    kill(next(line[-1] for line in run.log("rollout") if line[0] == "host1"))
    until(lambda: len(run.log("rollout")) == 4)
    assert sorted(line[:2] for line in run.log("rollout")) == [
        ["host1", "0"],
        ["host1", "1"],
        ["host2", "0"],
        ["host2", "1"],
    ]
    (run.folder / "rollout.sh").write_text("exit 0")
    run.done("train")
    for line in run.log("rollout")[2:]:
        kill(line[-1])
    assert run.wait() == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize("devices", ["1", "1-2"])
def test_a_world_that_ends_by_an_error_ends_the_run(start, devices):
    run = start(devices, 1, train=UNTIL_TOLD, rollout="sleep 0.1; exit 5")
    assert set(run.wait().values()) == {5} and not run.log("train"), "nothing is saved: training is ended"


def test_shared_memory_of_a_world_that_is_ended_is_removed(start):
    """Its launcher, which would do that, is killed; so is its rank, which needs a moment to end."""
    rank = "sleep 60 & echo $! >>$0.log; wait"
    run = start("1", 2, train="while [[ ! -f $0.done ]]; do sleep 0.02; done; exit 3", rollout=rank)
    until(lambda: run.log("rollout"))
    pid = int(run.log("rollout")[0][0])
    left = leftovers.SHARED_MEMORY / f"{leftovers.mark_of(pid)}-queue"
    left.touch()
    ends = threading.Timer(0.5, kill, [str(pid)])
    run.done("train")
    ends.start()
    assert run.wait() == {0: 3} and not left.exists()


@pytest.mark.parametrize(("restarts", "status"), [(1, 0), (0, 137)])
def test_a_silent_training_world_is_ended_and_starts_again(
    start, monkeypatch, capfd, tmp_path, restarts, status
):
    """The rank is stopped, and hears nothing; after a restart it is not."""
    log, silent = tmp_path / "train.sh.log", iter([7.0])
    monkeypatch.setattr(supervisor, "LOOK_S", 0.3)
    monkeypatch.setattr(
        Lookout,
        "silence_of_training",
        lambda self: next(silent, 0.0) if log.exists() and log.read_text() else 0.0,
    )
    train = "echo $2 >>$0.log; [[ $2 == 1 ]] && exit 0; kill -STOP $$"
    run = start("1", 2, train=train, rollout=UNTIL_KILLED, restarts=restarts)
    assert run.wait() == {0: status}
    assert run.log("train") == [["0"], ["1"]][: restarts + 1]
    assert "the training world gave no sign of life for 7 s" in capfd.readouterr().out


def test_an_error_of_training_is_that_of_all_hosts(start):
    run = start("2", 1, train="[[ $1 == host1 ]] && exit 3; sleep 60", rollout=UNTIL_KILLED)
    assert run.wait() == {0: 3, 1: 3, 2: 3}


def test_a_host_that_is_asked_to_end_lets_training_save(start):
    train = UNTIL_TOLD.replace("while", "echo begun >>$0.log; while")
    run = start("1+2", 1, train=train, rollout0=UNTIL_TOLD, rollout1=UNTIL_TOLD)
    run.done("rollout0"), run.done("rollout1")  # they hear of the end over the bridge
    until(lambda: run.log("train"))
    assert not run.statuses
    run.asked[2].received.add(signal.SIGTERM)
    assert run.wait() == {0: 0, 1: 0, 2: 0} and run.log("train") == [["begun"], ["told"]]


def test_each_sigterm_of_a_host_reaches_training_and_the_same_one_of_another_does_not(start):
    count = (
        "trap 'echo told >>$0.log' TERM; echo begun >>$0.log; while [[ ! -f $0.done ]]; do sleep 0.02; done"
    )
    run = start("1+2", 1, train=count, rollout0=UNTIL_TOLD, rollout1=UNTIL_TOLD)
    until(lambda: run.log("train"))
    for host, told in ((1, 1), (2, 1), (2, 2)):
        run.asked[host].received.add(signal.SIGTERM)
        until(lambda received=run.asked[host].received: not received)
        until(lambda told=told: len(run.log("train")) == 1 + told)
        time.sleep(0.2)
        assert run.log("train") == [["begun"], *[["told"]] * told]
    run.done("train"), run.done("rollout0"), run.done("rollout1")
    assert run.wait() == {0: 0, 1: 0, 2: 0}


# ---- where the worlds meet ---------------------------------------------------------------------------------


def test_the_bridge_is_where_torchrun_puts_rank_0():
    """Hosts of training are numbered in the order of their names."""
    store, found = dist.HashStore(), {}
    parts = placed("2", 1)

    def meet(host: int, address: str) -> None:
        call = Call(
            nnodes=3,
            node_rank=host,
            nproc_per_node=1,
            max_restarts=0,
            rdzv_id="",
            endpoint=("", 1),
            address=address,
            module="",
            arguments=[],
        )
        found[host] = supervisor._bridge(call, Board(store, TOKEN), parts, 7000 + host, lambda: None)

    threads = [
        threading.Thread(target=meet, args=each) for each in ((0, "worker-2"), (1, "worker-10"), (2, "a"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(found.values())) == 1 and found[2] == "worker-10:7001"

"""Worlds that launchers start over several nodes: network namespaces where allowed, else the loopback."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from parallel.runtime.seal import TOKEN
from parallel.runtime.store import reserved_port
from tests.end_to_end.conftest import REWARDS, make_toy, settings_of
from tests.end_to_end.launch import GONE, command_lines
from tests.launchers import LAUNCH, environment
from tests.processes import is_alive
from tests.worlds import ROOT

LISTENS = "0A"  # in /proc/net/tcp
MARK = "OMP_LAUNCH_TEST"  # one of the variables that nodes get: patterns of forwarded.txt
RECIPE = f"""
source {ROOT / LAUNCH}/local.sh
world 1 2
start tests.distributed.launch_worker "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Two machines, or what stands in for them."""

    addresses: tuple[str, str]
    ssh: str  # a script: takes an address and a line of shell
    environment: dict[str, str]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def loopback(tmp_path) -> Nodes:
    return Nodes(
        addresses=("127.0.0.1", "127.0.0.2"),
        ssh=script(tmp_path / "ssh", 'shift; exec bash -c "$*"'),
        environment={},
    )


@pytest.fixture
def nodes(tmp_path, loopback) -> Iterator[Nodes]:
    """Two network namespaces joined by a cable; the loopback without root or the program ip."""
    names = [f"launch{os.getpid()}n{node}" for node in (0, 1)]
    addresses = ("10.97.31.10", "10.97.31.11")
    steps = [f"netns add {name}" for name in names] + [
        f"-n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}"
    ]
    for name, address in zip(names, addresses):
        steps += [
            f"-n {name} addr add {address}/24 dev eth0",
            f"-n {name} link set eth0 up",
            f"-n {name} link set lo up",
        ]
    try:
        for step in steps:
            subprocess.run(["ip", *step.split()], check=True, capture_output=True)
        ssh = script(
            tmp_path / "ssh_to_namespace",
            f'node={names[0][:-1]}${{1: -1}}; shift; exec ip netns exec "$node" bash -c "$*"',
        )
        yield Nodes(
            addresses=addresses, ssh=ssh, environment={"GLOO_SOCKET_IFNAME": "eth0"}
        )  # the host's name resolves to another network
    except (OSError, subprocess.CalledProcessError):
        yield loopback
    finally:
        for name in names:
            subprocess.run(f"ip netns delete {name}", shell=True, capture_output=True)


class Launched:
    """hostfile.sh under way: what it has said, and which processes belong to it."""

    def __init__(
        self, nodes: Nodes, *arguments: str, slots: int, folder: Path, recipe: str = RECIPE, **more: str
    ):
        (folder / "hosts").write_text("".join(f"{address} slots={slots}\n" for address in nodes.addresses))
        (folder / "recipe.sh").write_text(recipe)
        self._holder = reserved_port()  # until this object goes
        self.mark, self.logs, self.output = uuid.uuid4().hex, folder / "logs", folder / "output"
        told = environment(
            SSH=nodes.ssh,
            LOGS=str(self.logs),
            MASTER_PORT=str(self._holder.getsockname()[1]),
            OMP_NUM_THREADS="1",
            **{MARK: self.mark},
            **nodes.environment,
            **more,
        )
        command = ["bash", ROOT / LAUNCH / "hostfile.sh", "hosts", "recipe.sh", *arguments]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=told, stdout=output, stderr=subprocess.STDOUT
            )

    def sums(self, count: int) -> list[str]:
        """What the ranks said, once `count` of them have."""
        return self.said(r"sum \d+ of .* pid=\d+", count)

    def said(self, pattern: str, count: int = 1) -> list[str]:
        """What has been said like a pattern, once it has been so often."""
        deadline = time.monotonic() + 300
        while len(found := re.findall(pattern, self.output.read_text())) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, self.output.read_text()[
                -6000:
            ]
            time.sleep(0.1)
        return found

    def listening(self) -> set[str]:
        """IPv4 addresses on which its processes listen; "::" for any of IPv6."""
        found = set()
        for pid in self.alive():
            with suppress(*GONE):
                found |= self._listening_of(pid)
        return found

    def _listening_of(self, pid: int) -> set[str]:
        own, found = set(), set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(*GONE):  # it has just been closed
                own.add(os.readlink(fd))
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == LISTENS and f"socket:[{inode}]" in own:
                    address = bytes.fromhex(local.partition(":")[0])[::-1]
                    found.add(socket.inet_ntoa(address) if kind == "tcp" else "::")
        return found

    def alive(self) -> set[int]:
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    f"{MARK}={self.mark}".encode() in (path / "environ").read_bytes()
                    and " Z " not in (path / "stat").read_text()
                ):
                    found.add(int(path.name))
            except OSError:
                continue  # it has just ended
        return found

    def code(self) -> int:
        return self.process.wait(300)

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 60
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, command_lines(left)


def test_a_recipe_that_is_asked_to_end_exits_with_0(tmp_path):
    """SIGTERM to the recipe reaches the ranks, which end well; torchrun does not make a failure of it."""
    (tmp_path / "recipe.sh").write_text(RECIPE)
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            ["bash", "recipe.sh", "hang"],
            cwd=tmp_path,
            env=environment(OMP_NUM_THREADS="1"),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + 300
    while len(pids := re.findall(r"sum 3 of 2 .* pid=(\d+)", (tmp_path / "output").read_text())) < 2:
        assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "output").read_text()[
            -6000:
        ]
        time.sleep(0.1)
    process.terminate()
    assert process.wait(300) == 0, (tmp_path / "output").read_text()[-6000:]
    assert not any(is_alive(int(pid)) for pid in pids)


def test_nodes_start_again_together_and_end_when_asked(nodes, tmp_path):
    """Rank 0 fails once, torchrun starts all ranks of both nodes again, and SIGTERM reaches each of them."""
    launched = Launched(
        nodes, "fail_once_and_hang", slots=2, folder=tmp_path, MAX_RESTARTS="1", MODEL="it's mine"
    )
    said = launched.sums(4)
    assert all(
        line.startswith("sum 15 of 4 ") and "LOCAL_WORLD_SIZE=2 " in line and "MODEL=it's mine" in line
        for line in said
    )
    places = {
        (int(re.search(r" RANK=(\d)", line)[1]), re.search(r"NODE_ADDR=(\S+)", line)[1]) for line in said
    }
    assert places == {(rank, nodes.addresses[rank // 2]) for rank in range(4)}, (
        "the ranks of a node follow each other"
    )
    assert len(launched.alive()) >= 4 + 2
    launched.process.terminate()
    assert launched.code() == 128 + signal.SIGTERM
    logs = "".join((launched.logs / f"{address}.log").read_text() for address in nodes.addresses)
    assert {line.rpartition("=")[2] for line in said} <= set(re.findall(r"asked to end: (\d+)", logs))
    launched.assert_nothing_left()
    assert not [path for path in launched.logs.iterdir() if path.suffix != ".log"]


def test_a_node_that_fails_ends_the_others(loopback, tmp_path):
    launched = Launched(loopback, "hang", slots=1, folder=tmp_path)
    last = next(line for line in launched.sums(2) if " RANK=1 " in line)
    os.kill(int(last.rpartition("=")[2]), signal.SIGKILL)
    assert launched.code() == 128 + signal.SIGKILL
    assert "127.0.0.2 ended with 137: ending all nodes" in launched.output.read_text()
    assert "asked to end" in (launched.logs / "127.0.0.1.log").read_text()
    launched.assert_nothing_left()


def test_a_launcher_that_is_killed_leaves_nothing(loopback, tmp_path):
    launched = Launched(loopback, "hang", slots=1, folder=tmp_path)
    launched.sums(2)
    launched.process.kill()
    launched.assert_nothing_left()


def test_each_world_on_a_host_of_its_own(nodes, tmp_path):
    """Training on the first host, the rollout on the second one, where a rank is killed."""
    make_toy(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    settings = settings_of(
        tmp_path, tmp_path / "run", "actor.layout=tp1", "critic.layout=tp1", "rollout.tp=1"
    )
    settings += ["run.iterations=20", "run.export=false", "rollout.devices=1", "async.max_staleness=1"]
    recipe = RECIPE.replace("tests.distributed.launch_worker", "verl_megatron.train")
    run = Launched(nodes, *settings, slots=1, folder=tmp_path, recipe=recipe)
    run.said("step 2/20: ")
    assert run.listening() <= {"127.0.0.1", *nodes.addresses}
    of_rank = {}
    for pid in run.alive():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
            told = Path(f"/proc/{pid}/environ").read_text().split("\0")
        except GONE:
            continue
        variables = dict(each.split("=", 1) for each in told if "=" in each)
        assert not (token := variables.get(TOKEN)) or token not in " ".join(words)
        if variables.get("RANK", "").isdecimal() and words[-2:] == ["--role", "rollout"]:
            of_rank[pid] = variables
    assert len({each[TOKEN] for each in of_rank.values()}) == 1
    os.kill(min(of_rank), signal.SIGKILL)
    assert run.code() == 0, run.output.read_text()[-6000:]
    text = run.output.read_text()
    assert f"{nodes.addresses[1]}: the rollout world ended with 137 and is started again" in text
    assert "rollout world 2 has joined" in text and "rollout world 3" not in text
    assert f"\n{nodes.addresses[0]}: validation accuracy" in text, text[-3000:]
    assert "Traceback" not in text and "Exception raised" not in text, text[-6000:]
    errors = re.findall(r"^(?:\S+: )?error:.*", text, re.MULTILINE)
    assert all("was ended by SIGKILL" in line for line in errors), errors
    run.assert_nothing_left()


@pytest.mark.skipif(
    not importlib.util.find_spec("ray"), reason="Ray is not installed: pip install verl-megatron[ray]"
)
def test_ray_makes_the_same_world(tmp_path):
    (tmp_path / "recipe.sh").write_text(RECIPE)
    told = environment(
        NNODES="1", GPUS="2", MODEL="it's mine", OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0"
    )
    run = subprocess.run(
        [sys.executable, ROOT / LAUNCH / "ray.py", "recipe.sh", "sum"],
        cwd=tmp_path,
        env=told,
        text=True,
        capture_output=True,
        timeout=240,
    )
    said = re.findall(
        r"sum 3 of 2 attempt 0 RANK=(\d) LOCAL_RANK=\1 LOCAL_WORLD_SIZE=2 NODE_ADDR=\S+ MODEL=it's mine",
        run.stdout + run.stderr,
    )
    assert run.returncode == 0 and sorted(said) == ["0", "1"], run.stderr[-6000:]

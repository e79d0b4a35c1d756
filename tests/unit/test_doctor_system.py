"""The doctor's checks of environment, limits, disk and recipes, each in planted states."""

import dataclasses
import os
import re
import resource
import socket
import stat
from pathlib import Path

import pytest

from parallel.runtime.store import reserved_port
from tests.planted_machine import found, only, worst
from verl_megatron.doctor import disk, limits, nccl, network, recipe
from verl_megatron.doctor.finding import Answer

# ---- environment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "status", "words"),
    [
        ("NCCL_DEBUG", "WARN", "ok", "NCCL_DEBUG=WARN"),
        ("NCCL_P2P_DISABLE", "1", "warning", "NVLink"),
        ("NCCL_P2P_DISABLE", "0", "ok", "NCCL_P2P_DISABLE=0"),
        ("NCCL_ALGO", "Ring", "warning", "one algorithm"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning", "every kernel waits"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "warning", "cannot be shared"),
        ("NCCL_SOCKET_IFNAME", "nothing0", "problem", "no interface begins with 'nothing0'"),
        ("NCCL_SOCKET_IFNAME", "=l", "problem", "no interface"),
        ("NCCL_SOCKET_IFNAME", "l", "ok", "NCCL_SOCKET_IFNAME=l"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok", "^docker"),
        ("CUDA_VISIBLE_DEVICES", "all", "problem", "CUDA_VISIBLE_DEVICES='all' must be a list"),
        ("NCCL_SECRET", "\x1b[31m", "ok", "\\x1b[31m"),
    ],
)
def test_variables_that_are_set(case, monkeypatch, name, value, status, words):
    monkeypatch.setenv(name, value)
    each = worst(nccl.check_nccl_environment, case)
    assert each.status == status and words in each.found + each.why, each


def test_no_variables(case):
    assert only(nccl.check_nccl_environment, case).found.startswith("no variable")


def test_the_hosts_name(case, monkeypatch):
    monkeypatch.setattr(network.socket, "gethostname", lambda: "no-such-host.invalid")
    each = only(network.check_hostname, case)
    assert each.status == "warning" and "no-such-host.invalid has no address" in each.found
    monkeypatch.setattr(network.socket, "gethostname", lambda: "localhost")
    assert only(network.check_hostname, case).found == "localhost is 127.0.0.1"


def test_a_port_that_is_taken(case, monkeypatch):
    with reserved_port() as holder:  # from other programs
        port = holder.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with socket.create_server(("", port)):
            each = only(network.check_port, case)
            assert each.status == "warning" and f"port {port} is taken" in each.found
        assert only(network.check_port, case).status == "ok"


# ---- the system --------------------------------------------------------------------------------------------


def test_limits(case, monkeypatch):
    def limit(soft: int, hard: int):
        monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (soft, hard))

    unlimited = resource.RLIM_INFINITY
    for soft, hard, status, words in (
        (256, 4096, "problem", "ulimit -n 4096"),
        (1024, 1_000_000, "warning", "ulimit -n 65536"),
        (1024, unlimited, "warning", "ulimit -n 65536"),
        (1024, 2048, "warning", "after raising the hard limit"),
        (unlimited, unlimited, "ok", ""),
    ):
        limit(soft, hard)
        each = only(limits.check_open_files, case)
        assert each.status == status and words in each.remedy, each
    limit(100, 100)
    assert only(limits.check_processes, case).status == "warning"


def test_locked_memory_matters_with_infiniband(case, monkeypatch, tmp_path):
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (65536, 65536))
    monkeypatch.setattr(limits, "INFINIBAND", tmp_path / "absent")
    assert only(limits.check_locked_memory, case).status == "ok"
    (tmp_path / "infiniband/mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(limits, "INFINIBAND", tmp_path / "infiniband")
    each = only(limits.check_locked_memory, case)
    assert each.status == "warning" and "mlx5_0" in each.found and "ulimit -l unlimited" in each.remedy


def test_shared_memory(case, monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "SHARED", tmp_path / "absent")
    assert only(limits.check_shared_memory, case).status == "problem"
    monkeypatch.setattr(limits, "SHARED", tmp_path)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: (64 << 20, 0, 64 << 20))
    each = only(limits.check_shared_memory, case)
    assert each.status == "warning" and "--shm-size=16g" in each.remedy
    monkeypatch.setattr(limits.os, "access", lambda path, mode: False)
    assert only(limits.check_shared_memory, case).status == "problem"


def test_memory_and_cores_of_a_container(case, monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(limits, "GROUP", tmp_path)
    assert re.search(r"1 GiB of it for this container; 1 cores", only(limits.check_memory, case).found)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert "container" not in only(limits.check_memory, case).found


def test_few_cores_for_many_gpus(gpu_case, monkeypatch):
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: {0})
    assert only(limits.check_memory, gpu_case).status == "warning"


def test_reading_another_process(case, monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "PTRACE", tmp_path / "scope")
    (tmp_path / "scope").write_text("3\n")
    monkeypatch.setattr(limits, "_said_of_reading", lambda: "Operation not permitted")
    each = only(limits.check_ptrace, case)
    assert each.status == "warning" and each.found.startswith("ptrace_scope 3; ")
    assert "Operation not permitted" in each.found and "ptrace_scope=0" in each.remedy


def test_reading_another_process_here(case):
    each = only(limits.check_ptrace, case)
    assert "no answer" not in each.found and "Traceback" not in each.found, each


# ---- the disk ----------------------------------------------------------------------------------------------


def test_the_disk_of_this_machine(case, monkeypatch):
    monkeypatch.setattr(disk, "MOST_BYTES", 16 << 20)
    space, speed = found(disk.check_disk, dataclasses.replace(case, folder=case.folder / "not/yet"))
    assert str(case.folder) in space.found and re.search(r"written at [\d.,]+ .B/s and read at", speed.found)
    assert not list(case.folder.iterdir())


def test_disks_that_are_slow_or_small(case, monkeypatch):
    monkeypatch.setattr(disk, "_speed", lambda path: (30e6, 2e9))
    monkeypatch.setattr(disk, "_has_links", lambda path: False)
    for free, status in ((1 << 20, "problem"), (20 << 30, "warning"), (1 << 50, "ok")):
        usage = shutil_usage(free)
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda path, usage=usage: usage)
        space, speed, links = found(disk.check_disk, case)
        assert (space.status, speed.status, links.status) == (status, "warning", "warning")
    assert speed.found == f"{case.folder} is written at 30 MB/s and read at 2.0 GB/s"


def shutil_usage(free: int):
    from shutil import _ntuple_diskusage

    return _ntuple_diskusage(1 << 51, 0, free)


def test_a_folder_that_cannot_be_written(case, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    each = only(disk.check_disk, dataclasses.replace(case, folder=tmp_path / "file"))
    assert each.status == "problem" and each.found == f"{tmp_path}/file is a file"
    assert only(disk.check_disk, dataclasses.replace(case, folder=Path("/proc/run"))).status == "problem"

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_speed", full)
    each = only(disk.check_disk, case)
    assert each.status == "problem" and "No space left on device" in each.found
    if os.geteuid():
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        assert only(disk.check_disk, case).status == "problem"
        tmp_path.chmod(stat.S_IRWXU)


# ---- recipes -----------------------------------------------------------------------------------------------


def test_a_recipe_that_fits(case):
    settings = ("actor.path=llama3-8b", "reward.function=match")
    each = only(
        recipe.check_recipe_fits, dataclasses.replace(case, recipe="grpo_8b", settings=settings, ranks=4)
    )
    assert each.status == "ok" and "grpo_8b: 4 ranks" in each.found and "It fits" in each.found, each


FITS_NOT = """dry run: 4 ranks on one host
It does not fit:
  actor_update takes 200 GiB of 139.8
These settings do, best first:
  actor.layout=tp4 rollout.tp=4
"""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            Answer(text=FITS_NOT, status=3, problem="ended with 3"),
            [
                "4 ranks on one host, h200 (no GPU here): it does not fit",
                "200 GiB",
                "add actor.layout=tp4 rollout.tp=4",
            ],
        ),
        (
            Answer(text="error: data.train has to be given; set it\n", status=2, problem="ended with 2"),
            ["mine.yaml: data.train has to be given", "set it"],
        ),
        (
            Answer(status=-1, problem="a Python program gave no answer within 120 s"),
            ["no answer within 120 s"],
        ),
    ],
)
def test_recipes_that_do_not_work(case, monkeypatch, answer, words):
    monkeypatch.setattr(recipe, "ask", lambda *_, **__: answer)
    each = only(recipe.check_recipe_fits, dataclasses.replace(case, recipe="mine.yaml"))
    assert each.status == "problem"
    assert all(word in f"{each.found}|{each.why}|{each.remedy}" for word in words), each


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ppo_toy_cpu", "train"),
        ("sft_toy_cpu", "sft"),
        ("dpo_toy_cpu", "dpo"),
        ("reward_model_toy_cpu", "reward-model"),
        ("absent", "train"),
    ],
)
def test_the_command_of_a_recipe(name, expected):
    assert recipe._command_of(recipe.SHIPPED / f"{name}.yaml") == expected

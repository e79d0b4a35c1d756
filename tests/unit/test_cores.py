"""Which cores a rank keeps to, on hosts of several shapes, and that a process is really bound."""

import os

import pytest
import torch

from parallel import cores, device

SOCKETS = [set(range(0, 8)) | set(range(16, 24)), set(range(8, 16)) | set(range(24, 32))]  # logical cores n and n + 16 are one physical core


@pytest.fixture
def allowed():
    """Cores that this process may use, again after the test."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_two_sockets_are_divided_by_whole_cores():
    near = [SOCKETS[gpu // 4] for gpu in range(8)]
    parts = [cores.own_part(gpu, near, core_of=lambda cpu: cpu % 16) for gpu in range(8)]
    assert parts[0] == {0, 1, 16, 17} and parts[7] == {14, 15, 30, 31}
    assert set.union(*parts) == set(range(32)) and sum(map(len, parts)) == 32


def test_what_cannot_be_divided_evenly_is_still_all_used():
    parts = [cores.own_part(gpu, [set(range(8))] * 3, core_of=lambda cpu: cpu) for gpu in range(3)]
    assert sorted(map(len, parts)) == [2, 3, 3] and set.union(*parts) == set(range(8))


def test_a_rank_keeps_the_others_cores_where_there_are_too_few():
    parts = [cores.own_part(gpu, [{0, 1}] * 4, core_of=lambda cpu: 0) for gpu in range(4)]
    assert all(parts) and set.union(*parts) == {0, 1}


def test_gpus_of_the_system_as_it_describes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "_SYSTEM", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: type("Card", (), {"pci_domain_id": 0, "pci_bus_id": 0x1B + gpu, "pci_device_id": 0}))
    (tmp_path / "bus/pci/devices/0000:1b:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:1b:00.0/local_cpulist").write_text("0-2,8,10-11\n")
    (tmp_path / "devices/system/cpu/cpu8/topology").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/cpu8/topology/thread_siblings_list").write_text("0,8\n")
    assert cores.near_gpu(0) == {0, 1, 2, 8, 10, 11}
    assert cores.near_gpu(1) == set()  # the system does not say
    assert cores.physical_core(8) == 0 and cores.physical_core(9) == 9


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to divide")
def test_the_process_is_bound_unless_its_launcher_did_it(allowed, monkeypatch):
    monkeypatch.setattr(cores, "near_gpu", lambda gpu: set())
    parts = []
    for rank in range(2):
        cores.keep_to_own_cores(rank, ranks_per_host=2)
        parts.append(os.sched_getaffinity(0))
        assert not cores.shares_cores() and device.cores_per_rank() == len(parts[-1])
        cores.keep_to_own_cores(rank, ranks_per_host=2)  # as for a process that is bound already
        assert os.sched_getaffinity(0) == parts[-1]
        os.sched_setaffinity(0, allowed)
    assert not parts[0] & parts[1] and parts[0] | parts[1] == allowed

"""Fixtures of several files."""

import os
import resource
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def plans_for_h200(tmp_path_factory):
    """Plans that name no GPU are for the H200, whichever GPUs this machine has."""
    if (real := shutil.which("nvidia-smi")) is None:
        return (yield)
    program = tmp_path_factory.mktemp("bin") / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu=name ] && echo NVIDIA H200 || exec {real} "$@"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        yield


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Path:
    """A model with a tokenizer in hf/ and its distributed checkpoint in mcore/, which no test changes."""
    from tests.converted import make_model  # with Megatron-Core, which most tests do without

    return make_model(tmp_path_factory.mktemp("converted"))


@pytest.fixture
def pictures(tmp_path) -> Path:
    """Folder for pictures of the documents: PICTURES, else one that pytest removes."""
    return Path(os.environ.get("PICTURES", tmp_path))


@pytest.fixture
def mcore(converted, tmp_path) -> Path:
    """A copy of that checkpoint to damage."""
    return shutil.copytree(converted / "mcore", tmp_path / "mcore")


@pytest.fixture
def small_files():
    """No file takes more than 100 kB, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def case(tmp_path, monkeypatch):
    """For the doctor: a machine without GPUs, whatever this one has."""
    from tests.planted_machine import without_gpus

    return without_gpus(tmp_path, monkeypatch)


@pytest.fixture
def gpu_case(tmp_path, monkeypatch):
    """For the doctor: a machine with two GPUs."""
    from tests.planted_machine import with_gpus

    return with_gpus(tmp_path, monkeypatch)


@pytest.fixture
def ends(monkeypatch):
    """Somebody's connection to the store, and both ends of a bridge that has been joined."""
    from tests.bridge_ends import bridge_ends

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with bridge_ends() as ends:
        yield ends

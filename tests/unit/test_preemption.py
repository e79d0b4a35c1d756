"""Preemption in one process: a SIGTERM while the main thread is inside C code, and what remains of it."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.torch_version import TorchVersion

from parallel.runtime import endings, preemption
from parallel.runtime.preemption import EXIT_STATUS, Preemption, usual_grace_s
from tests.processes import eventually
from verl_megatron.config.run import RunConfig
from verl_megatron.lifecycle.base_trainer import BaseTrainer

PATIENCE_S = 30


def wait_in_c() -> None:
    """Until the process ends; Python's lock is given up, and no Python handler runs meanwhile."""
    dist.HashStore().get("never")


@contextmanager
def forked(run: Callable[[Callable[[], None]], None]):
    """Process id of a child that runs this and has called its function; it ends with the block."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            run(lambda: os.write(writing, b"1"))
            code = 0
        finally:
            os._exit(code)
    try:
        os.close(writing)
        assert os.read(reading, 1) == b"1"
        yield pid
    finally:
        os.close(reading)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def end_of(pid: int) -> int:
    """Exit code of a child (minus the signal that ended it)."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    raise AssertionError(f"the process was still there after {PATIENCE_S} s")


def test_handlers_come_back():
    received: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with Preemption() as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert eventually(request._asked.is_set) and not received
        assert signal.getsignal(signal.SIGTERM) is mine and signal.set_wakeup_fd(-1) == -1
        os.kill(os.getpid(), signal.SIGTERM)
        assert eventually(lambda: received == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, former)


def test_ends_by_itself_when_the_grace_is_over(capfd):
    def run(ready):
        with Preemption(grace_s=0.5):
            ready()
            wait_in_c()

    with forked(run) as pid:
        os.kill(pid, signal.SIGTERM)
        assert end_of(pid) == EXIT_STATUS
    said = capfd.readouterr().err
    assert said.index("rank 0: SIGTERM; the run ends after this iteration, or in 0.5 s") < said.index(
        "0.5 s of grace are over"
    )


def test_a_run_that_is_saving_is_not_ended_by_its_grace():
    def run(ready):
        with Preemption(grace_s=0.3) as preemption:
            preemption.hold()
            ready()
            assert eventually(preemption._asked.is_set)
            time.sleep(1.0)

    with forked(run) as pid:
        os.kill(pid, signal.SIGTERM)
        assert end_of(pid) == 0


@pytest.mark.parametrize(("step", "is_held"), [(3, False), (4, True)])
def test_all_that_follows_the_last_iteration_is_saving(step, is_held):
    run = RunConfig(iterations=4, save_interval=0)
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(run=run), state=SimpleNamespace(step=step), preemption=Preemption(grace_s=1)
    )
    trainer.is_due = lambda interval: False
    BaseTrainer.save_if_due(trainer)
    assert trainer.preemption._held.is_set() == is_held


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_second_sigterm_ends_at_once_and_a_copy_does_not(capfd, monkeypatch, is_copy):
    monkeypatch.setattr(preemption, "COPY_S", 3600.0 if is_copy else 0.0)

    def run(ready):
        with Preemption(grace_s=10 * PATIENCE_S) as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert eventually(request._asked.is_set)
            ready()
            wait_in_c()

    with forked(run) as pid:
        os.kill(pid, signal.SIGTERM)
        if is_copy:
            time.sleep(1)
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # alive: the two were one request
        else:
            assert end_of(pid) == EXIT_STATUS
    assert capfd.readouterr().err.count("SIGTERM") == 2 - is_copy  # the request and the end


def test_the_sigterm_of_a_forked_child_is_its_own():
    with Preemption() as request:

        def run(ready):
            ready()
            wait_in_c()

        with forked(run) as pid:
            os.kill(pid, signal.SIGTERM)
            assert end_of(pid) == -signal.SIGTERM
        time.sleep(0.2)
        assert not request._asked.is_set()


def test_an_error_after_sigterm_goes_with_it(capfd):
    def run(ready):
        with Preemption() as request:
            ready()
            assert eventually(request._asked.is_set)
            endings.listen(lambda reason, text: print("recorded as", reason, flush=True))
            raise RuntimeError("connection closed by peer")

    with forked(run) as pid:
        os.kill(pid, signal.SIGTERM)
        assert end_of(pid) == -signal.SIGTERM
    said = capfd.readouterr()
    assert "after SIGTERM came RuntimeError: connection closed by peer (" in said.err
    assert said.out == "recorded as error\n"


@pytest.mark.parametrize("grace_s", [0, -1, float("nan")])
def test_refuses_no_grace(grace_s):
    with pytest.raises(ValueError, match="grace_s"):
        Preemption(grace_s=grace_s)


@pytest.mark.parametrize(
    ("version", "variable", "expected"),
    [("2.13.0+cpu", "40", 35), ("2.13.0", None, 25), ("2.11.0", "40", 25), ("2.12.1", "3", 1)],
)
def test_the_usual_grace_is_below_what_torchrun_waits(monkeypatch, version, variable, expected):
    monkeypatch.setattr("torch.__version__", TorchVersion(version))
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "GRACE_S"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", variable)
    assert usual_grace_s() == expected
    monkeypatch.setenv("GRACE_S", "85")  # of a launcher
    assert usual_grace_s() == 85.0
    monkeypatch.setenv("GRACE_S", "-1")
    with pytest.raises(ValueError, match="GRACE_S='-1' must be greater than 0"):
        usual_grace_s()

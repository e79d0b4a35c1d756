"""Resharding and export on four gloo processes; each world checks many cases, because starting one takes longest."""

from tests.worlds import run_world


def test_reshard():
    assert "all reshard checks passed" in run_world("tests/distributed/reshard_worker.py", 4)

"""Resharding and export on four gloo processes; a world checks many cases, as starting one is slow."""

from tests.worlds import run_world


def test_reshard():
    assert "all reshard checks passed" in run_world("tests/distributed/reshard_worker.py", 4)

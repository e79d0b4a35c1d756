"""Versioned weights on four gloo processes: two train, two generate; a world checks many cases."""

from tests.worlds import run_world

WORKER = "tests/distributed/versions_worker.py"


def test_versions():
    assert "all checks of versions passed" in run_world(WORKER, 4)


def test_a_dead_peer_is_an_error_on_all_others():
    output = run_world(WORKER, 4, "dying")
    assert output.count("saw that a peer is gone") == 3

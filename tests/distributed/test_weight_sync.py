"""Weight sync on four gloo processes, in one world for all modes and layouts."""

from tests.worlds import run_world


def test_every_element_arrives_in_every_mode():
    output = run_world("tests/distributed/weight_sync_worker.py", 4)
    assert "all weights arrived in every mode" in output

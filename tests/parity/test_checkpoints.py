"""Models and optimizers through the disk, on four gloo processes."""

from tests.worlds import run_world


def test_training_goes_on_from_a_checkpoint_under_every_layout():
    assert "all passed" in run_world("tests/parity/checkpoint_worker.py", 4, timeout=300)

from tests.worlds import run_world


def test_samples_arrive_once_at_every_destination_and_results_come_back():
    output = run_world("tests/distributed/redistribute_worker.py", 4)
    assert all(f"rank {rank} agrees" in output for rank in range(4))

from tests.worlds import run_world


def test_samples_arrive_once_and_losses_do_not_depend_on_context_parallelism():
    output = run_world("tests/distributed/redistribute_worker.py", 4)
    assert all(f"rank {rank} agrees" in output for rank in range(4))

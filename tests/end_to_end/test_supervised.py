"""Supervised tasks stop at SIGTERM and resume exactly; the reward model is exported for transformers."""

from tests.worlds import run_world


def test_a_stopped_run_resumes_to_the_last_bit(toy, tmp_path):
    output = run_world("tests/end_to_end/supervised_worker.py", 2, toy, tmp_path)
    assert output.count(" passed") == 3 and output.count("ending after iteration 2, as SIGTERM asks") == 3
    assert output.count("run.resume=verify: iteration 3, repeated, gives all") == 3

"""fp8 weights of vLLM's linear layers, in one process."""

from tests.worlds import run_world


def test_a_weight_sync_quantizes_as_vllm_does(tmp_path):
    assert "all checks of fp8 weights passed" in run_world(
        "tests/distributed/fp8_weights_worker.py", 1, tmp_path, timeout=180
    )

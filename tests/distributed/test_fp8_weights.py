"""fp8 weights of vLLM's linear layers, in one process."""

from tests.tiny import write_hf
from tests.worlds import run_world

SIZES = dict(
    hidden_size=256, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2
)


def test_a_weight_sync_quantizes_as_vllm_does(tmp_path):
    write_hf(tmp_path / "a", "qwen2", seed=1, **SIZES)
    write_hf(tmp_path / "b", "qwen2", seed=2, **SIZES)
    assert "all checks of fp8 weights passed" in run_world(
        "tests/distributed/fp8_weights_worker.py", 1, tmp_path, timeout=180
    )

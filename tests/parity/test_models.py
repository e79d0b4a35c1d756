"""Megatron-Core models against Hugging Face and plain PyTorch on four gloo processes.

A world checks many cases, as starting one is slow.
"""

from tests.worlds import run_world


def test_logits_log_probs_and_heads_equal_hugging_face():
    assert "all passed" in run_world("tests/parity/models_worker.py", 4, timeout=600)


def test_training_equals_one_rank_and_plain_pytorch():
    assert "all passed" in run_world("tests/parity/training_worker.py", 4, timeout=600)

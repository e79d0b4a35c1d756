"""Weights from Megatron-Core into vLLM and back on four gloo processes; a world per rollout TP size."""

import pytest

from tests.worlds import run_world


@pytest.mark.parametrize(
    "tp", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
def test_vllm_holds_what_a_fresh_engine_would(tp):
    assert "all passed" in run_world("tests/parity/reshard_worker.py", 4, tp, timeout=600)

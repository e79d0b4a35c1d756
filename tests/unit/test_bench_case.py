"""What benchmarks refuse before they build a model."""

import pytest

from parallel import device
from parallel.layout import Layout
from tests.tiny import tiny_architecture
from verl_megatron.benchmarks.case import check_room


def test_a_model_that_no_rank_has_room_for_is_refused(monkeypatch):
    arch, layout = tiny_architecture(), Layout.parse("tp2", (0, 1))
    check_room(arch, layout, bytes_per_parameter=16)
    monkeypatch.setattr(device, "free_memory_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"takes at least .* GiB, .* name a smaller model with --hf"):
        check_room(arch, layout, bytes_per_parameter=16)

"""Speculative decoding: the same samples or distribution as without, with one engine and with two ranks."""

import pytest

from tests.distributed.test_rollout import write_tokenizer
from tests.tiny import SHARP_VOCABULARY, write_sharp
from tests.worlds import run_world


@pytest.mark.parametrize("worlds", [(1,), pytest.param((1, 2), marks=pytest.mark.long)], ids=str)
def test_speculative_decoding(tmp_path, worlds):
    write_sharp(tmp_path / "sharp", head_dim=32)
    write_tokenizer(tmp_path / "sharp", SHARP_VOCABULARY)
    for nproc in worlds:
        assert "all checks of speculative decoding passed" in run_world(
            "tests/distributed/speculative_worker.py", nproc, tmp_path, timeout=550
        )

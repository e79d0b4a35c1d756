"""Speculative decoding: the same samples or distribution as without, with one engine and with two ranks."""

from tests.distributed.test_rollout import write_tokenizer
from tests.tiny import make_hf
from tests.worlds import run_world

VOCABULARY = 12  # few tokens, so that all that may be sampled can be enumerated


def test_speculative_decoding(tmp_path):
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=2)
    model = make_hf("llama", seed=1, vocab_size=VOCABULARY, **sizes)
    model.lm_head.weight.data.mul_(3)  # a small model's text is almost random otherwise
    model.save_pretrained(tmp_path / "sharp")
    write_tokenizer(tmp_path / "sharp", VOCABULARY)
    for nproc in (1, 2):
        assert "all checks of speculative decoding passed" in run_world(
            "tests/distributed/speculative_worker.py", nproc, tmp_path, timeout=240
        )

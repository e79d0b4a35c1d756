"""Random weights whose responses end by themselves after a given mean."""

import json

import pytest
import torch
from safetensors.torch import load_file

from parallel.weights.shapes import shape
from verl_megatron.data.tokenizer import load_tokenizer
from verl_megatron.examples.random_weights import ENDING, main, write_weights

SIZES = dict(
    hidden_size=256, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=4000
)


@pytest.mark.parametrize(("name", "head"), [("llama3-8b", "lm_head"), ("llama3-1b", "model.embed_tokens")])
def test_responses_end_after_the_mean(tmp_path, name, head):
    """Of vectors of unit root mean square, as the final norm leaves them."""
    (tmp_path / "config.json").write_text(json.dumps(shape(name, layers=1) | SIZES))
    write_weights(tmp_path, seed=1, response_tokens=50)
    (file,) = tmp_path.glob("*.safetensors")
    weight_VH = load_file(file)[f"{head}.weight"].float()
    hidden_NH = torch.randn(4000, 256, generator=torch.Generator().manual_seed(7))
    hidden_NH /= hidden_NH.square().mean(-1, keepdim=True).sqrt()
    ends_N = (hidden_NH @ weight_VH.T).softmax(-1)[:, -ENDING:].sum(-1)
    assert 1 / ends_N.mean() == pytest.approx(50, rel=0.15)
    named = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert named == list(range(4000 - ENDING, 4000))


def test_a_run_stops_at_the_ending_tokens(tmp_path, monkeypatch):
    small = shape("llama3-1b", layers=1) | SIZES
    monkeypatch.setattr("verl_megatron.examples.random_weights.shape", lambda *_, **__: small)
    main([str(tmp_path), "--shape", "llama3-1b", "--rows", "2", "--response-tokens", "50"])
    assert set(range(4000 - ENDING, 4000)) <= load_tokenizer(str(tmp_path / "model")).stop_token_ids
    main([str(tmp_path), "--shape", "llama3-1b", "--rows", "2"])
    assert len(load_tokenizer(str(tmp_path / "model")).stop_token_ids) == 1


@pytest.mark.parametrize(
    ("tokens", "said"), [("10000000", "must be from 0"), ("100000", "too long for this shape")]
)
def test_lengths_that_cannot_be_made_are_refused(tmp_path, capsys, tokens, said):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out"), "--layers", "1", "--rows", "2", "--response-tokens", tokens])
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()

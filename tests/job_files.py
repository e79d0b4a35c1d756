"""The files that a run names, as small as they may be: a model's config.json, prompts and a reward."""

import json
from pathlib import Path

LLAMA = dict(
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=96,
    vocab_size=150,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
)


def write_job(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "train.jsonl").write_text("{}\n")
    (folder / "rewards.py").write_text("def score(prompt, response, truth, extra):\n    return 1.0\n")

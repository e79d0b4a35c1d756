"""The files that a run names, as small as they may be: a model's config.json, prompts and a reward."""

import json
from pathlib import Path

from tests.tiny import SIZES

LLAMA = SIZES | dict(model_type="llama", rms_norm_eps=1e-5)


def write_job(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    (folder / "train.jsonl").write_text("{}\n")
    (folder / "rewards.py").write_text("def score(prompt, response, truth, extra):\n    return 1.0\n")

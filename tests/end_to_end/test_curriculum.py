"""GRPO with a curriculum over two files: the share of an impossible one falls, and runs resume exactly."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import TRAIN, settings_of
from tests.end_to_end.launch import run
from tests.end_to_end.measured import learned_in_attempts
from verl_megatron.data.order.curriculum import FLOOR

REWARD = '''
def score(prompt, response, ground_truth, extra):
    """Something that random answers differ in, and nothing for what is impossible."""
    return 0.0 if extra["impossible"] else sum(byte > 127 for byte in response.encode()) / 32
'''
JOB = [
    *("algorithm.name=grpo", "data.validation=", "data.curriculum=files"),
    *("data.prompts_per_iteration=64", "data.samples_per_prompt=2", "rollout.max_tokens=6"),
    *("run.export=false", "run.save_interval=3", "actor.layout=dp2", "rollout.tp=1"),
]
SHARE = "data/weight/impossible.jsonl"


def write_sources(source: Path, folder: Path) -> str:
    """Write the same rows as two files, and return what names both."""
    rows = [json.loads(line) for line in source.read_text().splitlines()[:50]]
    for name in ("possible", "impossible"):
        lines = [json.dumps(row | {"impossible": name == "impossible"}) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "score.py").write_text(REWARD)
    return f"data.train=[{folder}/possible.jsonl:0.5,{folder}/impossible.jsonl:0.5]"


def test_an_impossible_source_falls_to_the_floor_and_the_run_resumes_exactly(toy, tmp_path):
    data, found = write_sources(toy / "train.jsonl", tmp_path), []
    for folder, attempts in (("whole", [7]), ("resumed", [3, 7])):
        settings = settings_of(toy, tmp_path / folder, *JOB, data)
        settings.append(f"reward.function={tmp_path}/score.py:score")
        for iterations in attempts:
            ended = run(2, TRAIN, *settings, f"run.iterations={iterations}", folder=tmp_path)
            assert not ended.code, ended.text
        found.append(learned_in_attempts(tmp_path / folder))
    whole, resumed = found
    shares = [row[SHARE] for row in whole]
    assert len(shares) == 7 and shares[0] == 0.5 and shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(FLOOR / (1 + FLOOR))
    assert all(row[SHARE] + row["data/weight/possible.jsonl"] == pytest.approx(1) for row in whole)
    assert resumed == whole

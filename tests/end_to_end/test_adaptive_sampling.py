"""GRPO with groups of different sizes and temperatures: two ranks learn the same as one, to rounding."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import TRAIN, settings_of
from tests.end_to_end.launch import run
from tests.end_to_end.measured import learned

JOB = [
    *(
        "algorithm.name=grpo",
        "data.validation=",
        "data.prompts_per_iteration=12",
        "data.samples_per_prompt=5",
    ),
    *(
        "algorithm.num_mini_batches=2",
        "run.iterations=2",
        "run.export=false",
        "rollout.dynamic_batching=true",
    ),
    "rollout.adaptive_sampling=[0-7:temperature:0.8+samples:3,8-8:as_set,9-:temperature:1.2+samples:2]",
]
LAYOUTS = {1: ["actor.layout=tp1", "rollout.tp=1"], 2: ["actor.layout=dp2", "rollout.tp=1"]}


def write_mixed(source: Path, target: Path) -> None:
    """Questions of four, five and six words to sort: 7, 8 and 9 tokens."""
    lines = []
    for number, line in enumerate(source.read_text().splitlines()[:60]):
        words = json.loads(line)["prompt"].split()[1:-1][: 4 + number % 3]
        row = {"prompt": f"sort {' '.join(words)} :", "answer": " ".join(sorted(words))}
        lines.append(json.dumps(row))
    target.write_text("\n".join(lines) + "\n")


def test_two_ranks_learn_what_one_does(toy, tmp_path):
    write_mixed(toy / "train.jsonl", tmp_path / "train.jsonl")
    found = []
    for ranks, layout in LAYOUTS.items():
        folder = tmp_path / str(ranks)
        settings = settings_of(toy, folder, *JOB, *layout, f"data.train={tmp_path}/train.jsonl")
        ended = run(ranks, TRAIN, *settings, folder=tmp_path)
        assert not ended.code, ended.text
        found.append(learned(folder))
    for one, two in zip(*found, strict=True):
        shares = [one[f"sampling/share_{label}"] for label in ("0-7", "8-8", "9-")]
        assert sum(shares) == pytest.approx(1) and min(shares) > 0
        for name in ("policy/loss", "policy/entropy", "policy/grad_norm", "reward/mean", "kl/ref"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
        assert {name: two[name] for name in two if name.startswith("sampling/")} == pytest.approx(
            {name: one[name] for name in one if name.startswith("sampling/")}
        )

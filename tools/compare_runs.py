"""Compares the training metrics of runs with those at another commit, number by number.

    python tools/compare_runs.py COMMIT [--iterations 3] [--runs sft,ppo,grpo] [--relative 0]

A refactoring changes no number: run this against the previous commit. The toy job is made once, then both
trees train on it with the same seed: supervised steps and, from each tree's own result, PPO and GRPO. Every
training metric of every step must match to the last bit, unless --relative allows more. Times, memory and
throughput are left out. Each tree trains its own recipes, and settings have the names that it knows. Exit
status 1: a metric differs or is missing.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs where nothing is installed

from verl_megatron.config import RENAMED

ROOT = Path(__file__).resolve().parents[1]
LEARNING = (
    "sft/",
    "policy/",
    "critic/",
    "kl/",
    "reward/",
    "rollout/logprob_gap",
    "rollout/response_tokens",
    "validation/",
)
COSTS = ("_ms", "_s")
COMMON = ["--config-path", "../recipes", "run.seed=1", "run.track_metrics=[jsonl]"]
RL = ["data.prompts_per_iteration=96", "data.validation_samples=64"]
GRPO = [
    "algorithm.name=grpo",
    "algorithm.kl_in=loss",
    "algorithm.kl_estimator=k3",
    "data.samples_per_prompt=4",
    "data.prompts_per_iteration=24",
]

# Prints the settings of the tree in which it runs.
SETTINGS = """
import dataclasses, json, verl_megatron.config as schemas
print(json.dumps([dataclasses.asdict(schemas.TrainerConfig()), dataclasses.asdict(schemas.SFTConfig())]))
"""

Rows = list[dict[str, float | None]]  # one per step


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a work tree of `commit`, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="compare_runs_") as scratch:
        tree = Path(scratch) / "tree"
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--detach", "--quiet", tree, commit], check=True
        )
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def commands(toy: Path, out: Path, *, iterations: int) -> dict[str, list[str]]:
    """Return torchrun's arguments for each run, in dependency order."""
    data = [
        f"data.train={toy}/train.jsonl",
        f"data.validation={toy}/val.jsonl",
        f"actor.path={out}/sft/actor",
        f"run.iterations={iterations}",
    ]
    ppo = ["4", "verl_megatron.train", "--config-name", "ppo_toy_cpu", *COMMON, *data, *RL]
    return {
        "sft": [
            "2",
            "verl_megatron.sft",
            "--config-name",
            "sft_toy_cpu",
            *COMMON,
            f"data.train={toy}/sft.jsonl",
            f"actor.path={toy}/model",
            f"run.iterations={10 * iterations}",
        ],
        "ppo": ppo,
        "grpo": [*ppo, *GRPO],
    }


def known_settings(tree: Path) -> set[str]:
    """Return the names, "section.setting", of all settings that the code of `tree` has."""
    answer = subprocess.run([sys.executable, "-c", SETTINGS], **_inside(tree), check=True)
    return {
        f"{section}.{name}"
        for schema in json.loads(answer.stdout)
        for section, settings in schema.items()
        for name in settings
    }


def with_names_of(known: set[str], arguments: list[str]) -> list[str]:
    """Return `arguments` with settings under the names that they have among `known`."""
    translated = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name not in known:
            name = next((old for old, new in RENAMED.items() if new == name and old in known), name)
        translated.append(name + equals + value)
    return translated


def _inside(tree: Path) -> dict[str, Any]:
    """Return options of subprocess.run for a program that uses the code of `tree`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {"cwd": tree, "env": environment, "stdout": subprocess.PIPE, "text": True}


def run(tree: Path, toy: Path, out: Path, *, names: list[str], iterations: int) -> dict[str, Rows]:
    """Train with the code of `tree`, and return the metrics of each run."""
    found, known = {}, known_settings(tree)
    for name, (ranks, *arguments) in commands(toy, out, iterations=iterations).items():
        if name not in names and name != "sft":  # the others start from its model
            continue
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            ranks,
            "-m",
            *with_names_of(known, arguments),
            f"run.output_dir={out / name}",
        ]
        ended = subprocess.run(command, **_inside(tree), stderr=subprocess.STDOUT)
        if ended.returncode:
            raise SystemExit(f"{name} in {tree} ended with {ended.returncode}:\n{ended.stdout[-4000:]}")
        found[name] = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    return found


def learning_metrics(rows: Rows) -> dict[str, float | None]:
    """Return every training metric of every step, by "name at step"."""
    return {
        f"{name} at step {row['step']}": value
        for row in rows
        for name, value in row.items()
        if name.startswith(LEARNING) and not name.endswith(COSTS)
    }


def differences(before: Rows, after: Rows, *, relative: float) -> list[str]:
    """Return a line per training metric that differs by more than `relative` or is on one side only."""
    old, new = learning_metrics(before), learning_metrics(after)
    lines = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        close = (
            was is not None
            and now is not None
            and relative > 0
            and math.isclose(was, now, rel_tol=relative, abs_tol=relative)
        )
        if name not in old or name not in new or not (was == now or close):
            lines.append(f"{name}: {was!r} -> {now!r}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="what to compare the present tree with")
    parser.add_argument(
        "--iterations", type=int, default=3, help="of PPO and GRPO; ten times as many supervised steps"
    )
    parser.add_argument("--runs", default="sft,ppo,grpo", help="which of sft, ppo and grpo to compare")
    parser.add_argument("--relative", type=float, default=0.0, help="allowed relative difference; 0: none")
    given = parser.parse_args()
    names = given.runs.split(",")
    with tempfile.TemporaryDirectory(prefix="compare_runs_") as scratch, checkout(given.commit) as tree:
        toy = Path(scratch) / "toy"
        subprocess.run(
            [sys.executable, ROOT / "tools" / "make_toy.py", toy], check=True, stdout=subprocess.DEVNULL
        )
        before, after = (
            run(code, toy, Path(scratch) / side, names=names, iterations=given.iterations)
            for side, code in (("before", tree), ("after", ROOT))
        )
    failed = False
    for name in names:
        apart = differences(before[name], after[name], relative=given.relative)
        failed |= bool(apart)
        print(f"{name}: {len(learning_metrics(after[name]))} learning metrics, {len(apart)} differ")
        print("".join(f"  {line}\n" for line in apart[:20]), end="")
    sys.exit(failed)


if __name__ == "__main__":
    main()

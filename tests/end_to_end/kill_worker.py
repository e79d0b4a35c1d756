"""Kills a rank at random moments, restarts the run, and compares it with an undisturbed one.

    python -m tests.end_to_end.kill_worker FOLDER --moments 50 [--seed 1] [--settings setting=value ...]

FOLDER/toy gets the quickstart's job, cut short; the settings are added to its own. A few moments may never
come, as the run ends before. Ranks are forked after the imports, where torchrun --max-restarts would import
everything for each attempt. Exits with 1 if a number, a weight or a process is wrong.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

import tests.preloaded  # noqa: F401
from tests.end_to_end import killed_train
from tests.end_to_end.measured import ADAPTIVE, learned_in_attempts
from tests.forked import run_ranks
from tests.processes import eventually
from tests.worlds import ROOT
from verl_megatron.examples.toy import make_toy
from verl_megatron.launch.command_line import run_command
from verl_megatron.train import main as train

NUM_RANKS = 2
# Operations of a run, how often they begin before an attempt is at its end, and seconds that they may take:
# a kill comes in this time.
OPERATIONS = {
    "build": (1, 3.0),
    "resume": (1, 0.2),
    "reshard": (2, 0.05),
    "rollout": (2, 0.3),
    "return": (2, 0.02),
    "reward": (2, 0.05),
    "log_probs": (2, 0.2),
    "values": (2, 0.1),
    "advantages": (2, 0.02),
    "critic_update": (2, 0.3),
    "actor_update": (2, 0.3),
    "record": (2, 0.05),
    "save": (2, 0.2),
    "validation": (1, 0.1),
}
ATTEMPT_S = 120
# Everything that a checkpoint has to hold changes.
SETTINGS = [
    *(
        "run.save_interval=1",
        "run.validate_interval=1",
        "data.validation_samples=8",
        "data.prompts_per_iteration=16",
        "rollout.max_tokens=6",
    ),
    *("rollout.tp=2", "actor.layout=tp2", "critic.layout=pp2"),
    *ADAPTIVE,
]


def moments(count: int, seed: int) -> list[dict]:
    """Where the attempts end: every operation before one comes again, at random times."""
    draw = random.Random(seed)
    names: list[str] = []
    while len(names) < count:
        names += draw.sample(list(OPERATIONS), len(OPERATIONS))
    return [
        {
            "rank": draw.randrange(NUM_RANKS),
            "operation": name,
            "entry": OPERATIONS[name][0] if draw.random() < 0.3 else 1,
            "delay_s": draw.uniform(0, OPERATIONS[name][1]),
        }
        for name in names[:count]
    ]


def attempt(number: int, settings: list[str], log: Path, kills: Path | None) -> list[int]:
    """Exit codes of the ranks of one attempt of the launcher."""

    def rank() -> None:
        if kills is not None:
            killed_train.arm(kills)
        run_command(train)

    return run_ranks(
        rank,
        ["train", *settings],
        nproc=NUM_RANKS,
        stdout=log,
        timeout_s=ATTEMPT_S,
        TORCHELASTIC_RESTART_COUNT=str(number),
    )


def leftovers(mark: str) -> list[str]:
    """Command lines of processes with this in their environment, apart from this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes() and int(path.name) != os.getpid():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def same_weights(one: Path, other: Path) -> bool:
    whole, again = load_file(one), load_file(other)
    return whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settings", nargs="*", default=[])
    options = parser.parse_args()
    folder, kills = options.folder, options.folder / "kills.json"
    make_toy(folder / "toy")
    job = [
        f"actor.path={folder}/toy/model",
        f"data.train={folder}/toy/train.jsonl",
        f"data.validation={folder}/toy/val.jsonl",
    ]
    settings = [
        *("--config-path", str(ROOT / "recipes"), "--config-name", "ppo_toy_cpu"),
        *job,
        *SETTINGS,
        f"run.iterations={options.moments // 2 + 6}",
        *options.settings,
    ]
    os.environ["KILL_WORKER_MARK"] = mark = f"{os.getpid()}-{time.time()}"
    kills.write_text(json.dumps(moments(options.moments, options.seed)))
    whole, broken = folder / "whole", folder / "broken"
    codes = attempt(0, [*settings, f"run.output_dir={whole}"], folder / "whole.out", None)
    assert codes == [0] * NUM_RANKS, (folder / "whole.out").read_text()[-6000:]
    ends, number = [], 0
    while not ends or any(ends[-1]):
        assert number <= options.moments, (folder / "broken.out").read_text()[-6000:]
        ends.append(attempt(number, [*settings, f"run.output_dir={broken}"], folder / "broken.out", kills))
        number += 1
    struck = Counter(line.split()[0] for line in kills.with_suffix(".log").read_text().splitlines())
    print(f"{sum(-signal.SIGKILL in codes for codes in ends)} kills in {len(ends)} attempts: {dict(struck)}")
    expected, found = learned_in_attempts(whole), learned_in_attempts(broken)
    problems = [
        f"other metrics of step {one['step']}" for one, other in zip(expected, found) if one != other
    ] + ["other steps"] * (len(expected) != len(found))
    problems += [
        f"other weights of the {role}"
        for role in ("actor", "critic")
        if not same_weights(whole / role / "model.safetensors", broken / role / "model.safetensors")
    ]
    marked = f"KILL_WORKER_MARK={mark}"
    eventually(lambda: not leftovers(marked))
    problems += [f"still running: {command}" for command in leftovers(marked)]
    problems += [f"left in the folder: {path}" for path in (broken / "checkpoint").glob("*.damaged")]
    print(
        "; ".join(problems)
        or f"the same {len(expected)} rows of metrics, weights of actor and critic; nothing is left over"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

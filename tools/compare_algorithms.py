"""Trains the toy job by each algorithm's recipe and prints the validation accuracy before and after.

    python tools/compare_algorithms.py [--seeds 1,2,3] [--recipes grpo,rloo] [--out outputs/algorithms]

For each seed the quickstart makes the job, its warm start and PPO's actor; then every recipe of
recipes/toy_cpu starts from the same warm start. A run of a recipe takes about a minute on two cores. Finished
runs are not repeated. Exit status 1: a run failed or ended below --least.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes" / "toy_cpu"
ACCURACY = re.compile(r"validation accuracy ([\d.]+) -> ([\d.]+)")


def names_of_recipes() -> list[str]:
    """Return the recipes of the toy job, without the part that they share."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml") if path.stem != "group")


def accuracy_of(command: list[str], log: Path, **environment: str) -> tuple[float, float] | None:
    """Run a command unless `log` has its result.

    Return validation accuracy before and after; None if the command failed.
    """
    if not (log.exists() and ACCURACY.search(log.read_text())):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, env=os.environ | environment)
    match = ACCURACY.search(log.read_text())
    return (float(match[1]), float(match[2])) if match else None


def train(name: str, job: Path, seed: int) -> tuple[float, float] | None:
    """Train the job in folder `job` by a recipe."""
    command = [
        *("bash", "-c", 'source recipes/launch/local.sh; world 1 4; start "$@"', "compare_algorithms"),
        *("verl_megatron.train", "--config-path", str(RECIPES), "--config-name", name, f"run.seed={seed}"),
        *(
            f"run.output_dir={job}/{name}",
            f"data.train={job}/train.jsonl",
            f"data.validation={job}/val.jsonl",
        ),
        f"actor.path={job}/sft/actor",
    ]
    if name == "distillation":
        command.append(f"teacher.path={job}/ppo/actor")
    return accuracy_of(command, job / f"{name}.log")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--recipes", default=",".join(names_of_recipes()))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "algorithms")
    parser.add_argument("--least", type=float, default=0.8)
    options = parser.parse_args()
    seeds, table = [int(seed) for seed in options.seeds.split(",")], {}
    for seed in seeds:
        job = options.out.resolve() / f"seed_{seed}"
        quickstart = ["bash", "recipes/quickstart.sh"]
        table["ppo", seed] = accuracy_of(quickstart, job / "ppo.log", SEED=str(seed), OUT=str(job))
        for name in options.recipes.split(","):
            table[name, seed] = train(name, job, seed)
            print(f"seed {seed}, {name}: {table[name, seed]}", file=sys.stderr, flush=True)
    print(f"| recipe | {' | '.join(f'seed {seed}' for seed in seeds)} |\n|---|{'---|' * len(seeds)}")
    for name in ("ppo", *options.recipes.split(",")):
        results = [table[name, seed] for seed in seeds]
        cells = ["failed" if result is None else f"{result[0]:.2f} → {result[1]:.2f}" for result in results]
        print(f"| `{name}` | {' | '.join(cells)} |")
    return int(any(result is None or result[1] < options.least for result in table.values()))


if __name__ == "__main__":
    sys.exit(main())

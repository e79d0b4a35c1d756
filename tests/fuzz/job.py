"""A right job in a folder of its own, for a case to spoil."""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.worlds import ROOT
from verl_megatron.examples.toy import make_toy

ROWS = 24  # of the toy's, in each file of a job
WORLD = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}  # what the toy recipes are made for
RECIPES = {
    "train": "ppo_toy_cpu",
    "sft": "sft_toy_cpu",
    "dpo": "dpo_toy_cpu",
    "reward_model": "reward_model_toy_cpu",
}


class Job:
    """The toy job with few rows: model folder, data files and settings; a case writes into `folder`."""

    def __init__(self, toy: Path, folder: Path):
        self.toy, self.folder = toy, folder
        folder.mkdir(parents=True)

    # ---- files -------------------------------------------------------------------------------------------

    def model(self, name: str = "model") -> Path:
        """A copy of the toy's model folder; its files are links until `write` replaces them."""
        target = self.folder / name
        if not target.exists():
            shutil.copytree(self.toy / "model", target, copy_function=os.link)
        return target

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The first rows of train, val or sft."""
        with (self.toy / f"{name}.jsonl").open() as file:
            return [json.loads(line) for _, line in zip(range(ROWS), file)]

    def write(self, path: Path | str, content: str | bytes | Any) -> Path:
        """Write a file of the job, text, bytes or else JSON, in place of what had that name."""
        path = self.folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        clear(path)
        if not isinstance(content, (str, bytes)):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def write_rows(self, rows: list[dict], name: str = "data.jsonl") -> Path:
        return self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    # ---- what runs ---------------------------------------------------------------------------------------

    def settings(self, program: str = "train") -> list[str]:
        """What a user gives beside the recipe."""
        model = "reward" if program == "reward_model" else "actor"
        common = [f"run.output_dir={self.folder}/out", f"{model}.path={self.toy}/model"]
        if program == "sft":
            return [*common, f"data.train={self.toy}/few_sft.jsonl"]
        train, validation = ("train", "val") if program == "train" else ("pairs", "val_pairs")
        return [
            *common,
            f"data.train={self.toy}/few_{train}.jsonl",
            f"data.validation={self.toy}/few_{validation}.jsonl",
        ]

    def dry_run(
        self,
        *more: str,
        program: str = "train",
        recipe: tuple[str, ...] | None = None,
        env: dict[str, str | None] | None = None,
        settings: list[str] | None = None,
    ):
        """The command line of a dry run with `more` settings, to be called in a process of its own.

        Args:
            recipe: flags that name it, if not the toy's.
            env: variables that differ from those of a world of four ranks; None: unset.
            settings: all settings, in place of the toy's.
        """
        named = (
            ("--config-path", str(ROOT / "recipes"), "--config-name", RECIPES[program])
            if recipe is None
            else recipe
        )
        own = self.settings(program) if settings is None else settings
        return partial(run_program, program, [*named, "--dry-run", *own, *more], WORLD | (env or {}))


def make_job_base(toy: Path) -> None:
    """The toy job, and small files of its rows."""
    make_toy(toy)
    for name in ("train", "val", "sft", "pairs", "val_pairs"):
        lines = (toy / f"{name}.jsonl").read_text().splitlines(keepends=True)[:ROWS]
        (toy / f"few_{name}.jsonl").write_text("".join(lines))


def clear(path: Path) -> None:
    """Remove what has this name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run_program(program: str, argv: list[str], env: dict[str, str | None]) -> None:
    """What `python -m verl_megatron.PROGRAM ARGV` does, with these variables; it does not return."""
    from verl_megatron import train
    from verl_megatron.config import SCHEMAS
    from verl_megatron.launch.command_line import run_command
    from verl_megatron.launch.supervised import run_supervised

    for name, value in env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sys.argv[:] = [str(ROOT / "verl_megatron" / f"{program}.py"), *argv]
    if program == "train":
        run_command(train.main, plan=train.plan)
    run_supervised(SCHEMAS[program])

"""Runs of `benchmark_scaling.py`: a recipe's settings for a number of ranks, their checks, and the launch."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from parallel import device
from parallel.layout import Layout
from parallel.runtime.refusal import NO_ROOM
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.shapes import SHAPES, shape
from verl_megatron.checks.overrides import structured
from verl_megatron.checks.problems import refuse
from verl_megatron.checks.settings import check_config
from verl_megatron.config import TrainerConfig
from verl_megatron.data.formats.json_lines import read_rows
from verl_megatron.launch.command_line import settings_of
from verl_megatron.launch.recipe import SHIPPED
from verl_megatron.planner.planned_run import PlannedRun

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "verl_megatron.train"
SHAPE_TOKENS = 512  # of prompts and of responses in recipes with random weights
ENDING_S = 60.0  # from SIGTERM for torchrun to SIGKILL
# Only iterations are measured: nothing is saved, validated or exported, and every update runs.
MEASURING = {
    "run.save_interval": 0,
    "run.validate_interval": 0,
    "run.keep_best_k": 0,
    "run.async_save": False,
    "run.export": False,
    "run.resume": "never",
    "run.track_metrics": "[console,jsonl,timeline]",
    "data.validation": "''",
    "data.overlong": "error",
    "data.prompt_key": "prompt",
    "data.answer_key": "answer",
    "rollout.ignore_eos": True,
    "rollout.stop": "[]",
    "rollout.stop_token_ids": "[]",
    "algorithm.critic_warmup": 0,
    "algorithm.target_kl": 0.0,
}
Settings = dict[str, Any]  # by "section.setting"


@cache
def architecture(path: str) -> Architecture:
    """Return the architecture of a model folder, or of a published shape (a recipe without MODEL)."""
    if path in SHAPES and not Path(path).is_dir():
        return Architecture.from_hf(shape(path), source=path)
    return read_architecture(path)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe and the user's settings."""

    path: Path  # .yaml or .sh
    given: tuple[str, ...] = ()  # section.setting=value, as on the command line

    @classmethod
    def find(cls, name: str, given: tuple[str, ...] = ()) -> "Recipe":
        """Find a recipe: a file, or a name in recipes/ with or without its extension.

        Raises:
            ValueError: there is no such recipe, or a setting is not of the form section.setting=value.
        """
        for setting in given:
            if not re.fullmatch(r"\w+\.\w+=.*", setting, re.DOTALL):
                raise ValueError(
                    f"{setting!r} is no setting; write SECTION.SETTING=VALUE, such as actor.path=DIR"
                )
        names = (name, f"{name}.yaml", f"{name}.sh")
        for path in [Path(name), *(SHIPPED / each for each in names)]:
            if path.is_file() and path.suffix in (".yaml", ".sh"):
                return cls(path=path.resolve(), given=given)
        known = ", ".join(sorted(path.name for path in SHIPPED.iterdir() if path.suffix in (".yaml", ".sh")))
        raise ValueError(f"--recipe {name} is no .yaml or .sh file; name one, or one of {known}")

    def command(self, ranks: int, settings: Mapping[str, Any]) -> list[str]:
        """Return the command that starts it on `ranks` ranks of this host, with `environment(ranks)`."""
        written = [*self.given, *(f"{name}={value}" for name, value in settings.items())]
        if self.path.suffix == ".sh":
            return ["bash", str(self.path), *written]
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        return [
            *torchrun,
            "-m",
            PROGRAM,
            "--config",
            str(self.path),
            *written,
        ]

    def config(self, settings: Mapping[str, Any], ranks: int = 0) -> TrainerConfig:
        """Return the settings of that run; without MODEL, a script's actor.path is a published shape.

        Args:
            ranks: 0: the script's own number.

        Raises:
            ValueError: a script that fails or starts several programs, unknown settings or values of a wrong
                type.
        """
        path, written = self.path, [*self.given, *(f"{name}={value}" for name, value in settings.items())]
        if path.suffix == ".sh":
            path, written = _dry_run(self.command(ranks, settings), ranks)
        merged: Any = OmegaConf.create(settings_of(["--config", str(path), *written])[1])
        if "samples_per_step" in merged.get("data", {}):
            raise ValueError(
                f"{self.path.name} is supervised fine-tuning, which generates nothing; name a recipe of "
                "reinforcement learning"
            )
        if OmegaConf.is_missing(merged, "data.train") or "train" not in merged.get("data", {}):
            merged = OmegaConf.merge(merged, {"data": {"train": ""}})  # prompts are made for the run
        return structured(merged, TrainerConfig)


def environment(ranks: int) -> dict[str, str]:
    """Return the environment of a recipe on `ranks` ranks of this host, with this program's Python.

    Args:
        ranks: 0: the recipe's own number.
    """
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    found = {
        name: value for name, value in os.environ.items() if name not in ("NNODES", "GPUS", "LOCAL_RANK")
    }
    found |= {"PYTHONPATH": path, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    found.setdefault("OMP_NUM_THREADS", "1")
    # an interrupted measurement is not worth the end of an iteration and a checkpoint
    found.setdefault("GRACE_S", "1")
    return found | ({"NNODES": "1", "GPUS": str(ranks)} if ranks else {})


def _dry_run(command: list[str], ranks: int) -> tuple[Path, list[str]]:
    """Return the .yaml and the settings with which a script would start its run, after its checks."""
    done = subprocess.run([*command, "--dry-run"], env=environment(ranks), capture_output=True, text=True)
    # a run that does not fit the usual GPU may fit here; the run itself checks that
    if done.returncode not in (
        0,
        NO_ROOM,
    ):
        raise ValueError(
            f"{Path(command[1]).name} --dry-run says: {(done.stderr or done.stdout).strip()[-2000:]}"
        )
    starts = [
        line.partition(f"-m {PROGRAM} ")[2].split()
        for line in done.stdout.splitlines()
        if line.startswith("node 0 of ")
    ]
    if len(starts) != 1 or "--config-name" not in starts[0]:
        raise ValueError(
            f"{Path(command[1]).name} starts {len(starts)} programs, and one run of {PROGRAM} is measured; "
            "name its .yaml instead"
        )
    name = starts[0][starts[0].index("--config-name") + 1]
    return SHIPPED / f"{name}.yaml", [part for part in starts[0] if re.match(r"\w+\.\w+=", part)]


# ---- a size ------------------------------------------------------------------------------------------------


def layout_for(text: str, ranks: int) -> str:
    """Return a layout such as tp2pp2sp for `ranks` ranks.

    dp takes additional ranks; with fewer ranks, pp shrinks first, then cp, then tp. A model thus keeps its
    tensor parallelism longest, as a larger run would have it. Anything that is not a layout is returned as it
    is, for the checks of the run.
    """
    text = text.replace(" ", "").lower()
    if not re.fullmatch(r"((vpp|tp|pp|cp|dp)[1-9]\d*|sp)*", text):
        return text
    sizes = {name: int(size) for name, size in re.findall(r"(vpp|tp|pp|cp|dp)(\d+)", text)}
    sizes.pop("dp", None)
    while ranks % (sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)):
        axis = next(axis for axis in ("pp", "cp", "tp") if sizes.get(axis, 1) > 1)
        sizes[axis] //= next(prime for prime in range(2, sizes[axis] + 1) if sizes[axis] % prime == 0)
    if sizes.get("pp", 1) == 1:
        sizes.pop("vpp", None)
    written = "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    return (written or "tp1") + ("sp" if "sp" in text.replace("vpp", "") and sizes.get("tp", 1) > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """Rules for scaling a recipe up and down."""

    recipe: TrainerConfig  # the original recipe
    steps: int
    prompt_tokens: int
    response_tokens: int
    prompts: int  # of an iteration, on the largest number of ranks
    largest: int  # the largest number of ranks
    strong: bool = False  # the same number of prompts on fewer ranks; otherwise proportional
    layouts: Mapping[int, str]  # of all models, if the user gives them
    rollout_tp: Mapping[int, int]

    def prompts_on(self, ranks: int) -> int:
        """Return the number of prompts; ValueError if they cannot be proportional."""
        if not self.strong and self.prompts * ranks % self.largest:
            raise ValueError(
                f"--prompts {self.prompts} on {self.largest} ranks leave no whole number for {ranks}; choose "
                f"a multiple of {self.largest}, or --strong"
            )
        return self.prompts if self.strong else self.prompts * ranks // self.largest

    def settings(self, ranks: int) -> Settings:
        """Return the settings that `ranks` ranks add to the recipe, except output folder and prompts."""
        settings: dict[str, Any] = MEASURING | {
            "run.iterations": self.steps,
            "data.max_prompt_tokens": self.prompt_tokens,
            "data.prompts_per_iteration": self.prompts_on(ranks),
            "rollout.min_tokens": 0,  # all are as long as max_tokens: MEASURING ignores the end token
            "rollout.max_tokens": self.response_tokens,
            "rollout.tp": self.rollout_tp.get(ranks) or _largest_divisor(ranks, self.recipe.rollout.tp),
        }
        for name in ("actor", "critic", "reward"):
            model = getattr(self.recipe, name)
            settings[f"{name}.layout"] = self.layouts.get(ranks) or layout_for(model.layout, ranks)
            if (
                name != "reward"
                and model.stage_layers
                and Layout.parse(settings[f"{name}.layout"], tuple(range(ranks))).pp
                != len(model.stage_layers)
            ):
                settings[f"{name}.stage_layers"] = "[]"
        return settings


def _largest_divisor(ranks: int, limit: int) -> int:
    return max(size for size in range(1, min(ranks, limit) + 1) if ranks % size == 0)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A run that can be started."""

    recipe: Recipe
    ranks: int
    settings: Settings
    config: TrainerConfig
    run: PlannedRun
    output_dir: Path


def size_of(recipe: Recipe, sizing: Sizing, ranks: int, output_dir: Path, prompts: Path | None) -> Size:
    """Return the run on `ranks` ranks.

    Args:
        prompts: the training file, which is written once all sizes are checked; None: the recipe's own, for
            random weights.

    Raises:
        ValueError: any problem that would make it fail, with the number of ranks.
    """
    settings = sizing.settings(ranks) | {"run.output_dir": str(output_dir)}
    stand_in = {"data.train": str(recipe.path)} if prompts else {}  # checks need an existing file
    try:
        config = recipe.config(settings | stand_in, ranks)
        if recipe.path.suffix == ".yaml":
            refuse(check_config(config, world_size=ranks))
        run = PlannedRun.of(config, world_size=ranks, ranks_per_host=ranks, read=architecture)
    except ValueError as error:
        raise ValueError(f"on {ranks} ranks: {error}") from None
    return Size(
        recipe=recipe,
        ranks=ranks,
        settings=settings | ({"data.train": str(prompts)} if prompts else {}),
        config=config,
        run=run,
        output_dir=output_dir,
    )


def check_sizes(sizes: list[Size]) -> None:
    """Raise ValueError if this host has too few GPUs (ranks share a CPU), or if sizes train other models."""
    largest = max(size.ranks for size in sizes)
    if device.is_gpu() and largest > torch.cuda.device_count():
        raise ValueError(
            f"--gpus {largest} are more than the {torch.cuda.device_count()} of this host; larger sizes are "
            "modelled, so choose smaller ones"
        )
    if len({_architectures(size) for size in sizes}) > 1:
        raise ValueError(
            f"{sizes[0].recipe.path.name} trains other models on other numbers of ranks, so the sizes cannot "
            "be compared; name the same with MODEL and critic.path"
        )


def _architectures(size: Size) -> tuple[tuple[str, Architecture], ...]:
    """Return names and architectures of a run's models."""
    return tuple((role.name, role.arch) for role in size.run.roles)


# ---- running -----------------------------------------------------------------------------------------------


def make_prompts(path: Path, model: str, *, rows: int, tokens: int, seed: int) -> None:
    """Write random words, `tokens` tokens per prompt by the model's own tokenizer.

    A prompt has one or two fewer if the tokenizer cannot cut there.

    Raises:
        ValueError: no tokenizer, or one that cannot cut words to that length.
    """
    from verl_megatron.data.tokenizer import load_tokenizer
    from verl_megatron.examples.random_weights import write_prompts  # imports safetensors

    tokenizer = load_tokenizer(model)
    write_prompts(path, tokenizer.hf, rows=rows, lengths=range(tokens, tokens + 1), seed=seed)
    shortest = min(len(tokenizer.encode_prompt(row["prompt"])) for row in read_rows(path))
    if shortest < tokens - 2:
        raise ValueError(
            f"the tokenizer in {model} makes prompts of {shortest} tokens where {tokens} are asked for; "
            "choose another --prompt-tokens"
        )


def start_and_wait(size: Size) -> None:
    """Start the run and wait for its end; a signal to this program also ends the run.

    Its output is in `log.txt` next to its metrics.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    size.output_dir.mkdir(parents=True, exist_ok=True)
    log = size.output_dir / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            size.recipe.command(size.ranks, size.settings),
            env=environment(size.ranks),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        with _ended_with_us(process):
            code = process.wait()
    if code:
        raise RuntimeError(
            f"the run on {size.ranks} ranks ended with {code}; {log} ends with:\n{log.read_text()[-4000:]}"
        )


@contextlib.contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end this program by a SystemExit, so that what the block has started is ended, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _ended_with_us(process: subprocess.Popen) -> Iterator[None]:
    try:
        with exits_on_sigterm():
            yield
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun forwards it to its ranks
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()

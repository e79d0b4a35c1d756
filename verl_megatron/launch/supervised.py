"""Command line of the supervised tasks, which differ in the class of their settings."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_megatron.config import SupervisedConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run_supervised(schema: type[SupervisedConfig]) -> None:
    """Run the command line of the task with these settings."""
    from verl_megatron.launch.command_line import run_command

    run_command(partial(main, schema=schema), plan=partial(plan, schema=schema))


def preload(arguments: Sequence[str]) -> None:
    """Import what ranks import, before they start."""
    import verl_megatron.launch.command_line
    import verl_megatron.supervised.trainer  # noqa: F401
    from verl_megatron.data.tokenizer import import_transformers

    import_transformers()


def main(overrides: "DictConfig", *, schema: type[SupervisedConfig]) -> None:
    """Train, and print the last loss."""
    from verl_megatron.checks.overrides import structured
    from verl_megatron.supervised.trainer import SupervisedTrainer

    trainer = SupervisedTrainer(structured(overrides, schema))
    metrics = trainer.train()
    name = trainer.task.name
    if f"{name}/loss" in metrics:
        said = [f"last loss {metrics[f'{name}/loss']:.4f}"]
        if "validation/loss" in metrics:
            before = trainer.state.before.get("validation/loss")
            since = f"{before:.4f} -> " if before is not None else ""
            said.append(f"validation loss {since}{metrics['validation/loss']:.4f}")
        if "validation/accuracy" in metrics:
            said.append(f"validation accuracy {metrics['validation/accuracy']:.3f}")
        trainer.say(", ".join(said))


def plan(settings: dict[str, Any], *, schema: type[SupervisedConfig], gpu: str) -> tuple[str, bool]:
    """Return the plan of a dry run, and whether the run fits."""
    from verl_megatron.launch.dry_run import supervised_plan
    from verl_megatron.planner.text import DOES_NOT_FIT

    text = supervised_plan(settings, schema, gpu=gpu)
    return text, DOES_NOT_FIT not in text

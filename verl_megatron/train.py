"""Command line of RL training.

`torchrun --nproc_per_node 4 -m verl_megatron.train --config-name ppo_toy_cpu actor.layout=tp2pp2`
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parallel.runtime import process

if TYPE_CHECKING:
    from omegaconf import DictConfig


def preload(arguments: Sequence[str]) -> None:
    """Import what ranks with these arguments import, before they start."""
    import verl_megatron.launch.command_line
    import verl_megatron.trainer  # noqa: F401
    from verl_megatron.rollout.vllm_process import import_vllm

    options = " ".join(arguments).replace("--role=", "--role ")
    if "--role " not in options or "--role rollout" in options:
        import_vllm()


def main(overrides: "DictConfig") -> None:
    from verl_megatron.checks.overrides import structured
    from verl_megatron.config import TrainerConfig
    from verl_megatron.trainer import RLTrainer

    trainer = RLTrainer(structured(overrides, TrainerConfig))
    metrics = trainer.train()
    if "validation/after" in metrics:
        trainer.say(
            f"validation accuracy {metrics['validation/before']:.2f} -> {metrics['validation/after']:.2f}"
        )


def serve(overrides: "DictConfig", role: str) -> None:
    from verl_megatron.checks.overrides import structured
    from verl_megatron.config import TrainerConfig
    from verl_megatron.launch.rollout_world import RolloutWorld
    from verl_megatron.separate.scoring.world import ScoringWorld

    kind = RolloutWorld if role.startswith("rollout") else ScoringWorld
    kind(structured(overrides, TrainerConfig), role).serve()


def plan(settings: dict[str, Any], *, gpu: str) -> tuple[str, bool]:
    from verl_megatron.launch.dry_run import training_plan
    from verl_megatron.planner.text import DOES_NOT_FIT

    text = training_plan(settings, gpu=gpu)
    return text, DOES_NOT_FIT not in text


if __name__ == "__main__":
    process.begin()  # before slow imports

    from verl_megatron.launch.command_line import run_command

    run_command(main, plan=plan, serve=serve)

"""Command line of reinforcement learning: `torchrun --nproc_per_node 4 -m verl_megatron.train --config-name ppo_toy_cpu actor.layout=tp2pp2`."""

from typing import Any

from omegaconf import DictConfig

from verl_megatron.command_line import run_command


def main(overrides: DictConfig) -> None:
    from verl_megatron.checks import structured
    from verl_megatron.config import TrainerConfig
    from verl_megatron.trainer import RLTrainer

    trainer = RLTrainer(structured(overrides, TrainerConfig))
    metrics = trainer.train()
    if "validation/after" in metrics:
        trainer.say(f"validation accuracy {metrics['validation/before']:.2f} -> {metrics['validation/after']:.2f}")


def plan(settings: dict[str, Any], *, gpu: str) -> tuple[str, bool]:
    from verl_megatron.dry_run import training_plan
    from verl_megatron.planner.text import DOES_NOT_FIT

    text = training_plan(settings, gpu=gpu)
    return text, DOES_NOT_FIT not in text


if __name__ == "__main__":
    run_command(main, plan=plan)

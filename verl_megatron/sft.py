"""Command line of supervised fine-tuning.

`torchrun --nproc_per_node 2 -m verl_megatron.sft --config-name sft_toy_cpu`
"""

from typing import TYPE_CHECKING, Any

from parallel.runtime import process

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(overrides: "DictConfig") -> None:
    from verl_megatron.checks.overrides import structured
    from verl_megatron.config import SFTConfig
    from verl_megatron.sft_trainer import SFTTrainer

    trainer = SFTTrainer(structured(overrides, SFTConfig))
    metrics = trainer.train()
    if trainer.is_first:
        print(f"last loss {metrics['sft/loss']:.4f}", flush=True)


def plan(settings: dict[str, Any], *, gpu: str) -> tuple[str, bool]:
    from verl_megatron.launch.dry_run import supervised_plan
    from verl_megatron.planner.text import DOES_NOT_FIT

    text = supervised_plan(settings, gpu=gpu)
    return text, DOES_NOT_FIT not in text


if __name__ == "__main__":
    process.begin()  # before slow imports

    from verl_megatron.launch.command_line import run_command

    run_command(main, plan=plan)

"""Iterations that alternate between the given `reshard.offload` and none: `benchmark offload`."""

import sys
from dataclasses import replace

import torch.distributed as dist
from omegaconf import DictConfig

from parallel import device
from verl_megatron.benchmarks.options import show_help
from verl_megatron.benchmarks.options.offload import HELP
from verl_megatron.benchmarks.turns import InTurns, run_in_turns
from verl_megatron.checks.problems import refuse
from verl_megatron.config import TrainerConfig
from verl_megatron.launch.command_line import run_command
from verl_megatron.planner.preflight import check_fits, machine_here
from verl_megatron.rollout.weights import ColocatedChannel

NOTHING = "none"


class OffloadInTurns(InTurns):
    """Trainer that alternates between the given `reshard.offload` and none.

    Raises:
        ValueError: as of `InTurns`, or a variant that does not fit in memory.
    """

    def __init__(self, config: TrainerConfig):
        if config.reshard.offload == NOTHING:
            raise ValueError(
                "reshard.offload=none is what the others are compared with; choose grads, optimizer or all"
            )
        super().__init__(config, (config.reshard.offload, NOTHING))
        without = replace(config, reshard=replace(config.reshard, offload=NOTHING))
        refuse(
            check_fits(
                without,
                world_size=dist.get_world_size(),
                machine=machine_here(),
                ranks_per_host=device.ranks_per_host(),
            )
        )

    def turn(self, way: str, following: str) -> None:
        channel = self.run.channel
        assert isinstance(channel, ColocatedChannel)

        def publish(version: int, *, was_updated: bool = False) -> None:
            # offloading after the updates counts towards the next iteration
            self.run.residency.offload = following
            ColocatedChannel.publish(channel, version, was_updated=was_updated)

        channel.publish = publish


def conclude(trainer: InTurns) -> list[str]:
    """Return the table, and what the given way costs."""
    given = trainer.ways[0]
    ratio = trainer.medians(given)["iteration"] / trainer.medians(NOTHING)["iteration"]
    return [*trainer.table("offload"), f"with offload={given} an iteration takes {ratio - 1:+.1%}"]


def main(overrides: DictConfig) -> None:
    run_in_turns(overrides, OffloadInTurns, conclude)


if __name__ == "__main__":
    show_help(sys.argv[1:], text=HELP)
    run_command(main)

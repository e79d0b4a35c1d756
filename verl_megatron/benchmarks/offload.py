"""Cost of `reshard.offload`: a run in which it alternates between iterations.

Both variants have the same machine and model. Fix the lengths by rollout.min_tokens, rollout.max_tokens and
rollout.ignore_eos. Recipe and settings are those of `verl-megatron train`; nothing is saved, validated or
exported. Odd iterations use the given `reshard.offload`, even ones none, and both must fit in memory. The
first of each does not count: it allocates host memory and compiles kernels.
"""

import sys
from dataclasses import replace

import torch.distributed as dist
from omegaconf import DictConfig

from parallel import device
from verl_megatron.benchmarks.turns import InTurns, run_in_turns
from verl_megatron.checks.problems import refuse
from verl_megatron.config import TrainerConfig
from verl_megatron.launch.command_line import run_command
from verl_megatron.planner.preflight import check_fits, machine_here
from verl_megatron.rollout.weights import ColocatedChannel

NOTHING = "none"
HELP = f"""\
usage: verl-megatron benchmark offload [--ranks N] --config-name RECIPE | --config FILE [SETTING=VALUE ...]

{(__doc__ or "").strip()}

options:
  --config-name RECIPE  a shipped recipe
  --config FILE         a recipe of yours
  --ranks N             processes on this host, each with a GPU if it has GPUs (default: 1)

examples:
  verl-megatron benchmark offload --ranks 2 --config-name grpo_8b actor.path=MODEL data.train=prompts.jsonl \\
      reward.function=match reshard.offload=all run.iterations=8 rollout.ignore_eos=true
  verl-megatron benchmark offload --ranks 4 --config mine.yaml reshard.offload=optimizer run.iterations=6"""


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
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(HELP)
        sys.exit()
    run_command(main)

"""Cost of `reshard.offload`: a run in which it alternates between iterations.

Both variants have the same machine and model. Fix the lengths by rollout.min_tokens, rollout.max_tokens and
rollout.ignore_eos. Recipe and settings are those of `verl-megatron train`; nothing is saved, validated or
exported. Odd iterations use the given `reshard.offload`, even ones none, and both must fit in memory. The
first of each does not count: it allocates host memory and compiles kernels.
"""

import sys
import time
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from parallel import device
from verl_megatron.checks.overrides import structured
from verl_megatron.checks.problems import refuse
from verl_megatron.config import TrainerConfig
from verl_megatron.launch.command_line import run_command
from verl_megatron.planner import check_fits, machine_here
from verl_megatron.rollout.weights import ColocatedChannel
from verl_megatron.trainer import RLTrainer

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


class InTurns(RLTrainer):
    """Trainer that alternates between the given `reshard.offload` and none, and times each iteration.

    Raises:
        ValueError: invalid settings of a run, a variant that does not fit in memory, or nothing left to
            compare.
    """

    def __init__(self, config: TrainerConfig):
        if config.reshard.offload == NOTHING:
            raise ValueError(
                "reshard.offload=none is what the others are compared with; choose grads, optimizer or all"
            )
        if config.run.iterations < 4:
            raise ValueError(
                f"run.iterations={config.run.iterations} leaves nothing to compare, as the first of each way "
                "does not count; use at least 4"
            )
        config.run.save_interval = config.run.validate_interval = config.run.keep_best_k = 0
        config.run.export, config.run.resume, config.data.validation = False, "never", ""
        super().__init__(config)
        without = replace(config, reshard=replace(config.reshard, offload=NOTHING))
        refuse(
            check_fits(
                without,
                world_size=dist.get_world_size(),
                machine=machine_here(),
                ranks_per_host=device.ranks_per_host(),
            )
        )
        self.ways = (config.reshard.offload, NOTHING)
        # of each counted iteration, by phase
        self.seconds: dict[str, list[dict[str, float]]] = {way: [] for way in self.ways}

    def _iterate(self) -> dict[str, float] | None:
        step, way, began = self.state.step, self.run.residency.offload, time.perf_counter()

        channel = self.run.channel
        assert isinstance(channel, ColocatedChannel)

        def publish(version: int, *, was_updated: bool = False) -> None:
            # offloading after the updates counts towards the next iteration
            self.run.residency.offload = self.ways[(step + 1) % 2]
            ColocatedChannel.publish(channel, version, was_updated=was_updated)

        channel.publish = publish
        metrics = super()._iterate()
        if metrics is not None and step >= 2:
            phases = {
                key[len("time/") : -len("_s")]: value
                for key, value in metrics.items()
                if key.startswith("time/")
            }
            self.seconds[way].append(phases | {"iteration": time.perf_counter() - began})
        return metrics

    def table(self) -> str:
        """Return the medians of both variants."""
        given, nothing = (_medians(self.seconds[way]) for way in self.ways)
        device_name = torch.cuda.get_device_name() if device.is_gpu() else "CPU rank"
        counted = [len(self.seconds[way]) for way in self.ways]
        lines = [
            f"{self.config.actor.path} on {dist.get_world_size()} x {device_name}: seconds, medians of "
            f"{counted[0]} and {counted[1]} iterations, in turns"
        ]
        lines += [f"{'offload':<16}{self.ways[0]:>12}{NOTHING:>12}"]
        lines += [f"{phase:<16}{given[phase]:>12.3f}{nothing[phase]:>12.3f}" for phase in nothing]
        return "\n".join(
            [
                *lines,
                (
                    f"with offload={self.ways[0]} an iteration takes "
                    f"{given['iteration'] / nothing['iteration'] - 1:+.1%}"
                ),
            ]
        )


def _medians(iterations: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each phase."""
    medians = {}
    for phase in iterations[0]:
        medians[phase] = median(seconds[phase] for seconds in iterations)
    return medians


def main(overrides: DictConfig) -> None:
    trainer = InTurns(structured(overrides, TrainerConfig))
    trainer.train()
    if all(trainer.seconds.values()):  # otherwise SIGTERM ended it early
        trainer.say(trainer.table())


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(HELP)
        sys.exit()
    run_command(main)

"""A run whose iterations alternate between ways of doing the same, to compare their seconds."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from parallel import device
from verl_megatron.checks.overrides import structured
from verl_megatron.config import TrainerConfig
from verl_megatron.trainer import RLTrainer


class InTurns(RLTrainer):
    """Trainer that alternates between ways, and times each iteration.

    Nothing is saved, validated or exported. The first iteration of each way does not count: it allocates
    memory and compiles kernels.

    Args:
        ways: their names; iteration k, from 0, has the (k mod their number)-th.

    Raises:
        ValueError: invalid settings of a run, or too few iterations to compare.
    """

    def __init__(self, config: TrainerConfig, ways: Sequence[str]):
        if config.run.iterations < 2 * len(ways):
            raise ValueError(
                f"run.iterations={config.run.iterations} leaves nothing to compare, as the first of each way "
                f"does not count; use at least {2 * len(ways)}"
            )
        config.run.save_interval = config.run.validate_interval = config.run.keep_best_k = 0
        config.run.export, config.data.validation = False, ""
        super().__init__(config)
        self.ways = tuple(ways)
        # of each counted iteration, by phase
        self.seconds: dict[str, list[dict[str, float]]] = {way: [] for way in self.ways}

    def turn(self, way: str, following: str) -> None:
        """Change to the way of an iteration that begins; `following` is that of the next one."""
        raise NotImplementedError

    def resume(self) -> None:
        """Leave the checkpoints of a run in this folder where they are."""

    def leave(self, *, cursor: dict | None = None) -> None:
        self.preemption.hold()
        self.record.stopped = f"SIGTERM: iteration {self.state.step}, nothing saved"
        self.say(f"ending after iteration {self.state.step}, as SIGTERM asks for; nothing is saved")

    def _iterate(self) -> dict[str, float] | None:
        step, count = self.state.step, len(self.ways)
        way, began = self.ways[step % count], time.perf_counter()
        self.turn(way, self.ways[(step + 1) % count])
        metrics = super()._iterate()
        if metrics is not None and step >= count:
            phases = {
                key[len("time/") : -len("_s")]: value
                for key, value in metrics.items()
                if key.startswith("time/")
            }
            self.seconds[way].append(phases | {"iteration": time.perf_counter() - began})
        return metrics

    def medians(self, way: str) -> dict[str, float]:
        """Return the median seconds of each phase."""
        medians, iterations = {}, self.seconds[way]
        for phase in iterations[0]:
            medians[phase] = median(seconds[phase] for seconds in iterations)
        return medians

    def table(self, title: str) -> list[str]:
        """Return the medians of all ways as lines."""
        columns = [self.medians(way) for way in self.ways]
        device_name = torch.cuda.get_device_name() if device.is_gpu() else "CPU rank"
        counted = " and ".join(str(len(self.seconds[way])) for way in self.ways)
        lines = [
            f"{self.config.actor.path} on {dist.get_world_size()} x {device_name}: seconds, medians of "
            f"{counted} iterations, in turns",
            f"{title:<16}" + "".join(f"{way:>12}" for way in self.ways),
        ]
        for phase in columns[-1]:
            cells = [f"{column[phase]:>12.3f}" for column in columns]
            lines.append(f"{phase:<16}" + "".join(cells))
        return lines


def run_in_turns(
    overrides: DictConfig,
    make: Callable[[TrainerConfig], InTurns],
    conclude: Callable[[InTurns], Sequence[str]],
) -> None:
    """Train, and say what `conclude` returns."""
    trainer = make(structured(overrides, TrainerConfig))
    trainer.train()
    if all(trainer.seconds.values()):  # otherwise SIGTERM ended it early
        trainer.say("\n".join(conclude(trainer)))

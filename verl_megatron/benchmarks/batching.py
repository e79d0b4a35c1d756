"""Iterations that alternate between fitted and fixed sizes of micro-batches: `benchmark batching`."""

import sys

from omegaconf import DictConfig

from verl_megatron.benchmarks.options import show_help
from verl_megatron.benchmarks.options.batching import HELP
from verl_megatron.benchmarks.turns import InTurns, run_in_turns
from verl_megatron.config import TrainerConfig
from verl_megatron.launch.command_line import run_command

FITTED = "fitted"
PHASES = ("log_probs", "values", "critic_update", "actor_update")  # that micro-batches change


class BatchingInTurns(InTurns):
    """Trainer that alternates between the fitted token budget and two fixed ones.

    Raises:
        ValueError: as of `InTurns`.
    """

    def __init__(self, config: TrainerConfig):
        config.engine.dynamic_batching = True
        fixed = config.engine.tokens_per_micro_batch
        super().__init__(config, (FITTED, str(fixed), str(2 * fixed)))

    def turn(self, way: str, following: str) -> None:
        cursor, roles = self.run.source.cursor, self.run.learner.trainable
        if way == FITTED:
            if self.state.step == 0:
                self.budgets = {name: role.budget for name, role in roles.items()}
            self.drawn_from = cursor.state_dict()
        else:
            cursor.load_state_dict(self.drawn_from)
        for name, role in roles.items():
            role.budget = self.budgets[name] if way == FITTED else None
            if way != FITTED:
                role.engine.config.tokens_per_micro_batch = int(way)


def conclude(trainer: InTurns) -> list[str]:
    """Return the table, and how fast training is with the fitted budget."""
    seconds = {way: _seconds(trainer.medians(way)) for way in trainer.ways}
    best = min(trainer.ways[1:], key=lambda way: seconds[way])
    return [
        *trainer.table("micro-batches"),
        f"log-probs and updates: {seconds[FITTED]:.3f} s with the fitted budget, "
        f"{seconds[best] / seconds[FITTED]:.3f} times as fast as with {best} tokens",
    ]


def _seconds(medians: dict[str, float]) -> float:
    return sum(seconds for phase, seconds in medians.items() if phase in PHASES)


def main(overrides: DictConfig) -> None:
    run_in_turns(overrides, BatchingInTurns, conclude)


if __name__ == "__main__":
    show_help(sys.argv[1:], text=HELP)
    run_command(main)

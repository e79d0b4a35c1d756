"""Settings of a run whose rollout has ranks of its own."""

from dataclasses import dataclass

from verl_megatron.config.section import Section, setting


@dataclass(kw_only=True)
class AsyncConfig(Section):
    """Training and rollout at the same time, with `rollout.devices`."""

    max_staleness: int = setting(
        0, "weight syncs by which samples may lag behind; 0: both sides take turns", within="[0, 64]"
    )
    sync_interval: int = setting(
        1,
        "iterations between weight syncs, with buffer=window: an iteration trains on the first samples that "
        "are complete, and long ones may come later",
        within="[1, 64]",
    )
    buffer: str = setting(
        "in_order",
        "which samples an iteration trains on: those of its own prompts (in_order), or the oldest "
        "allowed and then the first that are complete (window)",
        choices=("in_order", "window"),
    )
    partial: str = setting(
        "finish",
        "running samples at new weights, with buffer=window: they end with the old ones (finish), or go on "
        "from their tokens with a new cache (continue) or with the old one (pause)",
        choices=("finish", "continue", "pause"),
    )

    @property
    def is_stale(self) -> bool:
        """Whether an iteration may train on samples of older weights than its own."""
        return self.max_staleness > 0 or self.sync_interval > 1

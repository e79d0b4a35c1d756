"""Settings of a run whose rollout has ranks of its own."""

from dataclasses import dataclass

from verl_megatron.config.section import Section, setting


@dataclass(kw_only=True)
class AsyncConfig(Section):
    """Training and rollout at the same time, with `rollout.devices`."""

    max_staleness: int = setting(
        0, "updates by which the weights of samples lag behind; 0: both sides take turns", within="[0, 64]"
    )

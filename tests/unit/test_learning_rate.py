"""The rate of every step against the formula, and no step without a rate."""

import math
from types import SimpleNamespace

import pytest

import verl_megatron.models  # noqa: F401  prepares Megatron-Core for a CPU
from verl_megatron.config import EngineConfig
from verl_megatron.roles.learning_rate import make_scheduler

SHAPES = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 20])
@pytest.mark.parametrize("total_steps", [1, 2, 7])
def test_rates(schedule, warmup_steps, total_steps):
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
    config = EngineConfig(lr_decay_style=schedule, lr_warmup_steps=warmup_steps, min_lr_ratio=0.1)
    scheduler = make_scheduler(optimizer, config, lr=2.0, total_steps=total_steps)
    warmup = min(max(warmup_steps, 1), total_steps)
    for step in range(1, total_steps + 1):
        scheduler.step(1)
        decayed = max(step - warmup, 0) / (total_steps + 1 - warmup)
        want = 2.0 * step / warmup if step <= warmup else 0.2 + 1.8 * SHAPES[schedule](decayed)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(want)
        assert optimizer.param_groups[0]["lr"] > 0.2 * 0.99 * min(1, step / warmup)


def test_a_decay_to_zero_leaves_every_step_a_rate():
    for total_steps in (1, 5):
        optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
        scheduler = make_scheduler(
            optimizer, EngineConfig(lr_decay_style="cosine"), lr=1.0, total_steps=total_steps
        )
        rates = []
        for _ in range(total_steps):
            scheduler.step(1)
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates[0] == 1.0 and rates[-1] > 0 and rates == sorted(rates, reverse=True)

"""Learning-rate schedule: warm-up, then constant, linear or cosine decay."""

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from verl_megatron.config import EngineConfig


def make_scheduler(
    optimizer: Any, config: EngineConfig, *, lr: float, total_steps: int
) -> OptimizerParamScheduler:
    """Build the scheduler of `total_steps` optimizer steps; call `step(1)` before each of them.

    Step k of w warm-up steps has the rate lr * k / w: the first is above 0 and the last has the full rate.
    Decay starts there and reaches min_lr_ratio * lr one step after the last, so that no step has a rate of 0.

    Args:
        optimizer: Megatron-Core's, or any object with `param_groups`.
    """
    warmup_steps = min(max(config.lr_warmup_steps, 1), total_steps)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=lr * config.min_lr_ratio,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=total_steps + 1,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # resume: step from the checkpoint, rates from the settings
    )

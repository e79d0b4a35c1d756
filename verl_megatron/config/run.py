"""Settings of the whole run."""

from dataclasses import dataclass

from verl_megatron.config.section import COUNT, POSITIVE, Section, setting


@dataclass(kw_only=True)
class RunConfig(Section):
    """Settings of the whole run."""

    output_dir: str = setting("outputs/run", "logs, checkpoints and the exported models")
    seed: int = setting(
        1, "seed of data order, sampling and newly initialised weights", within="[0, 4294967295]"
    )  # numpy's range
    iterations: int = setting(
        100, "rounds of rollout, scoring and update; optimizer steps in a supervised run", within=POSITIVE
    )
    validate_interval: int = setting(
        0, "iterations between validations; 0: only before the first and after the last", within=COUNT
    )
    save_interval: int = setting(0, "iterations between checkpoints; 0: none", within=COUNT)
    keep_last_k: int = setting(2, "number of newest checkpoints to keep; 0: all", within=COUNT)
    keep_best_k: int = setting(
        0, "number of further checkpoints to keep, by validation accuracy", within=COUNT
    )
    async_save: bool = setting(False, "write checkpoints in the background from a copy in host memory")
    resume: str = setting(
        "newest",
        "newest; verify: newest, and compare the repeated iteration; never: start over",
        choices=("newest", "verify", "never"),
    )
    stall_timeout_s: float = setting(
        300.0, "abort after this many seconds without progress; 0: never", within="[0, 10000000]"
    )  # four months; operating-system waits overflow at 292 years
    export: bool = setting(True, "write a Hugging Face folder of the actor (and critic) at the end")
    track_metrics: list[str] = setting(
        ["console", "jsonl", "csv", "tensorboard", "report"],
        "also wandb, mlflow, timeline (where ranks wait), profile (PyTorch profiler traces)",
    )

"""What two runs that should learn the same have in common."""

import re

from verl_megatron.observe.tracking import read_metrics

# Keys that no two runs agree on: seconds, memory, which samples a replica decodes together, and the last bit
# of vLLM's log-probs, which depends on that.
MEASURED = re.compile(
    r"time/|memory/|async/.*(wait|generation)|.*throughput|.*_ms$|.*/ms$|rollout/(logprob_gap|concurrent|kv_cache_used|preempted)"
)


# Settings under which everything that a checkpoint holds changes: schedules, KL coefficient, several steps.
ADAPTIVE = (
    "algorithm.num_mini_batches=2",
    "algorithm.kl_coef=0.1",
    "algorithm.kl_ctrl_target=0.01",
    "algorithm.kl_ctrl_horizon=64",
    "engine.lr_decay_style=cosine",
    "engine.lr_warmup_steps=2",
)


def learned(output_dir) -> list[dict]:
    """What the rows of metrics say about the mathematics."""
    return [mathematics_of(row) for row in read_metrics(output_dir)]


def learned_in_attempts(output_dir) -> list[dict]:
    """`learned` without the bytes sent to vLLM: it keeps weights after a validation, not over a restart."""
    rows = learned(output_dir)
    for row in rows:
        row.pop("reshard/bytes", None)
    return rows


def mathematics_of(row: dict) -> dict:
    return {key: value for key, value in row.items() if not MEASURED.match(key)}

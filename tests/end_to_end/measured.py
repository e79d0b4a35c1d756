"""What two runs that should learn the same have in common."""

import re

from verl_megatron.observe.tracking import read_metrics

# Keys that no two runs agree on: seconds, memory, and the last bit of vLLM's log-probs, which depends on
# the samples that a replica decodes together.
MEASURED = re.compile(r"time/|memory/|.*throughput|.*_ms$|.*/ms$|rollout/logprob_gap")


def learned(output_dir) -> list[dict]:
    """What the rows of metrics say about the mathematics."""
    return [
        {key: value for key, value in row.items() if not MEASURED.match(key)}
        for row in read_metrics(output_dir)
    ]

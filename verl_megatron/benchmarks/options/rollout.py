"""Generation as in a run compared with a bare vLLM: the same engine, prompts, seeds and flags, alternating.

Bare: each replica gets an equal number of samples at once and calls vLLM's own `generate`. As in a run:
replicas draw samples from one queue as they become free, tensor-parallel ranks check that they agree, and
each sample is saved with its log-probs.

Weights are random and every response ends at its given length. With --mixed, prompts have up to the full
length, and responses between 1/8 and all of what remains. Random text has nothing to draft from: --repeat 0.9
writes weights whose text goes on in a circle, each token with this probability.

--profile tells where the time of a decoding step goes on the first rank: in vLLM's process, both ways, and
on the GPU.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl_megatron.benchmarks.options import add_model
from verl_megatron.config import RolloutConfig
from verl_megatron.launch.options import COUNT, SHARE, Options, add_launcher_options

EXAMPLES = (
    "--ranks 4 --shape llama3-8b --tp 2",
    "--ranks 2 --hf outputs/toy/model --rows 64 --prompt 16 --response 16 --mixed",
    "--ranks 1 --shape llama3-8b --rows 8 --speculative ngram --repeat 0.9",
)


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    add_launcher_options(options)
    add_model(options)
    options.add_argument(
        "--tp", type=COUNT, default=1, help="tensor-parallel ranks of a replica; the others are replicas"
    )
    options.add_argument("--rows", type=COUNT, default=512, help="samples of all replicas")
    options.add_argument("--prompt", type=COUNT, default=512, help="tokens of a prompt")
    options.add_argument("--response", type=COUNT, default=512, help="tokens of a response")
    options.add_argument("--mixed", action="store_true", help="prompts and responses of several lengths")
    options.add_argument("--max-num-seqs", type=COUNT, default=256, help="as rollout.max_num_seqs")
    options.add_argument("--utilization", type=SHARE, default=0.6, help="vLLM's gpu_memory_utilization")
    options.add_argument("--eager", action="store_true", help="without CUDA graphs")
    defaults = RolloutConfig()
    options.add_argument(
        "--speculative", choices=("off", "ngram"), default="off", help="as rollout.speculative"
    )
    options.add_argument(
        "--speculative-tokens",
        type=COUNT,
        default=defaults.speculative_tokens,
        help="as rollout.speculative_tokens",
    )
    options.add_argument(
        "--speculative-max-seqs",
        type=COUNT,
        default=defaults.speculative_max_seqs,
        help="as rollout.speculative_max_seqs",
    )
    options.add_argument(
        "--repeat", type=float, default=0.0, help="probability that the text goes on as before; 0: random"
    )
    options.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="as rollout.kv_cache_dtype"
    )
    options.add_argument("--repetitions", type=COUNT, default=3, help="of each way")
    options.add_argument("--profile", action="store_true", help="parts and kernels of a decoding step")
    options.add_argument("--csv", type=Path, help="write the rows to this file")
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    if not 0 <= options.repeat < 1:
        command_line.error(f"--repeat={options.repeat} is no probability below 1")
    return options
